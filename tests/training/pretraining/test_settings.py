"""Settings of pre-training that contradict each other are one line with the remedy."""

from dataclasses import replace

import pytest

from bertsmith.training.pretraining.diagnostics import budget_tokens
from bertsmith.training.pretraining.settings import PretrainSettings

LTR, MLM = {"objective": "ltr"}, {"objective": "mlm"}
BY_MINUTES = {"steps": None, "minutes": 1}
REFUSED = {
    "`phase2_length=48`: must be above `max_length=48`": {"phase2_length": 48},
    "`phase2_ratio=0.2`: there is no second phase: give `phase2_length`": {"phase2_ratio": 0.2},
    "`phase2_batch_size=8`: there is no second phase": {"phase2_batch_size": 8},
    "`phase2_ratio=1.0`: must be above 0": {"phase2_length": 64, "phase2_ratio": 1.0},
    "`warmup_ratio=0.1` and `warmup_steps=5`: give one": {"warmup_ratio": 0.1, "warmup_steps": 5},
    "`warmup_ratio=1`": {"warmup_ratio": 1},
    "`mlm_probability=0`: must be above 0": {"masking": "span", "mlm_probability": 0},
    "`mlm_probability=0.3`: the objective ltr masks nothing": {**LTR, "mlm_probability": 0.3},
    "`masking=word`: the objective ltr masks nothing": {**LTR, "masking": "word"},
    "`nsp_sampling=clean`: the objective mlm has no pairs": {**MLM, "nsp_sampling": "clean"},
    "`nsp_weight=1.0`: objective mlm has no pairs": {**MLM, "nsp_weight": 1.0},
    "`nsp_weight=0`: must be above 0": {"nsp_weight": 0},
    "`bag_of_words`: with objective ltr [CLS] does not see all": {**LTR, "bag_of_words": 1.0},
    "`bag_of_words=-1.0`: must be at least 0": {**MLM, "bag_of_words": -1.0},
    "`max_predictions_per_seq=46`: a row of `max_length=48` has 45 tokens": {
        "max_predictions_per_seq": 46
    },
    "`mask_replace_prob=0.8`, `random_replace_prob=0.3`": {"random_replace_prob": 0.3},
    "`dropout=1.0`: must be in": {"dropout": 1.0},
    "`max_length=4`": {"max_length": 4},
    "`batch_size=0`": {"batch_size": 0},
    "`micro_batch_size=0`: must be at least 1": {"micro_batch_size": 0},
    "`batch_size=16` is not a multiple of `micro_batch_size=5`": {"micro_batch_size": 5},
    "`keep_steps=0`: must be at least 1": {"keep_steps": (5, 0)},
    "`shard=True`: lamb needs whole matrices": {"shard": True, "optimizer": "lamb"},
    "`shard=True`: muon needs whole matrices": {"shard": True, "optimizer": "muon"},
    "`dist_timeout=0`: must be above 0": {"dist_timeout": 0},
}


@pytest.mark.parametrize("says", REFUSED)
def test_contradictions(says, settings):
    with pytest.raises(ValueError) as error:
        replace(settings, **REFUSED[says])
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 10}, "exactly one of `steps`, `tokens` and `minutes`"),
        ({"steps": None, "minutes": 0}, "`minutes=0`: must be above 0"),
        ({"warmup_steps": 24}, "`warmup_steps=24`: .* raise `steps`"),
        ({**BY_MINUTES, "warmup_steps": 5}, "`warmup_steps=5`: needs a budget in `steps`"),
    ],
)
def test_budgets(changes, says, settings):
    made = replace(settings, **changes)
    with pytest.raises(ValueError, match=says):
        made.budget()


def test_a_short_budget_has_few_evaluations_unless_they_are_asked_for():
    def evaluations(**given):
        return PretrainSettings(**given).evaluations

    assert [evaluations(steps=steps) for steps in (5, 20, 60, 100, 5000)] == [1, 2, 6, 10, 10]
    assert evaluations(tokens=20 * 32 * 128) == 2 and evaluations(minutes=0.1) == 10
    assert evaluations(steps=20, num_evals=10) == 10


def test_the_tokens_of_a_budget():
    rows = {"batch_size": 10, "max_length": 100, "phase2_length": 200, "phase2_ratio": 0.1}
    assert budget_tokens(PretrainSettings(steps=100, **rows)) == pytest.approx(
        90 * 1000 + 10 * 2000
    )
    assert budget_tokens(PretrainSettings(tokens=7)) == 7
    assert budget_tokens(PretrainSettings(minutes=1)) is None
