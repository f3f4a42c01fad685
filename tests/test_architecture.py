"""The house rules that a machine can check: who imports whom, what is never used, sizes."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith

ROOT = Path(bertsmith.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
BASE = {"compiled", "config", "faults", "files", "progress"}

# Package or top-level module -> what of ours it may import. DESIGN: "Who may import whom".
ALLOWED = {
    "compiled": set(),
    "config": set(),
    "faults": set(),
    "files": {"faults"},
    "progress": set(),
    "text": BASE,
    "corpus": BASE | {"text"},
    "tasks": BASE | {"text"},
    "kernels": {"compiled"},
    "model": {"kernels"},
    "checkpoints": BASE | {"text", "model"},
    "training": BASE | {"text", "corpus", "tasks", "kernels", "model", "checkpoints"},
    "finetuning": BASE | {"text", "tasks", "kernels", "model", "checkpoints", "training"},
    "inference": BASE | {"text", "tasks", "model", "checkpoints", "training", "finetuning"},
    "reports": BASE | {"text", "tasks"},
}
ALLOWED["quickstart"] = {*ALLOWED} - {"reports"}  # one command's pipeline; only cli opens it
ALLOWED["cli"] = {*ALLOWED, "cli"}
FACES = {"__init__", "__main__"}  # the package's own front doors may open every room

WITHOUT_TORCH = BASE | {"text", "corpus", "tasks", "reports"}
TORCH_ONLY = {"model"}
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
MAX_FILE, MAX_FUNCTION = 350, 60


def room(path):
    """The package under `bertsmith`, or the module's name when it lies at the top."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imports(tree, where=""):
    """Every imported name with its line, wherever it stands; `from a.b import c` is a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # one dot is the room itself (rooms have no inner packages), two dots are bertsmith
            start = ("", f"bertsmith.{where}.", "bertsmith.")[node.level]
            for alias in node.names:
                yield node.lineno, f"{start}{node.module or ''}.{alias.name}".replace("..", ".")


def wrong_imports(where, tree):
    """Imports of ours that the design does not allow in the room `where`."""
    for line, name in imports(tree, where):
        parts = name.split(".")
        if parts[0] != "bertsmith" or name == "bertsmith.__version__" or where in FACES:
            continue
        target = parts[1] if len(parts) > 1 else "bertsmith"
        if target != where and target not in ALLOWED[where]:
            yield f"line {line}: {where} may not import {target}"


def wrong_packages(where, tree):
    """Imports of others' packages that the design does not allow in the room `where`."""
    for line, name in imports(tree, where):
        package = name.split(".")[0]
        if package == "torch" and where in WITHOUT_TORCH:
            yield f"line {line}: {where} is without torch"
        if where in TORCH_ONLY and package not in {*sys.stdlib_module_names, "torch", "bertsmith"}:
            yield f"line {line}: {where} knows torch only, not {package}"


def wrong_statements(tree):
    """Pickles, and handlers that would swallow our own mistakes."""
    for line, name in imports(tree):
        if name.split(".")[0] in PICKLING or name in ("torch.load", "torch.save"):
            yield f"line {line}: {name} pickles"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            yield f"line {node.lineno}: {ast.unparse(node)} pickles"
        if isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True":
            yield f"line {node.value.lineno}: allow_pickle"
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) == "Exception" for kind in kinds):
                yield f"line {node.lineno}: name the errors that are meant"


def long_parts(source, tree):
    """Files over 350 lines; functions over 60, their docstring not counted."""
    if (length := len(source.splitlines())) > MAX_FILE:
        yield f"{length} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            head = node.body[0].lineno - node.lineno
            length = head + (body[-1].end_lineno - body[0].lineno + 1 if body else 0)
            if length > MAX_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_the_house_rules(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    where = room(path)
    faults = [
        *wrong_imports(where, tree),
        *wrong_packages(where, tree),
        *wrong_statements(tree),
        *long_parts(source, tree),
    ]
    assert not faults, f"{path}: " + "; ".join(faults)


def test_one_file_knows_torch_distributed():
    users = [
        path.relative_to(ROOT)
        for path in FILES
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("torch.distributed")
    ]
    assert len(set(users)) <= 1, users


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("text", "def f():\n    from bertsmith.corpus.store import TokenStore"),
        ("reports", "import bertsmith.training.loop"),
        ("model", "from bertsmith import config"),
        ("model", "from .. import config"),
        ("corpus", "from ..training.loop import train"),
        ("training", "import bertsmith"),
    ],
)
def test_a_wrong_arrow_is_seen(where, source):
    assert len(list(wrong_imports(where, ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "x = torch.load(path)",
        "x = np.load(path, allow_pickle=True)",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (OSError, Exception):\n    pass",
    ],
)
def test_a_wrong_statement_is_seen(source):
    assert len(list(wrong_statements(ast.parse(source)))) == 1


def test_a_wrong_package_or_size_is_seen():
    assert list(wrong_packages("corpus", ast.parse("def f():\n    import torch.nn")))
    assert list(wrong_packages("model", ast.parse("import numpy")))
    assert not list(wrong_packages("model", ast.parse("import torch, math")))
    function = "def f():\n    '''Doc.\n\n    More.\n    '''\n" + "    x = 1\n" * 59
    assert not list(long_parts(function, ast.parse(function)))
    function += "    x = 1\n" * 300
    assert len(list(long_parts(function, ast.parse(function)))) == 2


def test_importing_bertsmith_costs_nothing():
    code = (
        "import bertsmith, json, sys; "
        "print(json.dumps([bertsmith.__version__, dir(bertsmith), sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    version, names, modules = json.loads(done.stdout)
    assert version == bertsmith.__version__ and set(names) >= {"Tokenizer", "load"}
    assert not {"torch", "numpy", "numba", "pyarrow", "tyro", "rich"} & set(modules)


@pytest.mark.parametrize("name", bertsmith.__all__)
def test_the_public_names_exist(name):
    assert getattr(bertsmith, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    assert not hasattr(bertsmith, "Tokeniser")
