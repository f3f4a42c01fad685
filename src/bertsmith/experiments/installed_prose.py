"""English prose that every Python installation carries: docstrings and the language reference.

Source files are parsed with `ast`, never imported. Paragraphs of running text are kept; examples,
code, tables, headings and markup are taken out.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bertsmith.base.processes import map_in_order
from bertsmith.base.terminal import Progress

TOPICS = "pydoc_data.topics"  # the language reference: one dictionary, a text for each topic
SKIPPED_FOLDERS = frozenset(
    [
        *["test", "tests", "testing", "_test", "idle_test", "conftest", "site-packages"],
        *["dist-packages", "vendor", "_vendor", "vendored", "_vendored", "_vendored_packages"],
        *["extern", "_extern", "externals", "third_party", "node_modules", "__pycache__"],
    ]
)
MAX_SOURCE = 2_000_000  # bytes; larger files are generated tables
FILES_AT_A_TIME = 32  # sent to a process together
MIN_WORDS = 5  # of a paragraph
MIN_PROSE = 0.75  # fraction of a paragraph's words that are plain words


class Module(NamedTuple):
    """The prose of one source file, or of one topic of the language reference."""

    name: str  # "numpy.linalg"
    package: str  # "numpy"
    paragraphs: list[str]  # each on one line; in no two modules the same
    docstrings: list[str]  # cleaned, paragraphs separated by "\n"; in no two modules the same


def harvest_prose(roots: Sequence[Path] | None = None, *, workers: int = 2) -> Iterator[Module]:
    """Yield the prose of all modules under the roots, sorted by root and path.

    `roots` are folders of packages, by default the standard library and the installed packages of
    the running Python. Test folders, vendored copies and files that do not parse are passed over; a
    paragraph or docstring seen before is dropped. The result does not depend on `workers`.
    """
    if roots is None:
        paths = sysconfig.get_paths()
        found = (Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib"))
        roots = list(dict.fromkeys(found))
    files = [(root, file) for root in roots for file in _source_files(root)]
    tasks = [files[i : i + FILES_AT_A_TIME] for i in range(0, len(files), FILES_AT_A_TIME)]
    seen: tuple[set[str], set[str]] = set(), set()  # paragraphs, docstrings

    def unseen(texts: list[str], before: set[str]) -> list[str]:
        new = [text for text in dict.fromkeys(texts) if text not in before]
        before.update(new)
        return new

    with Progress("reading docstrings", unit="MB", scale=1e6) as progress:
        for _, modules in map_in_order(partial, (_read_modules,), enumerate(tasks), workers):
            for module in modules:
                paragraphs = unseen(module.paragraphs, seen[0])
                docstrings = unseen(module.docstrings, seen[1])
                if paragraphs:
                    progress.update(sum(map(len, paragraphs)))
                    yield module._replace(paragraphs=paragraphs, docstrings=docstrings)


def _source_files(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
        and not path.name.startswith("test_")
    )


def _read_modules(files: list[tuple[Path, Path]]) -> list[Module]:
    gc.disable()  # it finds nothing in a syntax tree: parsing is twice as fast
    try:
        return [module for root, file in files for module in _modules(root, file)]
    finally:
        gc.enable()


def _modules(root: Path, file: Path) -> Iterator[Module]:
    """The module of a file, the modules of the topics' file, or none."""
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    package = name.partition(".")[0]
    source = file.read_bytes()
    if len(source) > MAX_SOURCE or not (b'"""' in source or b"'''" in source or name == TOPICS):
        return
    tree = None
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError, RecursionError):
        warnings.simplefilter("ignore")  # of doubtful escapes in other people's files
        tree = ast.parse(source)
    if tree is None:
        return
    if name == TOPICS:
        for topic, text in _topics(tree).items():
            yield Module(f"{name}.{topic}", package, prose_paragraphs(text), [])
        return
    texts = [paragraphs for text in _docstrings(tree) if (paragraphs := prose_paragraphs(text))]
    paragraphs = [paragraph for text in texts for paragraph in text]
    yield Module(name, package, paragraphs, ["\n".join(text) for text in texts])


