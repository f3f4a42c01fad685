"""The flags of a command: read into its dataclass, explained by `--help`.

A command is a frozen dataclass. Its fields are its flags and their docstrings the help; the
dataclasses it inherits from are groups of flags, each a block of the help. What it may say besides:

    common              names of the flags that most people use; they come first
    not_read(words)     names that this command line does not read, which its help leaves out
    check_first(words)  raises for a word that makes everything behind it pointless
    given               names of the flags on the command line, to tell them from defaults
    arguments           names of the library's arguments that are flags under another name

Markers of a field are in `base/settings.py`: `Advanced` flags are shown by `--help-all` alone.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
import typing
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import bertsmith
from bertsmith.base.settings import (
    Advanced,
    Alias,
    Hidden,
    Metavar,
    Positional,
    check_bounds,
    expected,
    nearest,
    options,
)

OTHER_NAMES = {  # what other programs call a flag
    "--paper-adam": "--optimizer paper-adam",
    "--init": "--model",
}
WIDTH, INDENT = 100, 26  # of a line of help; of the text beside a flag
VALUES = {int: "N", float: "NUMBER", Path: "PATH"}

FLAG = re.compile(r"(--?[A-Za-z][\w-]*)(=.*)?", re.DOTALL)  # with its value
STRINGS = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
SETTING = re.compile(rf"`(\w+)(?:=({STRINGS}|[^`]+))?`")  # as Python writes it

Command = TypeVar("Command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering:
    """Device, precision and engine of a model that answers."""

    title = "machine"

    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    precision: Literal["auto", "float32", "bf16", "int8"] = "auto"
    """bf16 and int8 are less exact; auto: the fastest that some rows show to be off by less than
    3%, else float32."""
    engine: Literal["auto", "bertsmith", "pytorch", "onnx", "openvino"] = "auto"
    """bertsmith is our own, on a CPU; onnx and openvino run what `bertsmith export` wrote into the
    model's folder; auto: the first that can, where the precision is auto the fastest."""

    def load(self, model: str) -> bertsmith.Predictor:
        """Open a model so."""
        return bertsmith.load(
            model, device=self.device, precision=self.precision, engine=self.engine
        )

    @property
    def machine(self) -> tuple[str, str, str]:
        """Device, precision and engine, which decide the numbers besides model and input."""
        return self.device, self.precision, self.engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkAnswering(Answering):
    """Answering files of any size."""

    title = "machine"

    backend: Literal["local", "ray"] = "local"
    """Who computes: this process, or all cores (with a GPU here: all GPUs) of the Ray cluster of
    RAY_ADDRESS, without one Ray on this machine. The answers are the same. Every machine must reach
    the folder of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The text that a command reads."""

    inputs: typing.Annotated[list[str], Positional, Metavar("INPUT...")]
    """Files (.txt, .jsonl, .csv, .tsv, .xml of Wikipedia, also with .gz, .bz2, .xz or .zst;
    .parquet), folders, or URLs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput:
    """Reading text from files."""

    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a command."""

    field: str
    flag: str
    """As it is written, "--min-frequency"; of a positional argument its name in capitals."""
    aliases: tuple[str, ...]
    hint: Any  # the type without markers
    value: str  # stands for its value in the help; "" of a switch
    about: str
    group: str  # the title of its block of the help
    default: Any
    is_positional: bool
    is_advanced: bool

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def several(self) -> Any:
        """The type of a list or tuple that takes any number of values, else None."""
        return next((o for o in options(self.hint) if typing.get_origin(o) in (list, tuple)), None)

    @property
    def usage(self) -> str:
        return self.flag if self.is_positional else f"{self.flag} {self.value}".rstrip()


