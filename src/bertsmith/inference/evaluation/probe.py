"""A linear probe of frozen vectors: what a word's states tell of its part of speech and its chunk.

Of each layer a logistic regression reads the state of a word's first piece (of a GPT its last) in
its sentence. The layer is chosen on dev, and its accuracy is that of the test file. Nothing of the
model is trained, so there is no noise of seeds. Data are CoNLL-2003's: word, part of speech, chunk,
entity. Beside it stands what needs no network: each word's most frequent tag in train.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.base.settings import checked
from bertsmith.base.terminal import Progress
from bertsmith.inference.engines.runner import ENCODER, Runner
from bertsmith.inference.features import Extraction, word_vectors
from bertsmith.inference.predictor import Predictor, opened
from bertsmith.tasks.examples import find_file
from bertsmith.tasks.metrics import standard_error
from bertsmith.tasks.tagging.sentences import Sentences, read_sentences
from bertsmith.tasks.task import NER
from bertsmith.tasks.vectors import float16_file

COLUMNS = {"pos": 1, "chunk": 2}  # of CoNLL-2003, the word being 0
SPLITS = "train", "dev", "test"
# The sum of losses counts C times against half the squared weights; vectors have variance 1. On an
# eighth of CoNLL-2003 and states of 64 numbers C of 0.001, 0.01 and 0.1 gave 51.0, 55.7, 56.3% of
# parts of speech.
STRENGTH, TOLERANCE, STEPS = 0.1, 1e-3, 1000


@checked()
def evaluate_probe(model: str | Path | Predictor, probe: str | Path) -> dict[str, Any]:
    """Read part of speech and chunk off each frozen layer, as `bertsmith evaluate --probe` does.

        bertsmith.evaluate_probe("runs/books", "conll2003")["columns"]["pos"]["accuracy"]

    `model` is a run, a Hugging Face folder, a hub name, or what `load` gave; `probe` the folder of
    CoNLL-2003. The result is {"words", "columns": {name: {"accuracy", "standard_error", "layer",
    "dev", "without_network"}}} of "pos" and "chunk": "dev" has the accuracy of every layer, 0 being
    the embeddings; "words" are those of test.

    Errors: ValueError for a folder without the three files, or of other columns;
    ModuleNotFoundError that names the extra when scikit-learn is absent.
    """
    from sklearn.linear_model import LogisticRegression

    model = opened(model)
    files = {split: _file(Path(probe), split) for split in SPLITS}
    tagged = {
        name: {
            split: read_sentences(file, True, "plain", ("tokens", name), column)
            for split, file in files.items()
        }
        for name, column in COLUMNS.items()
    }
    model.model(ENCODER)
    columns: dict[str, dict[str, Any]] = {name: {"dev": []} for name in COLUMNS}
    with TemporaryDirectory() as folder:
        vectors = {
            split: _vectors(model, sentences, Path(folder) / f"{split}.npy")
            for split, sentences in tagged["pos"].items()
        }
        layers = model.config.num_layers + 1
        with Progress("probe", layers * len(COLUMNS), "probes") as progress:
            for layer in range(layers):
                read = {split: vectors[split][:, layer].astype(np.float32) for split in SPLITS}
                mean, spread = read["train"].mean(axis=0), read["train"].std(axis=0)
                for split in SPLITS:
                    read[split] = (read[split] - mean) / np.maximum(spread, 1e-6)
                for name, found in columns.items():
                    own = {split: np.array(tagged[name][split].tags) for split in SPLITS}
                    linear = LogisticRegression(C=STRENGTH, tol=TOLERANCE, max_iter=STEPS)
                    linear.fit(read["train"], own["train"])
                    right = {
                        split: float(np.mean(linear.predict(read[split]) == own[split]))
                        for split in ("dev", "test")
                    }
                    if right["dev"] > max(found["dev"], default=-1.0):
                        found |= {"accuracy": right["test"], "layer": layer}
                    found["dev"].append(right["dev"])
                    progress.update(1)
    words = len(tagged["pos"]["test"].words)
    for name, found in columns.items():
        found["standard_error"] = standard_error(found["accuracy"], words)
        found["without_network"] = most_frequent_tags(tagged[name]["train"], tagged[name]["test"])
    return {"columns": columns, "words": words}


def most_frequent_tags(train: Sentences, test: Sentences) -> float:
    """The share of right tags where every word gets the one that it has most often in train, and a
    word that is not there the most frequent of all."""
    assert train.tags is not None and test.tags is not None
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for word, tag in zip(train.words, train.tags, strict=True):
        counts[word][tag] += 1
    best = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    ((other, _),) = Counter(train.tags).most_common(1)
    pairs = zip(test.words, test.tags, strict=True)
    return sum(best.get(word, other) == tag for word, tag in pairs) / len(test.words)


def _file(data: Path, split: str) -> Path:
    if (file := find_file(NER, data, split)) is None:
        raise ValueError(
            f"{data}: no {split} file: a probe needs train, dev and test of CoNLL-2003"
        )
    return file


def _vectors(model: Runner, sentences: Sentences, path: Path) -> np.ndarray:
    """float16 [W, L + 1, H], on the disk."""
    counts, extraction = np.diff(sentences.boundaries), Extraction(model.config, "all", "none")
    with Progress(f"states of {path.stem}", len(sentences), "sentences") as progress:
        vectors, _, _ = word_vectors(
            model,
            sentences,
            counts,
            extraction,
            lambda shape: float16_file(path, shape),
            progress.update,
        )
    return vectors


def describe(result: dict[str, Any]) -> Iterator[str]:
    """A line a column, and one of its layers on dev."""
    for name, found in result["columns"].items():
        accuracy, error = 100 * found["accuracy"], 100 * found["standard_error"]
        yield (
            f"{name:<6} {accuracy:.1f}% ± {error:.1f} of {result['words']:,} words, layer "
            f"{found['layer']}; without a network {100 * found['without_network']:.1f}%"
        )
        layers = (f"{number}: {100 * share:.1f}" for number, share in enumerate(found["dev"]))
        yield f"{'':<6} layers on dev: {', '.join(layers)}"
