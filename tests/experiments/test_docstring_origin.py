import re

import numpy as np
import pytest

from bertsmith.experiments.docstring_origin import docstring_origin, without_names
from bertsmith.experiments.installed_prose import Module

SIZES = {"train": 12, "dev": 4, "test": 8}
PACKAGES = [f"package{letter}" for letter in "abcdefghi"]


def made_modules() -> list[Module]:
    """Nine packages of six modules; each docstring names its package, and all share a text."""
    modules = []
    for package in PACKAGES:
        for m in range(6):
            name = f"{package}.module{m}"
            use = f"Use {package.title()}'s {package}.tool{m} for case{package[-1]}{m}x"
            rest = "in the same way as you would in any other place.\nMore."
            docstrings = [f"{use}{k} {rest}" for k in range(5)]
            docstrings += ["This sentence is in every package of them all and must go."]
            modules.append(Module(name, package, [], docstrings))
    more = "more of the largest package, " + "word " * 8
    modules[0].docstrings.extend(f"{more}{k}" for k in range(3))
    return modules


def test_balanced_held_out_by_module_and_without_copies_or_names():
    origin = docstring_origin(reversed(made_modules()), seed=5, **SIZES)
    names = origin.train.label_names
    assert len(names) == 8 and set(names) <= set(PACKAGES) and "packagea" in names
    modules_of = {}
    for split, examples in origin._asdict().items():
        assert np.bincount(examples.labels).tolist() == [SIZES[split]] * 8
        assert not any(re.search("package[a-i]|[.]tool", text, re.I) for text in examples.texts)
        for text, label in zip(examples.texts, examples.labels, strict=True):
            if case := re.search(r"case([a-i]\d)x", text):
                assert names[label] == f"package{case[1][0]}"  # the label is the true origin
                assert modules_of.setdefault(case[1], split) == split
    everything = [text.casefold() for examples in origin for text in examples.texts]
    assert len(set(everything)) == len(everything)
    assert not any("every package" in text for text in everything)


def test_a_pure_function_of_the_seed():
    first = docstring_origin(made_modules(), seed=5, **SIZES)
    again = docstring_origin(reversed(made_modules()), seed=5, **SIZES)
    assert first.test.texts == again.test.texts
    assert first.test.texts != docstring_origin(made_modules(), seed=6, **SIZES).test.texts


def test_too_few_packages():
    with pytest.raises(ValueError, match="only 9 of 10 packages have 24 usable docstrings"):
        docstring_origin(made_modules(), seed=5, num_classes=10, **SIZES)


@pytest.mark.parametrize(
    "word",
    ["numpy", "NumPy's", "numpys", "as_numpy", "np", "jnp", "scikit-learn", "HuggingFace", "PIL"]
    + ["sklearn/base.py", "a.b.c()", ".Figure", "C:\\\\x", "1.2", "--", "see:np.dot"],
)
def test_names_are_removed(word):
    strip = without_names(["numpy", "sklearn", "transformers", "PIL"])
    assert strip(f"pipe {word} pilot, (snap)") == "pipe pilot, (snap)"
