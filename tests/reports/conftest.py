"""Run directories as training writes them, with figures that are easy to recognize."""

import json
from html.parser import HTMLParser

import matplotlib
import pytest
from matplotlib.figure import Figure

from bertsmith.reports import plots
from bertsmith.reports.pages import write_report

from ..tiny import write

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """The words of a page, without those of its style and pictures.

    Fails on a tag that is not closed or that a browser would fetch for.
    """

    def __init__(self, page):
        super().__init__()
        self.open, self.words = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object", "img")
        for name, value in attributes:
            assert name != "src" and not name.startswith("on")
            if name.endswith("href"):
                assert value.startswith("#")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, words):
        if not {"style", "svg"} & set(self.open):
            self.words.append(words)


def split_words(page):
    return " ".join(" ".join(Reader(page).words).split())


@pytest.fixture
def page(tmp_path):
    """(words, source) of the report of runs."""

    def make(*runs, **more):
        out = tmp_path / "out" / "report.html"
        write_report(list(runs), out, **more)
        source = out.read_text(encoding="utf-8")
        assert "@import" not in source and "url(http" not in source
        return split_words(source), source

    return make


@pytest.fixture
def unwritten_charts(monkeypatch):
    """For tests of words: charts are painted, but not written as SVG, which takes longest."""

    def picture(size, paint, fixed=False):
        with matplotlib.rc_context(plots.STYLE):
            paint(Figure(figsize=size).add_subplot())
        return "<svg></svg>"

    monkeypatch.setattr(plots, "_picture", picture)


def write_run(run, kind, settings, log=None, result=None, **described):
    """A run's folder: run.json, and log and result where they are given."""
    described |= {"format": 1, "bertsmith": "9.8.7", "kind": kind, "settings": settings}
    described |= {"command": ["bertsmith", kind, "--out", "a b"], "parameters": 1_480_000}
    described |= {"machine": {"cpu": "Abacus <3000>", "device": "cpu"}}
    write(run / "run.json", json.dumps(described | {"created": "2026-01-02T03:04:05Z"}))
    if log:
        write(run / "log.jsonl", map(json.dumps, log))
    if result:
        write(run / "result.json", json.dumps(result))
    return run


@pytest.fixture
def pretrained(tmp_path):
    def make(name="first", *, finished=True, learning_rate=0.002, loss=4.25):
        alike = {"nsp_accuracy": 0.5, "learning_rate": learning_rate, "grad_norm": 1.0}
        log: list[dict] = [
            {"event": "train", "step": step, "tokens": step * 100, "seconds": step / 10, **alike}
            | {"mlm_loss": 9 - step / 20 if step != 50 else None, "mlm_accuracy": step / 300}
            | {"tokens_per_second": 1000}
            for step in range(10, 101, 10)
        ]
        log.append({"event": "evaluate", "step": 100, "mlm_loss": loss, "mlm_accuracy": 0.3})
        log.append({"event": "message", "text": "went on after <SIGTERM>"})
        held_out = {"mlm_loss": loss, "mlm_accuracy": 0.3125, "nsp_accuracy": 0.75}
        held_out["unigram_entropy"] = 6.5
        result = {"held_out": held_out, "steps": 100, "tokens": 10_000, "seconds": 95}
        settings = {"learning_rate": learning_rate, "model": {"size": "tiny"}}
        return write_run(tmp_path / name, "pretrain", settings, log, result if finished else None)

    return make


@pytest.fixture(scope="session")
def change():
    """Changes entries of a JSON file, of its settings or of another part."""

    def change(path, part=None, **entries):
        stored = json.loads(path.read_text())
        (stored if part is None else stored[part]).update(entries)
        write(path, json.dumps(stored))

    return change


