"""The command line: one table of commands, one place where errors become one line.

A command is a settings dataclass of its name (`VocabReport` for vocab-report), whose fields are the
flags and whose docstring, with examples, is the text of `--help`; and a function
`run_vocab_report(settings)`, which imports what is heavy. Commands of a family share a module; only
that of the command asked for is imported.

Exit codes: 0 done, 1 the machine failed (full disk, memory, network) or the work found something
wrong or came to nothing, 2 what the user asked for was refused: flags, values, files, rights,
packages, 75 stopped and saved, to go on with --resume, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import inspect
import io
import itertools
import os
import re
import signal
import sys
import threading
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from bertsmith.base import VERSION
from bertsmith.base.settings import nearest, required

COMMANDS = {  # name -> (module of cli, what it is for)
    "quickstart": (
        "inspect",
        "the whole way on text that is already on this machine, with a report",
    ),
    "vocab": ("vocab", "train a WordPiece vocabulary from text"),
    "vocab-report": ("vocab", "what a vocabulary does to a text, also beside a second one"),
    "vocab-extend": ("vocab", "put domain words into an existing model"),
    "extend-positions": ("models", "let an existing model read longer rows"),
    "corpus-report": (
        "corpus_survey",
        "show what a corpus is: sizes, scripts, repeated documents and lines",
    ),
    "corpus-dedup": (
        "corpus_survey",
        "list the documents that repeat an earlier one, to be left out",
    ),
    "corpus-overlap": ("corpus_survey", "list the documents that hold text of evaluation sets"),
    "corpus": ("corpus", "turn text into a token store for pre-training"),
    "corpus-append": ("corpus", "add new text to a token store, as its next generation"),
    "corpus-verify": ("corpus", "compare every block of a token store with its checksum"),
    "corpus-publish": (
        "corpus",
        "copy a token store to an object storage, from where runs can read it",
    ),
    "pretrain": ("pretrain", "pre-train a BERT on a token store"),
    "fill": ("predict", "fill the [MASK] of a sentence, also several together or with whole words"),
    "finetune": (
        "finetune",
        "train a model for a task: classes, scores, labels, choices, tags, answers",
    ),
    "evaluate": ("predict", "measure a model on labelled data or on held-out text"),
    "predict": ("predict", "answer new data with a fine-tuned model"),
    "compare": ("inspect", "tell whether two fine-tuned models differ by more than luck"),
    "features": (
        "features",
        "write a vector for every word, of any layers, for other models to read",
    ),
    "feature-ner": ("features", "tag words over a frozen model with a BiLSTM: the paper's Table 7"),
    "embed": ("features", "write a vector for every text"),
    "embed-train": ("features", "train a model's vectors of texts on pairs that belong together"),
    "convert": ("models", "write any model as one clean Hugging Face folder, proved equal"),
    "report": ("inspect", "write a self-contained HTML report of runs"),
    "doctor": ("inspect", "check that this machine computes what it should, and how fast"),
}

SHARED = "pretrain"  # the command whose work the processes of torchrun share

# Of a path or place that the user named; every other OSError is a fault of the machine.
REFUSED_PATHS = {
    errno.ENOENT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
}
REFUSED_ERRORS = (
    ValueError,
    ModuleNotFoundError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
)
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports a command that Ctrl-C ended
# Packages of the extras: import name -> what to call it when it is missing, and its extra.
EXTRAS = {
    "matplotlib": ("matplotlib", "train"),
    "optuna": ("Optuna", "train"),
    "ray": ("Ray", "ray"),
    "rensa": ("rensa", "dedup"),
    "scipy": ("scipy", "train"),
    "sklearn": ("scikit-learn", "train"),
    "tensorboard": ("tensorboard", "train"),
}
OTHER_NAMES = {  # what other programs call a flag
    "--paper-adam": "--optimizer paper-adam",
    "--init": "--model",
}
CAUGHT = (
    *(ValueError, ModuleNotFoundError),
    *(OSError, MemoryError, RuntimeError, FloatingPointError, KeyboardInterrupt),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        with one_interrupt(), quiet_threads():
            code = run_command(name, words[1:]) if name else top_level(words)
        sys.stdout.flush()  # here, where a closed pipe is still caught
        return code
    except BrokenPipeError:
        # The reader (`| head`) has enough. Python would complain at exit when it flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CAUGHT as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] not in EXTRAS:
            raise
        if debug:
            traceback.print_exc()
        print(f"bertsmith {name}".rstrip() + f": {one_line(error)}", file=sys.stderr)
        return exit_code(error)


def exit_code(error: BaseException) -> int:
    """
    >>> exit_code(ValueError("--size 0")), exit_code(OSError(28, "No space left on device"))
    (2, 1)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    is_path = isinstance(error, OSError) and error.errno in REFUSED_PATHS
    return 2 if is_path or isinstance(error, REFUSED_ERRORS) else 1


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Let Ctrl-C interrupt once; more of them must not interrupt the cleaning up that follows.

    A process pool whose shutdown is interrupted leaves workers for which the end of this process
    waits for ever.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame and "llvmlite" in frame.f_code.co_filename and hasattr(signal, "setitimer"):
            # Called from compiled code, which would lose the exception: a moment later, then.
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not in_main_thread:
        yield  # started to ignore Ctrl-C, or by a program that answers it
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Print no traceback of a thread that the disk failed.

    TensorBoard writes in a thread of its own; the main thread is told at its next line of the log.
    """
    before = threading.excepthook

    def hook(problem: threading.ExceptHookArgs) -> None:
        if not isinstance(problem.exc_value, OSError):
            before(problem)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def run_command(name: str, words: Sequence[str]) -> int:
    """Import the command's module, read its settings from the words, run it."""
    if name != SHARED and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and only `bertsmith "
            f"{SHARED}` shares its work among them: start `bertsmith {name}` without torchrun"
        )
    module = importlib.import_module(f"bertsmith.cli.{COMMANDS[name][0]}")
    settings = read_settings(module, name, words)
    run = getattr(module, f"run_{name.replace('-', '_')}")
    return 0 if settings is None else run(settings) or 0


