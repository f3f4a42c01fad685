"""Articles of a dump in the real format, with the traps of its markup; passages written by hand."""

import bz2
import gzip
import sys
from itertools import count
from xml.sax.saxutils import escape

import pytest
from mwparserfromhell import parser

from bertsmith.text.readers import wikipedia
from bertsmith.text.readers.documents import read_documents
from bertsmith.text.readers.wikipedia import passages

from ...tiny import bertsmith, cli, refused, write

HEAD = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" \
xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" \
xsi:schemaLocation="http://www.mediawiki.org/xml/export-0.11/ \
http://www.mediawiki.org/xml/export-0.11.xsd" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <generator>MediaWiki 1.45.0-wmf.20</generator>
    <case>first-letter</case>
    <namespaces>
      <namespace key="-2" case="first-letter">Medium</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="4" case="first-letter">Wikipedia</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""  # 14 lines
TAIL = "</mediawiki>\n"
ROME = """\
{{Short description|Capital of Italy}}
:''For other uses, see [[Rome (disambiguation)]].''
{{Infobox settlement
| name   = Rome {{nowrap|{{small|a=[[b]]}}}}
| motto  = ''Senatus''
}}
[[Datei:Rome.jpg|thumb|A caption with a [[link]], a note<ref>x</ref> and '''bold'''.]]
'''Rome''' ({{lang-it|Roma}}; {{IPA|x}}) is the ''capital'' of [[Italy]]<ref name="a">{{cite web
|url=http://example.org |title=[[Rome]]}}</ref><ref name="a" /> and l''''amour''' of
[[Europe|the continent]].<!-- a comment
over two lines --> It has {{convert|5|km}} 5&nbsp;km&sup2; &#8212; AT&amp;T &lt;b&gt;.

See [http://rome.example the site], not [http://rome.example]. A ''[[title]]''{{sfn|x}}''.''

== History ==
{| class="wikitable"
! a !! b
|-
| c || {{d}}
{| nested
| e
|}
|}
After the table<br />with H<sub>2</sub>O, <nowiki>''not'' [[a link]]</nowiki>,
<small>small</small> text and <math>x^2</math>. __NOTOC__

__NOTOC__'''Python''' has __init__, snake__case__x and A__B__C. __TOC__So. __ОГЛАВЛЕНИЕ__
* item one
** [[nested]] item
# number
; term : definition
Next to [[:Kategorie:Rome]], [[:fr:Rome|Rome in French]], [[wikt:word|a word]] and [[2001: A Film]].
<gallery>
Datei:a.jpg|caption
</gallery>
<ul><li>a list of HTML</li></ul>
<blockquote>A quotation.</blockquote>
<syntaxhighlight lang="python">
print(1)
</syntaxhighlight>
2024
----
{{Unclosed
| a = b
''The end'' is {{{argument}}} here.
[[Kategorie:Rome]] [[File:b.jpg]] [[Image:c.jpg|c]]
[[fr:Rome]]
[[zh-min-nan:Rome]]
"""
EXPECTED = [
    "Rome is the capital of Italy and l'amour of the continent. It has 5 km² — AT&T <b>.",
    "See the site, not. A title.",
    "After the table with H2O, ''not'' [[a link]], small text and.",
    "Python has __init__, snake__case__x and A__B__C. So.",
    "Next to Kategorie:Rome, Rome in French, a word and 2001: A Film.",
    "A quotation.",
    "The end is here.",
]


def page(text, number=0, extra=""):
    """A page as it stands in a dump: 17 lines and those of its text but one."""
    return f"""\
  <page>
    <title>Page</title>
    <ns>{number}</ns>
    <id>12</id>{extra}
    <revision>
      <id>34</id>
      <timestamp>2025-11-01T00:00:00Z</timestamp>
      <contributor>
        <username>Someone</username>
        <id>56</id>
      </contributor>
      <model>wikitext</model>
      <format>text/x-wiki</format>
      <text bytes="{len(text)}" sha1="x" xml:space="preserve">{escape(text)}</text>
      <sha1>x</sha1>
    </revision>
  </page>
"""


DUMP = [
    HEAD,
    page(ROME)
    + page("#REDIRECT [[Rome]]", extra='\n    <redirect title="Rome" />')
    + page("About a user.", number=2)
    + page("{{Only a template}}\n* and a list"),
    page("'''Second''' article.\n\nIts second passage."),
    TAIL,
]
WHOLE = "".join(DUMP).encode()
MULTISTREAM = b"".join(bz2.compress(part.encode()) for part in DUMP)


def found(path, **options):
    return [(d.line, d.lines) for d in read_documents([path], **options)]