@functools.cache
def command_flags(command: type) -> tuple[Flag, ...]:
    """All flags of a command, its own first, then those of its groups."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = [base for base in command.__mro__ if dataclasses.is_dataclass(base)]
    about, titles, found = {}, {}, []
    for base in reversed(groups):
        about |= _docstrings(base)
        own = base.__dict__.get("__annotations__", {})
        titles = dict.fromkeys(own, _title(base, command)) | titles
    for field in dataclasses.fields(command):
        markers = getattr(hints[field.name], "__metadata__", ())
        if Hidden in markers:
            continue
        hint = typing.get_args(hints[field.name])[0] if markers else hints[field.name]
        is_positional = Positional in markers
        metavar = next((str(mark) for mark in markers if isinstance(mark, Metavar)), None)
        name = field.name.replace("_", "-")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        flag = f"--no-{name}" if default is True else f"--{name}"
        found.append(
            Flag(
                field.name,
                (metavar or name.upper()) if is_positional else flag,
                tuple(str(mark) for mark in markers if isinstance(mark, Alias)),
                hint,
                "" if isinstance(default, bool) else metavar or _value(field.name, hint),
                about.get(field.name, ""),
                titles[field.name],
                default,
                is_positional,
                Advanced in markers,
            )
        )
    order = list(dict.fromkeys(_title(base, command) for base in groups))
    return tuple(sorted(found, key=lambda flag: order.index(flag.group)))


def read_command(command: type[Command], name: str, words: Sequence[str]) -> Command | None:
    """The command filled from its words; None when its help was printed.

    Errors: ValueError in one line for an unknown flag, a missing argument or a value of a wrong
    kind.
    """
    check_first = getattr(command, "check_first", lambda words: None)
    if asked := {"-h", "--help", "--help-all"} & set(words):
        print(help_text(command, name, words, everything="--help-all" in asked))
        return None
    if any(word == "" or (flag := FLAG.fullmatch(word)) and flag[2] == "=" for word in words):
        raise ValueError("an argument is empty: is a variable of the shell unset?")
    check_first(words)
    words, given = _known_flags(command, words)
    filled = command(**_values(command, words))
    check_bounds(filled)
    if hasattr(filled, "given"):
        filled = dataclasses.replace(filled, given=given)  # type: ignore[type-var]
    return filled


@contextlib.contextmanager
def flags_in_errors(command: type, *errors: type[BaseException]) -> Iterator[None]:
    """Make flags of the settings that errors of these types name, see `as_flags`."""
    try:
        yield
    except errors as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (as_flags(error.args[0], command),)
        raise


def as_flags(message: str, command: type) -> str:
    """The message with flags in place of the command's settings, which stand between backquotes.

    >>> as_flags("`precision='half'`: use `precision='bf16'`; see `nvidia-smi`", Answering)
    '--precision half: use --precision bf16; see `nvidia-smi`'

    `arguments` of the command are names of the library's that are flags under another name.
    """
    flags = {flag.field: flag for flag in command_flags(command) if not flag.is_positional}
    fields = getattr(command, "arguments", {})

    def rewritten(found: re.Match[str]) -> str:
        name, value = found.groups()
        flag = flags.get(fields.get(name, name))
        if flag is None:
            return found[0]
        is_switch = value in ("True", "False")  # whose flag says the other one than its default
        if value is None or (is_switch and value != str(flag.default)):
            return flag.flag
        if is_switch:
            return found[0]
        if value[:1] in tuple("'\"[("):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
        words = [value] if isinstance(value, str) else value
        return " ".join([flag.flag, *map(str, words)])

    return SETTING.sub(rewritten, message)


def _known_flags(command: type, words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words with aliases spelled out, and the fields whose flags are among them.

    Errors: ValueError for an unknown flag, with the nearest one, and for required ones not given.
    """
    flags = {flag.flag: flag for flag in command_flags(command) if not flag.is_positional}
    aliases = {alias: flag.flag for flag in flags.values() for alias in flag.aliases}
    spelled, given = [], []
    for number, word in enumerate(words):
        if word == "--":  # none of what follows is a flag
            spelled += words[number:]
            break
        name, equals, value = word.partition("=")
        if not FLAG.fullmatch(word):
            spelled.append(word)
            continue
        flag = name.replace("_", "-")
        flag = aliases.get(flag, flag)
        if flag not in flags:
            other = OTHER_NAMES.get(flag, "")
            is_ours = other.partition(" ")[0] in flags
            hint = f"did you mean '{other}'?" if is_ours else nearest(flag, flags)
            if alone := _positional(command, flag):
                hint = f"write {alone} without a flag"
            raise ValueError(f"unknown flag '{name}': {hint}")
        given.append(flags[flag].field)
        spelled.append(f"{flag}{equals}{value}")
    missing = [f.flag for f in flags.values() if f.is_required and f.field not in given]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    return spelled, tuple(given)


