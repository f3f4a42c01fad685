"""The command line: one table of commands, one place where errors become one line.

A command is a dataclass of its name (`VocabReport` for `vocab report`), whose fields are the flags
and whose docstring is the text of `--help` (flags.py), and a function `run_vocab_report(command)`,
which imports what is heavy. Only the module of the given command is imported.

Exit codes: 0 done; 1 the machine failed (full disk, memory, network), or the work found something
wrong or came to nothing; 2 the request was refused (flags, values, files, rights, packages);
75 stopped and saved, to be resumed with --resume; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from bertsmith.base import VERSION

BLOCKS = {  # of --help: command -> (module of cli, what it is for)
    "start": {
        "quickstart": ("experiments", "the whole way on text that is already here, with a report"),
        "doctor": ("inspect", "check that this machine computes what it should, and how fast"),
    },
    "text": {
        "vocab": ("vocab", "train a WordPiece vocabulary from text"),
        "vocab report": ("vocab", "show what a vocabulary does to a text, also beside another"),
        "vocab extend": ("vocab", "put domain words into an existing model"),
        "corpus": ("corpus", "turn text into a token store for pre-training"),
        "corpus append": ("corpus", "add new text to a token store, as its next generation"),
        "corpus verify": ("corpus", "compare every block of a token store with its checksum"),
        "corpus publish": ("corpus", "copy a token store to object storage, for runs to read"),
        "corpus report": ("corpus_survey", "show sizes, scripts, repeated documents and lines"),
        "corpus dedup": ("corpus_survey", "list documents that repeat an earlier one"),
        "corpus contamination": ("corpus_survey", "list documents with text of evaluation sets"),
    },
    "train": {
        "pretrain": ("train", "pre-train a BERT on a token store"),
        "finetune": ("train", "train a model for a task: classes, labels, tags, answers"),
        "embed train": ("features", "train a model's vectors of texts on pairs that match"),
    },
    "use": {
        "fill": ("predict", "fill the [MASK] of a sentence, also several together"),
        "predict": ("predict", "answer new data with a fine-tuned model"),
        "explain": ("inspect", "show the words that an answer hangs on, by three methods"),
        "embed": ("features", "write a vector for every text"),
        "search": ("features", "find the texts nearest to a query, by their vectors"),
        "features": ("features", "write a vector for every word, of any layers"),
        "serve": ("models", "answer over HTTP, with a page to look at what a model does"),
        "convert": ("models", "write any model as one clean folder, proved equal"),
        "export": ("models", "write files for ONNX Runtime or OpenVINO, and compare them"),
        "extend-positions": ("models", "let an existing model read longer rows"),
    },
    "lineage": {
        "lineage word-for-word": ("experiments", "translate by a dictionary: IBM model 1"),
        "lineage rnn": ("experiments", "translate by recurrent networks without attention"),
        "lineage attention": ("experiments", "translate by recurrent networks with attention"),
        "lineage transformer": ("experiments", "translate by a Transformer"),
        "lineage elmo": ("experiments", "pre-train an ELMo, to be fine-tuned like a BERT"),
        "lineage translate": ("experiments", "translate a file with one of these"),
        "lineage evaluate": ("experiments", "measure and compare these, with a report"),
    },
    "measure": {
        "evaluate": ("predict", "measure a model on labelled data, held-out text, BLiMP, a probe"),
        "baseline": ("inspect", "measure what a task gives without any network"),
        "compare": ("inspect", "tell whether two fine-tuned models differ by more than luck"),
        "report": ("inspect", "write a self-contained HTML report of runs"),
        "features ner": ("features", "tag words over a frozen model with a BiLSTM: Table 7"),
        "reproduce": ("experiments", "print the paper's tables beside ours, with verdicts"),
    },
}
COMMANDS = {name: command for block in BLOCKS.values() for name, command in block.items()}

SHARED = "pretrain"  # the command whose work the processes of torchrun share

# Errors of a path that the user named; every other OSError is a fault of the machine.
REFUSED_ERRORS = (
    *(ValueError, ModuleNotFoundError),
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
)
REFUSED_NUMBERS = errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports a command that Ctrl-C ended
# Import name of an optional package -> its own name, and the extra that installs it.
EXTRAS = {
    "matplotlib": ("matplotlib", "train"),
    "nncf": ("nncf", "openvino"),
    "h5py": ("h5py", "lineage"),
    "httptools": ("httptools", "serve"),
    "msgspec": ("msgspec", "serve"),
    "mwparserfromhell": ("mwparserfromhell", "wikipedia"),
    "onnx": ("onnx", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("OpenVINO", "openvino"),
    "optuna": ("Optuna", "train"),
    "orjson": ("orjson", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "ray": ("Ray", "ray"),
    "rensa": ("rensa", "dedup"),
    "sacrebleu": ("sacrebleu", "lineage"),
    "scipy": ("scipy", "train"),
    "sklearn": ("scikit-learn", "train"),
    "tensorboard": ("tensorboard", "train"),
    "tokenizers": ("tokenizers", "lineage"),
    "uvicorn": ("uvicorn", "serve"),
}
FAILURES = OSError, MemoryError, RuntimeError, FloatingPointError
ERRORS = *REFUSED_ERRORS, *FAILURES, KeyboardInterrupt  # that become one line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    name = command_name(words)
    try:
        with one_interrupt(), quiet_threads():
            code = run_command(name, words[len(name.split()) :]) if name else top_level(words)
        print(end="", flush=True)  # here, where a closed pipe is still caught
        return code
    except BrokenPipeError:
        # The reader (`| head`) has enough. Python would complain at exit when it flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ERRORS as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] not in EXTRAS:
            raise
        if debug:
            import traceback

            traceback.print_exc()
        from bertsmith.text.readers.files import without_password

        told = without_password(one_line(error))  # of a URL on the command line
        print(f"bertsmith {name}".rstrip() + f": {told}", file=sys.stderr)
        return exit_code(error)


def command_name(words: Sequence[str]) -> str:
    """The longest command that the words begin with; "": none.

    >>> command_name(["vocab", "report", "a.txt"]), command_name(["vocab", "a.txt"])
    ('vocab report', 'vocab')
    """
    tried = (" ".join(words[:count]) for count in (2, 1))
    return next((name for name in tried if name in COMMANDS), "")


def exit_code(error: BaseException) -> int:
    """
    >>> exit_code(ValueError("--size 0")), exit_code(OSError(28, "No space left on device"))
    (2, 1)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    is_path = isinstance(error, OSError) and error.errno in REFUSED_NUMBERS
    return 2 if is_path or isinstance(error, REFUSED_ERRORS) else 1


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Let Ctrl-C interrupt once, and not the clean-up that follows.

    A process pool whose shutdown is interrupted leaves workers for which this process waits for
    ever.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame and "llvmlite" in frame.f_code.co_filename and hasattr(signal, "setitimer"):
            # called from compiled code, which would lose the exception: a moment later, then
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
    """Print no traceback of a thread whose disk failed: TensorBoard's next log line raises it."""
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
    # `bertsmith --help` needs none of these
    from bertsmith.base.processes import keep_freed_memory
    from bertsmith.cli.flags import flags_in_errors, read_command

    if name not in BLOCKS["text"]:  # a model computes: before its libraries start threads
        keep_freed_memory()

    if name != SHARED and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but only `bertsmith {SHARED}` "
            f"shares its work among them: start `bertsmith {name}` without torchrun"
        )
    module = importlib.import_module(f"bertsmith.cli.{COMMANDS[name][0]}")
    kind = getattr(module, class_name(name))
    with flags_in_errors(kind, *ERRORS):
        command = read_command(kind, name, words)
        return 0 if command is None else getattr(module, function_name(name))(command) or 0


