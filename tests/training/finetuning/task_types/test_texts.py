"""One label an example: losses, answers and their scores, files, scores of any scale."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyarrow import parquet

from bertsmith.inference.evaluation.labelled import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.tasks.choice import ChoiceExamples
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import EncodingSettings, find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.task_types.base import ModelTask
from bertsmith.training.finetuning.task_types.losses import LOSSES, Objective
from bertsmith.training.finetuning.task_types.texts import (
    Choice,
    Classify,
    Labelled,
    MultiLabel,
    Regress,
)
from bertsmith.training.finetuning.trainer import with_metric

from ....tiny import write
from .files import read_rows

FIRST, SECOND = (0.123456, 0.876544), (0.5, 0.999999)
CLASSES = Labelled(np.array([1, 0]), np.array([FIRST, SECOND], np.float32))
SETS = Labelled(np.array([[False, True], [True, True]]), np.array([FIRST, SECOND], np.float32))
SCORES = Labelled(np.array([3.1, 0.123456], np.float32), None)
CASES = {
    "classify": (Classify(), CLASSES, [("war", "0.8765"), ("sea", "0.5")], ["probability"]),
    "multilabel": (
        MultiLabel(), SETS, [("war", "0.1235", "0.8765"), ("sea;war", "0.5", "1.0")],
        ["probability_sea", "probability_war"],
    ),
    "regress": (Regress(), SCORES, [("3.1",), ("0.123456",)], []),
}  # fmt: skip


def asked_of(kind, label="genre", names=("sea", "war"), separator=";"):
    other = {"separator": separator} if kind == "multilabel" else {}
    task = own_task(kind, "plot", None, label, **other)
    return ModelTask(task, () if kind == "regress" else names, EncodingSettings(max_length=16))


def written(out, kind, source, label="genre"):
    """The answers to a table of these rows, as they are written."""
    of, answers = CASES[kind][:2]
    asked = asked_of(kind, label)
    data = of.read_input(str(write(out.parent / "new.csv", source)), asked)
    table = of.answer_table(data, out, asked)
    table.write([of.answer_part(table, answers, data, asked)])
    return read_rows(out)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_table_of_answers(tmp_path, kind, suffix):
    """The answer is called as training's labels; of several labels each has its probability."""
    *_, values, beside = CASES[kind]
    rows = written(tmp_path / f"out{suffix}", kind, ["plot", "a", "b"])
    assert list(rows[0]) == ["plot", "genre", *beside]
    assert [tuple(row.values())[1:] for row in rows] == values

    rows = written(tmp_path / f"out{suffix}", kind, ["plot,genre", "a,x", "b,y"])
    assert list(rows[0]) == ["plot", "genre", "predicted_genre", *beside]
    assert [row["genre"] for row in rows] == ["x", "y"]


EACH = {"sea": 0.1235, "war": 0.8765}


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("classify", {"genre": "war", "probability": 0.8765, "probabilities": EACH}),
        ("multilabel", {"genre": ["war"], "probabilities": EACH}),
        ("regress", {"genre": 3.1}),
    ],
)
def test_lines_of_json(tmp_path, kind, first):
    rows = written(tmp_path / "out.jsonl", kind, ["plot", "a", "b"])
    assert rows[0] == {"plot": "a", **first}


def test_columns_of_one_name(tmp_path):
    """Of the answer itself, and of the input: before the work where there is no way out."""
    source = ["plot,probabilities", "a,1", "b,2"]
    rows = written(tmp_path / "out.csv", "classify", source, "probability")
    assert rows[0]["predicted_probability"] == "war" and rows[0]["probability"] == "0.8765"
    new = write(tmp_path / "new.csv", ["plot,probabilities,predicted_probabilities", "a,1,2"])
    data = Classify().read_input(str(new), asked_of("classify"))
    with pytest.raises(ValueError, match="'probabilities' and 'predicted_probabilities': rename"):
        Classify().answer_table(data, tmp_path / "out.jsonl", asked_of("classify"))
    Classify().answer_table(data, tmp_path / "out.csv", asked_of("classify"))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("classify", {"names": ("sea", "war\tfilm")}),
        ("multilabel", {"names": ("sea", "war\tfilm")}),
        ("multilabel", {"separator": "\t"}),
    ],
    ids=str,
)
def test_labels_that_a_tsv_cannot_hold_are_refused_before_the_work(tmp_path, kind, part):
    of, asked = CASES[kind][0], asked_of(kind, **part)
    data = of.read_input(str(write(tmp_path / "new.csv", ["plot", "a"])), asked)
    of.answer_table(data, tmp_path / "out.csv", asked)
    with pytest.raises(ValueError, match=r"holds a tab .* end `out` in \.csv or \.jsonl"):
        of.answer_table(data, tmp_path / "out.tsv", asked)


