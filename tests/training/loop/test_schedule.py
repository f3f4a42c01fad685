import pytest

from bertsmith.training.loop.schedule import Budget, learning_rate, warmup_share

SCHEDULES = ("linear", "paper", "cosine", "constant")


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_rises_to_its_peak_and_never_above(kind):
    rates = [learning_rate(p / 1000, 2e-3, 0.1, kind) for p in range(1001)]
    assert rates[:100] == pytest.approx([2e-3 * p / 100 for p in range(100)])
    assert rates[100] == pytest.approx(2e-3 * (0.9 if kind == "paper" else 1.0))
    after = rates[100:]
    assert after == sorted(after, reverse=True)
    assert after[-1] == pytest.approx(2e-3 if kind == "constant" else 0.0, abs=1e-12)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_without_warm_up_the_first_step_has_the_peak(kind):
    assert learning_rate(0.0, 1e-3, 0.0, kind) == 1e-3


def test_an_unknown_schedule_is_our_mistake():
    with pytest.raises(AssertionError):
        learning_rate(0.5, 1.0, 0.1, "triangle")


def test_warm_up_in_steps_is_a_share_of_the_steps():
    assert warmup_share(Budget(minutes=3), 0.05) == 0.05
    assert warmup_share(Budget(steps=200), 0.05, warmup_steps=20) == 0.1
    assert warmup_share(Budget(steps=200), 0.05, warmup_steps=0) == 0.0


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(steps=500), "`warmup_steps=10000`: .* less than the budget of 500 steps; raise"),
        (Budget(steps=10_000), "less than the budget"),
        (Budget(minutes=60), "needs a budget in `steps`; .* give `warmup_ratio`"),
        (Budget(tokens=10**9), "needs a budget in `steps`"),
    ],
)
def test_a_budget_that_does_not_hold_the_warm_up(budget, message):
    with pytest.raises(ValueError, match=message):
        warmup_share(budget, 0.05, warmup_steps=10_000)
