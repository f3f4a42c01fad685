import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.base import jit

PROGRAM = """
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.tokenizer.tokenizer import Tokenizer
print(Tokenizer(Vocabulary([*SPECIAL, "a"])).encode_batch(["a b"]).ids.tolist())
"""


NOTE = "compiling, once on this machine: some seconds\n"


def run(cache, program=PROGRAM, **settings):
    settings |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **settings}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_first_use_says_that_it_compiles_and_the_second_finds_it_on_disk(tmp_path):
    expected = "[5, 1]\n"
    assert run(tmp_path) == (expected, NOTE)
    assert run(tmp_path) == (expected, "")


def test_on_a_machine_it_is_said_once_whatever_is_compiled_later(tmp_path):
    assert run(tmp_path)[1] == NOTE
    another = """
from bertsmith.base.jit import compiled
def twice(x):
    return 2 * x
twice.__module__ = "bertsmith.example"
print(compiled(twice)(4))
"""
    (tmp_path / "another.py").write_text(another)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import another"
    assert run(tmp_path, program) == ("8\n", "")


def test_it_is_said_again_of_another_source_or_processor(tmp_path):
    """In one version, and with one cache, as in a home that machines share."""
    package, cache = tmp_path / "bertsmith", tmp_path / "cache"
    shutil.copytree(Path(jit.__file__).parent, package / "base")
    (package / "__init__.py").touch()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from bertsmith import kernel"
    for number in (1, 2):
        (package / "kernel.py").write_text(
            "from bertsmith.base.jit import compiled\n@compiled\ndef plus(x):\n"
            f"    return {number} + x\nprint(plus(1))\n"
        )
        for processor in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
            assert run(cache, program, **processor) == (f"{number + 1}\n", NOTE)
            assert run(cache, program, **processor) == (f"{number + 1}\n", "")


def test_without_a_folder_for_the_cache_it_still_works():
    # What Numba raises when it finds none; as root every folder can be written.
    program = """
import numba
real = numba.njit
def njit(function, cache=False, **options):
    if cache:
        raise RuntimeError("cannot cache function: no locator available")
    return real(function, **options)
numba.njit = njit
from bertsmith.base.jit import compiled
def twice(x):
    return 2 * x
twice.__module__ = "bertsmith.example"
print(compiled(twice)(4))
"""
    expected = "compiling, anew, as no cache folder can be written (NUMBA_CACHE_DIR names one)"
    assert run("", program) == ("8\n", f"{expected}: some seconds\n")


def test_numba_still_finds_the_matrix_products_of_scipy():
    pytest.importorskip("scipy")
    program = """
import sys
import bertsmith.base.jit
assert "scipy.linalg" not in sys.modules
import numba, numpy as np
product = numba.njit(lambda a: (a @ a, np.cov(a)))(np.eye(2) + 1)
print(product[0].tolist(), product[1].tolist(), "scipy.linalg" in sys.modules)
"""
    assert run("", program)[0] == "[[5.0, 4.0], [4.0, 5.0]] [[0.5, -0.5], [-0.5, 0.5]] True\n"


def test_a_constant_of_another_file_is_noticed(tmp_path):
    (tmp_path / "caller.py").write_text(
        "from bertsmith.base.jit import compiled\nfrom constants import RATE\n"
        "@compiled\ndef times(x):\n    return RATE * x\nprint(times(2))\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import caller"
    for rate, expected in ((3, "6\n"), (4, "8\n"), (3, "6\n")):
        (tmp_path / "constants.py").write_text(f"RATE = {rate}")
        assert run(tmp_path / "cache", program)[0] == expected


def test_a_full_disk_keeps_nothing_from_working(tmp_path):
    program = (
        """
import numba.core.caching as caching
def save(*overload):
    raise OSError(28, "No space left on device")
caching.FunctionCache.save_overload = save
"""
        + PROGRAM
    )
    assert run(tmp_path, program)[0] == "[5, 1]\n"


def test_two_processes_that_save_at_once_keep_their_codes_apart(tmp_path):
    """Both look what is there, one saves all of its own, then the other goes on."""
    (tmp_path / "caller.py").write_text(
        "from bertsmith.base.jit import compiled\n@compiled\ndef twice(x):\n    return 2 * x\n"
    )
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    other = f"""{path}
import numba.core.caching as caching
caching.IndexDataCacheFile._load_index = lambda file: {{}}
import caller
caller.twice(0.5)
"""
    one = f"""{path}
import subprocess
import numba.core.caching as caching
real = caching.IndexDataCacheFile._save_data
def save(file, name, code):
    caching.IndexDataCacheFile._save_data = real
    subprocess.run([sys.executable, "-c", {other!r}], check=True)
    real(file, name, code)
caching.IndexDataCacheFile._save_data = save
import caller
caller.twice(1)
"""
    run(tmp_path / "cache", one)
    later = f"{path}import caller; print(caller.twice(0.5), caller.twice(1))"
    for _ in range(2):
        assert run(tmp_path / "cache", later)[0] == "1.0 2\n"


def test_code_of_an_older_source_is_removed(tmp_path):
    caller, cache = tmp_path / "caller.py", tmp_path / "cache"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import caller"
    for number in range(2):
        caller.write_text(
            "from bertsmith.base.jit import compiled\n@compiled\ndef plus(x):\n"
            f"    return {number} + x\nprint(plus(1), plus(0.5))\n"
        )
        assert run(cache, program)[0] == f"{number + 1} {number + 0.5}\n"
        assert len(list(cache.rglob("*plus*.nbc"))) == 2
