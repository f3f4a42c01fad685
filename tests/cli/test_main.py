"""The command line: dispatch, flags, one-line errors, exit codes, nothing heavy for `--help`."""

import dataclasses
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

from bertsmith.base import VERSION
from bertsmith.cli import main as command_line

from ..tiny import bertsmith, cli, python, refused

SOURCE = '''from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bertsmith.base.settings import Positional


@dataclass
class Vocab:
    """Grind a text.

    Examples:
      bertsmith vocab books/ --out v --size 30522
    """

    inputs: Annotated[list[Path], Positional]
    """Text files or folders."""
    out: Path
    """Folder to write."""
    size: int = 30522
    """Number of pieces."""
    cased: bool = False
    """Keep upper and lower case apart."""
    shuffle: bool = True
    """Shuffle."""
    rate: float | None = None
    """Rate."""
    kind: Literal["mini", "tiny"] = "mini"
    """Kind."""
    min_frequency: int = 2
    """Fewest occurrences."""


def run_vocab(settings):
    print(settings)
'''


@pytest.fixture
def command(monkeypatch, tmp_path):
    """A stand-in for `bertsmith vocab`; its `run` can be replaced."""
    name, path = "bertsmith.cli.vocab", tmp_path / "vocab.py"
    path.write_text(SOURCE)
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, module)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def call(command):
    return lambda *words: cli("vocab", *words)


def test_flags_fill_the_settings(call):
    code, out, err = call("a", "b", "--out=v", "--cased", "--min_frequency", "3", "--no-shuffle")
    assert (code, err) == (0, "")
    assert "size=30522, cased=True, shuffle=False, rate=None" in out
    assert "min_frequency=3" in out and "PosixPath('b')" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a --out v --sizee 4", "unknown flag '--sizee': did you mean '--size'?"),
        ("a --sizee=4", "unknown flag '--sizee': did you mean '--size'?"),
        ("a --out v --no-cased", "unknown flag '--no-cased': did you mean '--cased'?"),
        ("a -o v", "unknown flag '-o': did you mean '--out'?"),
        ("a --size 3", "missing --out"),
        ("--out v", "missing argument: INPUTS"),
        ("a --out v --size", "--size has no value: give a whole number"),
        ("a --out v --size abc", "--size abc: must be a whole number"),
        ("a --out v --rate abc", "--rate abc: must be a number"),
        ("a --out v --kind huge", "--kind huge: must be mini or tiny"),
    ],
)
def test_a_wrong_command_line_gets_one_line(call, words, message):
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"bertsmith vocab: {message}"), err
    assert err.count("\n") == 1 and not set(err) & set("│╭─╰")


def test_help_shows_docstring_examples_and_flags(call):
    code, out, _ = call("--help")
    assert code == 0
    assert "bertsmith vocab books/ --out v" in out and "Number of pieces." in out
    assert "--no-cased" not in out and "--no-shuffle" in out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("x.txt:3: a line\nof 10 MB"), 2, "x.txt:3: a line of 10 MB"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.txt"), 2, "x.txt: No such file"),
        (FileNotFoundError("x: no folder here, and the hub is away"), 2, "x: no folder here, and"),
        (FileExistsError("run: exists: use --resume"), 2, "run: exists: use --resume"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "run"), 2, "run: Is a directory"),
        (OSError(errno.ENOSPC, "No space left", "v/x"), 1, "v/x: No space left: free"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "/x: Permission denied"),
        (MemoryError(), 1, "out of memory: use a smaller batch"),
        (RuntimeError("can't allocate 8 bytes"), 1, "out of memory: use a smaller batch"),
        (MemoryError("Unable to allocate 8 TiB"), 1, "out of memory: use a smaller batch"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory: use a smaller"),
        (ValueError("a.csv: no column 'allocate me'"), 2, "a.csv: no column 'allocate me'\n"),
        (PermissionError(errno.EACCES, "no", "allocated.csv"), 2, "allocated.csv: no\n"),
        (RuntimeError("allocated/a: it was 1"), 1, "allocated/a: it was 1\n"),
        (RuntimeError("shape mismatch\nframe #1"), 1, "shape mismatch\n"),
        (FloatingPointError("loss is nan at step 7"), 1, "loss is nan at step 7"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), 2, "/x: Read-only file system"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "x: File name too long"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), 2, "a/b: Not a directory"),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "x: Input/output error"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError(name="sklearn.metrics"), 2, "scikit-learn is not installed: pip"),
    ],
)
def test_errors_of_a_command(command, call, error, code, message):
    def run(settings):
        raise error

    command.run_vocab = run
    returned, out, err = call("a", "--out", "v")
    assert (returned, out) == (code, "")
    assert err.startswith(f"bertsmith vocab: {message}") and err.count("\n") == 1
    returned, out, err = call("--debug", "a", "--out", "v")
    assert returned == code and err.startswith("Traceback")


