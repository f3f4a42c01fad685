"""A quicker engine answers where a sample shows it faster and hardly off; the choice is kept."""

import math
from dataclasses import replace

import numpy as np
import pytest

import bertsmith
from bertsmith.inference.engines import choice, runner
from bertsmith.inference.engines.choice import Trial, deviation, kept_choice, quickest
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.kernels.llvm.blocks import integer_dtype

from ...tiny import cli, piece_tokenizer, random_model, write

TEXT = "the a cat dog sat on mat . good bad"
WORDS = TEXT.split()
TEXTS = [" ".join(WORDS[k % 7 : k % 7 + 1 + k % 4]) for k in range(20)]
EXACT = Processor("cpu", "float32", 1, "bertsmith")
BF16, INT8 = replace(EXACT, engine="pytorch", precision="bf16"), replace(EXACT, precision="int8")
ONNX = replace(EXACT, engine="onnx")
SUFFIXES = {"predict": ".jsonl", "embed": ".npy", "features": ""}
FASTER = Trial("pytorch", "bf16", 2.0, 0.01)
QUICKER = Trial("bertsmith", "int8", 2.0, 0.01)
HAS_INT8 = pytest.mark.skipif(integer_dtype() is None, reason="no products of integers")


class Machine:
    """A clock that goes on by an engine's seconds for each sample, and outputs that are `off`."""

    def __init__(self, seconds, off=None):
        self.now, self.rows = 0.0, []
        self.seconds, self.off = {EXACT: 1.0, **seconds}, off or {}

    def compute(self, own, rows):
        self.now += self.seconds[own]
        self.rows.append(rows)
        return np.full((len(rows), 4), 1.0 + self.off.get(own, 0.0), np.float32)


@pytest.mark.parametrize(
    ("seconds", "off", "taken"),
    [
        ({BF16: 0.3}, {BF16: 0.01}, BF16),
        ({BF16: 0.9}, {BF16: 0.01}, BF16),
        ({BF16: 0.92}, {BF16: 0.01}, EXACT),
        ({BF16: 3.0}, {BF16: 0.01}, EXACT),
        ({BF16: 0.3}, {BF16: 0.029}, BF16),
        ({BF16: 0.3}, {BF16: 0.031}, EXACT),
        ({BF16: 0.3}, {BF16: np.nan}, EXACT),
        ({BF16: 0.5, INT8: 0.3}, {INT8: 0.02}, INT8),
        ({BF16: 0.3, INT8: 0.5}, {INT8: 0.02}, BF16),
        ({BF16: 0.5, INT8: 0.3}, {INT8: 0.04}, BF16),
        ({INT8: 0.5, ONNX: 0.4}, {INT8: 0.02}, ONNX),
        ({}, {}, EXACT),
    ],
)
def test_an_engine_must_be_faster_and_agree(monkeypatch, seconds, off, taken):
    machine = Machine(seconds, off)
    monkeypatch.setattr(choice.time, "process_time", lambda: machine.now)
    trial = quickest(EXACT, 2000, machine.compute, list(seconds))
    assert (trial.engine, trial.precision) == (taken.engine, taken.precision)
    assert trial.gain == pytest.approx(1 / machine.seconds[taken])
    assert trial.beside.count("x, ") == len({*seconds} - {taken})  # the reason is told
    assert len(machine.rows) == 4 * (1 + len(seconds))  # each once unmeasured, then by turns


@pytest.mark.parametrize(("count", "sample"), [(800, 8), (2000, 20), (10**6, 64)])
def test_the_sample_is_small_and_spread_over_all_rows(monkeypatch, count, sample):
    machine = Machine({BF16: 1.0})
    monkeypatch.setattr(choice.time, "process_time", lambda: machine.now)
    assert quickest(EXACT, count, machine.compute, [BF16])[:2] == ("bertsmith", "float32")
    for rows in machine.rows:
        assert len(set(rows)) == sample and rows[0] == 0 and rows[-1] == count - 1
    assert 8 * sample <= 0.081 * count


