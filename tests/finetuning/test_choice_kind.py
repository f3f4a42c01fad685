"""Picking one of n options: the loss, the answers and their scores, files, and a toy run."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.inference.ensemble import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.tasks.choice import ChoiceExamples
from bertsmith.tasks.task import Layout, find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.finetuning.run import finetune
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task_types.base import Objective, Purpose
from bertsmith.training.finetuning.task_types.texts import Choice, Labelled
from bertsmith.training.finetuning.trainer import Job, Start, with_metric

from .tiny import bertsmith, write_model

KIND, SWAG = Choice(), find_task("swag")
LISTS = own_task("choice", "text", None, "label", options=("options",))
LETTERS = Tokenizer(Vocabulary([*SPECIAL, *"abcdefgh"]))


def purpose(task=LISTS, **layout):
    return Purpose(task, (), Layout(**{"max_length": 16, **layout}))


def examples(*rows):
    """From (context, options, right one)."""
    contexts, options, labels = map(list, zip(*rows, strict=True))
    return ChoiceExamples(
        contexts, options, np.array(labels, np.int64), "mem", list(range(1, len(rows) + 1))
    )


THREE = examples(
    ("a", ["b", "c", "d"], 2), ("b", ["c", "d", "e"], 0), ("c", ["d", "e", "f"], 2),
    ("d", ["e", "f", "g"], 1),
)  # fmt: skip


def featurised(data, **layout):
    return KIND.featurise(LETTERS, data, purpose(**layout).layout, ())


# --- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_options", [2, 3, 5])
def test_the_loss_is_the_cross_entropy_over_the_options_of_a_row(num_options):
    """Files of any number of options, but of one number each: `read_choices` refuses others."""
    generator = torch.Generator().manual_seed(num_options)
    outputs = torch.randn(7 * num_options, 1, generator=generator, requires_grad=True)
    labels = torch.randint(num_options, (7,), generator=generator)
    loss, right = KIND.loss(outputs, {"labels": labels}, Objective())
    (gradient,) = torch.autograd.grad(loss, outputs)

    nats, hits, slopes = 0.0, 0, []
    for k, label in enumerate(labels.tolist()):
        row = outputs.detach().numpy()[k * num_options : (k + 1) * num_options, 0]
        shares = np.exp(row) / np.exp(row).sum()
        nats -= np.log(shares[label])
        hits += row.argmax() == label
        slopes += [share - (option == label) for option, share in enumerate(shares)]
    assert loss.item() == pytest.approx(nats, rel=1e-5) and right == hits
    np.testing.assert_allclose(gradient[:, 0], slopes, atol=1e-6)
    logits = outputs.detach().view(7, num_options)
    torch.testing.assert_close(
        loss.detach(), torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    )
    assert KIND.num_labelled(labels.numpy()) == 7


def test_the_loss_pairs_the_rows_of_a_batch_with_their_example():
    """Outputs that are right of every example, whatever the order of a batch."""
    features = featurised(THREE)
    batch = features.batch(np.array([3, 0, 2]), pad_id=0)
    assert batch["ids"].shape[0] == 9 and batch["labels"].tolist() == [1, 2, 2]
    # [CLS] context [SEP] option [SEP]
    shown = [LETTERS.vocabulary.pieces[row[3]] for row in batch["ids"]]
    assert shown == [*"efg", *"bcd", *"def"]
    outputs = torch.zeros(9, 1)
    outputs[[1, 5, 8]] = 9.0  # f, d and f
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    loss, right = KIND.loss(outputs, tensors, Objective())
    assert right == 3 and loss.item() == pytest.approx(3 * np.log1p(2 * np.exp(-9)), rel=1e-3)


def test_the_loss_with_a_teacher_and_with_focus():
    outputs, labels = torch.tensor([[0.0], [1.0], [2.0], [0.5]]), torch.tensor([1, 1])
    shares = np.array([[1, np.e], [np.e**2, np.e**0.5]])
    shares /= shares.sum(axis=1, keepdims=True)
    of_labels = -np.log(shares[:, 1])

    focused, _ = KIND.loss(outputs, {"labels": labels}, Objective(focal=2.0))
    assert focused.item() == pytest.approx(((1 - shares[:, 1]) ** 2 * of_labels).sum(), rel=1e-5)

    teacher = np.array([[0.75, 0.25], [0.5, 0.5]])
    batch = {"labels": labels, "teacher": torch.from_numpy(np.log(teacher)).float()}
    taught, right = KIND.loss(outputs, batch, Objective(teacher_share=0.25))
    of_teacher = -(teacher * np.log(shares)).sum()
    assert taught.item() == pytest.approx(0.25 * of_teacher + 0.75 * of_labels.sum(), rel=1e-5)
    assert right == 1  # by the labels, not by the teacher


def test_a_guess_costs_the_logarithm_of_the_options():
    assert KIND.chance_loss(featurised(THREE)) == pytest.approx(np.log(3))
    even, _ = KIND.loss(torch.zeros(12, 1), {"labels": torch.tensor([2, 0, 2, 1])}, Objective())
    assert even.item() == pytest.approx(4 * np.log(3))
    assert KIND.num_outputs(KIND.label_names(THREE)) == 1


# --- answers and their scores ------------------------------------------------------------------


def answered(*logits, data=THREE, **layout):
    """Answers to a row of logits a unit."""
    outputs = np.array(logits, np.float32).reshape(-1, 1)
    return KIND.answers(outputs, featurised(data, **layout), data, purpose(**layout))


def test_answers_are_the_best_options_and_the_share_of_each():
    found = answered([0, 1, 3], [2, 0, 0], [0, 5, 1], [0, 0.5, 0])
    assert found.predicted.tolist() == [2, 0, 1, 1]
    assert found.probabilities[0] == pytest.approx(np.exp([0, 1, 3]) / np.exp([0, 1, 3]).sum())
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, rtol=1e-6)
    assert KIND.tune(np.zeros((12, 1)), featurised(THREE), THREE, purpose()) == {}

    data = replace(THREE, labels=None)  # what is to be predicted
    assert answered([0, 1, 3], *[[1, 0, 0]] * 3, data=data).predicted.tolist() == [2, 0, 0, 0]


def test_scores_by_hand():
    found = answered([0, 1, 3], [2, 0, 0], [0, 5, 1], [0, 0.5, 0])  # 2 0 1 1 of 2 0 2 1
    assert KIND.measure(found, THREE, purpose()) == {"accuracy": 0.75}
    more = replace(purpose(), task=replace(LISTS, metrics=("macro_f1", "accuracy", "matthews")))
    scores = KIND.measure(found, THREE, more)
    # F1 of option 0: 1; of 1: one of two answers is right, none missed; of 2: one of two is found
    assert scores["macro_f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    # (right * N - sum of true * answered) / root of (N^2 - answered^2) (N^2 - true^2)
    assert scores["matthews"] == pytest.approx((3 * 4 - 5) / ((16 - 6) * (16 - 6)) ** 0.5)
    assert KIND.undefined(found, THREE, more) == {}


def test_every_metric_on_offer_can_be_measured():
    found = answered([0, 1, 3], [2, 0, 0], [0, 5, 1], [0, 0.5, 0])
    with pytest.raises(ValueError, match="metric 'f1' is not for choice: use one of") as error:
        with_metric(LISTS, "f1", KIND.label_names(THREE))
    for name in str(error.value).partition("use one of ")[2].split(", "):
        task = with_metric(LISTS, name, KIND.label_names(THREE))
        assert KIND.measure(found, THREE, replace(purpose(), task=task))[name] > 0


def test_one_answer_for_all_is_seen():
    found = answered(*[[0, 1, 0]] * 4)
    assert KIND.constant(found, THREE) == "option 1"
    matthews = replace(purpose(), task=replace(LISTS, metrics=("matthews",)))
    assert KIND.undefined(found, THREE, matthews) == {"matthews": "every answer is 1"}
    assert KIND.measure(found, THREE, matthews) == {"matthews": 0.0}
    always = THREE.select([0, 2])  # where option 2 is right both times, it may be the one answer
    assert KIND.constant(answered([0, 0, 1], [0, 0, 1], data=always), always) is None
    assert KIND.constant(answered([0, 1, 3], *[[1, 0, 0]] * 3), THREE) is None


def test_windows_of_a_context_give_one_answer():
    """Two windows of one context: the mean of their log-probabilities decides."""
    data = examples(("a b c d e f g h", ["a", "b"], 1))
    layout = {"long_texts": "windows", "max_length": 8, "stride": 4}
    features = featurised(data, **layout)
    assert features.unit_examples.tolist() == [0, 0] and features.labels.tolist() == [1, 1]
    found = answered([2.0, 0.0], [0.0, 3.0], data=data, **layout)
    logs = [np.log([np.exp(a), np.exp(b)] / (np.exp(a) + np.exp(b))) for a, b in ((2, 0), (0, 3))]
    shares = np.exp(np.mean(logs, axis=0))
    assert found.predicted.tolist() == [1]
    np.testing.assert_allclose(found.probabilities, [shares / shares.sum()], rtol=1e-5)


def test_records_are_what_reports_read():
    found = answered([0, 1, 3], [2, 0, 0], [0, 5, 1], [0, 0.5, 0])
    records = KIND.records(found, THREE, purpose())
    assert json.loads(json.dumps(records)) == records
    assert [record["label"] for record in records] == ["2", "0", "2", "1"]
    assert [record["predicted"] for record in records] == ["2", "0", "1", "1"]
    assert records[0]["text"] == "a" and records[0]["options"] == ["b", "c", "d"]
    assert records[0]["probabilities"] == pytest.approx(found.probabilities[0], abs=6e-6)
    blind = KIND.records(found, replace(THREE, labels=None), purpose())
    assert "label" not in blind[0] and blind[2]["predicted"] == "1"


# --- files -------------------------------------------------------------------------------------


SWAG_ROWS = (
    "id,sent1,sent2,ending0,ending1,ending2,ending3,label\n"
    '7,"a, ""b""",c,d,"e,\nf",g,h,1\n'
    "8,b,,c,d,e,f,3\n"
)


