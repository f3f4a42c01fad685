"""Articles out of a dump of Wikipedia (pages-articles, pages-articles-multistream), text alone.

    file -> XML -> pages of articles -> groups of pages -> workers: markup -> passages

BERT takes "only the text passages" and leaves lists, tables and headers out (section 3.2). So no
heading, list (nor indented line), table, template, file, category, footnote or formula is kept.
What a template would have written, such as a converted length, the wiki alone knows: it is lost.

The format is that of https://www.mediawiki.org/wiki/Help:Export. Memory holds a few groups of
pages. A dump of all revisions gives the last one of each page.
"""

from __future__ import annotations

import functools
import html
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

from bertsmith.base.processes import map_in_order
from bertsmith.text.readers.files import MAX_ROW, RemoteFile, read_blocks, too_long

GROUP = 1 << 18  # characters of markup given to a worker at a time
KEPT = {"ns", "text", "namespace"}  # elements with contents of use
HIDDEN_KEYS = {"-2", "6", "14"}  # of namespaces whose links show no text: Media, File, Category
HIDDEN = frozenset({"media", "file", "image", "category"})  # their names in every wiki
LANGUAGE = re.compile("[a-z]{2,3}(-[a-z-]+)?|simple")  # in [[fr:Londres]]

INLINE = {
    "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i",
    "ins", "kbd", "mark", "nowiki", "onlyinclude", "q", "s", "samp", "small", "span", "strike",
    "strong", "sub", "sup", "time", "tt", "u", "var",
}  # fmt: skip
BLOCKS = {"blockquote", "center", "div", "noinclude", "p", "poem", "section"}
# Tokens of mwparserfromhell that begin a construct, part its fields, end it.
OPENS = {
    "TemplateOpen", "ArgumentOpen", "WikilinkOpen", "ExternalLinkOpen", "HTMLEntityStart",
    "HeadingStart", "CommentStart", "TagOpenOpen",
}  # fmt: skip
SEPARATES = {
    "TemplateParamSeparator", "TemplateParamEquals", "ArgumentSeparator", "WikilinkSeparator",
    "ExternalLinkSeparator", "TagAttrStart", "TagAttrEquals", "TagCloseOpen", "TagOpenClose",
}  # fmt: skip
CLOSES = {
    "TemplateClose", "ArgumentClose", "WikilinkClose", "ExternalLinkClose", "HTMLEntityEnd",
    "HeadingEnd", "CommentEnd", "TagCloseClose", "TagCloseSelfclose",
}  # fmt: skip
SIGNS = {"HTMLEntityNumeric": "#", "HTMLEntityHex": "x"}

LIST, BREAK = "\0", "\n\n"  # a list item begins; a passage ends (XML cannot hold a NUL)
# A line of a list, and one of a table or template that does not end, which is no markup then.
NO_TEXT = re.compile(r"^(?:.*\0.*|\s*(?:\{\||\{\{|\}\}|\|).*)$", re.MULTILINE)
QUOTES = re.compile("'{2,}")  # italics, bold
SWITCH = re.compile(r"(?<!\w)__[^\W\d_a-z]+__")  # __NOTOC__, but not __init__
# Left in brackets of which a template is gone: "Rome (; )", "(; born 1950)"; but not of "print()".
EMPTY = re.compile(r"(?<!\w)\([\s,;:]*\)")
OPENED = re.compile(r"\(\s*(?:[,;:]\s+)+")
BEFORE_SIGN = re.compile(r"\s+(?=[,.)])")


class Page(NamedTuple):
    """An article in a dump."""

    line: int  # on which the page begins, from 1
    markup: str


class Group(NamedTuple):
    """Pages on their way to a worker."""

    source: str
    hidden: frozenset[str]  # as in `passages`
    pages: list[Page]