def reference() -> str:
    """The page docs/reference/cli.md: the whole help of every command."""
    from bertsmith.cli.flags import help_text

    parts = ["# Commands", "Made by `make docs` from what `bertsmith COMMAND --help-all` prints."]
    for name, (module, _) in COMMANDS.items():
        command = getattr(importlib.import_module(f"bertsmith.cli.{module}"), class_name(name))
        text = help_text(command, name, everything=True, width=100)
        parts.append(f"## bertsmith {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def class_name(command: str) -> str:
    """
    >>> class_name("vocab report"), class_name("extend-positions")
    ('VocabReport', 'ExtendPositions')
    """
    return re.sub(r"\W", "", command.title())


def function_name(command: str) -> str:
    """
    >>> function_name("vocab report")
    'run_vocab_report'
    """
    return "run_" + re.sub(r"\W", "_", command)


def top_level(words: Sequence[str]) -> int:
    """Print help or version, or raise an error with the nearest name: there is no command.

    The first word of several commands, such as lineage, alone or with --help, lists these.
    """
    if words and words[0] == "--version":
        print(f"bertsmith {VERSION}")
        return 0
    named = [word for word in words if word not in ("-h", "--help")]
    family = [name for name in COMMANDS if named and name.startswith(f"{named[0]} ")]
    if len(named) > bool(family):
        kind = "flag" if named[0].startswith("-") else "command"
        known = ["--help", "--version", "--debug"] if kind == "flag" else list(COMMANDS)
        given = " ".join(named[: 1 + bool(family)])
        from bertsmith.base.settings import nearest

        raise ValueError(f"unknown {kind} '{given}': {nearest(given, known)}")
    width = max(map(len, COMMANDS)) + 2
    lines = [f"usage: bertsmith {named[0] if family else 'COMMAND'} ... [--debug]\n"]
    if not family:
        lines.append("BERT whole, in Python: from raw text to a fine-tuned model.\n")
    for title, block in BLOCKS.items():
        shown = [name for name in block if not family or name in family]
        if shown:
            lines += [f"{title}:", *(f"  {name:<{width}}{block[name][1]}" for name in shown), ""]
    lines.append("`bertsmith COMMAND --help` shows the flags of a command, with examples.")
    if not family:
        lines.append("--version prints the version; --debug adds the traceback to an error.")
    is_asked = len(named) < len(words)
    print("\n".join(lines), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


def one_line(error: BaseException) -> str:
    """The error in one line: culprit first, then the hint where we know one.

    >>> one_line(FileNotFoundError(2, "No such file or directory", "books.txt"))
    'books.txt: No such file or directory'
    >>> one_line(OSError(28, "No space left on device", "run/model.safetensors"))
    'run/model.safetensors: No space left on device: free some space and run the command again'
    """
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted: {error}" if error.args else "interrupted"
    if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
        package, extra = EXTRAS[str(error.name).partition(".")[0]]
        return f"{package} is not installed: pip install 'bertsmith[{extra}]'"
    message = " ".join(str(error).split())
    if isinstance(error, RuntimeError):  # torch puts its C++ stack after the first line
        message = str(error).strip().partition("\n")[0]
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, str | bytes)
        message = (f"{os.fsdecode(error.filename)}: " if named else "") + error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ": free some space and run the command again"
        if error.errno == errno.EEXIST:
            message += ": name a folder or file that is not there yet"
    if message.startswith("out of memory: "):  # it names the settings that help
        return message
    # torch says it in words, which other errors may have from the name of a file or column
    is_of_torch = isinstance(error, RuntimeError) and " allocate " in message
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or is_of_torch or is_of_system:
        message = f"out of memory: use a smaller batch, length or size ({message or 'no detail'})"
    return message or type(error).__name__
