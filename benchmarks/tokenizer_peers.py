"""The tokenizers that `benchmarks/tokenizer.py` compares, behind one interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by the thread pool of `tokenizers` when it is first used.
os.environ["RAYON_NUM_THREADS"] = "2"

import numpy as np
import tokenizers
import transformers

from bertsmith.text.tokenizer.tokenizer import Tokenizer

OURS, OURS_LOCATED = "bertsmith", "bertsmith, offsets and word ids"
FEW = (OURS, "tokenizers, encode_batch", "flash-tokenizer", "blingfire")  # on the worst cases
ROOM = 1 << 24  # tokens of a text: no peer may cut one


@dataclass(frozen=True)
class System:
    """A tokenizer: `encode(texts, threads)` is timed, `ids` makes lists of its result."""

    name: str
    version: str
    encode: Callable[[list[str], int], Any]
    ids: Callable[[Any], list[list[int]]] = list
    threads: Sequence[int] = (1, 2)
    every: int = 1  # the slow ones encode every fourth text


def found_systems(ours: Tokenizer, folder: Path) -> tuple[list[System], list[str]]:
    """The tokenizers there are, all with our vocabulary, and a line for each that is not there.

    `folder` holds our tokenizer as `Tokenizer.save` wrote it.
    """
    systems = [*_ours(ours), *_hugging_face(folder)]
    absent = []
    for name, open_it in (("flash_tokenizer", _flash), ("blingfire", _blingfire)):
        if importlib.util.find_spec(name) is None:
            absent.append(f"{name} is not installed: left out")
        elif not ours.normalization.lowercase or len(ours.vocabulary) != 30522:
            absent.append(f"{name} is compared on the uncased 30,522 pieces only: left out")
        else:
            systems.append(open_it(folder))
    return systems, absent


def _ours(tokenizer: Tokenizer) -> list[System]:
    def ids(encoded: Any) -> list[list[int]]:
        return [part.tolist() for part in np.split(encoded.ids, encoded.boundaries[1:-1])]

    def encode(offsets: bool) -> Callable[[list[str], int], Any]:
        return lambda texts, threads: tokenizer.encode_batch(
            texts, offsets=offsets, threads=threads
        )

    return [
        System(OURS, "this one", encode(False), ids),
        System(OURS_LOCATED, "this one", encode(True), ids),
    ]


def _hugging_face(folder: Path) -> list[System]:
    rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = transformers.BertTokenizerFast.from_pretrained(folder)

    def limited(threads: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def encode_batch(texts: list[str], threads: int) -> list[list[int]]:
        limited(threads)
        return [row.ids for row in rust.encode_batch(texts, add_special_tokens=False)]

    def encode_batch_fast(texts: list[str], threads: int) -> list[list[int]]:
        limited(threads)
        return [row.ids for row in rust.encode_batch_fast(texts, add_special_tokens=False)]

    def call(texts: list[str], threads: int) -> list[list[int]]:
        limited(threads)
        return fast(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return [
        System("tokenizers, encode_batch", tokenizers.__version__, encode_batch, every=4),
        System("tokenizers, encode_batch_fast", tokenizers.__version__, encode_batch_fast, every=4),
        System("transformers, fast tokenizer", transformers.__version__, call, every=4),
    ]


def _flash(folder: Path) -> System:
    import flash_tokenizer

    tokenizer = flash_tokenizer.BertTokenizerFlash(str(folder / "vocab.txt"), True, ROOM).tokenizer

    def encode(texts: list[str], threads: int) -> list[list[int]]:
        return tokenizer.batch_encode(texts, "longest", ROOM, threads > 1)

    def ids(rows: list[list[int]]) -> list[list[int]]:
        return [row[1:-1] for row in rows]  # it cannot leave out [CLS] and [SEP]

    return System("flash-tokenizer", importlib.metadata.version("flash_tokenizer"), encode, ids)


def _blingfire(folder: Path) -> System:
    import blingfire

    model = blingfire.load_model(str(Path(blingfire.__file__).parent / "bert_base_tok.bin"))

    def encode(texts: list[str], threads: int) -> list[Any]:
        return [
            blingfire.text_to_ids(model, text, max(4 * len(text), 1), 100, True) for text in texts
        ]

    def ids(rows: list[Any]) -> list[list[int]]:
        return [row.tolist() for row in rows]

    return System("blingfire", importlib.metadata.version("blingfire"), encode, ids, threads=(1,))
