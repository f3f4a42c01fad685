"""The task that a folder remembers: by its run.json, or by what its config.json may say."""

import csv
import json

import pytest

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.inference.model_task import read_model_task
from bertsmith.model.config import config_for
from bertsmith.model.heads import OptionScorer, SequenceClassifier, SpanPredictor
from bertsmith.tasks.task import find_task, own_task

from ..tiny import bertsmith, piece_tokenizer, random_model, refused, write

TOKENIZER = piece_tokenizer("ann met bob in rome who where")
CONFIG = config_for("1x64", len(TOKENIZER.vocabulary), max_positions=32)
SWAG = [
    "sent1,sent2,ending0,ending1,ending2,ending3,label",
    "ann met bob,who,met ann,in rome,bob,who ann,1",
    "in rome,bob,ann,met,where in,rome met,2",
]


def described(folder, **settings):
    """A model whose run.json says such a task; its head does not matter."""
    extra = {} if settings["task"] == "mnli" else {"kind": settings["task"]}
    return random_model(folder, TOKENIZER, SequenceClassifier, 3, run=settings, extra_config=extra)


CHOICE = {"task": "choice", "text": "q", "label": "a", "options": ["x", "y"], "separator": ","}
SETS = {"task": "multilabel", "text": "t", "label": "tags", "separator": "|"}


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"task": "mnli"}, find_task("mnli")),
        (CHOICE, own_task("choice", "q", None, "a", options=("x", "y"))),
        (SETS, own_task("multilabel", "t", None, "tags", separator="|")),
    ],
    ids=["mnli", "choice", "multilabel"],
)
def test_a_run_remembers_its_task(settings, task, tmp_path):
    folder = described(tmp_path / "run", **settings)
    assert read_model_task(folder).task == task
    assert read_model_task(folder, label="label").task.label == "label"


def test_a_run_remembers_the_metric_it_was_made_for(tmp_path):
    folder = described(tmp_path / "run", task="mnli", metrics=["macro_f1", "accuracy"])
    assert read_model_task(folder).task.metrics == ("macro_f1", "accuracy")


def of_transformers(folder, head, *outputs):
    """A model without a run.json, whose config.json says nothing of ours."""
    random_model(folder, TOKENIZER, head, *outputs, config=CONFIG, seed=3)
    tell(folder, None)
    return folder


def tell(folder, ours):
    """Write what is under "bertsmith" in config.json; None: nothing, as transformers does."""
    config = {**json.loads((folder / "config.json").read_text()), "bertsmith": ours}
    if ours is None:
        del config["bertsmith"]
    write(folder / "config.json", json.dumps(config))


@pytest.fixture
def chooser(tmp_path):
    return of_transformers(tmp_path / "chooser", OptionScorer, 1)


@pytest.fixture
def swag(tmp_path):
    return write(tmp_path / "val.csv", SWAG)


def evaluate(folder, data):
    return json.loads(bertsmith("evaluate", folder, "--data", data, "--json"))


@pytest.mark.parametrize("ours", [None, {"kind": "choice", "task": "choice"}])
def test_a_choice_says_what_is_missing(ours, chooser, swag, tmp_path):
    tell(chooser, ours)
    for words in (
        ("evaluate", chooser, "--data", swag),
        ("predict", chooser, swag, "--out", tmp_path / "out.csv"),
    ):
        line = refused(*words)
        assert "nothing says which columns its options are: write into config.json" in line
        assert '"bertsmith": {"task": "swag"}' in line and str(chooser) in line


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"kind": "sort"}, "bertsmith: kind 'sort': known are classify, regress, multilabel, "),
        ({"max_length": "64"}, "bertsmith: max_length = '64': expected a whole number"),
        ({"max_length": 10**9}, "bertsmith: max_length is 1,000,000,000, but the model has "),
        ({"max_length": -3}, "bertsmith: max_length is -3, but the model has "),
        ({"thresholds": {"thresholds": "x"}}, "thresholds {'thresholds': 'x'}: not numbers"),
        ({"thresholds": {"thresholds": [0.5] * 7}}, "not numbers, one a label"),
        ({"thresholds": [0.5]}, r"thresholds \[0.5\]: not numbers, one a label"),
    ],
)
def test_settings_that_cannot_be_are_named(ours, message, tmp_path):
    folder = of_transformers(tmp_path / "model", SequenceClassifier, 2)
    tell(folder, ours)
    with pytest.raises(
        ValueError, match=f"config.json: {message}" if "bert" in message else message
    ):
        read_model_task(folder)


def test_a_choice_answers_once_its_config_names_the_options(chooser, swag, tmp_path):
    tell(chooser, {"task": "swag"})
    assert read_model_task(chooser).task == find_task("swag")
    result = evaluate(chooser, swag)
    assert result["examples"] == 2

    options = [f"ending{k}" for k in range(4)]
    tell(chooser, {"text": "sent1", "text_pair": "sent2", "options": options})
    own = own_task("choice", "sent1", "sent2", "label", options=tuple(options))
    assert read_model_task(chooser).task == own
    bertsmith("predict", chooser, swag, "--out", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]  # labels are numbers, answers the options' columns
    right = [row["predicted_label"] == f"ending{row['label']}" for row in rows]
    assert sum(right) / 2 == result["metrics"]["accuracy"]


def test_the_run_goes_before_its_config(chooser):
    """A run of ours writes its task into both; who edits one of them is not to be guessed."""
    tell(chooser, {"task": "codah"})
    RunFolder(chooser).write_settings({"kind": "finetune", "settings": {"task": "swag"}})
    assert read_model_task(chooser).task == find_task("swag")


def test_a_model_of_questions_may_be_told_that_some_have_no_answer(tmp_path):
    answerer = of_transformers(tmp_path / "answerer", SpanPredictor)
    asked = [("ann met bob in rome", [{"text": "bob", "answer_start": 8}]), ("bob met ann", [])]
    paragraphs = [
        {"context": context, "qas": [{"id": f"q{k}", "question": "who", "answers": answers}]}
        for k, (context, answers) in enumerate(asked)
    ]
    squad = json.dumps({"data": [{"paragraphs": paragraphs}]})
    data, out = write(tmp_path / "dev.json", squad), tmp_path / "out.json"
    result = evaluate(answerer, data)
    (reason,) = result["notes"].values()
    assert 'write "bertsmith": {"task": "squad2"} into its config.json' in reason
    assert result["metrics"]["no_answer_exact_match"] == 0
    shown = bertsmith("evaluate", answerer, "--data", data)
    assert "no_answer_exact_match  0.0000  (no value, counts 0: the model was not made for" in shown

    tell(answerer, {"task": "squad2", "thresholds": {"null_threshold": -1e6}})
    result = evaluate(answerer, data)
    assert result["notes"] == {} and result["metrics"]["no_answer_exact_match"] == 1
    bertsmith("predict", answerer, data, "--out", out)
    assert json.loads(out.read_text()) == {"q0": "", "q1": ""}

    tell(answerer, {"task": "squad2"})
    bertsmith("predict", answerer, data, "--out", out)
    odds = json.loads((tmp_path / "out.null_odds.json").read_text())
    answers = json.loads(out.read_text())
    assert all((answers[name] == "") == (odds[name] > 0) for name in ("q0", "q1"))