def _topics(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a tree's module, classes and functions, in the order of the source."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, (ast.Module, *documented)):
        yield ast.get_docstring(node, clean=False) or ""
    for child in getattr(node, "body", ()):
        if isinstance(child, (*documented, ast.If)):
            yield from _docstrings(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            # add_newdoc("numpy", "dot", """..."""): how compiled functions get theirs
            strings = (part.value for part in ast.walk(child) if isinstance(part, ast.Constant))
            yield from (text for text in strings if isinstance(text, str) and "\n\n" in text)


# --- from a docstring to paragraphs of prose ---

_CODE_DIRECTIVES = (
    "code|code-block|sourcecode|plot|math|doctest|testcode|testoutput|ipython|parsed-literal|"
    "productionlist|list-table|csv-table|table|figure|image|toctree|autosummary|highlight|"
    "jupyter-execute|graphviz|index|only|raw|deprecated|versionadded|versionchanged"
)
_CODE_BLOCK = re.compile(rf"\.\. *(?:(?:{_CODE_DIRECTIVES})::|\[|_)")  # or a citation, a target
_DIRECTIVE = re.compile(r"\.\. [\w-]+:: ?|\.\. [\[_].*")
_RULE = re.compile(r"[^\w\s]{3,}(?:\s+[^\w\s]{2,})*$")
_BULLET = re.compile(r"(?:[-*+\u2022] +|\(?(?:\d{1,2}|[a-z])[.)] +)")
# ":param x: ...", "x (int): ...", "x : int", "x: ..."; the description behind it is kept.
_FIELD = re.compile(
    r":[a-z]+(?: [^:`]*)?:(?: +|$)|\*{0,2}[\w.]+ ?\([^()]*\):(?: +|$)|[a-z_]\w*:(?: +|$)"
    r"|[`*]*[\w.*, ]+ :(?: .*)?$"
)
_COLUMNS = re.compile(r"\S(?:  +|\t)\S.*\S(?:   +|\t)\S|\|.*\||^\s*\|")
_MARKUP = (
    (re.compile(r":(?:[\w+-]+:){1,2}`(?:~[\w.]*\.)?!?([^`<]*?)(?: *<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]*?) *<[^`>]*>`_{0,2}"), r"\1"),
    (re.compile(r"`{1,2}(?:~[\w.]*\.)?([^`]*)`{1,2}_{0,2}"), r"\1"),
    (re.compile(r"\[([^\]\[]*)\]\([^()]*\)"), r"\1"),
    (re.compile(r" ?\[[\w#*]{1,8}\]_"), ""),
    (re.compile(r"https?://[^\s<>]+|www\.[^\s<>]+"), ""),
    (re.compile(r"(?<!\w)\*{1,2}(\w[^*]*)\*{1,2}(?!\w)"), r"\1"),
)
_MARKED = re.compile(r"[`*\[]|://|www\.")
_PLAIN_WORD = re.compile(r"[(\"']?(?:[A-Z]?[a-z]+|[AI])(?:['\u2019-][A-Za-z][a-z]*)*[.,;:!?)\"']*$")


def prose_paragraphs(docstring: str) -> list[str]:
    """The paragraphs of running text of a docstring, each joined to one line.

    Dropped are doctests, code blocks, tables, headings, the names and types of parameters, and
    paragraphs of fewer than five words or mostly other words than plain ones.

    >>> prose_paragraphs('''Return the sum.
    ...
    ...     The numbers are added in :class:`~math.Order`,
    ...     one after the other.
    ...
    ...     Parameters
    ...     ----------
    ...     a : int
    ...         The number that is added to.
    ...
    ...     >>> add(1, 2)
    ...     3
    ...     ''')
    ['The numbers are added in Order, one after the other.', 'The number that is added to.']
    """
    found = []
    for lines in _blocks(inspect.cleandoc(docstring).split("\n")):
        paragraph = _without_markup(" ".join(lines))
        words = paragraph.split()
        plain = sum(1 for word in words if _PLAIN_WORD.match(word))
        is_formula = "\\" in paragraph  # in TeX
        if len(words) >= MIN_WORDS and not is_formula and plain >= MIN_PROSE * len(words):
            found.append(paragraph)
    return found


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Lines that belong together: up to a blank line, a bullet, a field, another indentation."""
    block: list[str] = []
    indentation: int | None = None  # of the block; None: the next line says
    code_indentation: int | None = None  # of the line that announced code
    skipping = False  # to the next blank line
    fenced = False
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.startswith(("```", "~~~")):
            fenced = not fenced
            text = ""
        elif text.startswith(">>>"):
            skipping = True
        elif not text:
            skipping = False
        elif code_indentation is not None and indent <= code_indentation:
            code_indentation = None
        if not text or fenced or skipping or code_indentation is not None:
            if block:
                yield block
            block = []
            continue
        if _RULE.match(text):
            block = []  # the heading above a rule goes with it
            continue
        starts = _BULLET.match(text) or _FIELD.match(text) or _DIRECTIVE.match(text)
        if _CODE_BLOCK.match(text) or text.endswith("::"):
            code_indentation = indent
        columns = _COLUMNS.search(line)
        if block and (starts or columns or (indentation not in (None, indent))):
            yield block
            block = []
        indentation = None if starts else indent
        if starts:
            text = "" if _CODE_BLOCK.match(text) else text[starts.end() :]
        if text and not columns:
            block.append(text.removesuffix(":") if text.endswith("::") else text)
    if block:
        yield block


def _without_markup(paragraph: str) -> str:
    """Keep the words inside roles, links and emphasis.

    >>> _without_markup("See :func:`~os.walk`, `~os.path`, ``None`` and `the page <x.html>`_ [1]_.")
    'See walk, path, None and the page.'
    """
    if _MARKED.search(paragraph):
        for pattern, kept in _MARKUP:
            paragraph = pattern.sub(kept, paragraph)
    return " ".join(paragraph.split())
