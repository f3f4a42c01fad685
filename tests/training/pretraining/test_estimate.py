import json

import pytest

from bertsmith.model.config import config_for, training_flops
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.memory import StepShape, parameters
from bertsmith.training.pretraining.estimate import (
    ASSUMED_SHARE,
    TOKENS_PER_PARAMETER,
    Speed,
    assumed_speed,
    best_size,
    estimate,
    measure_speed,
)

BASE = config_for("base", 30522)
SHAPE = StepShape(batch_size=256, micro_batch_size=32, length=128, predictions=20)


def of(budget, speed, available=None, *given):
    return estimate(BASE, SHAPE, budget, speed, available, *given)


def test_the_budget_in_steps_tokens_and_minutes_is_the_same_run():
    speed = Speed(32_768.0, measured=True)  # a step a second
    for budget in (Budget(steps=7200), Budget(tokens=7200 * 32_768), Budget(minutes=120)):
        run = of(budget, speed)
        assert (run.steps, run.tokens) == (7200, 7200 * 256 * 128)
        assert run.hours == pytest.approx(2.0)
        # paper-size check: 6 x (85 M weights of the layers and some of the head) x tokens
        assert run.flops / run.tokens / 6 == pytest.approx(85e6, rel=0.1)
    assert of(Budget(tokens=1), speed).steps == of(Budget(minutes=0.001), speed).steps == 1


def test_padding_is_no_token_and_figures_on_the_way_take_time():
    speed = Speed(32_768.0, measured=True)  # a step of whole rows a second
    for budget in (Budget(minutes=10), Budget(tokens=594 * 24_576), Budget(steps=594)):
        # 6 seconds of 600 go to figures of 12 steps' rows
        one = of(budget, speed, None, 0.25, 2 * 256 * 6)
        assert (one.steps, one.tokens, one.step_tokens) == (594, 594 * 24_576, 24_576)
        assert one.hours == pytest.approx(1 / 6)
        assert one.speed == Speed(24_576.0, measured=True)
        assert "at once: 24,576 tokens and 25% padding, " in one.text()
    whole = of(Budget(steps=594), speed)
    assert one.best.tokens == pytest.approx(0.75 * whole.best.tokens)


def test_text_and_json():
    speed = Speed(760.0, measured=True)
    found = of(Budget(steps=1000), speed, available=21 * 10**9)
    lines = found.text().splitlines()
    assert " ".join(line.split()[0] for line in lines) == "model memory step speed budget advice"
    assert lines[0] == "model    110,106,428 parameters"
    assert lines[1].endswith("21.00 GB are free")
    assert lines[2].startswith("step     256 rows of 128, 32 at once: 32,768 tokens, 16.9 TFLOP")
    assert lines[3] == "speed    760 tokens/s, measured here"
    assert lines[4].startswith("budget   1,000 steps, 32,768,000 tokens")
    assert lines[4].endswith("12.0 hours")
    assert "rule of thumb" in lines[5] and "arXiv 2203.15556" in lines[5]
    mapping = json.loads(json.dumps(found.mapping()))
    assert mapping["parameters"] == 110_106_428 and mapping["shape"]["length"] == 128
    assert mapping["memory"]["weights"] == 4 * 110_106_428
    assert mapping["fits"] is True
    tight = of(Budget(steps=1), speed, available=found.memory.peak - 1)
    assert not tight.fits and tight.mapping()["fits"] is False
    says = "too little; take a smaller micro-batch, length or size"
    assert says in tight.text().splitlines()[1]
    guess = of(Budget(steps=1), Speed(1.0, measured=False)).text()
    assert "a guess from the machine's peak" in guess and "are free" not in guess
    assert "the smallest; too short for" in guess and "too short" not in found.text()


@pytest.mark.parametrize("hours", [0.1, 1, 10, 1000])
def test_the_best_size_follows_the_rule(hours):
    numbers = {}
    for size in ("tiny", "mini", "small", "medium", "base", "large"):
        config = config_for(size, 30522)
        tokens = 3600 * hours * 0.5e12 / training_flops(config, 1, 128, 21, 20) * 128
        if tokens >= TOKENS_PER_PARAMETER * parameters(config):
            numbers[size] = parameters(config)
    expected = max(numbers, key=numbers.__getitem__) if numbers else "tiny"
    assert best_size(BASE, SHAPE, 3600 * hours * 0.5e12).size == expected


def test_the_best_size_keeps_the_shape_of_the_recipe():
    assert best_size(BASE, SHAPE, 1.0).size == "tiny"
    gated = config_for("base", 8000, gated=True, pre_norm=True)
    found = best_size(gated, SHAPE, 1.0)
    assert found.parameters == parameters(config_for("tiny", 8000, gated=True, pre_norm=True))


def test_a_measured_speed_leaves_out_the_first_step():
    now = [0.0]
    durations = iter([100.0, 2.0, 2.0, 2.0, 2.0])

    def step():
        now[0] += next(durations)
        return 50

    # three steps of two seconds reach five seconds
    assert measure_speed(step, 5.0, lambda: now[0]) == Speed(25.0, measured=True)


def test_an_assumed_speed_is_a_share_of_the_peak():
    speed = assumed_speed(BASE, SHAPE, peak=1e12)
    operations = training_flops(BASE, 1, 128, 21, 20) / 128
    assert speed.tokens_per_second * operations == pytest.approx(ASSUMED_SHARE * 1e12)
    assert not speed.measured
