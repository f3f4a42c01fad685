import shutil
from pathlib import Path

import pytest

from bertsmith.base import jit

from ..tiny import python, write

NOTE = "compiling, once on this machine: some seconds\n"
ENCODE = """
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.tokenizer.tokenizer import Tokenizer
print(Tokenizer(Vocabulary([*SPECIAL, "a"])).encode_batch(["a b"]).ids.tolist())
"""
TWICE = """
from bertsmith.base.jit import compiled
def twice(x):
    return 2 * x
twice.__module__ = "bertsmith.example"
print(compiled(twice)(4))
"""


def plus(number, *given):
    """A module with a compiled function, that prints what it makes of some numbers."""
    printed = f"print({', '.join(f'plus({one})' for one in given)})\n" if given else ""
    return (
        "from bertsmith.base.jit import compiled\n@compiled\ndef plus(x):\n"
        f"    return {number} + x\n{printed}"
    )


def run(cache, program=ENCODE, path="", **settings):
    """(stdout, stderr) of a program that finds modules of its own under `path`."""
    program = f"import sys; sys.path.insert(0, {str(path)!r})\n{program}" if path else program
    settings |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    code, out, err = python(program, **settings)
    assert code == 0, err
    return out, err


def test_that_it_compiles_is_said_once_on_a_machine_whatever_is_compiled_later(tmp_path):
    assert run(tmp_path) == ("[5, 1]\n", NOTE)
    assert run(tmp_path) == ("[5, 1]\n", "")  # found on disk
    write(tmp_path / "another.py", TWICE)
    assert run(tmp_path, "import another", tmp_path) == ("8\n", "")


@pytest.mark.slow  # eight processes
def test_it_is_said_again_of_another_source_or_processor(tmp_path):
    """In one version, and with one cache, as in a home that machines share."""
    package, cache = tmp_path / "bertsmith", tmp_path / "cache"
    shutil.copytree(Path(jit.__file__).parent, package / "base")
    (package / "__init__.py").touch()
    for number in (1, 2):
        write(package / "kernel.py", plus(number, 1))
        for processor in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
            for note in (NOTE, ""):
                found = run(cache, "from bertsmith import kernel", tmp_path, **processor)
                assert found == (f"{number + 1}\n", note)


def test_without_a_folder_for_the_cache_it_still_works():
    # What Numba raises when it finds none; as root every folder can be written.
    no_folder = """
import numba
real = numba.njit
def njit(function, cache=False, **options):
    if cache:
        raise RuntimeError("cannot cache function: no locator available")
    return real(function, **options)
numba.njit = njit
"""
    expected = "compiling, anew, as no cache folder can be written (NUMBA_CACHE_DIR names one)"
    assert run("", no_folder + TWICE) == ("8\n", f"{expected}: some seconds\n")


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
    write(tmp_path / "caller.py", "from constants import RATE\n" + plus("RATE", 2))
    for rate, expected in ((3, "5\n"), (4, "6\n"), (3, "5\n")):
        write(tmp_path / "constants.py", f"RATE = {rate}")
        assert run(tmp_path / "cache", "import caller", tmp_path)[0] == expected


def test_an_overload_of_another_file_is_noticed(tmp_path):
    package, cache = tmp_path / "bertsmith", tmp_path / "cache"
    shutil.copytree(Path(jit.__file__).parent, package / "base")
    (package / "__init__.py").touch()
    write(package / "kernel.py", "from bertsmith.rates import rate\n" + plus("rate()", 2))
    overloaded = """
from numba.extending import overload
def rate(): pass
@overload(rate)
def _rate():
    return lambda: NUMBER
"""
    for number in (3, 4, 3):
        write(package / "rates.py", overloaded.replace("NUMBER", str(number)))
        assert run(cache, "from bertsmith import kernel", tmp_path)[0] == f"{number + 2}\n"


def test_a_full_disk_keeps_nothing_from_working(tmp_path):
    full = """
import numba.core.caching as caching
def save(*overload):
    raise OSError(28, "No space left on device")
caching.FunctionCache.save_overload = save
"""
    assert run(tmp_path, full + ENCODE)[0] == "[5, 1]\n"


def test_two_processes_that_save_at_once_keep_their_codes_apart(tmp_path):
    """Both look what is there, one saves all of its own, then the other goes on."""
    write(tmp_path / "caller.py", plus(1))
    other = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import numba.core.caching as caching
caching.IndexDataCacheFile._load_index = lambda file: {{}}
import caller
caller.plus(0.5)
"""
    one = f"""
import subprocess
import numba.core.caching as caching
real = caching.IndexDataCacheFile._save_data
def save(file, name, code):
    caching.IndexDataCacheFile._save_data = real
    subprocess.run([sys.executable, "-c", {other!r}], check=True)
    real(file, name, code)
caching.IndexDataCacheFile._save_data = save
import caller
caller.plus(1)
"""
    run(tmp_path / "cache", one, tmp_path)
    later = "import caller; print(caller.plus(0.5), caller.plus(1))"
    for _ in range(2):
        assert run(tmp_path / "cache", later, tmp_path)[0] == "1.5 2\n"


def test_code_of_an_older_source_is_removed(tmp_path):
    cache = tmp_path / "cache"
    for number in range(2):
        write(tmp_path / "caller.py", plus(number, 1, 0.5))
        assert run(cache, "import caller", tmp_path)[0] == f"{number + 1} {number + 0.5}\n"
        assert len(list(cache.rglob("*plus*.nbc"))) == 2