def read_articles(path: Path | RemoteFile, workers: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (line of its page, passages, one a line) of each article of a dump, in order.

    Pages of other namespaces and redirects are left out, and with a line on standard error pages
    whose markup cannot be parsed. `workers` processes parse the markup, this one among them.

    Errors: ValueError that names the file for a damaged, cut or broken one and for what is no dump;
    ModuleNotFoundError without mwparserfromhell; those of `map_in_order`.
    """
    groups = ((None, group) for group in _groups(path))
    with closing(map_in_order(_load_parser, (), groups, workers)) as results:
        for _, articles in results:
            yield from articles


def _load_parser() -> Callable[[Group], list[tuple[int, str]]]:
    _tokenizer()  # a package that is not there is named at the start
    return _articles


def _articles(group: Group) -> list[tuple[int, str]]:
    from mwparserfromhell.parser import ParserError

    found = []
    for line, markup in group.pages:
        try:
            found.append((line, "\n".join(passages(markup, group.hidden))))
        except ParserError:  # its own mistake, which must not end a work of hours
            print(f"{group.source}:{line}: left out: cannot parse the markup", file=sys.stderr)
    return found


# --- XML ---


def _groups(path: Path | RemoteFile) -> Iterator[Group]:
    """The articles of a dump in groups of `GROUP` characters."""
    reader, pages, size = _PageReader(path), [], 0
    for page in reader.pages():
        pages.append(page)
        size += len(page.markup)
        if size >= GROUP:
            yield Group(str(path), reader.hidden, pages)
            pages, size = [], 0
    if pages:
        yield Group(str(path), reader.hidden, pages)


class _PageReader:
    """Takes what is of use out of the events of an XML parser."""

    def __init__(self, path: Path | RemoteFile) -> None:
        self.hidden = HIDDEN
        self._path = path
        self._found: list[Page] = []
        self._page: dict[str, str] = {}
        self._parts: list[str] | None = None  # contents of an element in `KEPT`
        self._line = self._size = 0
        self._key = ""
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start_root
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text

    def pages(self) -> Iterator[Page]:
        for block in read_blocks(self._path):
            self._parse(block)
            yield from self._found
            self._found.clear()
        self._parse(b"", is_last=True)

    def _parse(self, block: bytes, is_last: bool = False) -> None:
        try:
            self._parser.Parse(block, is_last)
        except expat.ExpatError as error:
            fault = "cut in the middle" if is_last else expat.ErrorString(error.code)
            where = f"{self._path}:{error.lineno}"
            raise ValueError(
                f"{where}: no whole dump of Wikipedia ({fault}): copy it again"
            ) from error

    def _start_root(self, name: str, attributes: dict[str, str]) -> None:
        if name != "mediawiki":
            fault = f"no dump of Wikipedia: it holds <{name}>, not <mediawiki>"
            raise ValueError(f"{self._path}: {fault}: leave it out, or make it .txt")
        self._parser.StartElementHandler = self._start

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self._page, self._line = {}, self._parser.CurrentLineNumber
        elif name == "redirect":
            self._page[name] = ""
        elif name in KEPT:
            self._parts, self._size = [], 0
            self._key = attributes.get("key", "")

    def _text(self, data: str) -> None:
        if self._parts is not None:
            self._parts.append(data)
            self._size += len(data)
            if self._size > MAX_ROW:
                raise too_long(self._path, self._line, MAX_ROW)

    def _end(self, name: str) -> None:
        if self._parts is not None and name in KEPT:
            self._page[name], self._parts = "".join(self._parts), None
        if name == "namespace" and self._key in HIDDEN_KEYS:
            self.hidden |= {self._page[name].casefold()}
        is_article = self._page.get("ns") == "0" and "redirect" not in self._page
        if name == "page" and is_article and self._page.get("text"):
            self._found.append(Page(self._line, self._page["text"]))


# --- markup ---


def passages(markup: str, hidden: frozenset[str] = HIDDEN) -> list[str]:
    """The paragraphs of running text of an article, without markup; needs mwparserfromhell.

    hidden: names, casefolded, of the namespaces whose links show no text.

    Errors: mwparserfromhell's ParserError, a mistake of its own.

    >>> passages("'''Rome''' ({{IPA|ro}}) is a [[city]].<ref>x</ref>\\n== Sights ==\\n* [[Forum]]")
    ['Rome is a city.']
    """
    text = html.unescape(_shown(_tokenizer().tokenize(markup, 0, True), hidden))
    tidied = map(_tidied, re.split(r"\n\s*\n", NO_TEXT.sub("", text)))
    return [passage for passage in tidied if any(map(str.isalpha, passage))]


@functools.cache
def _tokenizer() -> Any:
    """mwparserfromhell's tokenizer; the tree that it makes of tokens takes six times as long."""
    from mwparserfromhell.parser import CTokenizer
    from mwparserfromhell.parser.tokenizer import Tokenizer

    return (CTokenizer or Tokenizer)()


def _shown(tokens: Iterable[Any], hidden: frozenset[str]) -> str:
    """The text that a reader sees, with `LIST` and `BREAK` in it and entities as they are."""
    fields = [list[str]()]  # of the innermost construct, each in parts: a link's title and text
    outer: list[tuple[Any, list[list[str]]]] = []
    for token in tokens:
        kind = type(token).__name__
        if kind == "Text":
            text = token["text"]
            if fields[0] != ["nowiki"]:
                text = QUOTES.sub(_apostrophes, SWITCH.sub("", text))
            fields[-1].append(text)
        elif kind in OPENS:
            outer.append((token, fields))
            fields = [[]]
        elif kind in SEPARATES:
            fields.append([])
        elif kind in SIGNS:
            fields[-1].append(SIGNS[kind])
        elif kind in CLOSES:
            contents = ["".join(parts) for parts in fields]
            if kind == "TagCloseSelfclose":
                contents += ["", ""]  # as if it were closed
            token, fields = outer.pop()
            fields[-1].append(_construct(token, contents, hidden))
    return "".join(fields[0])


def _construct(token: Any, fields: list[str], hidden: frozenset[str]) -> str:
    """The text shown of what a token opened: nothing of a template, a comment, ..."""
    kind = type(token).__name__
    if kind == "WikilinkOpen":
        prefix, colon, _ = fields[0].partition(":")
        is_language = len(fields) == 1 and LANGUAGE.fullmatch(prefix)
        if colon and (is_language or prefix.strip().casefold() in hidden):
            return ""
        return fields[-1].removeprefix(":")
    if kind == "ExternalLinkOpen":
        return fields[-1] if len(fields) == 2 or not token["brackets"] else ""
    if kind == "HTMLEntityStart":
        return f"&{fields[0]};"
    if kind == "TagOpenOpen":
        return _tag(fields[0].strip().lower(), fields[-2])
    return BREAK if kind == "HeadingStart" else ""


def _tag(name: str, contents: str) -> str:
    if name in ("li", "dt", "dd"):
        return LIST  # in wiki markup its text is beside it, up to the end of the line
    if name == "br":
        return " "
    if name in INLINE:
        return contents
    if name in BLOCKS:
        return f"{BREAK}{contents}{BREAK}"
    return BREAK if name in ("table", "ul", "ol", "dl", "hr") else ""


def _apostrophes(quotes: re.Match[str]) -> str:
    """One of four marks is an apostrophe before bold text; of more than five all but five are."""
    count = len(quotes[0])
    return "'" * (1 if count == 4 else max(0, count - 5))


def _tidied(passage: str) -> str:
    """A passage on one line, without what templates leave in brackets.

    >>> _tidied("Rome ( ; born\\n 753 BC ) ( ) , a  city .")
    'Rome (born 753 BC), a city.'
    """
    passage = OPENED.sub("(", EMPTY.sub("", passage))
    return " ".join(BEFORE_SIGN.sub("", passage).split())