def top_level(words: Sequence[str]) -> int:
    """What `bertsmith` does without a command: help, version, or an error with the nearest name."""
    if words and words[0] == "--version":
        print(f"bertsmith {VERSION}")
        return 0
    if words and words[0] not in ("-h", "--help"):
        kind = "flag" if words[0].startswith("-") else "command"
        known = ["--help", "--version", "--debug"] if kind == "flag" else list(COMMANDS)
        raise ValueError(f"unknown {kind} '{words[0]}': {nearest(words[0], known)}")
    width = max(map(len, COMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{line}" for name, (_, line) in COMMANDS.items())
    text = (
        "usage: bertsmith COMMAND ... [--debug]\n\n"
        "BERT whole, in Python: from raw text to a fine-tuned model.\n\n"
        f"commands:\n{rows}\n\n"
        "`bertsmith COMMAND --help` lists the flags of a command, with examples.\n"
        "--version prints the version; --debug adds the traceback to an error."
    )
    print(text, file=sys.stdout if words else sys.stderr)
    return 0 if words else 2


def read_settings(module: ModuleType, name: str, words: Sequence[str]) -> Any:
    """The command's settings dataclass filled from its words; None when `--help` was printed.

    Errors: ValueError in one line for an unknown flag, a missing argument or a value of a wrong
    kind. tyro would draw a box over several lines; its text is captured and taken out of the box.
    """
    import tyro

    kind = getattr(module, settings_name(name))
    given = () if {"-h", "--help"} & set(words) else _check_flags(kind, words)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            settings = tyro.cli(
                kind,
                prog=f"bertsmith {name}",
                description=inspect.cleandoc(kind.__doc__ or ""),
                args=list(words),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        message = unboxed(box.getvalue()).removeprefix(f"Error parsing {kind.__name__}: ")
        raise ValueError(message.replace(f" from bertsmith {name}", "")) from None
    for field in required(kind):
        if getattr(settings, field) == []:
            raise ValueError(f"missing argument: {field.upper()}")
    if hasattr(settings, "given"):  # a command that must tell a default from a flag
        settings = dataclasses.replace(settings, given=given)
    return settings


def settings_name(command: str) -> str:
    """The settings dataclass of a command.

    >>> settings_name("vocab-report")
    'VocabReport'
    """
    return command.title().replace("-", "")


def _check_flags(kind: type, words: Sequence[str]) -> tuple[str, ...]:
    """The fields whose flags are given; unknown flags and missing ones are errors."""
    if "" in words:
        raise ValueError("an argument is empty: is a variable of the shell unset?")
    flags = dict(_flags(kind))
    given = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            flag = word.split("=")[0].replace("_", "-")
            if flag not in flags:
                raise ValueError(f"unknown flag '{word.split('=')[0]}': {_hint(flag, flags)}")
            given.append(flags[flag])
    missing = [
        flag for flag, field in flags.items() if field in required(kind) and field not in given
    ]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    return tuple(given)


def _hint(flag: str, flags: Mapping[str, str]) -> str:
    """What an unknown flag may have meant.

    >>> _hint("--paper-adam", {"--optimizer": "optimizer"})
    "did you mean '--optimizer paper-adam'?"
    """
    other = OTHER_NAMES.get(flag, "")
    return f"did you mean '{other}'?" if other.split(" ")[0] in flags else nearest(flag, flags)


def _flags(kind: type) -> Iterator[tuple[str, str]]:
    """(flag, field) for every field that is not a positional argument."""
    import tyro

    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        markers = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Positional not in markers and tyro.conf.Suppress not in markers:
            switched_off = "no-" if field.default is True else ""
            yield f"--{switched_off}{field.name.replace('_', '-')}", field.name


def unboxed(box: str) -> str:
    """The message of an error that tyro drew as a box: its rows up to the first rule or gap.

    >>> unboxed("╭─ Value error ─╮\\n│ Error parsing │\\n│ --size: 'abc' │\\n╰───────────────╯")
    "Error parsing --size: 'abc'"
    """
    rows = [row.strip("│ ") for row in box.splitlines()]
    start = 1 if rows[1].strip("-") else 2  # a terminal without box characters rules off the title
    message = itertools.takewhile(lambda row: row.strip("─-╰╯"), rows[start:])
    return " ".join(message)


def one_line(error: BaseException) -> str:
    """What went wrong, in one line: culprit first, then the remedy where we know one.

    >>> one_line(FileNotFoundError(2, "No such file or directory", "books.txt"))
    'books.txt: No such file or directory'
    >>> one_line(OSError(28, "No space left on device", "run/model.safetensors"))
    'run/model.safetensors: No space left on device: free some space and run the command again'
    """
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted: {error}" if error.args else "interrupted"
    if isinstance(error, ModuleNotFoundError):
        package, extra = EXTRAS[str(error.name).partition(".")[0]]
        return f"{package} is not installed: pip install 'bertsmith[{extra}]'"
    message = " ".join(str(error).split())
    if isinstance(error, RuntimeError):  # torch puts its C++ stack behind the first line
        message = str(error).strip().partition("\n")[0]
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, str | bytes)
        message = (f"{os.fsdecode(error.filename)}: " if named else "") + error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ": free some space and run the command again"
        if error.errno == errno.EEXIST:
            message += ": name a folder or file that is not there yet"
    if message.startswith("out of memory: "):  # said already, with the settings that help
        return message
    # torch says it in words, which other errors may have from the name of a file or column
    is_of_torch = isinstance(error, RuntimeError) and " allocate " in message
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or is_of_torch or is_of_system:
        message = f"out of memory: use a smaller batch, length or size ({message or 'no detail'})"
    return message or type(error).__name__