def test_labels_that_hold_the_separator_are_refused_before_the_work(tmp_path):
    of, asked = MultiLabel(), asked_of("multilabel", names=("sea; lake", "war"))
    data = of.read_input(str(write(tmp_path / "new.csv", ["plot", "a"])), asked)
    of.answer_table(data, tmp_path / "out.jsonl", asked)
    for name in ("out.csv", "out.tsv", "out.txt"):
        with pytest.raises(ValueError, match=r"label 'sea; lake' holds ';', .* in \.jsonl"):
            of.answer_table(data, tmp_path / name, asked)


# --- scores ------------------------------------------------------------------------------------

REGRESS, NUMBERS = Regress(), own_task("regress", "text", None, "label")
SCORED = ModelTask(NUMBERS, (), EncodingSettings())
WORTH = {"rain": 0.0, "snow": 0.2, "wind": 0.4, "bread": 0.6, "soup": 0.8, "fish": 1.0}


def worths(count, seed, times=1.0, plus=0.0):
    """The score is what one word is worth."""
    words = np.random.default_rng(seed).choice(list(WORTH), count)
    texts = [f"today there was {word} again" for word in words]
    labels = np.array([WORTH[word] for word in words], np.float32).astype(np.float64)
    labels = (times * labels + plus).astype(np.float32)
    return Examples(texts, None, labels, (), "made", list(range(1, count + 1)))


def of_worths(toy, settings, scale=(), **changes):
    return toy.prepare(worths(128, 1, *scale), worths(40, 2, *scale), NUMBERS, settings, **changes)


@pytest.fixture(scope="module")
def plain_scores(toy, tmp_path_factory):
    """Metrics of a training on scores between 0 and 1."""
    settings = replace(toy.still, epochs=12)
    plain = of_worths(toy, settings).run(settings, 1, tmp_path_factory.mktemp("plain"))
    return plain.evaluation.metrics


@pytest.mark.parametrize("scale", [(1000.0, 250_000.0), (0.001, 2005.0)])
def test_scores_of_any_scale_are_learned(toy, plain_scores, tmp_path, scale):
    """Prices far from 0, years close together: what the same scores between 0 and 1 give."""
    settings = replace(toy.still, epochs=12)
    trainer = of_worths(toy, settings, scale)
    result = train_seeds(trainer, run := tmp_path / "run", settings, [1])
    metrics, dev = result["metrics"], trainer.dev[0].data
    assert result["restarts"] == [] and metrics["pearson"] > 0.95
    # float32 knows numbers around 2005 to 0.0001, a tenth of what they differ by at most
    assert metrics["pearson"] == pytest.approx(plain_scores["pearson"], abs=0.02)
    # the written model gives scores by itself, to transformers too
    assert evaluate_on(load(run), dev)["metrics"] == pytest.approx(metrics)
    assert metrics["mse"] < 0.2 * dev.labels.astype(np.float64).var()
    # a further fine-tuning begins with the head of the first
    still = replace(settings, epochs=1, learning_rate=1e-12)
    again = of_worths(toy, still, scale, model=run).run(still, 1, tmp_path / "again")
    assert again.evaluation.metrics == pytest.approx(metrics, rel=1e-3)