def test_what_is_predicted_stands_behind_the_rows(tmp_path):
    (tmp_path / "new.csv").write_text(SWAG_ROWS)
    of_swag = purpose(SWAG)
    data = KIND.read_input(str(tmp_path / "new.csv"), of_swag)
    assert data.labels is None and data.contexts == ['a, "b" c', "b"]
    assert data.options[0] == ["d", "e,\nf", "g", "h"]
    found = Labelled(
        np.array([1, 0]), np.array([[0.125, 0.5, 0.25, 0.125], [0.75, 0, 0, 0.25]], np.float32)
    )
    wanted = [
        {**row, "predicted_label": label, "option": option, "probability": probability}
        for row, label, option, probability in zip(
            csv.DictReader(SWAG_ROWS.splitlines(keepends=True)),
            ("1", "0"),
            ("e,\nf", "c"),
            ("0.5", "0.75"),
            strict=True,
        )
    ]
    KIND.check_output(data, tmp_path / "out.csv", of_swag)
    KIND.write_answers(tmp_path / "out.csv", found, data, of_swag)
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == wanted
    KIND.write_answers(tmp_path / "out.jsonl", found, data, of_swag)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["predicted_label"] for line in lines] == [1, 0]
    assert [line["option"] for line in lines] == ["e,\nf", "c"]
    for line, row in zip(lines, found.probabilities.tolist(), strict=True):
        assert line["probabilities"] == {str(number): value for number, value in enumerate(row)}

    with pytest.raises(ValueError, match="row 1: 'ending1' holds a tab or a line break"):
        KIND.check_output(data, tmp_path / "out.tsv", of_swag)
    listed = {"text": "a", "endings": ["b", "c\td"]}  # as a column its tab would be escaped
    with pytest.raises(ValueError, match="row 1: 'option 1' holds a tab or a line break"):
        KIND.check_output(
            replace(data, rows=[listed], options=[["b", "c\td"]]), tmp_path / "o.tsv", of_swag
        )
    with pytest.raises(ValueError, match=r"out\.txt: cannot write '\.txt': end --out in \.csv"):
        KIND.check_output(data, tmp_path / "out.txt", of_swag)


