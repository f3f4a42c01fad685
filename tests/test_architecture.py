"""The house rules that a machine can check: who imports whom, what is never used, sizes."""

import ast
import graphlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest

import bertsmith

from .tiny import python

ROOT = Path(bertsmith.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Room -> what of ours it may import besides itself; in training also its own rooms, lowest first.
ALLOWED = {
    "base": set(),
    "text": {"base"},
    "corpus": {"base", "text"},
    "tasks": {"base", "text"},
    "model": {"base"},
    "reports": {"base", "text", "tasks"},
    "checkpoints": {"base", "text", "model"},
    "training": {"base", "text", "corpus", "tasks", "model", "checkpoints"},
    "inference": {"base", "text", "tasks", "model", "checkpoints", "training", "reports"},
}
ALLOWED["experiments"] = {*ALLOWED}  # only cli reaches them
ALLOWED["serving"] = {"base", "text", "tasks", "checkpoints", "inference"}
ALLOWED["cli"] = {*ALLOWED, ""}  # it is a user of the public names
FACES = {"", "__main__"}  # the package's own front doors may open every room
# A file of training may import files of a lower floor, or of its own room.
FLOORS = {
    "training": 0,
    "training.loop": 1,
    "training.checkpointing": 2,
    "training.pretraining": 3,
    "training.finetuning": 3,
    "training.doctor": 4,
}

WITHOUT_TORCH = {"base", "text", "corpus", "tasks", "reports"}
TORCH_ONLY = {"model"}
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNPICKLING_ERROR = "pickle.UnpicklingError"  # raised by PyTorch's restricted reader
# What `--help` and a first look at a request read: settings and tables, without what is heavy.
LIGHT = (
    "base.settings", "experiments.settings", "experiments.paper.experiment", "tasks.task",
    "corpus.build.settings", "corpus.examples.settings", "model.config", "training.loop.schedule",
    "training.pretraining.settings", "training.finetuning.settings",
    "training.finetuning.search_space", "training.finetuning.request", "serving.settings",
)  # fmt: skip
# What answers with our own engine; PyTorch comes with `inference.engines.pytorch`.
ANSWERING = (
    "checkpoints.reading", "inference.predictor", "inference.predict", "inference.bulk",
    "inference.embeddings.files", "inference.embeddings.vectors", "inference.fill",
)  # fmt: skip
HEAVY = {"torch", "numba", "pyarrow", "sklearn", "scipy", "matplotlib"}
MAX_LINES, MAX_ENTRIES, MAX_PARAMETERS = 500, 12, 7
ISOLATING = {
    "experiments.paper.cells",
    "serving.application",
    "serving.batching",
    "serving.server",
}  # a fault in a cell or a request is not the others'
MARKERS = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}


def module_name(path):
    """The dotted name within `bertsmith`; that of a package is its folder's."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_name(path): path for path in FILES}


@cache
def source_of(module):
    return MODULES[module].read_text(encoding="utf-8")


@cache
def tree_of(module):
    return ast.parse(source_of(module))


def floor(module):
    """(Floor, room) of a module of training."""
    return max((FLOORS[room], room) for room in FLOORS if f"{module}.".startswith(f"{room}."))


@cache
def imports(tree):
    """Every imported name with its line, wherever it stands; `from a.b import c` is a.b.c."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = f"{'.' * node.level}{node.module or ''}"
            found += [(node.lineno, f"{package}.{alias.name}") for alias in node.names]
    return found


def own_imports(tree):
    """(Line, module of ours) of every import."""
    for line, name in imports(tree):
        parts = name.split(".")
        if parts[0] == "bertsmith":
            tried = (".".join(parts[1:end]) for end in range(len(parts), 0, -1))
            yield line, next(module for module in tried if module in MODULES)


def wrong_imports(where, tree):
    """Imports of ours that the plan does not allow in the module `where`."""
    own = where.split(".")[0]
    for line, name in imports(tree):
        if name.startswith("."):
            yield f"line {line}: write bertsmith's full name"
    for line, target in own_imports(tree):
        room = target.split(".")[0]
        if own in FACES:
            continue
        if room != own and room not in ALLOWED[own]:
            yield f"line {line}: {where} may not import {target or 'bertsmith'}"
        if own == room == "training":
            (lower, ours), (upper, theirs) = floor(where), floor(target)
            if ours != theirs and upper >= lower:
                yield f"line {line}: {where} may not import {target}"


def wrong_packages(where, tree):
    """Imports of others' packages that the design does not allow in the room `where`."""
    room, is_kernel = where.split(".")[0], where.startswith("model.kernels")
    for line, name in imports(tree):
        package = name.split(".")[0]
        if package == "torch" and room in WITHOUT_TORCH:
            yield f"line {line}: {where} is without torch"
        known = {*sys.stdlib_module_names, "torch", "bertsmith"}
        if room in TORCH_ONLY and not is_kernel and package not in known:
            yield f"line {line}: {where} knows torch only, not {package}"


def wrong_statements(where, tree):
    """Pickles, and handlers that would swallow our own mistakes."""
    pickling, guarded = {"torch.load", "torch.save"}, set()
    if (
        where == "checkpoints.formats.pickled"
    ):  # the one file that may call PyTorch's restricted reader
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        checks = ((node, map(ast.unparse, node.keywords)) for node in calls)
        guarded = {node.func for node, words in checks if "weights_only=True" in words}
    for line, name in imports(tree):
        if (name.split(".")[0] in PICKLING and name != UNPICKLING_ERROR) or name in pickling:
            yield f"line {line}: {name} pickles"
    for node in ast.walk(tree):
        is_named = isinstance(node, ast.Attribute) and ast.unparse(node) in pickling
        if is_named and node not in guarded:
            yield f"line {node.lineno}: {ast.unparse(node)} pickles"
        if isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True":
            yield f"line {node.value.lineno}: allow_pickle"
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            is_wide = any(kind is None or ast.unparse(kind) == "Exception" for kind in kinds)
            if is_wide and where not in ISOLATING:
                yield f"line {node.lineno}: name the errors that are meant"


