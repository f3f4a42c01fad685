"""Functions compiled by Numba, kept on disk for the next process.

They are next to the source, in the user's cache folder, or where NUMBA_CACHE_DIR says.
"""

from __future__ import annotations

import glob
import hashlib
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit
from numba.core import event
from numba.core.caching import FunctionCache

if config.DISABLE_JIT:  # pyright: ignore
    raise ValueError(
        "NUMBA_DISABLE_JIT is set: functions of bertsmith emit machine code, and do not run as"
        " Python: unset it"
    )

FORMAT = 1  # of the files on disk; another one leaves all that are there unread


def _load_array_functions() -> None:
    """Have Numba load its array functions without SciPy, which would double the time it takes.

    At the first compiled function Numba looks for SciPy's matrix products, which no function here
    needs; others still find them. (A thread that imports `scipy.linalg` at this moment fails.)
    """
    if "scipy.linalg" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["scipy.linalg"] = None  # an import of it fails
    try:
        from numba.np import arraymath
    finally:
        del modules["scipy.linalg"]
    arraymath._HAVE_BLAS = find_spec("scipy") is not None  # pyright: ignore


_load_array_functions()


def compiled(function: Callable, fastmath: Collection[str] = ()) -> Any:
    """Compile a function at its first call; it runs without Python's lock, cached if possible.

    `fastmath` names the liberties that LLVM may take with floating-point arithmetic.
    """
    options = {"nogil": True, "fastmath": set(fastmath)}
    try:
        dispatcher: Any = njit(function, cache=True, **options)
    except RuntimeError:  # Numba found no folder that it may write
        _Notice.kept = False
        return njit(function, **options)
    file = dispatcher._cache._cache_file
    stamp = FORMAT, file._source_stamp, _surroundings(function)
    file._source_stamp = dispatcher.stamp = stamp
    file.save = partial(_save, file)
    save = dispatcher._cache.save_overload

    def save_if_possible(*overload: Any) -> None:
        with suppress(OSError):  # a full disk
            save(*overload)

    dispatcher._cache.save_overload = save_if_possible
    return dispatcher


def _surroundings(function: Callable) -> str:
    """The constants of the function's module, the stamps of compiled functions it imports, and the
    files of other functions of ours, which may be overloads or emit code.

    Numba only notices a change of the function's own file, but those are in its code as well.
    """
    values = {}
    for name, value in function.__globals__.items():
        module = str(getattr(value, "__module__", None))
        if isinstance(value, int | float | np.generic) or hasattr(value, "stamp"):
            values[name] = getattr(value, "stamp", value)
        elif callable(value) and module.startswith("bertsmith.") and module in sys.modules:
            values[name] = source_digest(module)
    # a digest: stamps hold stamps, and their texts would double with every level
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


@cache
def source_digest(module: str) -> str:
    """A digest of a module's file, and of those of ours that it imports from."""
    text = Path(str(sys.modules[module].__file__)).read_text()
    names = re.findall(r"^from (bertsmith\.[\w.]+) import", text, re.MULTILINE)
    sources = [source_digest(name) for name in names if name in sys.modules]
    return hashlib.sha256("".join([text, *sources]).encode()).hexdigest()


def _save(file: Any, key: Any, code: Any) -> None:
    """Keep the code of a signature in a file of its own, and only then name that in the index.

    Numba numbers the files and names one before it is there: of two processes that save at once,
    one could leave its code under the other's signature.
    """
    overloads = file._load_index()
    if not overloads and Path(file._index_path).exists():  # of another source, or another Numba
        base = file._index_name.removesuffix(".nbi")
        for old in Path(file._cache_path).glob(f"{glob.escape(base)}.*.nbc"):
            old.unlink(missing_ok=True)  # if missed after all, it is compiled again
    own = hashlib.sha256(repr((file._version, file._source_stamp, key)).encode()).digest()
    name = file._data_name(int.from_bytes(own[:6], "little"))
    file._save_data(name, code)
    file._save_index({**overloads, key: name})


def _is_first_time(dispatcher: Any) -> bool:
    """True until this source has compiled here for this processor; a file by the code tells."""
    try:
        sources = (path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
        made_of = b"".join(sources) + repr(dispatcher.targetctx.codegen().magic_tuple()).encode()
        folder = Path(FunctionCache(compiled)._impl.locator.get_cache_path())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"compiling-{hashlib.sha256(made_of).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except (OSError, RuntimeError):  # a full disk, no folder: rather twice than never
        pass
    return True


class _Notice(event.Listener):
    """One note on why the first call takes seconds; code from disk causes none."""

    kept = True
    given = False

    def on_start(self, event: event.Event) -> None:
        dispatcher = (event.data or {}).get("dispatcher")
        ours = getattr(dispatcher, "__module__", "").startswith("bertsmith.")
        if not ours or _Notice.given:
            return
        _Notice.given = True
        if self.kept and not _is_first_time(dispatcher):
            return
        when = "once on this machine" if self.kept else "anew, as no cache folder can be written"
        hint = "" if self.kept else " (NUMBA_CACHE_DIR names one)"
        print(f"compiling, {when}{hint}: some seconds", file=sys.stderr)

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _Notice())
