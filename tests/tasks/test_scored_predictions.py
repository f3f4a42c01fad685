"""Stored predictions, scored as `finetune` and `evaluate` do, against stored figures of others.

`scored_predictions/*.json` hold right answers and predictions made up for this test (the classes
and scores drawn at random) and figures that were computed once, from the same lists, by

two_classes, three_classes  scikit-learn 1.9.1: accuracy_score, f1_score, matthews_corrcoef
scores     scipy 1.17.1: pearsonr, spearmanr; scikit-learn: mean_squared_error
tags       seqeval 1.2.2 as it comes (reads any tags, as conlleval does): f1_score,
           precision_score, recall_score, accuracy_score; by type precision_recall_fscore_support
squad_1.1  `evaluate` of the official script, as google-research/electra@ac8d487 keeps it in
           finetune/qa/squad_official_eval_v1.py
squad_2.0  `get_raw_scores`, `make_eval_dict`, `merge_eval` of the official script, as farm 0.8.0 of
           PyPI keeps it in evaluation/squad_evaluation.py; the figures of transformers 4.57.1
           (data/metrics/squad_metrics.py) are the same

torchmetrics 1.9.0 gives those of classes, scores and SQuAD 1.1 too, to its float32; but where a
right answer of 1.1 and the prediction both have no word left ("the"), it has F1 1, the script 0.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.squad.answers import squad1_scores, squad2_scores
from bertsmith.tasks.squad.files import read_questions
from bertsmith.tasks.tagging.schemes import entity_scores, tag_scores

FOLDER = Path(__file__).parent / "scored_predictions"


def stored(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def same(figures):
    return pytest.approx(figures, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"), [("two_classes", np.int64), ("three_classes", np.int64), ("scores", float)]
)
def test_classes_and_scores_as_scikit_learn_and_scipy(name, kind):
    file = stored(name)
    gold, predicted = (np.array(file[part], kind) for part in ("gold", "predicted"))
    assert len(gold) == 60
    scores = compute_metrics(list(file["figures"]), predicted, gold, file.get("num_labels", 0))
    assert scores == same(file["figures"])


def test_tags_as_seqeval():
    file = stored("tags")
    sentences = file["sentences"]
    sizes = [len(sentence["words"].split()) for sentence in sentences]
    boundaries = np.cumsum([0, *sizes])
    gold, predicted = (
        [tag for sentence in sentences for tag in sentence[part].split()]
        for part in ("gold", "predicted")
    )
    assert tag_scores(gold, predicted, boundaries, "IOB2") == same(file["figures"])
    by_type = entity_scores(gold, predicted, boundaries)
    assert set(by_type) == {"overall", *file["figures_by_type"]}
    for name, figures in file["figures_by_type"].items():
        assert {figure: by_type[name][figure] for figure in figures} == same(figures)


def test_squad_1_as_the_official_script():
    file, questions = stored("squad_1.1"), read_questions(FOLDER / "squad_1.1.json")
    scores = squad1_scores(questions, file["predictions"])
    assert len(file["predictions"]) == 39  # one was not answered, which counts as wrong
    assert scores.pop("total") == 40
    figures = file["figures"]
    assert scores == same({"exact": figures["exact_match"], "f1": figures["f1"]})


def test_squad_2_as_the_official_script():
    file, questions = stored("squad_2.0"), read_questions(FOLDER / "squad_2.0.json")
    assert squad2_scores(questions, file["predictions"]) == same(file["figures"])