def test_what_predict_reads(tmp_path):
    """Rows without a label, in a list or a column an option; never standard input."""
    (tmp_path / "new.jsonl").write_text('{"text": "a", "options": ["b", "c"], "id": 3}\n')
    data = KIND.read_input(str(tmp_path / "new.jsonl"), purpose())
    assert data.rows == [{"text": "a", "options": ["b", "c"], "id": 3}] and data.num_options == 2
    columns = purpose(own_task("choice", "text", None, "label", options=("x", "y")))
    for name, mark in (("new.csv", ","), ("new.tsv", "\t"), ("new.txt", "\t")):
        (tmp_path / name).write_text(f"text{mark}y{mark}x\na{mark}b{mark}c\n")
        data = KIND.read_input(str(tmp_path / name), columns)
        assert data.options == [["c", "b"]], name
        assert data.rows == [{"text": "a", "y": "b", "x": "c"}], name
    with pytest.raises(ValueError, match="texts with their options are read from a file, not from"):
        KIND.read_input("-", purpose())
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "options": ["b"]}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: 1 options: a choice needs two or more"):
        KIND.read_input(str(tmp_path / "bad.jsonl"), purpose())


# --- a toy run ---------------------------------------------------------------------------------


WEATHER, FOOD = ("rain", "snow", "wind"), ("bread", "soup", "fish")


