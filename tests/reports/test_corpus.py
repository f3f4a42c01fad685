import re
from xml.etree import ElementTree

import pytest

from bertsmith.reports.corpus import check_plot_path, write_plot


def side(name, *, pieces=1.5, documents=((128, 180, 3), (724, 1023, 1))):
    rows = [(1, 1, 9990), (2, 12, 10), (13, None, 4)]  # the last too rare to be drawn
    lengths = [{"from": a, "to": b, "words": n, "pieces_per_word": pieces} for a, b, n in rows]
    figures = {"name": name, "size": 8000, "pieces_per_word": pieces, "word_coverage": 0.9875}
    figures["by_word_length"] = lengths
    for unit, bars in (("lines", ((4, 5, 1), (16, 22, 3))), ("documents", documents)):
        histogram = [{"from": a, "to": b, "count": n} for a, b, n in bars]
        figures[unit] = {"count": sum(bar[2] for bar in bars), "histogram": histogram}
        figures[unit] |= {"over_128": 0.25, "over_512": 0.125}
    return figures


def words_of_picture(path):
    ElementTree.parse(path)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_two_vocabularies_side_by_side(tmp_path):
    long = "x" * 60 + "/the-end <&> $a_b$"
    figures = {"vocabularies": [side("mine"), side(long, pieces=1.25)]}
    write_plot(figures, tmp_path / "new" / "a.svg")
    words = words_of_picture(tmp_path / "new" / "a.svg")
    assert "mine: 8,000 pieces, 1.50 a word, 1.25% of the words unknown" in words
    [other] = [line for line in words if line.startswith("…x")]
    figures = "8,000 pieces, 1.25 a word, 1.25% of the words unknown"
    assert other.endswith(f"/the-end &lt;&amp;&gt; $a_b$: {figures}")
    assert words.count("25.0% over 128, 12.5% over 512") == 4
    assert {"pieces per word", "lines", "documents", "1", "2-12"} <= set(words)
    assert "13+" not in words
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.svg"]


def test_one_line_documents_are_drawn_once(tmp_path):
    only = side("mine")
    only["documents"] = only["lines"]
    write_plot({"vocabularies": [only]}, tmp_path / "a.svg")
    assert "lines" not in words_of_picture(tmp_path / "a.svg")


def test_a_text_without_words_gives_an_empty_picture(tmp_path):
    empty = side("mine", documents=((2, 2, 4),))
    for row in empty["by_word_length"]:
        row.update(words=0, pieces_per_word=0.0)
    write_plot({"vocabularies": [empty]}, tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.pdf: a plot is a \.png or an \.svg file"):
        check_plot_path(tmp_path / "a.pdf")
    check_plot_path(tmp_path / "a.SVG")