@pytest.mark.parametrize("unit", [1e-7, 1.0, 1e6])
def test_records_tell_as_much_as_the_scores(unit):
    """Of rates of 1e-6 five decimals would leave 0."""
    labels = (unit * np.array([0.1, 2.000001, 3.25])).astype(np.float32)
    data = Examples(["a", "b", "c"], None, labels, (), "made", [1, 2, 3])
    answers = Labelled(labels[::-1] * np.float32(1.1), None)
    records = json.loads(json.dumps(REGRESS.to_records(answers, data, SCORED)))
    for name, values in (("label", labels), ("predicted", answers.predicted)):
        assert np.array_equal(np.array([r[name] for r in records], np.float32), values)
    assert [records[0]["label"]] == [float(f"{0.1 * unit:.7g}")]  # as it was in the file


def test_a_dead_model_is_seen_where_the_labels_differ(model_folder):
    data, same = worths(8, 1), np.full(8, 0.75, np.float32)
    rows = REGRESS.featurize(Tokenizer.from_pretrained(model_folder), data, SCORED)
    answers = REGRESS.answers(same[:, None], rows, data, SCORED)
    assert answers.probabilities is None and answers.predicted.shape == (8,)

    def constant(predicted, labels=data.labels):
        return REGRESS.constant_prediction(
            answers._replace(predicted=predicted), replace(data, labels=labels)
        )

    wavering = 0.75 + 1e-4 * np.arange(8, dtype=np.float32)  # by rounding alone
    assert constant(same) == constant(wavering) == "0.75"
    assert constant(data.labels) is None and constant(same, labels=same) is None
    told = dict.fromkeys(["pearson", "spearman"], "no value, counts 0: every answer is 0.75")
    assert REGRESS.notes(answers, data, SCORED) == told
    mse = pytest.approx(np.mean((0.75 - data.labels) ** 2), rel=1e-5)
    assert REGRESS.measure(answers, data, SCORED) == {"pearson": 0.0, "spearman": 0.0, "mse": mse}


def test_one_score_is_nothing_to_learn(toy):
    one = replace(worths(4, 1), labels=np.full(4, 2.5, np.float32))  # the others were split off
    with pytest.raises(ValueError, match="made: every training example has the score 2.5: .*`dev`"):
        toy.prepare(one, worths(9, 2), NUMBERS)


# --- choice: the loss --------------------------------------------------------------------------

CHOICE, SWAG = Choice(), find_task("swag")
LISTS = own_task("choice", "text", None, "label", options=("options",))
LETTERS = Tokenizer(Vocabulary([*SPECIAL, *"abcdefgh"]))


def model_task(task=LISTS, **encoding):
    return ModelTask(task, (), EncodingSettings(**{"max_length": 16, **encoding}))


def examples(*rows):
    """From (context, options, right one)."""
    contexts, options, labels = map(list, zip(*rows, strict=True))
    lines = list(range(1, len(rows) + 1))
    return ChoiceExamples(contexts, options, np.array(labels, np.int64), "mem", lines)


THREE = examples(
    ("a", ["b", "c", "d"], 2), ("b", ["c", "d", "e"], 0), ("c", ["d", "e", "f"], 2),
    ("d", ["e", "f", "g"], 1),
)  # fmt: skip


def featurized(data, **encoding):
    return CHOICE.featurize(LETTERS, data, model_task(**encoding))


@pytest.mark.parametrize("num_options", [2, 3, 5])
def test_the_loss_is_the_cross_entropy_over_the_options_of_a_row(num_options):
    """Files of any number of options, but of one number each: `read_choices` refuses others."""
    generator = torch.Generator().manual_seed(num_options)
    outputs = torch.randn(7 * num_options, 1, generator=generator, requires_grad=True)
    labels = torch.randint(num_options, (7,), generator=generator)
    loss, right = LOSSES[CHOICE.name](outputs, {"labels": labels}, Objective())
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
    assert CHOICE.num_labelled(labels.numpy()) == 7