def test_the_deviation_is_that_of_the_worst_row():
    exact = np.array([[1.0, 0.0], [0.0, 3.0], [2.0, 2.0]])
    quick = exact + np.array([[0.0, 0.1], [0.0, 0.0], [0.03, 0.04]])
    assert deviation(exact, quick) == pytest.approx(0.1 / np.sqrt(18 / 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer, path = piece_tokenizer(TEXT), tmp_path_factory.mktemp("models") / "model"
    config = ModelConfig(len(tokenizer.vocabulary), 32, 2, 1, 64, max_positions=24)
    written = {"label_names": ["bad", "good"], "extra_config": {"max_length": 16}}
    return random_model(path, tokenizer, SequenceClassifier, 2, config=config, std=0.4, **written)


@pytest.fixture
def kept(folder, tmp_path, monkeypatch):
    """The processor that is kept, or that `measure` gives, and the files; in an empty cache."""
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))

    def ask(measure, processors=(EXACT, BF16), work=("BareModel", None)):
        chosen = kept_choice(folder, processors, work, measure)
        return chosen, sorted((tmp_path / "cache").rglob("*.json"))

    return ask


def test_a_choice_is_kept_and_said(kept, folder, capsys):
    chosen, (file,) = kept(lambda: FASTER)
    assert kept(pytest.fail) == (BF16, [file]) == (chosen, [file])
    said = (
        f"{folder}: answers by pytorch in bf16, 2.0x as fast here and 1.0% off at most in a "
        "sample; float32 precision is exact; {} " + f"{file}\n"
    )
    assert capsys.readouterr().err == said.format("kept in") + said.format("as measured before:")


def test_the_line_tells_of_the_others(monkeypatch):
    machine = Machine({BF16: 0.5, INT8: 0.25}, {BF16: 0.01, INT8: 0.1})
    monkeypatch.setattr(choice.time, "process_time", lambda: machine.now)
    assert str(quickest(EXACT, 2000, machine.compute, [BF16, INT8])) == (
        "answers by pytorch in bf16, 2.0x as fast here and 1.0% off at most in a sample (beside "
        "it: bertsmith in int8 4.0x, 10.0% off); float32 precision is exact"
    )


def test_that_nothing_is_faster_is_kept_too(kept, capsys):
    assert kept(lambda: Trial("bertsmith", "float32"))[0] == kept(pytest.fail)[0] == EXACT
    said = "answers by bertsmith in float32: nothing faster is off by less than 3%; "
    assert capsys.readouterr().err.count(said) == 2


@pytest.mark.parametrize("what", ["weights", "threads", "engines", "work", "version", "processor"])
def test_other_circumstances_are_measured_again(kept, folder, monkeypatch, what):
    kept(lambda: FASTER)
    asked = {}
    if what == "weights":
        weights = folder / "model.safetensors"
        stored = weights.read_bytes()
        weights.write_bytes(stored)  # of another time
    elif what == "threads":
        asked["processors"] = [replace(own, threads=2) for own in (EXACT, BF16)]
    elif what == "engines":
        asked["processors"] = [EXACT, BF16, ONNX]
    elif what == "work":
        asked["work"] = "BareModel", [2]
    elif what == "version":
        monkeypatch.setattr(choice, "version", lambda package: "0.1")
    else:
        monkeypatch.setattr(choice, "cpu_features", lambda: {"avx2"})
    chosen, files = kept(lambda: Trial("bertsmith", "float32"), **asked)
    assert chosen.engine == "bertsmith" and len(files) == 2


def test_a_damaged_choice_is_measured_again(kept):
    _, (file,) = kept(lambda: FASTER)
    stored = file.read_bytes()
    for damaged in (b"", b"{}", stored[:-9], stored.replace(b"bf16", b"int8")):
        file.write_bytes(damaged)
        assert kept(lambda: FASTER)[0] == BF16
        assert file.read_bytes() == stored


