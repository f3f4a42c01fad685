"""The quickstart's classification task: which package does this docstring belong to?

The labels cost nothing, for the text names its own origin; giveaways are taken out: package names,
their abbreviations, dotted and file paths, markup. Train, dev and test share no module, and no text
occurs twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from bertsmith.experiments.installed_prose import Module
from bertsmith.tasks.examples import Examples

MIN_WORDS, MAX_WORDS = 8, 60
PER_MODULE = 40  # texts used of one module, so that no class is a single long file
PATH = re.compile(r"[/\\]|\w\.\w|\.\w")  # a file, an address, an import path, a version, .name

# Other names that packages go by in prose.
ALIASES = (
    *("pillow", "protobuf", "jnp", "nx", "np", "pd", "pa", "sp", "scikit", "tf"),
    *("mpl", "mplot3d", "plt", "pylab", "pyplot"),  # matplotlib
    *("hugging", "face", "hf"),  # transformers
)


class Origin(NamedTuple):
    train: Examples
    dev: Examples
    test: Examples


def docstring_origin(
    modules: Iterable[Module], *, seed: int, num_classes: int = 8, train: int, dev: int, test: int
) -> Origin:
    """Make the three sets, with `train`, `dev` and `test` texts of each class.

    The classes are the packages (also of the standard library) with the most usable texts; texts
    that two packages share are left out. The order of `modules` does not matter.

    Errors: ValueError when fewer packages have enough texts.
    """
    needed = train + dev + test
    usable = _usable_texts(sorted(modules, key=lambda module: module.name), needed)
    sizes = {package: sum(map(len, files.values())) for package, files in usable.items()}
    random = np.random.default_rng(seed)
    chosen: dict[str, list[list[str]]] = {}
    for package in sorted(usable, key=lambda package: (-sizes[package], package)):
        if parts := _by_module(list(usable[package].values()), (train, dev, test), random):
            chosen[package] = parts
        if len(chosen) == num_classes:
            break
    else:
        raise ValueError(
            f"docstring task: only {len(chosen)} of {num_classes} packages have {needed} usable"
            " docstrings in enough modules: install more packages or ask for fewer classes or texts"
        )
    names = tuple(sorted(chosen))
    sets = []
    for part, name in enumerate(Origin._fields):
        rows = [(text, k) for k, package in enumerate(names) for text in chosen[package][part]]
        rows = [rows[i] for i in random.permutation(len(rows))]
        texts, labels = [text for text, _ in rows], np.array([label for _, label in rows], np.int64)
        lines = list(range(1, len(rows) + 1))
        sets.append(Examples(texts, None, labels, names, f"docstrings: {name}", lines))
    return Origin(*sets)


def _usable_texts(modules: Sequence[Module], needed: int) -> dict[str, dict[str, list[str]]]:
    """package -> module -> texts, of every package that may have `needed` of them."""
    counts = Counter(module.package for module in modules for _ in module.docstrings)
    candidates = [package for package, count in counts.items() if count >= needed]
    strip_names = without_names(candidates)
    packages: dict[str, set[str]] = {}  # folded text -> packages it is in
    distinct: list[tuple[str, Module, str]] = []
    for module in modules:
        for docstring in module.docstrings:
            text = " ".join(strip_names(docstring).split()[:MAX_WORDS])
            folded = " ".join(re.findall(r"\w+", text.casefold()))
            if folded not in packages:
                distinct.append((folded, module, text))
            packages.setdefault(folded, set()).add(module.package)

    usable: dict[str, dict[str, list[str]]] = {package: {} for package in candidates}
    for folded, module, text in distinct:
        is_long = len(text.split()) >= MIN_WORDS
        if module.package in usable and len(packages[folded]) == 1 and is_long:
            texts = usable[module.package].setdefault(module.name, [])
            if len(texts) < PER_MODULE:
                texts.append(text)
    return usable


def _by_module(
    modules: list[list[str]], sizes: Sequence[int], random: np.random.Generator
) -> list[list[str]] | None:
    """Deal whole modules to the sets in random order, then draw `sizes[i]` texts of each.

    The emptiest set for its size is served first. None when a set stays short.
    """
    sets: list[tuple[int, list[str]]] = [(size, []) for size in sizes]
    for k in random.permutation(len(modules)):
        _, emptiest = min(sets, key=lambda pair: len(pair[1]) / pair[0])
        emptiest.extend(modules[k])
    if any(len(texts) < size for size, texts in sets):
        return None
    return [[texts[i] for i in random.permutation(len(texts))[:size]] for size, texts in sets]


def without_names(packages: Sequence[str]) -> Callable[[str], str]:
    """A function that drops words that give a text's package away, and bare punctuation.

    These are names of `packages`, aliases, paths and dotted names. A name of five letters or more
    also counts inside a longer word ("PyTorch", "to_numpy"), a shorter one only as a part of its
    own, with plural or possessive.

    >>> without_names(["torch", "pip"])("PyTorch's use of a pipe, pips, (pip's), a.b or np_array .")
    'use of a pipe, or'
    """
    names = [re.sub(r"s$|\d+$|_", "", package.lower()) for package in packages]
    names += ALIASES
    inside = [name for name in names if len(name) >= 5]
    short = {name for name in names if len(name) < 5}

    @cache  # the words of a language repeat
    def gives_away(word: str) -> bool:
        parts = re.findall(r"[a-z0-9]+", word.lower())
        squeezed = "".join(parts)
        return (
            not squeezed
            or PATH.search(word) is not None
            or any(name in squeezed for name in inside)
            or any(part in short or part.removesuffix("s") in short for part in parts)
        )

    return lambda text: " ".join(word for word in text.split() if not gives_away(word))
