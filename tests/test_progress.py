"""Progress lines: figures against hand-made clocks, a bar on a terminal, stdout left alone."""

import sys

import pytest

from bertsmith import progress
from bertsmith.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand: clock.now += seconds."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    stand_in = Clock()
    monkeypatch.setattr(progress, "time", stand_in)
    return stand_in


def test_figures_with_a_total(clock):
    work = Progress("reading", total=4e6, unit="MB", scale=1e6)
    clock.now += 10
    work.update(1e6, note="loss 4.1")
    assert work.text() == " 25% · 1 MB · 0.1 MB/s · 0:30 left · loss 4.1"
    work.update(done=4e6)
    assert work.text() == "100% · 4 MB · 0.4 MB/s · 0:10 · loss 4.1"


def test_figures_without_a_total(clock):
    work = Progress("reading", unit="documents")
    assert work.text() == "0 documents · 0.0 documents/s · 0:00"
    clock.now += 2
    work.update(3)
    assert work.text() == "3 documents · 1.5 documents/s · 0:02"


def test_plain_lines_are_rare_and_on_stderr(clock, capsys):
    with Progress("reading", total=100, unit="tokens") as work:
        for _ in range(100):
            clock.now += 0.3
            work.update(1)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3  # at 10 s, at 20 s and at the end
    assert lines[-1] == "reading: 100% · 100 tokens · 3.3 tokens/s · 0:30"


def test_an_error_inside_prints_no_closing_line(capsys):
    with pytest.raises(ValueError, match="stop"), Progress("reading"):
        raise ValueError("stop")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("reading", total=2, unit="documents") as work:
        work.update(2)
    out, err = capsys.readouterr()
    assert out == "" and "reading" in err and "100%" in err
