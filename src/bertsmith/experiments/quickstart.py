"""The whole way in minutes: text -> vocabulary -> store -> pre-training -> fill -> classifier.

Without a corpus it reads the English prose that every Python installation carries. The classifier's
labels come with the text: the package of a docstring, or the file or document of a paragraph.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from bertsmith.base.files import FOLDER_LOCK, locked_folder, read_json, write_json
from bertsmith.base.terminal import of_cases
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.experiments.docstring_origin import MIN_WORDS, Origin, docstring_origin
from bertsmith.experiments.installed_prose import Module, harvest_prose
from bertsmith.experiments.settings import QuickstartSettings
from bertsmith.inference.predictor import Predictor, load
from bertsmith.model.config import config_for
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.metrics import confusion
from bertsmith.tasks.task import own_task
from bertsmith.text.readers.documents import Document, no_text, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.finetuning.run import notable_examples
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.trainer import InitialModel, Trained, Trainer
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

PROMPTS = (
    "If the file does not exist, an [MASK] is raised.",
    "The function returns a [MASK] of strings.",
    "Return [MASK] if the two arrays are equal, otherwise False.",
    "The default [MASK] is None.",
    "For more information, see the [MASK].",
)
MARKER = ".quickstart"  # in a folder that may be written anew
OURS = ("vocab", "store", "pretrain", "finetune")
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (1, 2, 3)
SET_SIZES = ((150, 50, 100), (60, 20, 40))  # train, dev and test examples of a class
CLASSES = 8
BLOCK = 5  # paragraphs of a document that stay on one side


def quickstart(
    out: Path, settings: QuickstartSettings, corpus: Sequence[Path] = ()
) -> dict[str, Any]:
    """Run everything into `out`, in place of an earlier quickstart; returns the written summary.

    Errors: ValueError when `out` is a folder of something else, or lies within the corpus or around
    it, or another process writes there, or the corpus cannot be used.
    """
    recipes = _recipes(settings)  # mistakes end it before minutes are spent
    _check_folder(out, corpus)
    if corpus and not any(True for _ in read_documents(corpus)):
        raise no_text(corpus)
    with locked_folder(out):
        return _whole_way(out, settings, corpus, *recipes)


def _whole_way(
    out: Path,
    settings: QuickstartSettings,
    corpus: Sequence[Path],
    pretraining: PretrainSettings,
    finetuning: FinetuneSettings,
) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    modules: list[Module] = []
    if not corpus:
        with _stage("text", "reading the prose of this Python installation", seconds):
            modules = list(harvest_prose(workers=settings.workers))
    origin = _labelled(modules or _passages(read_documents(corpus)), settings.seed)
    documents = [Document(m.name, 1, m.paragraphs) for m in modules if m.paragraphs]
    with _stage("vocabulary", f"learning {settings.vocab_size:,} pieces", seconds):
        texts: Iterable[Document] = documents or read_documents(corpus)
        try:
            vocabulary = train_vocabulary(texts, settings.vocab_size, workers=settings.workers)
        except ValueError as error:  # whose last remedies are settings that a quickstart has not
            raise ValueError(re.split(r",? \(?or (?:lower|fewer) ", str(error))[0]) from error
        _clear(out)  # not before the text is known to do
        tokenizer = Tokenizer(vocabulary)
        tokenizer.save(out / "vocab")
    with _stage("corpus", "tokenizing into a store", seconds):
        build = BuildSettings(workers=settings.workers)
        manifest = build_store(corpus, tokenizer, out / "store", build, documents=documents or None)
    with _stage("pretrain", f"pre-training for {settings.minutes:g} minutes", seconds):
        result = pretrain(out / "store", out / "pretrain", pretraining)
    if not result.finished:
        raise KeyboardInterrupt
    summary: dict[str, Any] = {
        "settings": {**vars(settings), "corpus": [str(path) for path in corpus]},
        "machine": read_json(out / "pretrain" / "run.json")["machine"],
        "corpus": _corpus_figures(manifest),
        "pretrain": "pretrain",
        "unigram_entropy": result.eval_metrics.get("unigram_entropy"),
        "held_out": result.eval_metrics,
    }
    _print_held_out(summary["held_out"])
    predictor = load(out / "pretrain")
    prompts = _own_prompts(predictor, read_documents(corpus)) if corpus else PROMPTS
    summary["fill"] = [_filled(predictor, text) for text in prompts]
    if origin is not None:
        with _stage("fine-tuning", "pre-trained against from scratch", seconds):
            sides = _classification(out, origin, finetuning)
        sides["verdict"] = verdict(sides["pretrained"], sides["scratch"], result.steps)
        summary["classification"] = sides
    summary["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    write_json(out / "quickstart.json", summary)
    return summary


def _recipes(settings: QuickstartSettings) -> tuple[PretrainSettings, FinetuneSettings]:
    """The settings of both trainings; ValueError for one that cannot be."""
    import matplotlib  # noqa: F401 - of the extra `train`: classifier and report need it at the end
    import sklearn  # noqa: F401

    config_for(settings.size, settings.vocab_size)
    pretraining = PretrainSettings(
        size=settings.size,
        minutes=settings.minutes,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
    )
    pretraining.budget()
    return pretraining, FinetuneSettings(
        precision="auto",
        epochs=settings.epochs,
        max_length=96,
        keep="last",
        evals_per_epoch=0,
        max_retries=0,
    )


def _check_folder(out: Path, corpus: Sequence[Path]) -> None:
    """Errors: ValueError for a folder that must not be written into."""
    if out.is_file() or (
        out.exists()
        and not (out / MARKER).exists()
        and any(path.name != FOLDER_LOCK for path in out.iterdir())
    ):
        raise ValueError(f"{out} holds something that no quickstart wrote: name another `out`")
    for path in corpus:
        if out.resolve() in path.resolve().parents:
            raise ValueError(f"{path} lies in {out}, which is written anew: name another `out`")
        # the corpus is read several times, also after the first files of ours
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{out} lies in the corpus {path}: name an `out` outside of it")


def _clear(out: Path) -> None:
    """Remove what an earlier quickstart wrote, and mark the folder as ours."""
    for name in OURS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("quickstart.json", "report.html"):
        (out / name).unlink(missing_ok=True)
    (out / MARKER).touch()


@contextmanager
def _stage(name: str, work: str, seconds: dict[str, float]) -> Iterator[None]:
    print(f"\n== {name}: {work}", flush=True)
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started


def _corpus_figures(manifest: dict[str, Any]) -> dict[str, Any]:
    train, held_out = manifest["splits"]["train"], manifest["splits"]["held_out"]
    figures = {name: train[name] + held_out[name] for name in ("documents", "sentences", "tokens")}
    print(
        f"{figures['documents']:,} documents, {figures['sentences']:,} sentences, "
        f"{figures['tokens']:,} tokens; {held_out['tokens']:,} of them held out"
    )
    sizes = {"vocabulary_size": manifest["vocabulary_size"], "held_out_tokens": held_out["tokens"]}
    return {**figures, "megabytes": round(manifest["text_bytes"] / 1e6, 1), **sizes}


def _print_held_out(figures: dict[str, Any]) -> None:
    if not figures:
        return
    pairs = ""
    if "nsp_accuracy" in figures:
        number = of_cases(figures["nsp_cases"]) or " of the"
        pairs = f" and {figures['nsp_accuracy']:.0%}{number} next sentences"
    print(
        f"held-out text: MLM loss {figures['mlm_loss']:.2f} nats where token counts alone give "
        f"{figures['unigram_entropy']:.2f}; {figures['mlm_accuracy']:.0%} of the masked tokens"
        f"{pairs} right"
    )


def _filled(predictor: Predictor, text: str) -> dict[str, Any]:
    predictions = predictor.fill(text)
    print(f"\n{text}")
    for answers in predictions:
        print("   " + "  ".join(f"{a.token} {a.probability:.0%}" for a in answers))
    rows = [[answer.to_dict() for answer in answers] for answers in predictions]
    return {"text": text, "predictions": rows}


def _own_prompts(predictor: Predictor, documents: Iterable[Document]) -> list[str]:
    """Sentences of the text with a word from their middle masked, one a document."""
    prompts = []
    for document in islice(documents, 200):
        for sentence in split_sentences(document.lines[0]):
            encoded = predictor.tokenizer.encode_batch([sentence])
            single = np.flatnonzero(np.bincount(encoded.word_ids) == 1)  # words of one piece
            inner = [word for word in single if 2 <= word < encoded.word_ids[-1] - 1]
            if 8 <= len(encoded.ids) <= 40 and inner:
                word = inner[len(inner) // 2]
                start, end = encoded.offsets[encoded.word_ids.tolist().index(word)]
                if end - start >= 2:
                    prompts.append(f"{sentence[:start]}[MASK]{sentence[end:]}")
                    break
        if len(prompts) == len(PROMPTS):
            break
    return prompts


def _passages(documents: Iterable[Document]) -> list[Module]:
    """The user's paragraphs, a few neighbours a module; the class is the file, of a single file the
    document. A book is one document: whole, it would all be on one side."""
    documents = list(documents)
    sources = {document.source for document in documents}
    shared = os.path.commonprefix([*sources]).rpartition("/")[0]  # folders of all

    def name(document: Document) -> str:
        if len(sources) == 1:
            return f"document at line {document.line}"
        return document.source.removeprefix(shared).lstrip("/")

    return [
        Module(f"{d.source}:{d.line}.{start}", name(d), [], d.lines[start : start + BLOCK])
        for d in documents
        for start in range(0, len(d.lines), BLOCK)
    ]


def _labelled(modules: Sequence[Module], seed: int) -> Origin | None:
    """The labelled sets; None, with the reason printed, when the text has too few."""
    classes = min(CLASSES, len({module.package for module in modules}))
    for train, dev, test in SET_SIZES:
        sizes = {"train": train, "dev": dev, "test": test}
        for count in range(classes, 1, -1):
            with suppress(ValueError):
                return docstring_origin(modules, seed=seed, num_classes=count, **sizes)
    least = f"{sum(SET_SIZES[-1])} passages of {MIN_WORDS} words or more each"
    print(f"no classifier: the text has no two files, or documents of one file, with {least}")
    return None


def _classification(out: Path, origin: Origin, recipe: FinetuneSettings) -> dict[str, Any]:
    """The same network, pre-trained and from scratch: best of three rates on dev, three seeds."""
    task, names = own_task("classify", "text", None, "label"), origin.test.label_names
    figures: dict[str, Any] = {"labels": list(names)}
    figures |= {f"{split}_examples": len(part) for split, part in origin._asdict().items()}
    for side in ("pretrained", "scratch"):
        start = InitialModel(out / "pretrain", from_scratch=side == "scratch")
        trainer = Trainer.prepare(start, task, origin.train, {"dev": origin.dev}, recipe)

        def run(
            rate: float, seed: int, name: str, side: str = side, trainer: Trainer = trainer
        ) -> Trained:
            folder = out / "finetune" / side / name.replace(" ", "-")
            return trainer.run(replace(recipe, learning_rate=rate), seed, folder, f"{side}, {name}")

        trained = {rate: run(rate, SEEDS[0], f"rate {rate:g}") for rate in RATES}
        rates = {rate: one.evaluation.metrics["accuracy"] for rate, one in trained.items()}
        best = max(RATES, key=rates.__getitem__)
        records = {SEEDS[0]: _test_records(trainer, trained[best], origin.test)}
        for seed in SEEDS[1:]:
            records[seed] = _test_records(trainer, run(best, seed, f"seed {seed}"), origin.test)
        accuracies = {
            str(seed): mean(float(record["label"] == record["predicted"]) for record in rows)
            for seed, rows in records.items()
        }
        figures[side] = {
            "rates": {f"{rate:g}": accuracy for rate, accuracy in rates.items()},
            "best_rate": f"{best:g}",
            "accuracies": accuracies,
            "mean": mean(accuracies.values()),
            "spread": stdev(accuracies.values()),
        }
        if side == "pretrained":
            figures |= confusion(records[SEEDS[0]], names)
            figures["examples"] = notable_examples(records[SEEDS[0]], names)
    return figures


def _test_records(trainer: Trainer, trained: Trained, test: Examples) -> list[dict[str, Any]]:
    """The answers of a trained model for the test set."""
    model_task = trained.evaluation.model_task
    rows = trainer.task_type.featurize(trainer.tokenizer, test, model_task)
    answers = trainer.task_type.answers(trained.outputs(rows), rows, test, model_task)
    return trainer.task_type.to_records(answers, test, model_task)


def verdict(pretrained: dict[str, Any], scratch: dict[str, Any], steps: int) -> str:
    """One sentence: did pre-training help, by its mean accuracy and the stds of the seeds?

    A difference counts as one above its two standard errors.

    >>> scratch = {"mean": 0.47, "spread": 0.02, "accuracies": {"1": 0.45, "2": 0.47, "3": 0.49}}
    >>> verdict({**scratch, "mean": 0.65}, scratch, 2000)
    'Pre-training helps by 18.0 points.'
    >>> verdict({**scratch, "mean": 0.48}, scratch, 40)
    'The 40 steps of pre-training make no difference beyond chance (+1.0 points); train longer.'
    """
    gain = 100 * (pretrained["mean"] - scratch["mean"])
    variance = sum(side["spread"] ** 2 / len(side["accuracies"]) for side in (pretrained, scratch))
    if gain > 200 * variance**0.5:
        return f"Pre-training helps by {gain:.1f} points."
    found = f"make no difference beyond chance ({gain:+.1f} points)"
    if gain < -200 * variance**0.5:
        found = f"cost {-gain:.1f} points: too few to help"
    return f"The {steps:,} steps of pre-training {found}; train longer."
