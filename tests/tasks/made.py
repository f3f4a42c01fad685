"""What tests of several kinds of tasks need: one-letter pieces, rows of JSON, refusals."""

import contextlib
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..tiny import word_tokenizer, write

DATA = Path(__file__).parents[2].parent / "shared" / "data"
PAD, UNK, CLS, SEP, _ = range(5)
ALPHABET = "abcdefgh"
LETTERS = word_tokenizer(ALPHABET)  # a..h are 5..12
JOINED = Tokenizer(Vocabulary([*SPECIAL, *ALPHABET, *(f"##{c}" for c in ALPHABET), "?", "."]))


def needs(folder):
    reason = f"the shared data of {folder} are not on this machine"
    return pytest.mark.skipif(not (DATA / folder).is_dir(), reason=reason)


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def jsonl(path, *rows):
    return write(path, lines(*rows))


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def write_packed(path, text):
    """A file packed as its name says."""
    pack = PACKERS.get(path.suffix.lower(), bytes)
    return write(path, pack(text if isinstance(text, bytes) else text.encode()))


@contextlib.contextmanager
def refused(match):
    """A refusal whose message is one line."""
    with pytest.raises(ValueError, match=match) as error:
        yield error
    assert "\n" not in str(error.value)


def by_row(features, values):
    return [row.tolist() for row in np.split(values, features.boundaries[1:-1])]
