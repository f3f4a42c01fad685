"""The `bertsmith` command, as `python -m bertsmith` too."""

import atexit
import contextlib
import io
import os
import sys

from bertsmith.cli.main import main


def run() -> int:
    """Run the command line of this process; its exit code.

    The process ends without taking every object apart, which takes Numba and LLVM 0.3 s. What the
    command wants done at exit is done before.
    """
    code = 1  # of an exception that is not ours, whose traceback Python prints

    def leave() -> None:
        with contextlib.suppress(OSError):  # a full disk, which `main` has told
            print(end="", flush=True)
            print(end="", file=sys.stderr, flush=True)
        os._exit(code)

    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may hold half a character
        sys.stdout.reconfigure(errors="backslashreplace")
    atexit.register(leave)  # first, and so called last
    code = main()
    return code


if __name__ == "__main__":
    sys.exit(run())
