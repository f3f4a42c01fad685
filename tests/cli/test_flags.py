"""Flags from dataclasses: groups, markers, help, what a wrong value is told."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bertsmith.base.settings import Advanced, Alias, Metavar, Positional, group_values
from bertsmith.cli.experiments import Quickstart
from bertsmith.cli.flags import as_flags, flags_in_errors, help_text, read_command
from bertsmith.cli.main import COMMANDS, ERRORS, class_name, main
from bertsmith.cli.train import Pretrain

TWO_SCREENS = 2 * 50  # lines


@dataclass(frozen=True)
class Speed:
    """How fast."""

    title = "how fast"

    rate: Annotated[float | None, Alias("--lr")] = None
    """Steps a second. Default: as fast as it goes."""
    warmup: Annotated[int, Advanced] = 3
    """Slow steps."""


@dataclass(frozen=True, kw_only=True)
class Grind(Speed):
    """Grind a text.

    Examples:
      bertsmith grind a.txt --out o

    A paragraph
    of two lines.
    """

    common = ("keep",)

    inputs: Annotated[list[Path], Positional, Metavar("FILE...")]
    """What to grind."""
    out: Path
    """Where to."""
    keep: tuple[int, ...] = ()
    """Sizes to keep."""
    fine: bool = True
    """Grind twice."""
    kind: Literal["flour", "meal"] = "flour"
    """The result."""
    given: tuple[str, ...] = ()

    @classmethod
    def not_read(cls, words):
        return {"kind"} if "plain" in words else set()


WORDS = ["a.txt", "b.txt", "--out", "o"]


def test_values_aliases_and_what_was_given():
    found = read_command(Grind, "grind", [*WORDS, "--lr", "2", "--keep", "1", "2", "--no-fine"])
    assert found == Grind(
        inputs=[Path("a.txt"), Path("b.txt")],
        out=Path("o"),
        rate=2.0,
        keep=(1, 2),
        fine=False,
        given=("out", "rate", "keep", "fine"),
    )
    assert group_values(found, Speed) == Speed(rate=2.0)


def test_the_last_of_two_counts_and_words_with_a_dash_may_be_values():
    words = ["--out=a=", "--keep=1", "-Wow, fine", "--keep", "2", "-3", "--", "--kind", "-x"]
    found = read_command(Grind, "grind", words)
    assert found == Grind(
        inputs=[Path("-Wow, fine"), Path("--kind"), Path("-x")],
        out=Path("a="),
        keep=(2, -3),
        given=("out", "keep", "keep"),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep"], "--keep has no value: give a whole number, or several"),
        (["--kind="], "an argument is empty: is a variable of the shell unset?"),
        (["--no-fine=1"], "--no-fine is a switch: leave '=1' out"),
        (["--keep", "1", "x"], "--keep: must be a whole number, or several"),
        (["--lr", "fast"], "--rate fast: must be a number"),
        (["--kind=bran"], "--kind bran: must be flour or meal"),
        (["--keeps", "2"], "unknown flag '--keeps': did you mean '--keep'?"),
        (["--kind"], "--kind has no value: give flour or meal"),
    ],
)
def test_a_wrong_value_is_told_what_is_wanted(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_command(Grind, "grind", [*WORDS, *words])


def test_the_help_has_blocks(capsys):
    assert read_command(Grind, "grind", ["a.txt", "--help"]) is None
    assert capsys.readouterr().out.split("\n\n") == [
        "usage: bertsmith grind FILE... --out PATH [flags]",
        "Grind a text.",
        "Examples:\n  bertsmith grind a.txt --out o",
        "A paragraph of two lines.",
        "  FILE...                 What to grind.\n  --out PATH              Where to.",
        "most used:\n  --keep N...             Sizes to keep.",
        "more:\n  --no-fine               Switch off: Grind twice.\n"
        "  --kind flour|meal       The result. (default: flour)\n"
        "  --given GIVEN...",
        "how fast:\n  --rate NUMBER, --lr     Steps a second. Default: as fast as it goes.",
        "--help-all shows 1 more.\n",
    ]
    everything = help_text(Grind, "grind", everything=True)
    assert "--warmup N              Slow steps. (default: 3)" in everything
    assert "--kind" not in help_text(Grind, "grind", ["plain"])


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_help_of_a_command_fits_two_screens(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    module = importlib.import_module(f"bertsmith.cli.{COMMANDS[name][0]}")
    text = help_text(getattr(module, class_name(name)), name)
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100 and (columns == "80" or len(lines) <= TWO_SCREENS)
    assert not re.search(r"\bSTR\b|\bINT\b|None|default: \)", text)


def test_the_help_of_finetune_shows_what_its_task_reads(capsys):
    shown = {}
    for task in ("sst2", "classify", "ner", "squad2"):
        assert main(["finetune", task, "--help-all"]) == 0
        everything = capsys.readouterr().out
        assert main(["finetune", task, "--help"]) == 0
        shown[task] = capsys.readouterr().out
        assert len(shown[task]) < len(everything)
    flags = {task: set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for task, text in shown.items()}
    assert "--label" in flags["classify"] - flags["sst2"]
    assert "--freeze-encoder" in flags["ner"] - flags["sst2"]
    assert "--long-texts" in flags["sst2"] - flags["squad2"]
    assert main(["finetune", "sst3", "--help"]) == 2
    assert main(["finetune", "sst3"]) == 2
    assert capsys.readouterr().err.count("unknown task 'sst3': did you mean 'sst2'?") == 2


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`rate`: lower `warmup`", "--rate: lower --warmup"),
        ("`rate=1e-05`: no", "--rate 1e-05: no"),
        ("`kind='bran'`: use `kind=\"meal\"`", "--kind bran: use --kind meal"),
        (
            "name another `out`, not `out='my `runs\\'s'`",
            "name another --out, not --out my `runs's",
        ),
        ("`keep=[1, 2]` or `keep=(1, 2)`", "--keep 1 2 or --keep 1 2"),
        ("`fine`, `fine=False`", "--no-fine, --no-fine"),
        ("`fine=True` and `kind=` stay", "`fine=True` and `kind=` stay"),
        ("`bertsmith corpus ... --out o`, `rates`", "`bertsmith corpus ... --out o`, `rates`"),
        ("`inputs` is no flag", "`inputs` is no flag"),
        ("runs/rate=2, a lone ` and `rate`", "runs/rate=2, a lone ` and --rate"),
    ],
)
def test_settings_become_flags(message, expected):
    assert as_flags(message, Grind) == expected


def test_an_argument_of_another_name_becomes_a_flag():
    message = "`recipe='fats'`: no such recipe; `resume=True`; leave `shard=False`"
    assert as_flags(message, Pretrain) == (
        "--config fats: no such recipe; --resume; leave `shard=False`"
    )


NAMED = [kind for kind in ERRORS if kind is not ModuleNotFoundError]  # it becomes a command of pip


@pytest.mark.parametrize("kind", [*NAMED, ConnectionError, TimeoutError])
def test_errors_of_every_type_name_flags(kind):
    with pytest.raises(kind) as caught, flags_in_errors(Grind, *ERRORS):
        raise kind("lower `rate`")
    assert str(caught.value) == "lower --rate"


def test_an_error_of_the_system_stays():
    with pytest.raises(OSError) as caught, flags_in_errors(Grind, *ERRORS):
        raise OSError(28, "No space left on device", "`out`")
    assert (caught.value.errno, caught.value.filename) == (28, "`out`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fill x modal m --model m", "unexpected argument 'modal, m': did you mean '--model'?"),
        ("predict r a.csv b.csv --out o", "argument 'b.csv': this command takes RUN INPUT"),
        ("doctor extra", "unexpected argument 'extra': this command takes flags alone"),
        ("compare a", "missing argument: RUN RUN"),
        ("convert a --out b", "unknown flag '--out': did you mean '--to'?"),
        ("predict --model r a.csv --out o", "unknown flag '--model': write RUN without a flag"),
        ("serve --model r", "unknown flag '--model': write [NAME=]MODEL... without a flag"),
        ("search --query x --vectors v", "unknown flag '--query': write QUERY without a flag"),
        ("corpus a --vocab v --out s --held-out 10", "corpus: --held-out 10.0: must be in [0, 1)"),
        ("vocab report a --vocab v --limit-mb 0", "--limit-mb 0.0: must be above 0, and finite"),
        ("vocab extend a --model m --out o --add -1", "--add -1: must be at least 0"),
    ],
)
def test_what_the_parser_and_the_bounds_refuse_is_one_plain_line(words, message, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_size_of_a_vocabulary_has_the_flag_of_its_command():
    assert as_flags("use `size=18` or less", Quickstart) == "use --vocab-size 18 or less"
