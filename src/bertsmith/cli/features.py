"""Commands: embed, embed train, features, features ner."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

import bertsmith
from bertsmith.base.settings import Metavar
from bertsmith.base.terminal import Progress
from bertsmith.cli.flags import Answering, group_values
from bertsmith.cli.outputs import (
    after_similarity_training,
    check_folder,
    check_new_folder,
    check_outputs,
)
from bertsmith.training.finetuning.request import check_tokens_per_window, parse_seeds
from bertsmith.training.finetuning.settings import ROWS, ContrastiveSettings, FrozenSettings

if TYPE_CHECKING:
    import numpy as np

    from bertsmith.inference.embeddings import PoolingSettings

OUTPUTS = (".npy", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class Embed(Answering):
    """Write a vector for every text of a file.

    Examples:
      bertsmith embed titles.txt --model pairs --out titles.npy --normalize
      bertsmith embed new.csv --text body --model run --out new.jsonl --whiten input
      cat titles.txt | bertsmith embed - --model pairs --out titles.npy

    A .txt file is a text a line; a .csv, .tsv, .jsonl or .parquet has one in the column --text.
    Vectors of a model that was only pre-trained say little about similarity, and the command warns
    of it: --whiten helps, and so does training (`bertsmith embed train`). What is done is kept in
    OUT.partial: after Ctrl-C or a kill the same command goes on.
    """

    input: Annotated[str, tyro.conf.Positional, Metavar("INPUT")]
    """File with the texts; - for standard input, a text a line."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    out: Path
    """.npy (float32, a row a text) or .jsonl ({"text", "vector"} a line). A file that is there is
    replaced, once the new one is whole."""
    pool: Literal["mean", "cls", "max"] | None = None
    """Mean of the tokens, the vector at [CLS] or the tokens' largest values. Default: as trained,
    else mean."""
    prompt: str | None = None
    """Put this before every text, such as "query: ". Default: as trained, else nothing."""
    no_prompt: bool = False
    """Put nothing before a text, also where the model was trained otherwise."""
    normalize: bool = False
    """Make every vector of length 1, so that dot products are cosines. Default: as trained."""
    no_normalize: bool = False
    """Leave the vectors their lengths, also where the model was trained otherwise."""
    whiten: Annotated[str | None, Metavar("FILE")] = None
    """Give the vectors mean 0 and equal, uncorrelated directions: those of the texts of FILE, or of
    INPUT itself when FILE is "input"."""
    dimensions: int | None = None
    """With --whiten: keep only so many directions, those of the largest variance."""
    text: str | None = None
    """Column with the text of a table, also of --whiten. Default: text."""
    max_length: int | None = None
    """Tokens of a text; longer ones are cut. Default: as trained, else all the model can read."""


def run_embed(settings: Embed) -> None:
    from bertsmith.inference import embeddings
    from bertsmith.tasks.answer_files import is_text, read_texts
    from bertsmith.training.finetuning.hidden_states import unit_length

    source, out = settings.input, settings.out
    other = None if settings.whiten in (None, "input") else Path(settings.whiten)
    _check(settings, other)
    predictor = bertsmith.load(settings.model, device=settings.device, precision=settings.precision)
    folder = predictor.folder
    pooling = embeddings.pooling_settings(
        folder,
        settings.pool,
        settings.max_length,
        "" if settings.no_prompt else settings.prompt,
        settings.normalize or (False if settings.no_normalize else None),
    )
    if embeddings.similarity_training(folder):
        print(f"{folder}: {pooling}", file=sys.stderr)

    # all is read, and refused if it must be, before the first vector is computed
    has_table = not all(map(is_text, (source, other or source)))
    texts, others = (
        read_texts(file, None if has_table and is_text(file) else settings.text)[0] if file else []
        for file in (source, other)
    )
    if settings.whiten:
        size = predictor.config.hidden_size
        embeddings.Whitening.check(len(others or texts), size, settings.dimensions)

    files = {source: texts} | ({str(other): others} if other else {})
    unscaled = replace(pooling, normalize=False)  # whitening comes before that
    with vectors_of(predictor, files, unscaled, settings) as (vectors, *more):
        if settings.whiten:
            fitted = more[0] if more else vectors
            vectors = embeddings.Whitening.fit(fitted, settings.dimensions).apply(vectors)
        if pooling.normalize:
            vectors = unit_length(vectors)
        _write_vectors(out, texts, vectors)
    print(f"{out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers")
    if warning := embeddings.pooling_warning(folder, pooling):
        print(f"warning: {warning}", file=sys.stderr)


