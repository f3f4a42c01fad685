"""Progress lines: figures against hand-made clocks, a bar on a terminal, stdout left alone."""

import re
import sys
from types import SimpleNamespace

import pytest

from bertsmith.base import terminal
from bertsmith.base.terminal import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand: clock.now += seconds."""

    stand_in = SimpleNamespace(now=100.0, monotonic=lambda: stand_in.now)
    monkeypatch.setattr(terminal, "time", stand_in)
    return stand_in


def test_figures_with_a_total(clock):
    work = Progress("reading", total=4e6, unit="MB", scale=1e6)
    clock.now += 5
    work.update(0.5e6)
    clock.now += 5
    work.update(0.5e6, notes=["loss 4.1"])
    assert work.text() == " 25% · 0:30 left · 1 MB · 0.1 MB/s · loss 4.1"
    work.update(done=4e6)
    assert work.text() == "100% · 0:10 · 4 MB · 0.4 MB/s · loss 4.1"


def test_without_a_unit_amount_and_rate_are_left_to_the_notes(clock):
    work = Progress("training", total=60)
    for _ in range(2):
        clock.now += 5
        work.update(10, notes=["loss 4.1", "62,372 tokens/s"])
    assert work.text() == " 33% · 0:20 left · loss 4.1 · 62,372 tokens/s"


def test_time_left_is_not_guessed_from_a_first_update_that_compiled(clock):
    work = Progress("training", total=100, start=10)
    clock.now += 30
    work.update(done=11)
    assert work.text() == " 11% · 0:30"
    clock.now += 1
    work.update(done=12)
    assert work.text() == " 12% · 1:28 left"


def test_a_small_amount_is_in_thousands(clock):
    work = Progress("counting words", unit="M characters", scale=1e6)
    clock.now += 2
    work.update(31_000)
    assert work.text() == "0:02 · 31 k characters · 15.5 k characters/s"


def test_figures_without_a_total(clock):
    work = Progress("reading", unit="documents")
    assert work.text() == "0:00 · 0 documents · 0.0 documents/s"
    clock.now += 2
    work.update(3)
    assert work.text() == "0:02 · 3 documents · 1.5 documents/s"


def test_plain_lines_are_rare_and_on_stderr(clock, capsys):
    with Progress("reading", total=100, unit="tokens") as work:
        for _ in range(100):
            clock.now += 0.3
            work.update(1)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3  # at 10 s, at 20 s and at the end
    assert lines[-1] == "reading: 100% · 0:30 · 100 tokens · 3.3 tokens/s"


def test_an_error_inside_prints_no_closing_line(capsys):
    with pytest.raises(ValueError, match="stop"), Progress("reading"):
        raise ValueError("stop")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("reading", total=2, unit="documents") as work:
        work.update(2)
    out, err = capsys.readouterr()
    assert out == "" and "reading" in err and "2 documents" in err


LINES = {
    "pretrain": ("MLM loss 10.504", "1,062,372 tokens/s", "step 12,000", "12% right"),
    "pretrained, rate 0.0003, and more": ("loss 10.881", "70,419 tokens/s", "step 190", "norm 1.2"),
}


@pytest.mark.parametrize("label", LINES)
@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminals_line_holds_what_matters_once(clock, monkeypatch, capsys, label, columns):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with Progress(label, total=600.0) as work:
        for done in (30.0, 60.0):
            clock.now += 15
            work.update(done=done, notes=LINES[label])
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).splitlines()[-1]
    head, bar, text = re.fullmatch("(.*?) ([━╸╺]+) (.*)", line.rstrip()).groups()
    assert len(line) <= columns and len(bar) >= 8
    assert head[1:].strip(" …") in label and "pretrain" in head  # behind a spinner that turns
    shown = text.split(" · ")
    assert shown == ["4:30 left", *LINES[label][: len(shown) - 1]]
    assert len(shown) >= 3 if columns == 80 else len(shown) >= 4