def _positional(command: type, flag: str) -> str | None:
    """The positional argument that a flag of its name stands for: of a RUN also --model."""
    name = flag.removeprefix("--").removesuffix("s")
    for own in command_flags(command):
        is_named = own.field.removesuffix("s") == name or (name == "model" and "RUN" in own.flag)
        if own.is_positional and is_named:
            return own.flag
    return None


def _values(command: type, words: Sequence[str]) -> dict[str, Any]:
    """The values of the fields that the words give; of a flag that is given twice the last one.

    Errors: ValueError for one that does not fit its field, is missing, or belongs to none.
    """
    flags = {flag.flag: flag for flag in command_flags(command) if not flag.is_positional}
    positional = [flag for flag in command_flags(command) if flag.is_positional]
    found, loose, left = {}, [], deque(words)
    while left:
        name, equals, value = (word := left.popleft()).partition("=")
        if word == "--":
            loose += left
            break
        if (flag := flags.get(name)) is None:
            loose.append(word)
        elif isinstance(flag.default, bool):
            if equals:
                raise ValueError(f"{name} is a switch: leave '={value}' out")
            found[flag.field] = not flag.default
        else:
            own = [value] if equals else []
            most = len(left) if flag.several and not equals else 1
            while left and len(own) < most and left[0].partition("=")[0] not in {*flags, "--"}:
                own.append(left.popleft())
            found[flag.field] = _value_of(flag, own)
    for number, flag in enumerate(positional):
        count = len(loose) - len(positional) + number + 1 if flag.several else 1
        own, loose = loose[: max(count, 0)], loose[max(count, 0) :]
        if own:
            found[flag.field] = _value_of(flag, own)
    if loose:
        hint = nearest(unexpected := ", ".join(loose), flags)
        taken = " ".join(flag.flag for flag in positional) or "flags alone"
        hint = hint if hint.startswith("did you mean") else f"this command takes {taken}"
        raise ValueError(f"unexpected argument '{unexpected}': {hint}")
    if any(flag.is_required and flag.field not in found for flag in positional):
        raise ValueError(f"missing argument: {' '.join(flag.flag for flag in positional)}")
    return found


def _value_of(flag: Flag, words: Sequence[str]) -> Any:
    """The value of a field. Errors: ValueError that says what is wanted."""
    may_be_empty = flag.several and flag.default is None  # which is not the same
    if not words and not may_be_empty:
        raise ValueError(f"{flag.flag} has no value: give {expected(flag.hint)}")
    try:
        if flag.several:
            (kind, *_), container = typing.get_args(flag.several), typing.get_origin(flag.several)
            return container(_converted(word, kind) for word in words)
        return _converted(words[0], flag.hint)
    except ValueError:
        shown = "" if flag.several else f" {words[0]}"
        raise ValueError(f"{flag.flag}{shown}: must be {expected(flag.hint)}") from None


def _converted(word: str, hint: Any) -> Any:
    """A word as one of the types, or of the literals' words. Errors: ValueError.

    >>> _converted("3", int | Literal["auto"]), _converted("auto", int | Literal["auto"] | None)
    (3, 'auto')
    """
    for option in options(hint):
        if isinstance(option, str):
            if word == option:
                return word
        else:
            with contextlib.suppress(ValueError):
                return option(word)
    raise ValueError(word)


