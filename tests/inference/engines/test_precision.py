"""A quicker precision answers where a sample shows it faster and hardly off; else float32."""

import numpy as np
import pytest

import bertsmith
from bertsmith.inference.engines import precision, runner
from bertsmith.inference.engines.precision import Trial, deviation, quickest
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier

from ...tiny import cli, piece_tokenizer, random_model, write

TEXT = "the a cat dog sat on mat . good bad"
WORDS = TEXT.split()
TEXTS = [" ".join(WORDS[k % 7 : k % 7 + 1 + k % 4]) for k in range(20)]
FLOAT32 = Processor("cpu", "float32", 1)
SUFFIXES = {"predict": ".jsonl", "embed": ".npy", "features": ""}
FASTER = Trial("bf16", 2.0, 0.01)


class Machine:
    """A clock that goes on by a precision's seconds for each sample, and outputs that are `off`."""

    def __init__(self, seconds, off=None):
        self.now, self.seconds, self.off, self.rows = (
            0.0,
            {"float32": 1.0, **seconds},
            off or {},
            [],
        )

    def compute(self, engine, rows):
        self.now += self.seconds[engine.precision]
        self.rows.append(rows)
        return np.full((len(rows), 4), 1.0 + self.off.get(engine.precision, 0.0), np.float32)


@pytest.mark.parametrize(
    ("seconds", "off", "taken"),
    [
        ({"bf16": 0.3}, {"bf16": 0.01}, "bf16"),
        ({"bf16": 0.9}, {"bf16": 0.01}, "bf16"),
        ({"bf16": 0.92}, {"bf16": 0.01}, None),
        ({"bf16": 3.0}, {"bf16": 0.01}, None),
        ({"bf16": 0.3}, {"bf16": 0.029}, "bf16"),
        ({"bf16": 0.3}, {"bf16": 0.031}, None),
        ({"bf16": 0.3}, {"bf16": np.nan}, None),
        ({"bf16": 0.5, "int8": 0.3}, {"int8": 0.02}, "int8"),
        ({"bf16": 0.3, "int8": 0.5}, {"int8": 0.02}, "bf16"),
        ({"bf16": 0.5, "int8": 0.3}, {"int8": 0.04}, "bf16"),
    ],
    ids=str,
)
def test_a_precision_must_be_faster_and_agree(monkeypatch, seconds, off, taken):
    machine = Machine(seconds, off)
    monkeypatch.setattr(precision.time, "process_time", lambda: machine.now)
    trial = quickest(FLOAT32, 2000, machine.compute, list(seconds))
    assert (trial and trial.precision) == taken
    if trial:
        assert trial.gain == pytest.approx(1 / seconds[taken])
    assert len(machine.rows) == 3 * (1 + len(seconds))  # each once unmeasured, then by turns


@pytest.mark.parametrize(("count", "sample"), [(800, 8), (2000, 20), (10**6, 64)])
def test_the_sample_is_small_and_spread_over_all_rows(monkeypatch, count, sample):
    machine = Machine({"bf16": 1.0})
    monkeypatch.setattr(precision.time, "process_time", lambda: machine.now)
    assert quickest(FLOAT32, count, machine.compute, ["bf16"]) is None
    for rows in machine.rows:
        assert len(set(rows)) == sample and rows[0] == 0 and rows[-1] == count - 1
    assert 6 * sample <= 0.061 * count


def test_few_rows_and_machines_with_nothing_quicker_are_not_measured():
    machine = Machine({"bf16": 0.1})
    assert quickest(FLOAT32, 799, machine.compute, ["bf16"]) is None
    assert quickest(FLOAT32, 10**6, machine.compute, []) is None
    assert not machine.rows


def test_the_deviation_is_that_of_the_worst_row():
    exact = np.array([[1.0, 0.0], [0.0, 3.0], [2.0, 2.0]])
    quick = exact + np.array([[0.0, 0.1], [0.0, 0.0], [0.03, 0.04]])
    assert deviation(exact, quick) == pytest.approx(0.1 / np.sqrt(18 / 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer, path = piece_tokenizer(TEXT), tmp_path_factory.mktemp("models") / "model"
    config = ModelConfig(len(tokenizer.vocabulary), 32, 2, 2, 64, max_positions=24)
    written = {"label_names": ["bad", "good"], "extra_config": {"max_length": 16}}
    return random_model(path, tokenizer, SequenceClassifier, 2, config=config, std=0.4, **written)


@pytest.fixture
def tried(monkeypatch):
    """What is measured is what a test says; with it how often, and the samples' shapes."""
    asked = []

    def of(trial):
        def try_it(engine, count, compute, precisions):
            outputs = [compute(engine, np.array([0, 5])), compute(engine, np.arange(count))]
            asked.append([output.shape for output in outputs])
            return trial

        monkeypatch.setattr(runner, "quickest", try_it)
        return asked

    return of


def test_a_predictor_settles_once_and_for_good(folder, tried, capsys):
    exact = bertsmith.load(folder).classify(TEXTS)
    narrow = bertsmith.load(folder, precision="bf16").classify(TEXTS)
    assert exact != narrow
    asked = tried(FASTER)
    model = bertsmith.load(folder, precision="auto")
    assert model.classify(TEXTS) == narrow
    assert capsys.readouterr().err == (
        f"{folder}: answers in bf16, 2.0x as fast here and 1.0% off at most in a sample; "
        "float32 precision is exact\n"
    )
    assert model.classify(TEXTS) == narrow and len(asked) == 1
    tried(None)
    model = bertsmith.load(folder, precision="auto")
    assert model.classify(TEXTS) == exact
    tried(FASTER)  # comes too late: a text has one answer
    assert model.classify(TEXTS) == exact
    assert capsys.readouterr().err == ""


def test_python_answers_in_float32_unless_told(folder, tried):
    asked = tried(FASTER)
    assert bertsmith.load(folder).classify(TEXTS)
    assert bertsmith.load(folder).processor.precision == "float32" and not asked


@pytest.mark.parametrize("command", ["predict", "embed", "features"])
def test_the_commands_settle_by_their_own_rows(folder, tried, tmp_path, command):
    texts = write(tmp_path / "texts.txt", TEXTS)

    def ran(name, *flags):
        """The bytes that the command writes, and whether it says that they are bf16's."""
        out = tmp_path / f"{name}{SUFFIXES[command]}"
        words = [folder, texts] if command == "predict" else [texts, "--model", folder]
        done = cli(command, *words, "--out", out, *flags)
        assert done.code == 0
        written = out / "vectors.npy" if command == "features" else out
        return written.read_bytes(), "answers in bf16, 2.0x" in done.err

    asked = tried(FASTER)
    exact, narrow = ran("exact", "--precision", "float32"), ran("narrow", "--precision", "bf16")
    assert not asked and exact[0] != narrow[0] and not exact[1] and not narrow[1]
    assert ran("faster") == (narrow[0], True)
    ((two, whole),) = asked
    assert whole[0] > two[0] and two[1:] == whole[1:]
    tried(None)
    assert ran("slower") == exact
