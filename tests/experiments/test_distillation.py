"""Teachers: what they say of texts, what a student learns of it, and whom they cannot teach."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import load_model
from bertsmith.experiments.distillation import Teacher
from bertsmith.model.config import config_for
from bertsmith.model.heads import OptionScorer, SequenceClassifier, TokenClassifier
from bertsmith.tasks.choice import ChoiceExamples
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import find_task, own_task
from bertsmith.text.readers.tables import digest
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.engine import choose_engine
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.trainer import InitialModel, Trainer

from ..tiny import bertsmith, cli, random_model, write

SETTINGS = FinetuneSettings(
    epochs=6, batch_size=16, learning_rate=3e-3, max_length=16, precision="float32", threads=1
)
TASK = own_task("classify", "text", None, "label")
NAMES = ("weather", "food")
WORDS = (("rain", "snow", "wind"), ("bread", "soup", "fish"))


def examples(count, seed, names=NAMES):
    """Weather or food, told by one word; `names` is the order of the classes."""
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 2, count)
    texts = [f"today there was {WORDS[k][random.integers(3)]} again" for k in kinds]
    labels = np.array([names.index(NAMES[k]) for k in kinds])
    return Examples(texts, None, labels, names, "made", list(range(1, count + 1)))


def with_noise(data, seed=5):
    """The same texts with labels that say nothing."""
    labels = np.random.default_rng(seed).permutation(data.labels)
    return Examples(data.texts, None, labels, data.label_names, data.source, data.lines)


def tokenizer(pieces=54):
    return Tokenizer(train_vocabulary(examples(200, 0).texts, pieces))


CONFIG = config_for("1x64", 54, max_positions=32)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("student"), tokenizer(), config=CONFIG, std=0.05)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with a vocabulary, a size and an order of classes of its own, that knows the task."""
    larger, names = config_for("2x64", 45, max_positions=32), NAMES[::-1]
    made = {"config": larger, "std": 0.05, "seed": 2}
    folder = random_model(tmp_path_factory.mktemp("larger"), tokenizer(45), **made)
    dev = {"dev": examples(40, 2, names)}
    trainer = Trainer.prepare(InitialModel(folder), TASK, examples(96, 1, names), dev, SETTINGS)
    out = tmp_path_factory.mktemp("teacher") / "run"
    assert train_seeds(trainer, out, SETTINGS, [1])["metrics"]["accuracy"] > 0.95
    return out


@pytest.fixture(scope="module")
def engine():
    return choose_engine("cpu", "float32", 1)


def headed(folder, head, kind, names=None, outputs=2, run=None, **extra):
    """A folder with a fine-tuned model's form and random weights, which differ from row to row."""
    own = {"task": kind, "kind": kind, "max_length": 16, **extra}
    made = {"config": CONFIG, "std": 0.3, "seed": 3, "run": run}
    made |= {"label_names": names, "extra_config": own}
    return random_model(folder, tokenizer(), head, outputs, **made)


def alone(folder, head, text, pair=None):
    """The outputs of one row without padding."""
    pairs = None if pair is None else [pair]
    rows = Tokenizer.from_pretrained(folder).rows([text], pairs, max_length=16, offsets=False)
    ids, types = torch.from_numpy(rows.ids)[None], torch.from_numpy(rows.token_types)[None]
    with torch.inference_mode():
        return load_model(folder, head).model.eval()(ids, types, None)[0].numpy()


def test_a_student_learns_what_its_labels_do_not_say(student, teacher, engine, tmp_path):
    train, dev = with_noise(examples(96, 1)), {"dev": examples(40, 2)}
    plain = Trainer.prepare(InitialModel(student), TASK, train, dev, SETTINGS)
    assert plain.run(SETTINGS, 1, tmp_path / "plain").evaluation.metrics["accuracy"] < 0.8
    data, outputs = Teacher.open(teacher, TASK, NAMES, engine).teach(train)
    assert data is train and outputs.shape == (96, 2)
    taught = Trainer.prepare(InitialModel(student), TASK, train, dev, SETTINGS, outputs)
    trained = taught.run(SETTINGS, 1, tmp_path / "taught")
    assert trained.evaluation.metrics["accuracy"] > 0.95


