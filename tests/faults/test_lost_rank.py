"""A rank that is killed or hangs: torchrun starts all again, and the run ends as if it had not.

Two agents of torchrun on this machine stand for two machines.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertsmith.base.files import read_json
from bertsmith.checkpoints.run_folder import RunFolder, step_number

from ..training.runs import assert_same_run, lines, messages

pytestmark = pytest.mark.faults
SETTINGS = {
    "size": "1x64", "max_length": 32, "batch_size": 8, "steps": 12, "learning_rate": 3e-3,
    "dropout": 0.1, "precision": "float32", "device": "cpu", "threads": 1, "checkpoint_every": 3,
    "log_every": 1, "num_evals": 3, "eval_rows": 8, "dist_timeout": 30.0, "loggers": (),
}  # fmt: skip
RANK = Path(__file__).parents[1] / "training" / "pretraining" / "two_ranks.py"
ONE_MACHINE = ("--standalone", "--nproc-per-node=2")


def start(words, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--shutdown-timeout=5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(agent):
    error = agent.communicate(timeout=300)[1]
    assert agent.returncode == 0, error
    return error


@pytest.fixture(scope="module")
def planned(small_store, tmp_path_factory):
    """planned(name, incident, shard) -> the file that says so, and the run's folder."""
    folder = tmp_path_factory.mktemp("ranks")

    def plan(name, incident=None, **changes):
        run = {"corpus": str(small_store), "out": str(folder / name)}
        run["settings"] = {**SETTINGS, **changes}
        if incident:
            run["incident"] = incident
        file = folder / f"{name}.plan"
        file.write_text(json.dumps([run]))
        return file, folder / name

    return plan


@pytest.fixture(scope="module")
def undisturbed(planned):
    """The same runs in peace, each made when it is first asked for."""
    made = {}

    def run(**changes):
        key = json.dumps(changes)
        if key not in made:
            file, made[key] = planned(f"peace{len(made)}", **changes)
            ended(start(ONE_MACHINE, RANK, file))
        return made[key]

    return run


@pytest.mark.parametrize(
    ("rank", "what", "shard"),
    [(1, "SIGKILL", False), (0, "SIGKILL", False), (1, "SIGKILL", True), (1, "SIGSTOP", False)],
)
def test_all_are_started_again_and_end_as_if_undisturbed(
    planned, undisturbed, rank, what, shard, tally
):
    # one that hangs is lost when the others have waited for so long
    changes = {"shard": shard} | ({"dist_timeout": 4.0} if what == "SIGSTOP" else {})
    incident = {"what": what, "rank": rank, "step": 7}
    plan, out = planned(f"{what}-{rank}-{shard}", incident, **changes)
    error = ended(start((*ONE_MACHINE, "--max-restarts=1"), RANK, plan))
    assert_same_run(undisturbed(shard=shard), out)
    assert read_json(out / "run.json")["machine"]["ranks"] == 2
    assert [line["step"] for line in lines(out)] == [*range(1, 13)]
    if what == "SIGSTOP":
        assert f"rank {1 - rank} of 2 lost another one" in error
    tally(f"a rank {'killed' if what == 'SIGKILL' else 'that hung'}, all started again")


def two_machines(restarts):
    """The words of torchrun on each of two machines, and the port where they meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "--local-addr=127.0.0.1"]
    return [*words, f"--max-restarts={restarts}"], port


def test_two_machines_and_one_of_them_killed(planned, undisturbed, tally):
    plan, out = planned("machines", {"what": "SIGKILL", "rank": 1, "step": 7})
    words, _ = two_machines(restarts=2)
    agents = [start(words, RANK, plan) for _ in range(2)]
    for agent in agents:
        ended(agent)
    assert_same_run(undisturbed(shard=False), out)
    tally("a rank of two machines killed, all started again")


def command_of(store, out):
    flags = [
        f"--{n.replace('_', '-')}={v}" for n, v in SETTINGS.items() if n not in ("loggers", "steps")
    ]
    return ["-m", "bertsmith", "pretrain", f"--corpus={store}", f"--out={out}", *flags, "--resume"]


def wait_for_a_checkpoint(out, behind=-1):
    """The step of a checkpoint behind the given one, once there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        latest = RunFolder(out).latest()
        if latest is not None and step_number(latest) > behind:
            return step_number(latest)
        time.sleep(0.05)
    raise TimeoutError(f"{out}: no checkpoint behind step {behind}")


def test_one_of_two_machines_is_stopped_and_the_other_waits_for_it(
    planned, small_store, tally, monkeypatch
):
    """As when a pod is moved: its torchrun gets a signal, the other one's goes on with its next."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as in kubernetes.yaml
    _, out = planned("moved")
    words, port = two_machines(restarts=5)
    command = [*command_of(small_store, out), "--steps=100000"]
    stays = start(words, *command)
    while not answers(port):  # the two meet at this one
        time.sleep(0.05)
    moves = start(words, *command)
    wait_for_a_checkpoint(out)
    moves.send_signal(signal.SIGTERM)
    moves.communicate(timeout=120)
    stopped = step_number(RunFolder(out).latest())
    moves = start(words, *command)
    assert wait_for_a_checkpoint(out, behind=stopped) > stopped
    assert stays.poll() is None
    for agent in (stays, moves):
        agent.send_signal(signal.SIGTERM)
    for agent in (stays, moves):
        agent.communicate(timeout=120)
    steps = [line["step"] for line in lines(out)]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) > stopped
    tally("a machine stopped and back, the other one waited for it")


def answers(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_the_command_stops_on_a_signal_to_torchrun_and_goes_on(planned, small_store, tally):
    _, out = planned("signal")
    command = command_of(small_store, out)
    agent = start(ONE_MACHINE, *command, "--steps=100000")
    wait_for_a_checkpoint(out)
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=120)
    assert agent.returncode != 0
    stopped = RunFolder(out).latest()
    step = read_json(stopped / "state.json")["step"]
    assert messages(out)[-1] == f"stopped by a signal at step {step}; saved"
    ended(start(ONE_MACHINE, *command, f"--steps={step + 1}"))
    assert read_json(out / "result.json")["steps"] == step + 1
    tally("a signal to torchrun, saved and gone on")
