"""What each rank does in test_torchrun.py and tests/faults: the runs of a JSON file, one by one.

    [{"corpus": DIR, "out": DIR, "settings": {...}, "resume": false, "argv": [...],
      "incident": {"what": "SIGTERM", "rank": 1, "step": 3}}, ...]

With "argv" the run is that command line. An incident comes to one rank inside one step, unless
torchrun has started the ranks again. What became of run N at rank R is written beside the file, as
NAME.N.R.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from bertsmith.cli.main import main
from bertsmith.training.engine import measure_peak
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining.run import pretrain

RANK = int(os.environ.get("RANK", 0))
STARTED_AGAIN = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
real_step = Stepper.step
measure_peak.__defaults__ = (128, 0.0)  # of a small product: no weight hears of it


def step_with(what, rank, step):
    """The loop's step, with the incident."""

    def stepping(stepper, batch, rate):
        task = stepper.run.task
        if stepper.run.state.step == step and rank == RANK and not STARTED_AGAIN:
            if what == "nan":
                real_loss = task.loss

                def loss(*arguments):
                    value, sums = real_loss(*arguments)
                    return value * float("nan"), sums

                task.loss = loss
            else:
                os.kill(os.getpid(), getattr(signal, what))
        return real_step(stepper, batch, rate)

    return stepping


def outcome(run):
    """The result of a run, or its error."""
    Stepper.step = step_with(**run["incident"]) if "incident" in run else real_step
    if "argv" in run:
        return {"code": main(run["argv"])}
    try:
        resume = run.get("resume", False)
        result = pretrain(run["corpus"], run["out"], resume=resume, **run["settings"])
    except (ValueError, FloatingPointError) as error:
        dist.destroy_process_group()  # as the end of a process would
        return {"error": str(error), "kind": type(error).__name__}
    return {"result": result.to_dict() if result.finished else None}


if __name__ == "__main__":
    plan = Path(sys.argv[1])
    for number, run in enumerate(json.loads(plan.read_text())):
        found = outcome(run)
        plan.with_suffix(f".{number}.{RANK}.json").write_text(json.dumps(found))