def _write_vectors(out: Path, texts: Sequence[str], vectors: np.ndarray) -> None:
    import numpy as np

    from bertsmith.base.files import atomic_file

    with atomic_file(out) as temporary:
        if out.suffix == ".npy":
            np.save(temporary, vectors)
            return
        with temporary.open("w", encoding="utf-8", newline="") as file:
            for text, vector in zip(texts, vectors.tolist(), strict=True):
                file.write(json.dumps({"text": text, "vector": vector}) + "\n")


def _check(settings: Embed, whitening_file: Path | None) -> None:
    if settings.out.suffix not in OUTPUTS:
        raise ValueError(f"{settings.out}: end --out in {' or '.join(OUTPUTS)}")
    if settings.normalize and settings.no_normalize:
        raise ValueError("--normalize, --no-normalize: give one of them")
    if settings.prompt is not None and settings.no_prompt:
        raise ValueError("--prompt, --no-prompt: give one of them")
    if settings.dimensions is not None and settings.whiten is None:
        raise ValueError(f"--dimensions {settings.dimensions}: only with --whiten")
    check_outputs([Path(settings.input), whitening_file], {"--out": settings.out})


@contextmanager
def vectors_of(
    predictor: bertsmith.Predictor,
    files: Mapping[str, list[str]],
    pooling: PoolingSettings,
    settings: Embed,
) -> Iterator[list[np.ndarray]]:
    """The vectors of each file's texts, kept beside --out until the block has used them."""
    import numpy as np

    from bertsmith.inference.embeddings import embed, resolve_precision
    from bertsmith.inference.kept_blocks import (
        BLOCK_CHARACTERS,
        kept_blocks,
        request_digest,
        sorted_blocks,
    )

    work = [
        (name, block)
        for name, texts in files.items()
        for block in sorted_blocks([len(text) + 1 for text in texts], BLOCK_CHARACTERS)
    ]
    sizes = [len(block) for _, block in work]
    every = [text for texts in files.values() for text in texts]
    content = (text.encode("utf-8", "surrogatepass") for text in every)
    flags = (pooling, settings.device, settings.precision)
    request = request_digest(
        [predictor.folder], content, sizes, predictor.tokenizer.fingerprint, *flags
    )
    with kept_blocks(settings.out, request, sizes, "texts") as kept:
        kept.set_precision([predictor], lambda model: resolve_precision(model, every, pooling))
        with Progress("embed", sum(sizes), "texts", start=kept.rows) as progress:

            def compute(number: int) -> tuple[np.ndarray, np.ndarray]:
                name, block = work[number]
                texts = [files[name][k] for k in block]
                vectors, cut = embed(predictor, texts, pooling, progress.update)
                return vectors, np.array(cut)

            found = kept.arrays(compute)
        size = found[0][0].shape[1]
        vectors = {name: np.empty((len(texts), size), np.float32) for name, texts in files.items()}
        cut = dict.fromkeys(files, 0)
        for (name, block), (part, cut_in_part) in zip(work, found, strict=True):
            vectors[name][block] = part
            cut[name] += int(cut_in_part)
        for name, count in cut.items():
            if count:
                print(f"{name}: {count:,} of {len(files[name]):,} texts were cut", file=sys.stderr)
        yield list(vectors.values())


