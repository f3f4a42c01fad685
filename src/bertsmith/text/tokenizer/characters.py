"""ELMo's tokenizer: the bytes of each word, so that no table of words is needed.

A row is [CLS] a [SEP] b [SEP] as of BERT; the two are ELMo's begin and end of a sentence. Words are
those of BERT's cased basic tokenization, each as its UTF-8 bytes and an end of word. A word begins
at a byte that follows no byte; the model puts the word's begin and padding around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import write_json
from bertsmith.text.tokenizer.files import MODEL_MAX_LENGTH, TOKENIZER_CONFIG
from bertsmith.text.tokenizer.normalize import (
    CHUNK,
    GOOGLE_CASED,
    is_dropped,
    is_ideograph,
    is_punctuation,
)
from bertsmith.text.tokenizer.rows import Encoded, concatenate
from bertsmith.text.tokenizer.tokenizer import NO_LIMIT, Tokenizer, text_groups, text_starts
from bertsmith.text.tokenizer.wordpiece import Vocabulary

MOST_BYTES = 48  # of a word: ELMo reads no more
SPACE, DROPPED, ALONE, PART = range(4)  # kinds of characters


def byte_pieces() -> list[str]:
    """The names of ELMo's 262 numbers, padding in front.

    The end of a word is [UNK], since alone it is a word without a byte; the padding inside a word,
    which no row holds, is [MASK]: the word is not there.

    >>> pieces = byte_pieces()
    >>> len(pieces), pieces[66], pieces[11], pieces[257:]
    (262, 'A', '<0x0A>', ['[CLS]', '[SEP]', '[WORD]', '[UNK]', '[MASK]'])
    """
    shown = (chr(byte) if 32 < byte < 127 else f"<0x{byte:02X}>" for byte in range(256))
    return ["[PAD]", *shown, "[CLS]", "[SEP]", "[WORD]", "[UNK]", "[MASK]"]


class CharacterTokenizer(Tokenizer):
    """Texts to bytes of their words; the interface of `Tokenizer`.

    A piece that ends a word has the place where the word ends. Of a word of more than 48 bytes the
    last piece stands for all of the rest.

    >>> encoded = CharacterTokenizer().encode_batch(["A \u00e9!", ""])
    >>> encoded.ids.tolist(), encoded.boundaries.tolist()
    ([66, 260, 196, 170, 260, 34, 260], [0, 7, 7])
    >>> encoded.offsets[:4].tolist(), encoded.word_ids.tolist()
    ([[0, 1], [1, 1], [2, 3], [2, 3]], [0, 0, 1, 1, 1, 2, 2])
    """

    def __init__(self) -> None:
        self.vocabulary, self.normalization = Vocabulary(byte_pieces()), GOOGLE_CASED
        self.fingerprint = self.vocabulary.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return CharacterTokenizer, ()

    def save(
        self, folder: Path | str, max_length: int = MODEL_MAX_LENGTH, token_types: bool = True
    ) -> None:
        """Write the file that names it; nothing else has to be known."""
        write_json(Path(folder) / TOKENIZER_CONFIG, {"tokenizer_class": type(self).__name__})

    def encode_words(self, words: Sequence[str]) -> Encoded:
        """The pieces of words of data, each a word as it is given."""
        return self._pieces(list(words), text_starts(list(words)) - np.arange(len(words) + 1), True)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The words of ids, with spaces between; what is no byte or end of a word is left out.

        >>> CharacterTokenizer().decode(CharacterTokenizer().encode("a \u00e9"))
        'a \u00e9'
        """
        end, numbers = self.vocabulary.unk_id, np.asarray(ids)
        values = np.where(numbers == end, ord(" "), numbers - 1)
        kept = values[(values >= 0) & (values < 256)].astype(np.uint8)
        return kept.tobytes().decode("utf-8", "replace").strip()

    def _encode_part(
        self, texts: list[str], starts: np.ndarray, offsets: bool, limit: int
    ) -> Encoded:
        found = self._pieces(texts, starts - np.arange(len(starts)), False)
        sizes = np.diff(found.boundaries)
        if limit < NO_LIMIT and (sizes > limit).any():
            place = np.arange(len(found.ids)) - np.repeat(found.boundaries[:-1], sizes)
            kept, ends = place < limit, np.cumsum(np.minimum(sizes, limit))
            arrays = (found.ids[kept], found.offsets[kept], found.word_ids[kept])
            found = Encoded(*arrays, np.concatenate([[0], ends]))
        if offsets:
            return found
        return Encoded(found.ids, found.offsets[:0], found.word_ids[:0], found.boundaries)

    def _encode_groups(self, texts: list[str], offsets: bool, limit: int) -> Encoded:
        parts = [
            self._encode_part(group, text_starts(group), offsets, limit)
            for group in text_groups(texts, 1)
        ]
        return concatenate(parts, lambda work, items: [*map(work, items)])

    def _pieces(self, texts: list[str], starts: np.ndarray, whole: bool) -> Encoded:
        """All at once; `starts` int64 [N + 1] are those of the texts, one after the other.

        `whole`: a text is one word, whatever is in it.
        """
        joined = "".join(texts)
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        distinct, which = np.unique(codes, return_inverse=True)
        kind = _whole_kind if whole else _kind
        kinds = np.array([kind(int(code)) for code in distinct], np.int8)[which]
        # characters that are read: their texts, and which of them begin a word
        spaces = np.cumsum(kinds == SPACE)
        read = np.flatnonzero(kinds >= ALONE)
        text = np.searchsorted(starts, read, side="right") - 1
        alone = kinds[read] == ALONE
        begins = np.ones(len(read), np.bool_)
        begins[1:] = alone[1:] | alone[:-1] | (np.diff(text) > 0) | (np.diff(spaces[read]) > 0)
        word = np.cumsum(begins) - 1
        # their bytes, of which each word keeps the first
        widths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF).astype(np.int64)
        is_read = np.repeat(kinds >= ALONE, widths)
        values = np.frombuffer(joined.encode("utf-8", "surrogatepass"), np.uint8)[is_read]
        character = np.repeat(np.arange(len(read)), widths[read])
        words = word[-1] + 1 if len(word) else 0
        sizes = np.bincount(word[character], minlength=words)
        place = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        kept = place < MOST_BYTES
        character, of_word = character[kept], word[character[kept]]
        counts = np.minimum(sizes, MOST_BYTES)
        # one piece more for each end of a word
        targets = np.arange(len(character)) + of_word
        ends = np.cumsum(counts) + np.arange(words)
        total = len(character) + words
        ids = np.full(total, self.vocabulary.unk_id, np.int32)
        ids[targets] = values[kept].astype(np.int32) + 1
        firsts = np.flatnonzero(begins)
        lasts = np.append(firsts, len(read))[1:] - 1
        text_of_word = text[firsts]
        after = read[lasts] + 1 - starts[text_of_word]  # int64 [words], places of their ends
        offsets = np.empty((total, 2), np.int32)
        offsets[targets] = (read[character] - starts[text[character]])[:, None] + np.array([0, 1])
        offsets[ends] = after[:, None]
        offsets[ends - 1, 1] = after
        by_text = np.bincount(text_of_word, minlength=len(texts))
        number = np.arange(words) - np.repeat(np.cumsum(by_text) - by_text, by_text)
        word_ids = np.repeat(number, counts + 1).astype(np.int32)
        pieces = np.bincount(text_of_word, weights=counts + 1, minlength=len(texts))
        boundaries = np.concatenate([[0], np.cumsum(pieces.astype(np.int64))])
        return Encoded(ids, offsets, word_ids, boundaries)


@cache
def _kind(code: int) -> int:
    character = chr(code)
    if not CHUNK.match(character):
        return SPACE
    if is_dropped(character) or _is_surrogate(code):
        return DROPPED
    return ALONE if is_punctuation(character) or is_ideograph(character) else PART


def _whole_kind(code: int) -> int:
    return DROPPED if _is_surrogate(code) else PART


def _is_surrogate(code: int) -> bool:
    return 0xD800 <= code < 0xE000  # half of a character: it has no bytes