def forecasts(count, seed):
    """Of three options the one about the weather is right."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        right = random.integers(3)
        words = [random.choice(WEATHER if k == right else FOOD) for k in range(3)]
        rows.append(("tomorrow there is", [f"some {word} again" for word in words], right))
    return examples(*rows)


def test_it_learns_and_answers_new_rows_of_any_number_of_options(tmp_path):
    texts = ["tomorrow there is some again", " ".join(WEATHER + FOOD)]
    model = write_model(tmp_path / "model", texts)
    settings = FinetuneSettings(epochs=6, batch=8, rate=3e-3, precision="float32", threads=1)
    dev = forecasts(40, 2)
    job = Job.prepare(Start(model), LISTS, forecasts(96, 1), {"dev": dev}, settings)
    run = tmp_path / "run"
    result = finetune(job, run, settings, [1])
    assert result["metrics"]["accuracy"] > 0.95 and result["restarts"] == []
    assert (result["main_metric"], result["labels"]) == ("accuracy", [])
    assert "confusion" not in result  # the options of two rows have nothing in common
    assert evaluate_on(load(run), dev)["metrics"] == result["metrics"]
    scores = json.loads((run / "dev_scores.json").read_text())
    right = [record["label"] == record["predicted"] for record in scores["examples"]]
    assert scores["kind"] == "choice" and np.mean(right) == result["metrics"]["accuracy"]

    new = [["some fish again", "some wind again"], ["some rain again", "some soup again"]]
    rows = [{"text": "tomorrow there is", "options": options} for options in new]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bertsmith("predict", run, tmp_path / "new.jsonl", "--out", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["label"], line["option"]) for line in lines] == [
        (1, "some wind again"),
        (0, "some rain again"),
    ]
    assert all(0.5 < line["probability"] < 1 for line in lines)