@dataclass(frozen=True, kw_only=True)
class EmbedTrain(ContrastiveSettings):
    """Train a model's vectors of texts on pairs that belong together.

    Examples:
      bertsmith embed train --model run --data pairs.csv --text query --text-pair reply --out pairs
      bertsmith embed train --model run --data duplicates.tsv --text sentence1 \\
          --text-pair sentence2 --dev STS-B/dev.tsv --score score --out pairs

    Each first text must find its own second text among those of its group (multiple negatives
    ranking loss); nothing but the pairs is labelled. --dev is a file of pairs with a similarity
    each (STS-B): the Spearman correlation of the cosines with it is printed, before and after. OUT
    is a model folder for `bertsmith embed`.
    """

    model: str
    """A run, a Hugging Face folder or hub name."""
    data: Path
    """csv, tsv, jsonl or parquet file of pairs."""
    text: str
    """Column of the first text."""
    text_pair: str
    """Column of the second text."""
    out: Path
    """Run directory to write."""
    dev: Path | None = None
    """File of pairs under the same columns, with a similarity each."""
    score: str | None = None
    """Its column of the similarity. Default: score."""


def run_embed_train(settings: EmbedTrain) -> None:
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.training.finetuning.contrastive import read_pairs, train_sentence_vectors

    if settings.dev is None and settings.score is not None:
        raise ValueError("--score: only with --dev")
    check_folder(settings.out)
    start = open_model_folder(settings.model)
    pairs = read_pairs(settings.data, settings.text, settings.text_pair)
    dev = None
    if settings.dev is not None:
        dev = read_pairs(settings.dev, settings.text, settings.text_pair, settings.score or "score")
    own, command = group_values(settings, ContrastiveSettings), ["bertsmith", *sys.argv[1:]]
    result = train_sentence_vectors(start, pairs, dev, settings.out, own, command=command)
    for name, after in result["metrics"].items():
        print(f"{name} on dev: {after:.4f} (before: {result['metrics_before'][name]:.4f})")
    print(f"{settings.out}: trained on {len(pairs):,} pairs")
    print(after_similarity_training(settings.out))


@dataclass(frozen=True, kw_only=True)
class Features(Answering):
    """Write a vector for every word of a file, out of any layers of a model.

    Examples:
      bertsmith features news.txt --model run --out vectors
      bertsmith features ner/train.conll --model run --out vectors --layers -4 --document-context
      bertsmith features reviews.csv --text body --model run --out v --layers all --pool none

    INPUT is .txt (a text a line), a table with --text (.csv, .tsv, .jsonl, .parquet), .jsonl or
    .parquet with {"tokens": [...]} or, under any other suffix, CoNLL columns; text may be packed
    (.gz, .xz, .zst). The folder OUT holds a memory-mapped float16 array and where each text lies in
    it; `bertsmith.open_features(OUT)[k]` are the vectors of text k.
    """

    input: Annotated[Path, tyro.conf.Positional, Metavar("INPUT")]
    """File with the texts or words."""
    model: str
    """Run directory, Hugging Face folder or hub name."""
    out: Path
    """Folder to write; it must be new or empty."""
    layers: str = "last"
    """last, all, -1, 0,6,12 or a span, written --layers=-4..-1; 0 is the embeddings' output."""
    pool: Literal["none", "sum", "concatenate"] = "concatenate"
    """How several layers become one vector; none: each by itself, for learned weights."""
    align: Literal["first", "mean", "pieces"] = "first"
    """A word's vector: of its first piece, or the mean of its pieces; pieces: one a piece."""
    text: str | None = None
    """Column with the text of a table. Default: text."""
    document_context: bool = False
    """CoNLL columns with -DOCSTART- lines: fill each row with what stands around its sentence in
    the document (slower)."""
    max_length: int | None = None
    """Tokens of a row; longer texts are read in overlapping windows. Default: at most 512."""


