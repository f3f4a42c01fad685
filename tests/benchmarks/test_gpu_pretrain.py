"""The GPU's benchmark, rehearsed on the CPU at toy size, without the packages it may not need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
REHEARSAL = """
import runpy, sys
for name in ("tyro", "rich", "pyarrow", "sklearn", "scipy"):
    sys.modules[name] = None  # an import of it fails
sys.path.insert(0, sys.argv[1])
sys.argv[0] = "gpu_pretrain.py"
del sys.argv[1]
runpy.run_path(sys.path[0] + "/gpu_pretrain.py", run_name="__main__")
"""


def run(*arguments):
    command = [sys.executable, "-c", REHEARSAL, str(FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_rehearsal_measures_profiles_and_merges(tmp_path):
    where = ["--device", "cpu", "--toy", "--out", str(tmp_path)]
    done = run(*where, "--only", "2x64-32-fast")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "gpu_pretrain.json"
    first = json.loads(file.read_text())["results"]
    assert list(first) == ["2x64-32-fast"] and first["2x64-32-fast"]["profile"]
    assert run(*where).returncode == 0  # the other case
    both = json.loads(file.read_text())["results"]
    assert both["2x64-32-fast"] == first["2x64-32-fast"]
    for result in both.values():
        assert result["ratio"]["transformers, eager"] > 0
        assert all(0 < found["share_of_peak"] < 2 for found in result["systems"].values())
    page = (tmp_path / "gpu_pretrain.md").read_text()
    assert "## 2x64-32-paper" in page and "time to ours" in page
    bad = run(*where, "--only", "nothing")
    assert bad.returncode == 1 and bad.stderr.startswith("unknown: nothing; known are 2x64-32-fast")
