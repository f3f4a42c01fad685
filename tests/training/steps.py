"""Incidents in the loop's steps."""

from bertsmith.training.loop.step import Stepper


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


def before_steps(monkeypatch, act):
    """Have the loop call act(its `Training`, the batch) before every step."""
    real = Stepper.step

    def step(self, batch, rate):
        act(self.run, batch)
        return real(self, batch, rate)

    monkeypatch.setattr(Stepper, "step", step)


def killed_at(step, monkeypatch):
    """Make the loop die inside the given step, as a kill would."""

    def die(run, batch):
        if run.state.step == step:
            raise Killed

    before_steps(monkeypatch, die)
