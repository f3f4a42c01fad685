"""Texts as people hand them over: one string, or any list of strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any


def texts_of(given: Any, name: str = "texts") -> list[str]:
    """The texts: one of a string; those of a list, tuple, array, pandas Series or iterator.

    `name` is what messages call it.

    >>> texts_of("a text"), texts_of(("one", "two"))
    (['a text'], ['one', 'two'])

    Errors: ValueError that says what was expected and what came: no texts, or an item that is none.
    """
    if isinstance(given, str):
        return [given]
    texts = items_of(given, name)
    for k, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{k}] is {_shown(text)}: expected a text (str)")
    return texts


def items_of(given: Any, name: str) -> list[Any]:
    """The items of anything that has an order and one dimension, strings and bytes left out.

    Errors: ValueError for anything else.
    """
    # a table (pandas) has two dimensions and iterates over the names of its columns
    flat = isinstance(given, Iterable) and getattr(given, "ndim", 1) == 1
    if not flat or isinstance(given, str | bytes | bytearray | Mapping | Set):
        raise ValueError(
            f"{name}: expected a text (str) or a list, array or Series of texts, not"
            f" {_shown(given)}"
        )
    return list(given)


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r:.40}"