def test_a_cache_that_cannot_be_written_is_no_error(kept, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert kept(lambda: FASTER)[0] == BF16
    assert "float32 precision is exact; not kept: " in capsys.readouterr().err


def test_a_package_of_another_name(kept, monkeypatch):
    def version(package):
        raise choice.PackageNotFoundError(package)

    monkeypatch.setattr(choice, "version", version)
    assert kept(lambda: FASTER)[0] == kept(pytest.fail)[0] == BF16


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """What is measured is what a test says; with it how often, and the samples' shapes."""
    asked = []
    monkeypatch.setattr(runner, "FEWEST_ROWS", 2)
    monkeypatch.setattr(Processor, "has_bf16", lambda self: True)

    def of(trial):
        monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / f"cache-{len(asked)}"))

        def try_it(exact, count, compute, others):
            outputs = [compute(exact, np.array([0, 5])), compute(others[0], np.arange(count))]
            asked.append([output.shape for output in outputs])
            return trial

        monkeypatch.setattr(runner, "quickest", try_it)
        return asked

    return of


@HAS_INT8
def test_a_predictor_settles_once_and_for_good(folder, tried, capsys):
    exact = bertsmith.load(folder).classify(TEXTS)
    narrow = bertsmith.load(folder, precision="int8").classify(TEXTS)
    assert exact != narrow
    asked = tried(QUICKER)
    model = bertsmith.load(folder, precision="auto")
    assert model.classify(TEXTS) == narrow
    assert capsys.readouterr().err.startswith(f"{folder}: answers by bertsmith in int8, 2.0x as")
    assert repr(model).endswith("cpu, bertsmith in int8>")
    assert {own.precision for _, own in model._models} == {"int8"}  # no second copy of weights
    assert model.classify(TEXTS) == narrow and len(asked) == 1
    assert bertsmith.load(folder, precision="auto").classify(TEXTS) == narrow and len(asked) == 1
    tried(Trial("bertsmith", "float32"))
    model = bertsmith.load(folder, precision="auto")
    assert model.classify(TEXTS) == exact
    assert {own.precision for _, own in model._models} == {"float32"}
    tried(QUICKER)  # comes too late: a text has one answer
    assert model.classify(TEXTS) == exact


def test_few_rows_and_what_is_told_are_not_measured(folder, tried):
    asked = tried(FASTER)
    for told in ({}, {"precision": "bf16"}, {"engine": "pytorch"}, {"engine": "bertsmith"}):
        assert bertsmith.load(folder, **told).classify(TEXTS)
    assert bertsmith.load(folder, precision="auto").classify(TEXTS[:1]) and not asked
    model = bertsmith.load(folder, precision="auto", engine="pytorch")
    assert model.classify(TEXTS) and len(asked) == 1


def test_python_answers_in_float32_unless_told(folder):
    assert bertsmith.load(folder).processor.precision == "float32"
    assert bertsmith.load(folder).processor.engine == "bertsmith"


@HAS_INT8
@pytest.mark.parametrize("command", ["predict", "embed", "features"])
def test_the_commands_settle_by_their_own_rows(folder, tried, tmp_path, command):
    texts = write(tmp_path / "texts.txt", TEXTS)

    def ran(name, *flags):
        """The bytes that the command writes, and whether it says that they are int8's."""
        out = tmp_path / f"{name}{SUFFIXES[command]}"
        words = [folder, texts] if command == "predict" else [texts, "--model", folder]
        done = cli(command, *words, "--out", out, *flags)
        assert done.code == 0
        written = out / "vectors.npy" if command == "features" else out
        return written.read_bytes(), "by bertsmith in int8, 2.0x" in done.err

    asked = tried(QUICKER)
    exact, narrow = ran("exact", "--precision", "float32"), ran("narrow", "--precision", "int8")
    assert not asked and exact[0] != narrow[0] and not exact[1] and not narrow[1]
    assert ran("faster") == (narrow[0], True)
    ((two, whole),) = asked
    assert whole[0] > two[0] and two[1:] == whole[1:]
    tried(Trial("bertsmith", "float32"))
    assert ran("slower") == exact


def test_scores_that_are_all_alike_are_equal_or_endlessly_far():
    alike = np.full((3, 1), 5.0)
    assert deviation(alike, alike) == 0 and deviation(alike, alike + 1) == math.inf