@pytest.mark.parametrize("compiled", [True, False])
def test_passages_of_an_article(monkeypatch, compiled):
    """Also where mwparserfromhell could not compile its tokenizer."""
    if not compiled:
        monkeypatch.setattr(parser, "CTokenizer", None)
    monkeypatch.setattr(wikipedia, "_tokenizer", wikipedia._tokenizer.__wrapped__)
    assert passages(ROME, wikipedia.HIDDEN | {"datei", "kategorie"}) == EXPECTED


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("", []),
        ("''one\n\ntwo'' '''''three''''' ''''''four'''''", ["one", "two three 'four"]),
        ("A ({{x}}) b ( ; {{y}}, c) print() {{z}}, e.", ["A b (c) print(), e."]),
        ("A line\nand the next.\n\n\nAnother.", ["A line and the next.", "Another."]),
        ("<div>\n* item\nText\n</div>more", ["Text", "more"]),
        ("Unclosed <ref>note\n\n[[link and {{x}}", ["Unclosed <ref>note", "[[link and"]),
        ("http://example.org is bare.", ["http://example.org is bare."]),
        ("[[image: a.jpg|x]][[ Category :X]]&#x41;&#66;", ["AB"]),
        ("東京は[[日本]]の'''首都'''である。", ["東京は日本の首都である。"]),
    ],
)
def test_markup(markup, expected):
    assert passages(markup) == expected


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("dewiki-20251101-pages-articles-multistream.xml.bz2", MULTISTREAM),
        ("dewiki-20251101-pages-articles1.xml-p1p297012.bz2", bz2.compress(WHOLE)),
        ("a.xml", WHOLE),
        ("a.XML.gz", gzip.compress(WHOLE, mtime=0)),
    ],
    ids=["multistream", "part", "plain", "gz"],
)
def test_an_article_is_a_document(tmp_path, monkeypatch, name, data):
    """Documents are named by the line of their page; no other page is one."""
    last = WHOLE[: WHOLE.index(b"'''Second'''")].count(b"\n") + 1 - 13
    expected = [(15, EXPECTED), (last, ["Second article.", "Its second passage."])]
    write(tmp_path / name, data)
    assert found(tmp_path) == expected
    monkeypatch.setattr(wikipedia, "GROUP", 1)
    assert found(tmp_path / name, workers=2) == expected


def test_the_last_revision_counts(tmp_path):
    old, new = page("Old text."), page("New text.")
    both = old.replace("  </page>\n", "") + new[new.index("    <revision>") :]
    assert found(write(tmp_path / "a.xml", HEAD + both + TAIL)) == [(15, ["New text."])]


def test_a_page_that_the_parser_gives_up_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    calls = count()

    class Failing:
        def tokenize(self, *arguments):
            if next(calls) == 0:
                raise parser.ParserError("a mistake")
            return real.tokenize(*arguments)

    real = wikipedia._tokenizer()
    monkeypatch.setattr(wikipedia, "_tokenizer", Failing)
    path = write(tmp_path / "a.xml", WHOLE)
    assert [lines for _, lines in found(path)] == [["Second article.", "Its second passage."]]
    assert capsys.readouterr().err == f"{path}:15: left out: cannot parse the markup\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cut.xml", WHOLE[:-30], r"cut\.xml:\d+: no whole dump of Wikipedia \(cut in the middle\)"),
        ("cut.xml.bz2", MULTISTREAM[:-9], r"cut\.xml\.bz2: damaged \.bz2 file \(.*\): copy it"),
        ("end.xml.bz2", MULTISTREAM[: MULTISTREAM.rindex(b"BZh9")], r"end\..*\(cut in the middle"),
        ("bad.xml.bz2", b"no archive" * 9, r"bad\.xml\.bz2: damaged \.bz2 file"),
        ("empty.xml", b"", r"empty\.xml:1: no whole dump of Wikipedia \(cut in the middle\)"),
        ("text.xml", b"plain text", r"text\.xml:1: no whole dump of Wikipedia \(syntax error\)"),
        ("broken.xml", WHOLE.replace(b"</ns>", b"", 1), r"broken\.xml:\d+: .*\(mismatched tag\)"),
        ("page.xml", b"<html><p>x</p></html>", r"page\.xml: no dump of Wikipedia: it holds <html>"),
        ("big.xml", HEAD + page("x" * 16_000_001), r"big\.xml:15: line of more than 16,000,000"),
        ("long.xml", HEAD + page("x" * 1_000_001) + TAIL, r"long\.xml:15: line of more than 1,000"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_what_is_no_whole_dump_is_named(tmp_path, name, data, message):
    with pytest.raises(ValueError, match=message):
        found(write(tmp_path / name, data))


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    wikipedia._tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "mwparserfromhell.parser", None)
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    path = write(tmp_path / "a.xml", WHOLE)
    message = refused("vocab", path, "--out", tmp_path / "vocab")
    assert "mwparserfromhell is not installed: pip install 'bertsmith[wikipedia]'" in message


def test_commands_read_a_dump_and_a_cut_one_leaves_a_store_alone(tmp_path):
    """A store is the same from a dump and from its passages as text, with any number of workers."""
    dump = write(tmp_path / "a.xml.bz2", MULTISTREAM)
    second = ["Second article.", "Its second passage."]
    text = write(tmp_path / "a.txt", "\n".join([*EXPECTED, "", *second]))
    vocab = tmp_path / "vocab"
    bertsmith("vocab", dump, "--out", vocab, "--size", 80, "--min-frequency", 1)
    stores = [tmp_path / name for name in ("text", "dump", "both")]
    options = "--vocab", vocab, "--held-out", 0
    bertsmith("corpus", text, *options, "--out", stores[0])
    bertsmith("corpus", dump, *options, "--out", stores[1], "--workers", 2)
    tokens = [next(store.glob("train-*.tokens")).read_bytes() for store in stores[:2]]
    assert tokens[0] == tokens[1] != b""
    cut = write(tmp_path / "cut.xml.bz2", MULTISTREAM[:-9])
    before = {file: file.read_bytes() for file in stores[1].rglob("*") if file.is_file()}
    ran = cli("corpus", "append", cut, "--store", stores[1])
    assert ran.code == 2 and "cut.xml.bz2: damaged .bz2 file" in ran.err
    kept = {file: file.read_bytes() for file in stores[1].rglob("*") if file.is_file()}
    assert kept.items() >= before.items()
    assert bertsmith("corpus", "verify", stores[1])
