"""What runs must have in common to answer together."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bertsmith.inference.predict import common_model_task
from bertsmith.tasks.task import EncodingSettings, find_task
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask

from ..tiny import piece_tokenizer

TOKENIZER = piece_tokenizer("a")
CASED = Tokenizer(TOKENIZER.vocabulary, GOOGLE_CASED)
STRIDE_64 = EncodingSettings(384, doc_stride=64)
SQUAD = ModelTask(find_task("squad2"), (), EncodingSettings(384), {"null_threshold": -1.0})
SST = ModelTask(find_task("sst2"), ("0", "1"), EncodingSettings(), {"thresholds": [0.25]})


def predictor(model_task, folder="a", tokenizer=TOKENIZER):
    kind = TASK_TYPES[model_task.task.task_type]
    known = {"folder": folder, "model_task": model_task, "tokenizer": tokenizer}
    return SimpleNamespace(**known, task_type=kind)


@pytest.mark.parametrize(
    ("model_task", "second", "together"),
    [
        (SQUAD, {"null_threshold": 2.0}, {"null_threshold": 0.5}),
        (SST, {"thresholds": [0.75]}, {"thresholds": [0.5]}),
        (replace(SST, thresholds={}), {}, {}),
    ],
)
def test_what_was_tuned_is_averaged(model_task, second, together):
    other = predictor(replace(model_task, thresholds=second))
    found = common_model_task(predictor(model_task), [other])
    assert found == replace(model_task, thresholds=together)
    assert common_model_task(predictor(model_task), []) == model_task


def columns(text, pair=None):
    return replace(SST, task=replace(SST.task, text=text, text_pair=pair))


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (columns("title"), columns("body"), "b: .* 'body', but a 'title': .* `text='title'`"),
        (columns("x", "y"), columns("x", "z"), "b: .* 'z', but a 'y': .*text_pair='y'"),
        (columns("x", "y"), columns("x"), "b: reads no second text, but a reads that of 'y': an"),
        (columns("x"), columns("x", "y"), "a: reads no second text, but b reads that of 'y': an"),
    ],
)
def test_runs_that_read_other_columns(ours, theirs, message):
    with pytest.raises(ValueError, match=message):
        common_model_task(predictor(ours), [predictor(theirs, "b")])


def test_questions_are_the_same_whatever_their_columns_are_called():
    other = replace(SQUAD, task=replace(SQUAD.task, text="text", text_pair=None))
    assert common_model_task(predictor(SQUAD), [predictor(other, "b")]) == SQUAD


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (predictor(SQUAD, "b", piece_tokenizer("b")), "vocabulary or casing"),
        (predictor(SQUAD, "b", CASED), "vocabulary or casing"),
        (predictor(replace(SQUAD, encoding=STRIDE_64), "b"), "encoding .*stride"),
        (predictor(replace(SQUAD, thresholds={}), "b"), "set of tuned thresholds"),
        (predictor(replace(SQUAD, score_activation="sigmoid"), "b"), "activation of scores"),
        (predictor(SST, "b"), "kind of task"),
        (predictor(replace(SQUAD, label_names=("0", "1")), "b"), "set of classes"),
    ],
)
def test_runs_that_do_not_fit(other, message):
    with pytest.raises(ValueError, match=f"b: has another {message}.* than a: an ensemble needs"):
        common_model_task(predictor(SQUAD), [other])