def run_features(settings: Features) -> None:
    from bertsmith.inference.features import Extraction, extract_features
    from bertsmith.tasks.tagging.sentences import read_words

    out = settings.out
    check_new_folder(out)
    predictor = bertsmith.load(settings.model, device=settings.device, precision=settings.precision)
    extraction = Extraction(
        predictor.config,
        settings.layers,
        settings.pool,
        settings.align,
        settings.max_length,
        settings.document_context,
    )
    sentences, counts = read_words(settings.input, settings.text)
    if settings.document_context and not sentences.has_documents:
        raise ValueError(
            f"--document-context: without effect: no -DOCSTART- line in {settings.input} says which"
            " sentences belong together; leave it out"
        )
    with Progress("features", unit="rows") as progress:
        extract_features(predictor, sentences, counts, extraction, out, progress.update)
    written = bertsmith.open_features(out)
    size = "x".join(map(str, written.vectors.shape))
    print(
        f"{out}: {len(written):,} texts, {len(sentences.words):,} words, float16 {size}, "
        f"{written.vectors.nbytes / 1e6:,.1f} MB, layers {', '.join(map(str, extraction.numbers))}"
    )


@dataclass(frozen=True, kw_only=True)
class FeaturesNer(FrozenSettings):
    """Tag words over a frozen model with a BiLSTM: the six rows of the paper's Table 7.

    Examples:
      bertsmith features ner --data conll2003 --model bert-base-cased --out runs/table7
      bertsmith features ner --data conll2003 --model run --out t7 --rows last concat-last-four
      bertsmith features ner --data conll2003 --model run --out t7-all --sentences 0 --seeds 1..5

    The model's states of every word are computed once; each row then trains a two-layer BiLSTM over
    other layers of them (paper section 5.3). The table of entity F1 is also in OUT/table.md. The
    same command again goes on where it was stopped; more rows or seeds are added to what is there.
    """

    data: Path
    """Folder with train, dev and test files in CoNLL columns, .jsonl or .parquet."""
    model: str
    """A run, a Hugging Face folder or hub name."""
    out: Path
    """Run directory to write, or to go on with."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which rows of the table."""
    seeds: str = "1"
    """Seeds, such as 1,2,3 or 1..5."""
    given: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run_features_ner(settings: FeaturesNer) -> None:
    seeds = parse_seeds(settings.seeds)
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.checkpoints.model_folder import load_tokenizer
    from bertsmith.checkpoints.tensors import weight_files
    from bertsmith.tasks.tagging.summary import case_warning
    from bertsmith.tasks.task import find_task
    from bertsmith.text.readers.tables import digest
    from bertsmith.training.finetuning.feature_tagger import feature_table, table
    from bertsmith.training.finetuning.settings import Provenance
    from bertsmith.training.finetuning.task_types.base import read_data
    from bertsmith.training.finetuning.task_types.tagging import Tag

    check_folder(settings.out)
    folder, task, task_type = open_model_folder(settings.model), find_task("ner"), Tag()
    train, dev, record = read_data(task_type, task, settings.data, None)
    data = {"train": train, **dev}
    if "tokens_per_window" in settings.given:
        check_tokens_per_window(
            settings.tokens_per_window, settings.document_context, *data.values()
        )
    if test := task_type.find_file(task, settings.data, "test"):
        data["test"] = task_type.read(test, task, task_type.label_names(train))
        record["data_sha256"]["test"] = digest(test)
    record["model_sha256"] = [digest(path) for path in weight_files(folder)]
    print(task_type.summarize(train, data["dev"]), file=sys.stderr)
    if warning := case_warning(train, load_tokenizer(folder).normalization):
        print(warning, file=sys.stderr)
    own, made_of = (
        group_values(settings, FrozenSettings),
        Provenance(["bertsmith", *sys.argv[1:]], record),
    )
    result = feature_table(folder, data, settings.rows, seeds, own, settings.out, made_of)
    for line in table(result):
        print(line)