def test_the_loss_pairs_the_rows_of_a_batch_with_their_example():
    """Outputs that are right of every example, whatever the order of a batch."""
    features = featurized(THREE)
    batch = features.batch(np.array([3, 0, 2]), pad_id=0)
    assert batch["ids"].shape[0] == 9 and batch["labels"].tolist() == [1, 2, 2]
    # [CLS] context [SEP] option [SEP]
    shown = [LETTERS.vocabulary.pieces[row[3]] for row in batch["ids"]]
    assert shown == [*"efg", *"bcd", *"def"]
    outputs = torch.zeros(9, 1)
    outputs[[1, 5, 8]] = 9.0  # f, d and f
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    loss, right = LOSSES[CHOICE.name](outputs, tensors, Objective())
    assert right == 3 and loss.item() == pytest.approx(3 * np.log1p(2 * np.exp(-9)), rel=1e-3)


def test_the_loss_with_a_teacher_and_with_focus():
    outputs, labels = torch.tensor([[0.0], [1.0], [2.0], [0.5]]), torch.tensor([1, 1])
    shares = np.array([[1, np.e], [np.e**2, np.e**0.5]])
    shares /= shares.sum(axis=1, keepdims=True)
    of_labels = -np.log(shares[:, 1])

    focused, _ = LOSSES[CHOICE.name](outputs, {"labels": labels}, Objective(focal_gamma=2.0))
    assert focused.item() == pytest.approx(((1 - shares[:, 1]) ** 2 * of_labels).sum(), rel=1e-5)

    teacher = np.array([[0.75, 0.25], [0.5, 0.5]])
    batch = {"labels": labels, "teacher": torch.from_numpy(np.log(teacher)).float()}
    taught, right = LOSSES[CHOICE.name](outputs, batch, Objective(distillation_weight=0.25))
    of_teacher = -(teacher * np.log(shares)).sum()
    assert taught.item() == pytest.approx(0.25 * of_teacher + 0.75 * of_labels.sum(), rel=1e-5)
    assert right == 1  # by the labels, not by the teacher


def test_a_guess_costs_the_logarithm_of_the_options():
    assert CHOICE.baseline_loss(featurized(THREE)) == pytest.approx(np.log(3))
    even, _ = LOSSES[CHOICE.name](
        torch.zeros(12, 1), {"labels": torch.tensor([2, 0, 2, 1])}, Objective()
    )
    assert even.item() == pytest.approx(4 * np.log(3))
    assert CHOICE.num_outputs(CHOICE.label_names(THREE)) == 1


# --- answers and their scores ------------------------------------------------------------------


MIXED = ([0, 1, 3], [2, 0, 0], [0, 5, 1], [0, 0.5, 0])  # 2 0 1 1, where 2 0 2 1 is right


def answered(*logits, data=THREE, **encoding):
    """Answers to a row of logits a unit."""
    outputs = np.array(logits, np.float32).reshape(-1, 1)
    return CHOICE.answers(outputs, featurized(data, **encoding), data, model_task(**encoding))


def test_answers_are_the_best_options_and_the_share_of_each():
    found = answered(*MIXED)
    assert found.predicted.tolist() == [2, 0, 1, 1]
    assert found.probabilities[0] == pytest.approx(np.exp([0, 1, 3]) / np.exp([0, 1, 3]).sum())
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, rtol=1e-6)
    assert CHOICE.tune(np.zeros((12, 1)), featurized(THREE), THREE, model_task()) == {}

    data = replace(THREE, labels=None)  # what is to be predicted
    assert answered([0, 1, 3], *[[1, 0, 0]] * 3, data=data).predicted.tolist() == [2, 0, 0, 0]