def test_the_loss_is_the_cross_entropy_with_the_teacher_by_hand(student, tmp_path):
    """The first line of the log, before a weight has moved, of a teacher that says 3 to 1."""
    train, dev = examples(16, 1), {"dev": examples(8, 2)}
    outputs = np.tile(np.log([[0.75, 0.25]]).astype(np.float32), (16, 1))
    still = {"learning_rate": 1e-12, "dropout": 0.0, "attention_dropout": 0.0}
    settings = replace(SETTINGS, epochs=10, temperature=2.0, **still)
    trainer = Trainer.prepare(InitialModel(student), TASK, train, dev, settings, outputs)
    trained = trainer.run(settings, 1, tmp_path / "run")
    logits = trained.outputs(trainer.train)
    soft = np.array([0.75, 0.25]) ** 0.5 / (0.75**0.5 + 0.25**0.5)
    student_log = logits / 2 - np.logaddexp.reduce(logits / 2, axis=1, keepdims=True)
    expected = -4 * (soft * student_log).sum(axis=1).mean()  # temperature^2
    log = (tmp_path / "run/log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in log if json.loads(line)["event"] == "train"]
    assert losses == [pytest.approx(expected, rel=1e-4)]


def test_outputs_are_in_the_students_order_of_classes(teacher, engine):
    data = examples(20, 4)
    outputs = Teacher.open(teacher, TASK, NAMES, engine).outputs(data)
    assert (outputs.argmax(axis=1) == data.labels).mean() > 0.95
    turned = Teacher.open(teacher, TASK, NAMES[::-1], engine).outputs(data)
    np.testing.assert_array_equal(turned, outputs[:, ::-1])
    assert outputs.dtype == np.float32


@pytest.mark.parametrize(("kind", "outputs"), [("regress", 1), ("multilabel", 3)])
def test_scores_and_label_sets_are_the_models_own(kind, outputs, engine, tmp_path):
    names = ("a", "b", "c") if kind == "multilabel" else None
    folder = headed(tmp_path, SequenceClassifier, kind, names, outputs)
    task = own_task(kind, "text", None, "label")
    data = examples(6, 3)
    given = Teacher.open(folder, task, names or (), engine).outputs(data)
    expected = [alone(folder, SequenceClassifier, text) for text in data.texts]
    np.testing.assert_allclose(given, expected, atol=1e-5)


def choices(count, num_options=3):
    random = np.random.default_rng(count)
    words = np.array(WORDS).reshape(-1)
    contexts = [f"today there was {random.choice(words)}" for _ in range(count)]
    options = [[f"{random.choice(words)} again" for _ in range(num_options)] for _ in contexts]
    labels = random.integers(0, num_options, count)
    return ChoiceExamples(contexts, options, labels, "made", list(range(1, count + 1)))


def test_a_choice_has_an_output_an_option(engine, tmp_path):
    task = own_task("choice", "text", None, "label", options=("a", "b", "c"))
    run = {"task": "choice", "options": list(task.options)}
    folder = headed(tmp_path / "run", OptionScorer, "choice", None, 1, run)
    data = choices(5)
    teacher = Teacher.open(folder, task, (), engine)
    expected = [
        [alone(folder, OptionScorer, context, option)[0] for option in options]
        for context, options in zip(data.contexts, data.options, strict=True)
    ]
    np.testing.assert_allclose(teacher.outputs(data), expected, atol=1e-5)
    write(tmp_path / "more.jsonl", '{"text": "today", "a": "rain", "b": "snow"}\n')
    two = own_task("choice", "text", None, "label", options=("a", "b"))
    with pytest.raises(ValueError, match="more.jsonl: 2 options, but the training file has 3"):
        Teacher.open(folder, two, (), engine).teach(data, tmp_path / "more.jsonl")


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_windows_of_a_text_are_taught_the_same(student, engine, tmp_path, pool):
    """The teacher reads a text in 1 row or some, its student in others."""
    windows = {"long_texts": "windows", "doc_stride": 4, "pool": pool, "max_length": 12}
    folder = headed(tmp_path, SequenceClassifier, "classify", NAMES, **windows)
    data = examples(6, 3)
    data.texts[2] = " ".join(["rain and wind and then some soup"] * 4)
    outputs = Teacher.open(folder, TASK, NAMES, engine).outputs(data)
    assert outputs.shape == (6, 2)
    one_row = alone(
        folder, SequenceClassifier, data.texts[0]
    )  # fits; the log-probabilities are pooled
    np.testing.assert_allclose(outputs[0], one_row - np.logaddexp.reduce(one_row), atol=1e-5)
    settings = FinetuneSettings(max_length=8, long_texts="windows", doc_stride=4)
    dev = {"dev": examples(4, 1)}
    trainer = Trainer.prepare(InitialModel(student), TASK, data, dev, settings, outputs)
    assert len(trainer.teacher) == len(trainer.train) > 6
    np.testing.assert_array_equal(trainer.teacher, outputs[trainer.train.unit_examples])


def test_transfer_data_get_the_teachers_answers(teacher, engine, tmp_path, monkeypatch):
    train, more = examples(8, 1), examples(10, 9)
    teacher = Teacher.open(teacher, TASK, NAMES, engine)
    data, outputs = teacher.teach(train, write(tmp_path / "more.txt", more.texts))
    assert data.texts == train.texts + more.texts and len(data) == len(data.lines) == 18
    np.testing.assert_array_equal(outputs[:8], teacher.outputs(train))
    np.testing.assert_array_equal(data.labels[:8], train.labels)
    np.testing.assert_array_equal(data.labels[8:], outputs[8:].argmax(axis=1))
    assert (data.labels[8:] == more.labels).mean() > 0.85
    rows = [json.dumps({"id": k, "text": text}) for k, text in enumerate(more.texts)]
    again, _ = teacher.teach(train, write(tmp_path / "more.jsonl", rows))
    assert again.texts == data.texts and again.rows is None
    lines = "\n\n".join(["", *more.texts, " "]) + "\n"
    gaps, taught = teacher.teach(train, write(tmp_path / "gaps.txt", lines))
    assert gaps.texts == data.texts and len(gaps.lines) == len(taught) == 18
    blank = write(tmp_path / "blank.txt", "\n \n")
    # before the teacher has answered a training set, which may take hours
    monkeypatch.setattr(Teacher, "outputs", lambda self, data: pytest.fail("too early"))
    with pytest.raises(ValueError, match="blank.txt: no text in it"):
        teacher.teach(train, blank)
    with pytest.raises(ValueError, match="none.txt: no such file"):
        teacher.teach(train, tmp_path / "none.txt")


def test_pairs_with_a_blank_text_are_no_transfer_data(engine, tmp_path):
    run = {"task": "classify", "text": "text", "text_pair": "pair", "label": "label"}
    folder = headed(tmp_path / "run", SequenceClassifier, "classify", NAMES, run=run)
    task = own_task("classify", "text", "pair", "label")
    texts = examples(4, 1).texts
    train = Examples(texts, texts, np.zeros(4, np.int64), NAMES, "made", [1, 2, 3, 4])
    more = write(tmp_path / "x.tsv", "text\tpair\nrain\tsnow\n \tsnow\nrain\t\nwind\tsoup\n")
    data, outputs = Teacher.open(folder, task, NAMES, engine).teach(train, more)
    assert data.texts[4:] == ["rain", "wind"] and data.pairs[4:] == ["snow", "soup"]
    assert len(outputs) == len(data.labels) == 6


@pytest.mark.parametrize("kind", ["regress", "multilabel"])
def test_transfer_labels_are_of_the_kind(kind, engine, tmp_path):
    names = NAMES if kind == "multilabel" else ()
    labels = np.ones((4, 2), bool) if names else np.ones(4, np.float32)
    outputs = 2 if names else 1
    folder = headed(tmp_path / "run", SequenceClassifier, kind, names or None, outputs)
    task = own_task(kind, "text", None, "label")
    texts = examples(4, 1).texts
    train = Examples(texts, None, labels, names, "made", [1, 2, 3, 4])
    more = write(tmp_path / "more.txt", "wind\n")
    data, outputs = Teacher.open(folder, task, names, engine).teach(train, more)
    assert data.labels.dtype == labels.dtype and len(data.labels) == 5
    expected = outputs[4] > 0 if names else outputs[4, 0]
    np.testing.assert_array_equal(data.labels[4], expected)


OTHERS = ("sport", "food")
REGRESS = own_task("regress", "text", None, "label")
PAIRS = own_task("classify", "text", "pair", "label")


@pytest.mark.parametrize(
    ("folder", "task", "names", "message"),
    [
        ("teacher", find_task("ner"), NAMES, "a model of kind 'tag' cannot be taught"),
        ("teacher", find_task("squad1"), NAMES, "a model of kind 'answer' cannot be taught"),
        ("teacher", REGRESS, (), "fine-tuned for 'classify', but the task is of kind 'regress'"),
        ("teacher", TASK, OTHERS, "knows the labels food, weather, but the .* has food, sport"),
        ("teacher", TASK, (*NAMES, "sport"), "knows the labels"),
        ("student", TASK, NAMES, "not a fine-tuned classifier"),
        ("teacher", PAIRS, NAMES, "it reads single texts, but the task has pairs"),
        ("tagger", TASK, NAMES, "fine-tuned for 'tag', but the task is of kind 'classify'"),
    ],
)
def test_who_cannot_teach(folder, task, names, message, engine, request):
    with pytest.raises(ValueError, match=message) as refusal:
        Teacher.open(request.getfixturevalue(folder), task, names, engine)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def tagger(tmp_path):
    return headed(tmp_path, TokenClassifier, "tag", NAMES)


def test_the_command(student, teacher, tmp_path):
    for name, data in (("train", with_noise(examples(96, 1))), ("dev", examples(40, 2))):
        rows = zip(data.texts, data.labels, strict=True)
        lines = [f"{text},{data.label_names[label]}" for text, label in rows]
        write(tmp_path / f"{name}.csv", ["text,label", *lines])
    more, run = write(tmp_path / "more.txt", examples(32, 7).texts), tmp_path / "run"
    flags = f"--model {student} --data {tmp_path} --out {run} --teacher {teacher}"
    flags += " --max-length 16 --precision float32 --threads 1 --epochs 6 --batch-size 16"
    flags += f" --learning-rate 3e-3 --teacher-data {more} --temperature 2"
    bertsmith("finetune", "classify", *flags.split())
    result = json.loads((run / "result.json").read_text())
    assert result["metrics"]["accuracy"] > 0.95 and result["train_examples"] == 128
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert settings["teacher"] == str(teacher) and settings["temperature"] == 2
    assert settings["teacher_data"] == str(more)
    assert settings["data_sha256"]["teacher_data"] == digest(more)
    assert settings["data_sha256"]["teacher"] == digest(teacher / "model.safetensors")


def test_a_sweep_is_told_the_weights_of_its_teacher(student, teacher, tmp_path, monkeypatch):
    """Its study is then found on another machine, where the teacher's outputs round otherwise."""
    told = []

    def sweep(trainer, *_):
        told.append((trainer.teacher_sha256, trainer.teacher is not None))
        raise KeyboardInterrupt

    monkeypatch.setattr("bertsmith.experiments.finetuning.sweep", sweep)
    rows = ["today there was rain,weather", "today there was soup,food"] * 4
    data = write(tmp_path / "train.csv", ["text,label", *rows])
    words = ("finetune", "classify", "--model", student, "--data", data, "--dev", data)
    words += ("--out", tmp_path / "run", "--max-length", 16, "--threads", 1, "--sweep", "paper")
    assert cli(*words).code == cli(*words, "--teacher", teacher).code == 130
    assert told == [("", False), (digest(teacher / "model.safetensors"), True)]
