"""Run by the tests of this folder: trains in children of its own, each of which may be killed.

A line of JSON on standard input is one training, and its exit status is answered on standard
output. A child is a process like any other, but starts in milliseconds: this one has imported all
there is to import, has done the first training itself, and has no threads that a fork would lose.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from bertsmith.base import files as faults
from bertsmith.base.settings import from_mapping
from bertsmith.training.pretraining import run as training
from bertsmith.training.pretraining.settings import PretrainSettings

training.measure_peak = lambda engine: 0.0  # half a second, of which no weight hears


def train(store, out, settings, kill_at):
    faults.kill_at(kill_at)
    recipe = from_mapping(PretrainSettings, settings, "the test")
    training.pretrain(Path(store), Path(out), recipe, resume=True)


def in_a_child(job, seconds):
    child = os.fork()
    if not child:
        try:
            train(**job)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":  # pytest imports it for doctests
    warm = False
    for line in sys.stdin:
        job = json.loads(line)
        seconds = job.pop("kill_after")
        if warm:
            print(in_a_child(job, seconds), flush=True)
        else:  # here, so that what is compiled is loaded once
            train(**job)
            assert not Path("/proc/self/task").exists() or len(os.listdir("/proc/self/task")) == 1
            print(0, flush=True)
        warm = True