def test_scores_by_hand():
    found = answered(*MIXED)
    assert CHOICE.measure(found, THREE, model_task()) == {"accuracy": 0.75}
    more = replace(model_task(), task=replace(LISTS, metrics=("macro_f1", "accuracy", "matthews")))
    scores = CHOICE.measure(found, THREE, more)
    # F1 of option 0: 1; of 1: one of two answers is right, none missed; of 2: one of two is found
    assert scores["macro_f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    # (right * N - sum of true * answered) / root of (N^2 - answered^2) (N^2 - true^2)
    assert scores["matthews"] == pytest.approx((3 * 4 - 5) / ((16 - 6) * (16 - 6)) ** 0.5)
    assert CHOICE.notes(found, THREE, more) == {}


def test_every_metric_on_offer_can_be_measured():
    found = answered(*MIXED)
    with pytest.raises(ValueError, match="metric 'f1' is not for choice: use one of") as error:
        with_metric(LISTS, "f1", CHOICE.label_names(THREE))
    for name in str(error.value).partition("use one of ")[2].split(", "):
        task = with_metric(LISTS, name, CHOICE.label_names(THREE))
        assert CHOICE.measure(found, THREE, replace(model_task(), task=task))[name] > 0


def test_one_answer_for_all_is_seen():
    found = answered(*[[0, 1, 0]] * 4)
    assert CHOICE.constant_prediction(found, THREE) == "option 1"
    matthews = replace(model_task(), task=replace(LISTS, metrics=("matthews",)))
    assert CHOICE.notes(found, THREE, matthews) == {
        "matthews": "no value, counts 0: every answer is 1"
    }
    assert CHOICE.measure(found, THREE, matthews) == {"matthews": 0.0}
    always = THREE.select([0, 2])  # where option 2 is right both times, it may be the one answer
    assert CHOICE.constant_prediction(answered([0, 0, 1], [0, 0, 1], data=always), always) is None
    assert CHOICE.constant_prediction(answered([0, 1, 3], *[[1, 0, 0]] * 3), THREE) is None


def test_windows_of_a_context_give_one_answer():
    """Two windows of one context: the mean of their log-probabilities decides."""
    data = examples(("a b c d e f g h", ["a", "b"], 1))
    encoding = {"long_texts": "windows", "max_length": 8, "doc_stride": 4}
    features = featurized(data, **encoding)
    assert features.unit_examples.tolist() == [0, 0] and features.labels.tolist() == [1, 1]
    found = answered([2.0, 0.0], [0.0, 3.0], data=data, **encoding)
    logs = [np.log([np.exp(a), np.exp(b)] / (np.exp(a) + np.exp(b))) for a, b in ((2, 0), (0, 3))]
    shares = np.exp(np.mean(logs, axis=0))
    assert found.predicted.tolist() == [1]
    np.testing.assert_allclose(found.probabilities, [shares / shares.sum()], rtol=1e-5)


def test_records_are_what_reports_read():
    found = answered(*MIXED)
    records = CHOICE.to_records(found, THREE, model_task())
    assert json.loads(json.dumps(records)) == records
    assert [record["label"] for record in records] == ["2", "0", "2", "1"]
    assert [record["predicted"] for record in records] == ["2", "0", "1", "1"]
    assert records[0]["text"] == "a" and records[0]["options"] == ["b", "c", "d"]
    assert records[0]["probabilities"] == pytest.approx(found.probabilities[0], abs=6e-6)
    blind = CHOICE.to_records(found, replace(THREE, labels=None), model_task())
    assert "label" not in blind[0] and blind[2]["predicted"] == "1"


# --- files -------------------------------------------------------------------------------------


SWAG_ROWS = (
    "id,sent1,sent2,ending0,ending1,ending2,ending3,label\n"
    '7,"a, ""b""",c,d,"e,\nf",g,h,1\n'
    "8,b,,c,d,e,f,3\n"
)


def test_what_is_predicted_stands_behind_the_rows(tmp_path):
    of_swag, new = model_task(SWAG), write(tmp_path / "new.csv", SWAG_ROWS)
    data = CHOICE.read_input(str(new), of_swag)
    assert data.labels is None and data.contexts == ['a, "b" c', "b"]
    assert data.options[0] == ["d", "e,\nf", "g", "h"]
    shares = np.array([[0.125, 0.5, 0.25, 0.125], [0.75, 0, 0, 0.25]], np.float32)
    found = Labelled(np.array([1, 0]), shares)
    for name in ("out.csv", "out.jsonl", "out.parquet", "out.txt"):
        CHOICE.check_output(data, tmp_path / name, of_swag)
        CHOICE.write_answers(tmp_path / name, found, data, of_swag)
    first, second = read_rows(new)
    assert read_rows(tmp_path / "out.csv") == [
        {**first, "predicted_label": "1", "option": "e,\nf", "probability": "0.5"},
        {**second, "predicted_label": "0", "option": "c", "probability": "0.75"},
    ]
    lines = read_rows(tmp_path / "out.jsonl")
    assert [(line["predicted_label"], line["option"]) for line in lines] == [(1, "e,\nf"), (0, "c")]
    for line, row in zip(lines, shares.tolist(), strict=True):
        assert line["probabilities"] == {str(number): value for number, value in enumerate(row)}
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == lines
    assert (tmp_path / "out.txt").read_text() == "1\n0\n"

    # a column of its own would have its tab escaped
    rows = [{"text": "a", "endings": ["b", "c\td"]}]
    listed = replace(data, rows=rows, options=[["b", "c\td"]], names=[[0, 1]])
    for rows, name, message in (
        (data, "out.tsv", "row 1: 'ending1' holds a tab or a line break"),
        (listed, "out.tsv", "row 1: 'option 1' holds a tab or a line break"),
        (data, "out.xml", r"out\.xml: cannot write '\.xml': end `out` in \.csv"),
    ):
        with pytest.raises(ValueError, match=message):
            CHOICE.check_output(rows, tmp_path / name, of_swag)


NAMED_COLUMNS = own_task("choice", "text", None, "right", options=("1", "2"))
NAMED_KEYS = own_task("choice", "text", None, "right", options=("of",))


@pytest.mark.parametrize(
    ("task", "rows", "names"),
    [
        (NAMED_COLUMNS, [{"1": "b", "2": "c", "right": "2"}, {"2": "d", "1": "a", "right": "1"}],
         [["1", "2"], ["1", "2"]]),
        (NAMED_KEYS, [{"of": {"A": "b", "B": "c"}, "right": "B"},
                      {"of": {"2": "d", "1": "a"}, "right": "2"}], [["A", "B"], ["2", "1"]]),
    ],
    ids=["columns", "keys"],
)  # fmt: skip
def test_options_with_names_are_answered_by_these(tmp_path, task, rows, names):
    """What is written is read again as the same answers."""
    text = "".join(json.dumps({"text": "a", **row}) + "\n" for row in rows)
    asked, new = model_task(task), write(tmp_path / "new.jsonl", text)
    data, out = CHOICE.read_input(str(new), asked), tmp_path / "out.jsonl"
    shares = np.array([[0.25, 0.75], [0.75, 0.25]], np.float32)
    found = Labelled(np.array([1, 0]), shares)
    CHOICE.check_output(data, out, asked)
    CHOICE.write_answers(out, found, data, asked)
    lines = read_rows(out)
    assert [line["predicted_right"] for line in lines] == [line["right"] for line in rows]
    assert [line["probabilities"] for line in lines] == [
        dict(zip(row, of, strict=True)) for row, of in zip(names, shares.tolist(), strict=True)
    ]
    again = CHOICE.read(out, replace(task, label="predicted_right"))
    assert again.labels.tolist() == found.predicted.tolist()
    CHOICE.write_answers(tmp_path / "out.parquet", found, data, asked)
    stored = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    for line, row in zip(lines, stored, strict=True):
        held = {name: share for name, share in row["probabilities"].items() if share is not None}
        assert held == line["probabilities"]


def test_what_predict_reads(tmp_path):
    """Rows without a label, in a list or a column an option; never standard input."""
    row = {"text": "a", "options": ["b", "c"], "id": 3}
    data = CHOICE.read_input(str(write(tmp_path / "new.jsonl", json.dumps(row))), model_task())
    assert data.rows == [row] and data.num_options == 2
    columns = model_task(own_task("choice", "text", None, "label", options=("x", "y")))
    for name, mark in (("new.csv", ","), ("new.tsv", "\t"), ("new.txt", "\t")):
        new = write(tmp_path / name, f"text{mark}y{mark}x\na{mark}b{mark}c\n")
        data = CHOICE.read_input(str(new), columns)
        assert data.options == [["c", "b"]], name
        assert data.rows == [{"text": "a", "y": "b", "x": "c"}], name
    with pytest.raises(ValueError, match="texts with their options are read from a file, not from"):
        CHOICE.read_input("-", model_task())
    bad = write(tmp_path / "bad.jsonl", '{"text": "a", "options": ["b"]}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: 1 options: a choice needs two or more"):
        CHOICE.read_input(str(bad), model_task())
