"""GPT's tokenizer: byte pairs of lower-cased words (Sennrich et al. 2016, arXiv 1508.07909).

Words are BERT's, as in transformers, where the original had spaCy's; the last piece of a word ends
in "</w>". The package `tokenizers` merges the pieces.

    tokenizer.json                                  Hugging Face's whole tokenizer, or
    vocab.json + merges.txt                         its two files, or
    encoder_bpe_40000.json + vocab_40000.bpe        OpenAI's of 2018
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import read_json_object, write_json, write_text
from bertsmith.text.tokenizer.files import (
    MODEL_MAX_LENGTH,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    numbered_pieces,
    stored_pieces,
)
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED
from bertsmith.text.tokenizer.rows import Encoded
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import BORDERS, SURROGATE, Vocabulary

UNKNOWN, END = "<unk>", "</w>"
FILES = ("vocab.json", "merges.txt"), ("encoder_bpe_40000.json", "vocab_40000.bpe")


class BytePairVocabulary(Vocabulary):
    """Pieces of byte-pair encoding: `<unk>` is also what pads and hides.

    Errors: ValueError for pieces without `<unk>`.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        if UNKNOWN not in pieces:
            raise ValueError(f"the vocabulary of {len(pieces):,} pieces lacks {UNKNOWN}")
        self._number(pieces)
        self.pad_id = self.unk_id = self.mask_id = self.ids[UNKNOWN]
        self._surround(None)


class BytePairTokenizer(Tokenizer):
    """Cuts texts as transformers' OpenAIGPTTokenizer does, with offsets in the text as given.

    Errors: ValueError for a merge of what is no piece.

    >>> pieces = ["<unk>", "l", "o", "w</w>", "lo", "low</w>"]
    >>> merges = [("l", "o"), ("lo", "w</w>")]
    >>> BytePairTokenizer(BytePairVocabulary(pieces), merges).tokenize("Low ol")
    ['low</w>', 'o', '<unk>']
    """

    def __init__(self, vocabulary: BytePairVocabulary, merges: Sequence[tuple[str, str]]) -> None:
        self.vocabulary, self.normalization = vocabulary, GOOGLE_UNCASED
        self.merges = tuple(merges)
        for number, (first, second) in enumerate(self.merges, 1):
            if not {first, second, first + second} <= vocabulary.ids.keys():
                raise ValueError(f"merge {number}, {first!r} and {second!r}: not all are pieces")
        settings = [vocabulary.fingerprint, self.merges]
        self.fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def __reduce__(self) -> Any:
        return BytePairTokenizer, (self.vocabulary, self.merges)

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> BytePairTokenizer:
        """Errors: ValueError that names the file for a tokenizer of another kind."""
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if path.exists():
            pieces, merges = _read_whole(path)
        else:
            vocabulary, path = next(
                (folder / first, folder / second)
                for first, second in FILES
                if (folder / first).exists()
            )
            pieces = numbered_pieces(read_json_object(vocabulary).items(), vocabulary)
            merges = _read_merges(path)
        try:
            return cls(BytePairVocabulary(pieces), merges)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(
        self, folder: Path | str, max_length: int = MODEL_MAX_LENGTH, token_types: bool = True
    ) -> None:
        """Write `tokenizer.json`, and the settings beside it, as transformers opens them."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "OpenAIGPTTokenizer",
            "model_max_length": max_length,
            "unk_token": UNKNOWN,
        }
        write_json(folder / TOKENIZER_CONFIG, config)
        write_text(folder / TOKENIZER_FILE, self._library.to_str(pretty=True) + "\n")

    def with_borders(self) -> BytePairTokenizer:
        return BytePairTokenizer(self.vocabulary.with_borders(), self.merges)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Join the pieces, with spaces between words."""
        pieces = (piece + END * (piece in BORDERS) for piece in self._pieces_of(ids))
        return "".join(pieces).replace(END, " ").removesuffix(" ")

    @cached_property
    def _library(self) -> Any:
        """The tokenizer of the package."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        model = models.BPE(
            vocab=self.vocabulary.ids,
            merges=list(self.merges),
            unk_token=UNKNOWN,
            end_of_word_suffix=END,
        )
        made = Library(model)
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.BPEDecoder(suffix=END)
        return made

    def _encode_all(
        self, texts: list[str], offsets: bool, limit: int, threads: int | None
    ) -> Encoded:
        clean = texts
        if not "".join(texts).isascii():  # of lone surrogates the package makes nothing
            clean = [SURROGATE.sub("\ufffd", text) for text in texts]
        encode = self._library.encode_batch if offsets else self._library.encode_batch_fast
        encoded = encode(clean, add_special_tokens=False)
        ids = [one.ids[:limit] for one in encoded]
        spans = [one.offsets[:limit] for one in encoded] if offsets else []
        words = [one.word_ids[:limit] for one in encoded] if offsets else []
        return Encoded(
            np.array([piece for text in ids for piece in text], np.int32),
            np.array([span for text in spans for span in text], np.int32).reshape(-1, 2),
            np.array([word for text in words for word in text], np.int32),
            np.cumsum([0, *map(len, ids)], dtype=np.int64),
        )


def is_byte_pair(folder: Path) -> bool:
    """True for the folder of a tokenizer of byte pairs."""
    if (folder / VOCABULARY_FILE).exists():
        return False
    if (path := folder / TOKENIZER_FILE).exists():
        model = read_json_object(path).get("model")
        return isinstance(model, dict) and model.get("type") == "BPE"
    return any((folder / name).exists() for name, _ in FILES)


def _read_whole(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    stored = read_json_object(path)
    for section, name, expected in (
        ("model", "end_of_word_suffix", END),
        ("normalizer", "type", "BertNormalizer"),
        ("normalizer", "lowercase", True),
        ("pre_tokenizer", "type", "BertPreTokenizer"),
    ):
        settings = stored.get(section)
        value = settings.get(name) if isinstance(settings, dict) else None
        if value != expected:
            raise ValueError(
                f"{path}: {name} of the {section} is {value!r}, not {expected!r}: of the tokenizers"
                " of byte pairs bertsmith reads GPT's alone"
            )
    merges = stored["model"].get("merges") or []
    if not isinstance(merges, list):
        raise ValueError(f"{path}: merges is {merges!r:.60}: it must be a list of pairs")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    return stored_pieces(stored, path), _pairs(pairs, path)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Merges a line each, below a line on the version. Errors: ValueError; FileNotFoundError."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return _pairs([line.split(" ") for line in lines[1:] if line.strip()], path)


def _pairs(found: list[Any], path: Path) -> list[tuple[str, str]]:
    for number, pair in enumerate(found, 1):
        are_texts = isinstance(pair, list) and all(isinstance(p, str) and p for p in pair)
        if not are_texts or len(pair) != 2:
            raise ValueError(f"{path}: merge {number} is {pair!r}: it has two pieces")
    return [tuple(pair) for pair in found]
