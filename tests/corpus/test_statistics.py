"""The figures of a corpus report and its page, counted by hand."""

import sys
from html.parser import HTMLParser

import pytest

from bertsmith.corpus.statistics import corpus_statistics
from bertsmith.reports.corpus import corpus_page

from ..tiny import write

CAT = "the cat sat on the mat and looked at the dog that slept beside the red door today"


@pytest.fixture
def texts(tmp_path):
    twice = f"{CAT}\nThe End"
    documents = [twice, "한국 кот", twice, f"{CAT} again\n<b>The</b> End", "The End"]
    return [write(tmp_path / "a.txt", "\n\n".join(documents))]


def test_figures_are_those_counted_by_hand(texts):
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    found = corpus_statistics(texts)
    assert (found["files"], found["documents"], found["lines"]) == (1, 5, 8)
    assert found["characters"] == 3 * len(CAT) + len(" again") + 3 * 7 + len("<b>The</b> End") + 6
    assert found["bytes_stored"] == texts[0].stat().st_size
    lengths = found["document_characters"]
    assert (lengths["shortest"], lengths["median"]) == (6, len(CAT) + 7)
    assert sum(one["documents"] for one in lengths["histogram"]) == 5
    assert [one["script"] for one in found["scripts"]] == ["Latin", "Cyrillic", "Hangul"]
    assert sum(one["share"] for one in found["scripts"]) == pytest.approx(1)
    assert found["duplicate_lines"]["most_frequent"][0] == {"line": "The End", "count": 3}
    repeated = found["duplicate_documents"]
    assert repeated["exact"]["documents"] == 1
    assert repeated["exact"]["bytes"] == len(CAT) + 8  # the line break counts
    assert [one["document"] for one in repeated["near"]["examples"]] == [3]


def test_without_rensa_equal_documents_are_counted(texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    found = corpus_statistics(texts, near=False)["duplicate_documents"]
    assert found["similarity"] is None
    assert (found["exact"]["documents"], found["near"]["documents"]) == (1, 0)
    with pytest.raises(ModuleNotFoundError):
        corpus_statistics(texts)


def test_a_limit_ends_the_reading(tmp_path):
    long = "\n\n".join(f"text number {k} é " + "x" * 100_000 for k in range(30))
    file = write(tmp_path / "a.txt", long)
    for limit, count in ((1, 11), (2e6, 22)):  # whole batches: the first to reach 1 Mi characters
        assert corpus_statistics([file], near=False, limit=limit)["documents"] == count


def test_an_empty_corpus_has_figures_of_nothing(tmp_path):
    found = corpus_statistics([write(tmp_path / "a.txt", "\n\n")], near=False)
    assert found["documents"] == 0 and found["document_characters"]["longest"] == 0
    assert found["scripts"] == []


def test_the_page_is_whole_and_escaped(texts):
    class Checker(HTMLParser):
        open = []

        def handle_starttag(self, tag, _):
            if tag not in ("meta", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    page = corpus_page(corpus_statistics(texts, near=False), ["a<b>.txt", "b", "c", "d"])
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert "a&lt;b&gt;.txt, b, c …" in page and "The End" in page and "Cyrillic" in page
    assert "near duplicates" not in page
    names = ["caf\udce9.txt", "sftp://me:secret@host/b"]
    page = corpus_page(corpus_statistics(texts, near=False), names)
    assert "caf?.txt" in page and "sftp://me:***@host/b" in page
