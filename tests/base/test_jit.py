import importlib
import shutil
import sys
from pathlib import Path

import numba
import pytest
from numba.core.caching import FunctionCache, IndexDataCacheFile

import bertsmith
from bertsmith.base import jit

from ..tiny import python, write

NOTE = "compiling, once on this machine: some seconds\n"
TWICE = """
from bertsmith.base.jit import compiled
def twice(x):
    return 2 * x
twice.__module__ = "bertsmith.example"
print(compiled(twice)(4))
"""


def plus(number):
    """A module with a compiled function."""
    return (
        "from bertsmith.base.jit import compiled\n@compiled\ndef plus(x):\n"
        f"    return {number} + x\n"
    )


def run(cache, program, path="", **settings):
    """(stdout, stderr) of a program that finds modules of its own under `path`."""
    program = f"import sys; sys.path.insert(0, {str(path)!r})\n{program}" if path else program
    settings |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    code, out, err = python(program, **settings)
    assert code == 0, err
    return out, err


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import a module of tmp_path, those named before it too, as a new process would: all that is
    left of earlier imports is the code on disk, in tmp_path / "cache"."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(bertsmith, "__path__", [*bertsmith.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)

    loaded = set()

    def forget():
        jit.source_digest.cache_clear()
        importlib.invalidate_caches()
        for name in loaded:
            sys.modules.pop(name, None)

    def load(*names):
        loaded.update(names)
        forget()
        return [importlib.import_module(name) for name in names][-1]

    yield load
    forget()


def test_that_it_compiles_is_said_once_on_a_machine_whatever_is_compiled_later(tmp_path):
    write(tmp_path / "one.py", plus(1))
    write(tmp_path / "another.py", plus(2))
    ours = f"import bertsmith; bertsmith.__path__.append({str(tmp_path)!r})\n"
    two = f"{ours}from bertsmith.one import plus; print(plus(1), plus(0.5))"
    assert run(tmp_path / "cache", two) == ("2 1.5\n", NOTE)
    assert run(tmp_path / "cache", two) == ("2 1.5\n", "")  # found on disk
    third = f"{ours}from bertsmith.another import plus; print(plus(1))"
    assert run(tmp_path / "cache", third) == ("3\n", "")


@pytest.mark.slow  # eight processes
def test_it_is_said_again_of_another_source_or_processor(tmp_path):
    """In one version, and with one cache, as in a home that machines share."""
    package, cache = tmp_path / "bertsmith", tmp_path / "cache"
    shutil.copytree(Path(jit.__file__).parent, package / "base")
    (package / "__init__.py").touch()
    for number in (1, 2):
        write(package / "kernel.py", plus(number))
        for processor in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
            for note in (NOTE, ""):
                program = "from bertsmith import kernel; print(kernel.plus(1))"
                found = run(cache, program, tmp_path, **processor)
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
from numba.np import arraymath
product = numba.njit(lambda a: a @ a)(np.eye(2) + 1)
print(product.tolist(), arraymath._HAVE_BLAS, "scipy.linalg" in sys.modules)
"""
    assert run("", program)[0] == "[[5.0, 4.0], [4.0, 5.0]] True True\n"


def test_a_constant_of_another_file_is_noticed(load, tmp_path):
    write(tmp_path / "caller.py", "from constants import RATE\n" + plus("RATE"))
    for rate in (3, 4, 3):
        write(tmp_path / "constants.py", f"RATE = {rate}")
        assert load("constants", "caller").plus(2) == rate + 2


def test_an_overload_of_another_file_is_noticed(load, tmp_path):
    write(tmp_path / "kernel.py", "from bertsmith.rates import rate\n" + plus("rate()"))
    overloaded = """
from numba.extending import overload
def rate(): pass
@overload(rate)
def _rate():
    return lambda: NUMBER
"""
    for number in (3, 4, 3):
        write(tmp_path / "rates.py", overloaded.replace("NUMBER", str(number)))
        assert load("bertsmith.rates", "bertsmith.kernel").plus(2) == number + 2


def test_what_an_overload_takes_from_a_third_file_is_noticed(load, tmp_path):
    write(tmp_path / "kernel.py", "from bertsmith.rates import rate\n" + plus("rate()"))
    overloaded = """
from numba.extending import overload
from bertsmith.numbers import NUMBER
def rate(): pass
@overload(rate)
def _rate():
    number = NUMBER
    return lambda: number
"""
    write(tmp_path / "rates.py", overloaded)
    for number in (3, 4, 3):
        write(tmp_path / "numbers.py", f"NUMBER = {number}")
        names = "bertsmith.numbers", "bertsmith.rates", "bertsmith.kernel"
        assert load(*names).plus(2) == number + 2


def test_a_full_disk_keeps_nothing_from_working(load, tmp_path, monkeypatch):
    def full(*overload):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", full)
    write(tmp_path / "caller.py", plus(1))
    assert load("caller").plus(2) == 3
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_two_processes_that_save_at_once_keep_their_codes_apart(load, tmp_path, monkeypatch):
    """Both look what is there, one saves all of its own, then the other goes on."""
    write(tmp_path / "caller.py", plus(1))
    real = IndexDataCacheFile._save_data

    def save(file, name, code):
        with monkeypatch.context() as patch:
            patch.setattr(IndexDataCacheFile, "_save_data", real)
            patch.setattr(IndexDataCacheFile, "_load_index", lambda file: {})
            assert load("caller").plus(0.5) == 1.5
        real(file, name, code)

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", save)
        assert load("caller").plus(1) == 2
    for _ in range(2):
        later = load("caller")
        assert (later.plus(0.5), later.plus(1)) == (1.5, 2)


def test_code_of_an_older_source_is_removed(load, tmp_path):
    for number in range(2):
        write(tmp_path / "caller.py", plus(number))
        caller = load("caller")
        assert (caller.plus(1), caller.plus(0.5)) == (number + 1, number + 0.5)
        assert len(list((tmp_path / "cache").rglob("*plus*.nbc"))) == 2


def test_without_the_compiler_an_error_says_so():
    code, out, err = python("from bertsmith import Tokenizer", NUMBA_DISABLE_JIT="1")
    assert (code, out) == (1, "") and "ValueError: NUMBA_DISABLE_JIT is set: " in err
