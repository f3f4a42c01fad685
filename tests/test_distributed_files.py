"""What docs/how-to/many-machines.md gives to copy: torchrun and bertsmith know every flag."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from bertsmith.cli import train
from bertsmith.cli.flags import read_command
from bertsmith.cli.train import Pretrain

FOLDER = Path(__file__).parents[1] / "docs" / "distributed"
SCRIPTS = ("two-hosts.sh", "slurm.sbatch")
MANIFEST = "kubernetes.yaml"


def launched(name):
    """The words behind torchrun."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name == MANIFEST:
        _, job = yaml.safe_load_all(text)
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["command"] == ["torchrun"]
        return container["args"]
    line = text.replace("\\\n", " ").split("torchrun ")[-1].split("\n")[0]
    return shlex.split(line)


@pytest.mark.parametrize("name", [*SCRIPTS, MANIFEST])
def test_every_flag_is_known(name):
    torchrun = get_args_parser().parse_args(launched(name))
    assert torchrun.module and torchrun.training_script == "bertsmith"
    command, *words = torchrun.training_script_args
    assert command == "pretrain"
    settings = read_command(Pretrain, command, words)
    assert isinstance(settings, Pretrain) and settings.resume
    recipe = train._recipe(settings).settings
    assert recipe.steps


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_shell_can_read_it(name):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    subprocess.run(["bash", "-n", FOLDER / name], check=True)


def test_the_pods_find_each_other_by_the_services_name():
    service, job = yaml.safe_load_all((FOLDER / MANIFEST).read_text(encoding="utf-8"))
    name = service["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:{port}" in launched(MANIFEST)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