def test_our_own_mistakes_are_not_hidden(command, call):
    command.run_vocab = lambda settings: [][0]
    with pytest.raises(IndexError):
        call("a", "--out", "v")


def test_the_code_of_a_command_is_returned(command, call):
    command.run_vocab = lambda settings: 1
    assert call("a", "--out", "v")[0] == 1


def test_a_command_for_one_process_refuses_to_be_one_of_several(call, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert call("a.txt", "--out=b")[0] == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, error = call("a.txt", "--out=b")
    assert code == 2 and "start `bertsmith vocab` without torchrun" in error


def test_top_level():
    shown = bertsmith("--help")
    places = (shown.index(line) for _, line in command_line.COMMANDS.values())
    assert len({place - shown.rindex("\n", 0, place) for place in places}) == 1  # one column
    assert all(f"\n  {name}  " in shown for name in command_line.COMMANDS)
    assert (cli().code, cli("--version").code) == (2, 0)
    unknown = cli("vocabb")
    assert unknown.code == 2 and "unknown command 'vocabb': did you mean 'vocab'?" in unknown.err


def test_the_first_word_of_several_commands_lists_them():
    shown = bertsmith("lineage", "--help")
    assert [f"\n  {name}  " in shown for name in command_line.COMMANDS] == [
        name.startswith("lineage ") for name in command_line.COMMANDS
    ]
    alone, unknown = cli("lineage"), cli("lineage", "elmoo", "--help")
    assert (alone.code, alone.err) == (2, shown)
    assert unknown.code == 2 and "'lineage elmoo': did you mean 'lineage elmo'?" in unknown.err


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_has_the_agreed_form(name):
    module = importlib.import_module(f"bertsmith.cli.{command_line.COMMANDS[name][0]}")
    settings = getattr(module, command_line.class_name(name))
    run = getattr(module, command_line.function_name(name))
    assert dataclasses.is_dataclass(settings) and callable(run)
    assert f"bertsmith {name}" in settings.__doc__, "the docstring shows an example"


HELP_OF_ALL = """
import contextlib, io, json, sys
from bertsmith.cli.main import COMMANDS, main
with contextlib.redirect_stdout(io.StringIO()):
    codes = [main(["--help"]), *(main([*name.split(), "--help"]) for name in COMMANDS)]
print(json.dumps([codes, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_help_of_every_command_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, check=True)
    codes, modules = json.loads(done.stdout)
    assert set(codes) == {0}
    heavy = {"torch", "numpy", "numba", "pyarrow", "sklearn", "scipy", "matplotlib", "transformers"}
    assert not heavy & set(modules)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_and_a_closed_pipe():
    command = [sys.executable, "-m", "bertsmith", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left on device: free some space" in done.stderr
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "code", "out"),
    [
        (["--version"], 0, "bertsmith {version}\nat exit\n"),
        (["no-such-command"], 2, "at exit\n"),
        (["--wrong"], 1, "at exit\n"),  # an exception that is not ours
    ],
)
def test_the_process_ends_with_the_code_when_all_is_written(words, code, out):
    program = f"""
import atexit, sys
from bertsmith import __main__ as command
if {words!r} == ["--wrong"]:
    command.main = lambda: 1 / 0
sys.argv = ["bertsmith", *{words!r}]
atexit.register(print, "not reached: the process has left")
try:
    found = command.run()
finally:
    atexit.register(print, "at exit")
sys.exit(found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out.format(version=VERSION))
    assert ("ZeroDivisionError" in done.stderr) == (words == ["--wrong"])


def test_half_a_character_is_printed_as_its_escape():
    program = r"""
import json, sys
from bertsmith import __main__ as command
command.main = lambda: print(json.dumps({"label": "half \ud83d"}, ensure_ascii=False)) or 0
sys.exit(command.run())
"""
    assert python(program) == (0, '{"label": "half \\ud83d"}\n', "")


def test_closed_output_is_no_error():
    command = [sys.executable, "-m", "bertsmith", "--help"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_empty_argument_is_refused():
    assert "an argument is empty" in refused("vocab", "a", "--out", "")


def test_an_interrupt_within_a_callback_of_compiled_code_comes_after_it():
    # There, in llvmlite's files, Python would report the exception and go on.
    program = """
import os, signal, time
from bertsmith.cli.main import one_interrupt
lines = "os.kill(os.getpid(), signal.SIGINT)", "time.sleep(0.001)", "print('whole')"
callback = compile("\\n".join(lines), "llvmlite/x.py", "exec")
try:
    with one_interrupt():
        exec(callback)
        time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "whole\ninterrupted\n", done.stderr


def test_ctrl_c_interrupts_once(monkeypatch, made, tmp_path):
    """A second one must not interrupt the cleaning up."""
    cleaned = []

    def interrupted(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    monkeypatch.setattr("bertsmith.corpus.build.build.build_store", interrupted)
    ran = cli(*made.words("corpus", tmp_path / "out"))
    assert cleaned and (ran.code, ran.err) == (130, "bertsmith corpus: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