@pytest.fixture
def in_two_phases(tmp_path):
    """A run as it goes on in longer rows from step 90: figures are worse from there on."""

    def make(name, *predicted, phases=2):
        settings = {"objective": "+".join(predicted), "max_length": 128}
        settings |= {"phase2_length": 512} if phases == 2 else {}
        lines = []
        for step in range(10, 121, 10):
            second = phases == 2 and step > 90
            if second and step == 100:
                lines.append({"event": "message", "text": "phase 2 from step 90 on"})
            figures: dict[str, float] = {"phase": 1 + second} if phases == 2 else {}
            for k, figure in enumerate(predicted):
                figures[f"{figure}_loss"] = 9 - step / 20 + 2 * second + k
                figures[f"{figure}_accuracy"] = (step / 300 - 0.1 * second) / (k + 1)
            speed = {"tokens_per_second": 1000, "padding_ratio": 0.25 if second else 0.0}
            lines.append({"event": "train", "step": step, "tokens": step * 100, **figures, **speed})
            lines.append({"event": "evaluate", "step": step, **figures})
        final = {f"{figure}_loss": 5.0 for figure in predicted}
        final |= {f"{figure}_accuracy": 0.25 * (k + 1) for k, figure in enumerate(predicted)}
        final["unigram_entropy"] = 6.5 if "mlm" in predicted else 6.75
        lines.append({"event": "evaluate", "step": 120, **final})  # as the end of a run: no phase
        result = {"held_out": final, "steps": 120, "tokens": 12_000}
        return write_run(tmp_path / name, "pretrain", settings, lines, result)

    return make


@pytest.fixture
def finetuned(tmp_path):
    def make(name="classifier", seeds=(1, 2, 10), labels=("cat", "<dog>")):
        run = tmp_path / name
        metrics = {str(seed): {"accuracy": 0.8 + seed / 100, "loss": 0.5} for seed in seeds}
        for seed in seeds:
            lines = [{"event": "train", "step": step, "loss": 1 / step} for step in range(1, 20)]
            lines += [{"event": "evaluate", "step": step, "accuracy": 0.7} for step in (10, 20)]
            write(run / "seeds" / str(seed) / "log.jsonl", map(json.dumps, lines))
        wrong = {"text": "sure & wrong", "label": "cat", "predicted": "<dog>", "probability": 0.99}
        right = {"text": "<script>x</script>", "label": "cat", "predicted": "cat"}
        result = {
            "metrics": metrics[str(seeds[0])],
            "main_metric": "accuracy",
            "labels": list(labels),
            "confusion": [[30, 10], [20, 40]],
            "seeds": metrics,
            "best_seed": seeds[-1],
            "dev_examples": 120,
            "examples": [wrong, right | {"probability": 0.51}],
        }
        return write_run(run, "finetune", {"task": "classify"}, result=result)

    return make


@pytest.fixture
def quickstart(tmp_path, pretrained):
    side = {"rates": {"1e-4": 0.7, "3e-4": 0.75}, "best_rate": "3e-4"}
    pretrained("story/pretrain")
    predictions = [[{"token": "<b>", "probability": 0.25}]]
    story = {
        "settings": {"minutes": 4},
        "machine": {"cpu": "Abacus"},
        "corpus": {"documents": 5214, "sentences": 214311, "tokens": 6_812_331, "megabytes": 31.4},
        "pretrain": "pretrain",
        "unigram_entropy": 6.5,
        "held_out": {"mlm_loss": 4.25, "mlm_accuracy": 0.3125},
        "fill": [{"text": "The [MASK] & <i>I</i>", "predictions": predictions}],
        "classification": {
            "labels": ["cat", "<dog>"],
            "train_examples": 6400,
            "test_examples": 100,
            "pretrained": {**side, "accuracies": {"1": 0.8, "2": 0.82, "3": 0.84}, "mean": 0.82},
            "scratch": {**side, "accuracies": {"1": 0.7, "2": 0.71, "3": 0.72}, "mean": 0.71},
            "confusion": [[30, 10], [20, 40]],
            "examples": [],
        },
        "seconds": {"pretrain": 240.0, "fine-tuning": 60.0},
    }
    return write(tmp_path / "story" / "quickstart.json", json.dumps(story)).parent


@pytest.fixture
def tuned(tmp_path):
    """A finished fine-tuning run with its answers on the dev set."""

    def make(kind, examples, *, name="tuned", task=None, labels=(), seeds=None, **more):
        run, task = tmp_path / name, task or kind
        settings = {"task": task, "data_sha256": {"train": "ab12", "dev": "cd34"}}
        log = [{"event": "train", "step": 1, "loss": 1.0}]
        metrics = more.pop("metrics", {"accuracy": 0.5})
        result = {"metrics": metrics, "main_metric": next(iter(metrics)), "labels": list(labels)}
        result |= {"seeds": seeds or {"1": metrics}} | more
        scores = {"task": task, "kind": kind, "metrics": list(metrics), "labels": list(labels)}
        write(run / "dev_scores.json", json.dumps({**scores, "examples": examples}))
        return write_run(run, "finetune", settings, log, result, commit="f00dfeed")

    return make
