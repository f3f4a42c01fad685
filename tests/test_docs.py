"""Pages and source name files that are there; pages link to pages and sections that are there."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

from bertsmith.base.settings import options
from bertsmith.cli.flags import command_flags
from bertsmith.cli.main import COMMANDS, class_name, command_name, reference

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "bertsmith"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").rglob("*.md")),
]
OURS = {path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir()}
FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)+[\w-]+\.(?:py|md|toml))\b")
DEFINED = re.compile(r"`([\w/]+\.py): ([\w., ]+)`")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def absent_files(text):
    """Names of source, pages and recipes in folders of ours, from the root or from the package."""
    for name in FILE.findall(text):
        known = name.split("/")[0] in OURS
        if known and not any((base / name).is_file() for base in (ROOT, PACKAGE)):
            yield name


def absent_names(text):
    """Names after a file of the package, `model/encoder.py: Layer`, that it does not define."""
    for file, names in DEFINED.findall(text):
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        there = set(defined(tree.body))
        yield from (f"{file}: {name}" for name in names.split(", ") if name not in there)


def defined(body, prefix=""):
    """Names of classes, functions and variables of a module, and of what its classes have."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = (part for target in targets for part in ast.walk(target))
            yield from (prefix + part.id for part in found if isinstance(part, ast.Name))


def broken_links(page):
    for name, section in LINK.findall(page.read_text(encoding="utf-8")):
        if name.startswith(("http:", "https:")):
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield name
        elif section and section not in sections(target.read_text(encoding="utf-8")):
            yield f"{name}#{section}"


def sections(text):
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "benchmarks"], ids=lambda path: path.name)
def test_source_names_files_that_are_there(folder):
    for path in sorted(folder.rglob("*.py")):
        assert not list(absent_files(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_and_links_what_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert not list(absent_files(text))
    assert not list(absent_names(text))
    assert not list(broken_links(page))


QUOTED = re.compile(r"^```py\n# ([\w/]+\.py): .+\n((?:.*\n)+?)```$", re.MULTILINE)


def stale_quotes(text):
    """Lines that pages quote from a file of the package, which has no such lines."""
    for name, lines in QUOTED.findall(text):
        source = (PACKAGE / name).read_text(encoding="utf-8").splitlines()
        depths = {len(line) - len(line.lstrip()) for line in source}
        indented = (textwrap.indent(lines, " " * depth) for depth in depths)
        if not any(block in "\n".join([*source, ""]) for block in indented):
            yield name, lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_quotes_lines_that_stand_in_the_source(page):
    text = page.read_text(encoding="utf-8")
    assert not list(stale_quotes(text))
    assert len(QUOTED.findall(text)) == text.count("```py\n")


def test_a_stale_quote_is_seen():
    quote = "```py\n# model/elmo.py: Layer\nself.ahead, self.back = {}\n```\n"
    both = quote.format("ProjectedLSTM(config), ProjectedLSTM(config)") + quote.format("1, 2")
    assert list(stale_quotes(both)) == [("model/elmo.py", "self.ahead, self.back = 1, 2\n")]


def test_what_is_absent_is_seen(tmp_path):
    text = (
        "`training/engine.py`, training/lost.py (`docs/lost.md`), x/lost.py, `tests/test_docs.py`"
    )
    assert list(absent_files(text)) == ["training/lost.py", "docs/lost.md"]
    names = (
        "`model/encoder.py: Layer.forward, LayerNorm`, `model/config.py: SIZES, Size.words, LOST`"
    )
    assert list(absent_names(names)) == ["model/config.py: Size.words", "model/config.py: LOST"]
    page = tmp_path / "page.md"
    page.write_text(
        "# What `--resume` takes\n[a](page.md#what---resume-takes) [b](#lost) [c](lost.md) "
        "[d](https://example.org/lost) ![e](page.md)"
    )
    assert list(broken_links(page)) == ["#lost", "lost.md"]


def test_the_reference_of_commands_is_what_they_print():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert page == reference(), "write it anew: make docs"


COMMAND_LINE = re.compile(r"(`?)\bbertsmith ((?:[\w./=:,'\"{}$*<>@|+-]+|\\\n|[ \t])+)")


def unknown_flags(text):
    """(command, flag) of the command lines in a page whose flags the command does not have, or no
    such value of a flag with choices; ("", word) where no command begins so."""
    for quote, line in COMMAND_LINE.findall(text):
        words = re.split(r" \| | > | && ", line.replace("\\\n", " "))[0].split()
        if not (name := command_name(words)):
            if quote and words[0] != "COMMAND":  # else it is prose
                yield name, words[0]
            continue
        module = importlib.import_module(f"bertsmith.cli.{COMMANDS[name][0]}")
        flags = command_flags(getattr(module, class_name(name)))
        known = {"--help", "--help-all", *(alias for flag in flags for alias in flag.aliases)}
        known |= {flag.flag for flag in flags}
        choices = {flag.flag: options(flag.hint) for flag in flags if flag.several is None}
        for word, following in zip(words, [*words[1:], ""], strict=True):
            flag = word.split("=")[0].rstrip(".,")
            if flag.startswith("--") and flag not in known:
                yield name, flag
            values = choices.get(word, [])
            is_choice = values and all(isinstance(value, str) for value in values)
            if is_choice and following.islower() and not set(following.split("|")) <= {*values}:
                yield name, f"{flag} {following}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "results"],  # there are lines that were run
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_shows_flags_that_commands_have(page):
    assert not list(unknown_flags(page.read_text(encoding="utf-8")))


def test_an_unknown_flag_is_seen():
    text = (
        "Run `bertsmith fill --model run --lost` or\n    bertsmith vocab report a.txt \\\n  --not\n"
        "`bertsmith lost` bertsmith has `bertsmith pretrain --masking words --objective ltr`"
    )
    assert list(unknown_flags(text)) == [
        ("fill", "--lost"),
        ("vocab report", "--not"),
        ("", "lost"),
        ("pretrain", "--masking words"),
    ]