def long_parts(where, source):
    """Files of too many lines; functions of too many parameters, but for kernels."""
    if (length := len(source.splitlines())) > MAX_LINES:
        yield f"{length} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
            is_called_by_torch = node.name in ("forward", "backward", "__init__")
            if len(names) > MAX_PARAMETERS and not is_called_by_torch and "kernel" not in where:
                yield node.name, len(names)


@pytest.mark.parametrize("module", MODULES)
def test_a_file_keeps_the_house_rules(module):
    tree = tree_of(module)
    long = [*long_parts(module, source_of(module))]
    rules = (wrong_imports, wrong_packages, wrong_statements)
    faults = [fault for rule in rules for fault in rule(module, tree)]
    assert not faults + long, module
    assert ast.get_docstring(tree), "say what is in the file"


def circle_in(graph):
    """Modules that import each other in a circle; () where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return ()


def test_imports_have_no_circle():
    graph = {module: {target for _, target in own_imports(tree_of(module))} for module in MODULES}
    assert not circle_in({module: graph[module] - {module} for module in graph})
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_a_folder_has_few_entries():
    for folder in {path.parent for path in FILES}:
        entries = {entry.name for entry in folder.iterdir()} - MARKERS
        assert len(entries) <= MAX_ENTRIES, f"{folder}: {sorted(entries)}"


@pytest.mark.parametrize(
    ("modules", "absent"), [(LIGHT, HEAVY), (ANSWERING, {"torch", "pyarrow", "sklearn"})]
)
def test_modules_do_not_import_what_is_heavy(modules, absent):
    (imports,) = imported([f"bertsmith.{module}" for module in modules], "sorted(sys.modules)")
    assert {f"bertsmith.{module}" for module in modules} <= set(imports)
    assert not absent & set(imports)


def imported(modules, *values):
    """What a fresh process says after imports."""
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps([{', '.join(values)}]))"
    return json.loads(python(code).out)


def test_one_file_knows_torch_distributed():
    users = {
        module
        for module in MODULES
        if any(name.startswith("torch.distributed") for _, name in imports(tree_of(module)))
    }
    assert len(users) <= 1, users


ARROWS, PACKAGES = wrong_imports, wrong_packages
SWALLOWED = "try:\n    f()\nexcept{}:\n    pass"


@pytest.mark.parametrize(
    ("rule", "where", "source"),
    [
        (ARROWS, "text.sentences", "def f():\n    from bertsmith.corpus.store import store"),
        (ARROWS, "reports.pages", "import bertsmith.training.loop.loop"),
        (ARROWS, "model.encoder", "from bertsmith.checkpoints import hub"),
        (ARROWS, "model.encoder", "from .. import checkpoints"),
        (ARROWS, "corpus.dedup", "if TYPE_CHECKING:\n    from bertsmith.training import engine"),
        (ARROWS, "training.engine", "import bertsmith"),
        (ARROWS, "training.loop.loop", "from bertsmith.training.pretraining.run import pretrain"),
        (ARROWS, "training.pretraining.run", "from bertsmith.training.finetuning import run"),
        (ARROWS, "inference.fill", "from bertsmith.experiments.quickstart import run"),
        (PACKAGES, "corpus.dedup", "def f():\n    import torch.nn"),
        (PACKAGES, "model.heads", "import numpy"),
        (wrong_statements, "", "import pickle"),
        (wrong_statements, "", "from torch import load"),
        (wrong_statements, "", "x = torch.load(path, weights_only=True)"),
        (
            wrong_statements,
            "checkpoints.formats.pickled",
            "x = torch.load(path, weights_only=False)",
        ),
        (wrong_statements, "", "x = np.load(path, allow_pickle=True)"),
        (wrong_statements, "", SWALLOWED.format("")),
        (wrong_statements, "", SWALLOWED.format(" (OSError, Exception)")),
    ],
)
def test_a_broken_rule_is_seen(rule, where, source):
    assert len(list(rule(where, ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("where", "source"),
    [("model.heads", "import torch, math"), ("model.kernels.attention", "import numpy")],
)
def test_packages_that_a_room_may_import(where, source):
    assert not list(wrong_packages(where, ast.parse(source)))


def test_a_part_too_long_is_seen():
    function = "def f(a, b, *, c, d, e, f, g):\n" + "    x = 1\n" * 499
    assert not list(long_parts("text.sentences", function))
    function = function.replace("g)", "g, h)") + "    x = 1\n"
    assert len(list(long_parts("text.sentences", function))) == 2


def test_importing_bertsmith_costs_nothing():
    values = ("bertsmith.__version__", "dir(bertsmith)", "sorted(sys.modules)")
    version, names, modules = imported(["bertsmith"], *values)
    assert version == bertsmith.__version__ and set(names) >= {"Tokenizer", "load"}
    assert not {"torch", "numpy", "numba", "pyarrow", "rich"} & set(modules)


@pytest.mark.parametrize("name", dir(bertsmith))
def test_the_public_names_exist(name):
    assert getattr(bertsmith, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    assert not hasattr(bertsmith, "Tokeniser")