def help_text(
    command: type, name: str, words: Sequence[str] = (), everything: bool = False, width: int = 0
) -> str:
    """The help of a command: usage, description, then its flags in blocks.

    The flags that most people use come first; advanced ones and those that the words' task does not
    read are left out unless `everything` is asked for. `width` 0: the terminal's, at most 100.
    """
    width = width or max(INDENT + 30, min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))
    hidden = set() if everything else getattr(command, "not_read", lambda words: set())(words)
    common = getattr(command, "common", ())
    flags = [flag for flag in command_flags(command) if flag.field not in hidden]
    shown = [flag for flag in flags if everything or not flag.is_advanced]
    required = [flag for flag in shown if flag.is_required or flag.is_positional]
    required.sort(key=lambda flag: not flag.is_positional)
    most_used = [flag for field in common for flag in shown if flag.field == field]
    rest = [flag for flag in shown if flag not in required and flag not in most_used]
    usage = " ".join(flag.usage for flag in required)
    line = " ".join(filter(None, ("usage: bertsmith", name, usage, "[flags]")))
    first = _wrapped(line, width, "  ")
    parts = [first, *_description(command, width)]
    blocks = [("", required), ("most used", most_used)]
    for title in dict.fromkeys(flag.group for flag in rest):
        blocks.append((title, [flag for flag in rest if flag.group == title]))
    for title, block in blocks:
        if block:
            rows = [_row(flag, width) for flag in block]
            parts.append("\n".join([f"{title}:", *rows] if title else rows))
    if left := len(command_flags(command)) - len(shown):
        parts.append(f"--help-all shows {left} more.")
    return "\n\n".join(parts)


def _description(command: type, width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.__doc__ or "").split("\n\n"):
        is_table = any(line.startswith(" ") for line in paragraph.split("\n"))
        yield paragraph if is_table else _wrapped(" ".join(paragraph.split("\n")), width)


def _row(flag: Flag, width: int) -> str:
    """A flag and its text, from the same column on."""
    about = " ".join(flag.about.split())
    if flag.default is True:
        about = f"Switch off: {about}"
    value = flag.default
    is_nothing = value is None or value in ((), "") or isinstance(value, bool)
    is_said = re.search(r"\bdefault\b", about, re.IGNORECASE)
    is_said = is_said or (value == 0 and re.search(r"\b0: ", about))
    if not (is_nothing or is_said or flag.is_required):
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        about = f"{about} (default: {value})".lstrip()
    name = "  " + ", ".join([flag.usage, *flag.aliases])
    first = name.ljust(INDENT) if len(name) < INDENT - 1 else name + "\n" + " " * INDENT
    return (first + _wrapped(about, width, " " * INDENT, INDENT)).rstrip()


def _wrapped(text: str, width: int, indent: str = "", begun: int = 0) -> str:
    """Lines of at most `width`; of the first `begun` columns are used."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False)
    wrapper.break_long_words = False
    return wrapper.fill(" " * begun + text)[begun:]


def _value(field: str, hint: Any) -> str:
    """
    >>> _value("keep", Literal["best", "last"]), _value("out", Path), _value("model", str)
    ('best|last', 'PATH', 'MODEL')
    >>> _value("threads", int | Literal["auto"] | None), _value("steps", tuple[int, ...])
    ('N|auto', 'N...')
    """
    if typing.get_origin(hint) in (list, tuple):
        return _value(field, typing.get_args(hint)[0]) + "..."
    metavar = field.rpartition("_")[2].upper()
    words = (o if isinstance(o, str) else VALUES.get(o, metavar) for o in options(hint))
    return "|".join(words)


def _title(group: type, command: type) -> str:
    """
    >>> class TextInput: pass
    >>> _title(TextInput, int)
    'text input'
    """
    if group is command:
        return "more"
    name = re.sub(r"(?<!^)(?=[A-Z])", " ", group.__name__.removesuffix("Settings")).lower()
    return getattr(group, "title", name)


@functools.cache
def _docstrings(group: type) -> dict[str, str]:
    """The docstrings of a dataclass' own fields, which Python does not keep: from the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(body.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                found[name] = inspect.cleandoc(doc)
    return found
