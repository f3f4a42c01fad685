"""A fault point kills the process at the passing that the environment names, and only there."""

import os
import signal
import subprocess
import sys

import pytest

CODE = """
from bertsmith.base.files import fault_point
for number in range(1, 4):
    fault_point("other")
    print(number, flush=True)
    fault_point("place")
"""


@pytest.mark.parametrize(
    ("where", "passed", "code"),
    [
        ("place:2", "1 2", -signal.SIGKILL),
        ("other:1", "", -signal.SIGKILL),
        ("place:4", "1 2 3", 0),
        ("nowhere:1", "1 2 3", 0),
        ("", "1 2 3", 0),
    ],
)
def test_the_process_dies_where_the_environment_says(where, passed, code):
    environment = os.environ | {"BERTSMITH_KILL_AT": where}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True)
    assert (done.returncode, done.stdout.decode().split()) == (code, passed.split())
