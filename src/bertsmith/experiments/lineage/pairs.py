"""Translation data: files -> pairs of texts -> pieces -> batches by tokens; and pieces -> text.

WordPiece sets punctuation apart and forgets where a space was. Here a sign keeps what it touched:
`T-Shirt.` becomes `T` `￭-￭` `Shirt` `￭.`, and a piece with the joiner ￭ (that of OpenNMT's
tokenizer) is written without a space on that side. So pieces hold the text itself, in any language
and without rules, at no more pieces a sentence; a model learns the spaces along with the signs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertsmith.base.files import nearby
from bertsmith.base.settings import nearest
from bertsmith.tasks.features import cumulate, token_budget_batches
from bertsmith.tasks.labels import listed
from bertsmith.text.readers.files import read_lines
from bertsmith.text.readers.tables import SUFFIXES, file_suffix, read_columns
from bertsmith.text.tokenizer.normalize import Normalization, is_punctuation
from bertsmith.text.tokenizer.rows import Encoded, concatenated_ranges, pad
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.train import VocabularySettings, train_vocabulary
from bertsmith.training.finetuning.fit import Epochs

JOINER = "￭"  # no space on this side
# Ideographs set apart could not be joined again: a run of them is one word, of several pieces.
CASED = Normalization(lowercase=False, strip_accents="none", split_cjk=False)
PAD = 0  # the id of [PAD] in every vocabulary that we train
JOINT, SOURCE, TARGET = "vocab", "source", "target"  # folders


@dataclass(frozen=True)
class Pairs:
    """N texts and their translations.

    name   where they come from, for messages
    lines  the line of each in its file; None: 1 to N
    """

    source: list[str]
    target: list[str]
    name: str
    lines: Sequence[int] | None = None

    def __post_init__(self) -> None:
        assert len(self.source) == len(self.target)

    def __len__(self) -> int:
        return len(self.source)

    def lines_of(self, indices: Sequence[int] | np.ndarray) -> str:
        """Name the lines of some pairs, the first few of many: "lines 3, 8"."""
        names = [str(line) for line in self.of(indices).lines or ()]
        return f"line{'s' * (len(names) > 1)} {listed(names)}"

    def of(self, indices: Sequence[int] | np.ndarray) -> Pairs:
        """Some of the pairs, with their lines."""
        lines = self.lines or range(1, len(self) + 1)
        source, target = ([side[k] for k in indices] for side in (self.source, self.target))
        return Pairs(source, target, self.name, [lines[k] for k in indices])


def read_pairs(
    source: Path,
    target: Path | None = None,
    columns: tuple[str, str] = ("source", "target"),
    skip_empty: bool = False,
) -> Pairs:
    """Read two text files, whose lines are translations, or one table (tsv, csv, jsonl, parquet).

    columns     names of the table's columns; a tsv or csv whose first line has neither name is read
                as two columns without a header
    skip_empty  leave out pairs of which a text is empty, with a line on stderr, as training may; an
                evaluation needs every line

    Errors: ValueError for an absent file, a kind of file that cannot be read, unequal numbers of
    lines, a line of more columns, empty texts, and the same text on both sides of most pairs; those
    of `read_lines` and `read_columns`.
    """
    for path in filter(None, (source, target)):
        if not path.is_file():
            raise ValueError(f"{path}: no such file{nearby(path)}")
    pairs = _read_table(source, columns) if target is None else _read_lines(source, target)
    pairs = _without_empty(pairs, skip_empty)
    same = [k for k, (a, b) in enumerate(zip(pairs.source, pairs.target, strict=True)) if a == b]
    if len(same) > len(pairs) / 2:
        raise ValueError(
            f"{pairs.name}: source and target are the same text in {len(same):,} of {len(pairs):,}"
            f" pairs ({pairs.lines_of(same)}): give the same sentences in two languages"
        )
    return pairs


def _read_lines(source: Path, target: Path) -> Pairs:
    for path in (source, target):
        if file_suffix(path) not in (None, ".txt"):
            raise ValueError(f"{path}: a table holds both languages: give it alone")
    ours, theirs = ([line for _, line in read_lines(path)] for path in (source, target))
    if len(ours) != len(theirs):
        raise ValueError(
            f"{source} has {len(ours):,} lines, {target} has {len(theirs):,}: line k of one must be"
            " the translation of line k of the other"
        )
    return Pairs(ours, theirs, f"{source}, {target}")


def _read_table(path: Path, columns: tuple[str, str]) -> Pairs:
    if file_suffix(path) is None:
        raise ValueError(
            f"{path}: a text file holds one language: give that of the other, too, or one table"
            f" ({', '.join(SUFFIXES)})"
        )
    wanted = dict(zip(columns, ("the source text", "the target text"), strict=True))
    found, lines = read_columns(path, wanted, header=columns)
    for name, values in found.items():
        for line, value in zip(lines, values, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{path}:{line}: '{name}' is {value!r:.40}: expected a text")
    ours, theirs = ([text.strip() for text in found[name]] for name in columns)
    return Pairs(ours, theirs, str(path), lines)


def _without_empty(pairs: Pairs, skip: bool) -> Pairs:
    full = [bool(a and b) for a, b in zip(pairs.source, pairs.target, strict=True)]
    empty = np.flatnonzero(~np.array(full, bool))
    where = f"{pairs.name}: {pairs.lines_of(empty)}: the text of one language is empty"
    if len(empty) == len(pairs):
        raise ValueError(f"{pairs.name}: no pair of texts in it")
    if len(empty) and not skip:
        raise ValueError(f"{where}: fill or remove them on both sides")
    if len(empty):
        print(f"{where}: {len(empty):,} of {len(pairs):,} pairs are left out", file=sys.stderr)
    return pairs.of(np.flatnonzero(full)) if len(empty) else pairs


class Sentences(NamedTuple):
    """The T pieces of N sentences; sentence k is `boundaries[k]:boundaries[k + 1]`."""

    ids: np.ndarray  # int32 [T]
    boundaries: np.ndarray  # int64 [N + 1]

    @property
    def lengths(self) -> np.ndarray:
        """Pieces of each, int64 [N]."""
        return np.diff(self.boundaries)

    def padded(self, indices: np.ndarray) -> np.ndarray:
        """Some of them, int64 [B, longest], with 0 after their ends."""
        width = int(self.lengths[indices].max(initial=0))
        return pad(self.ids, self.boundaries, indices, width, PAD).astype(np.int64)

    def framed(self, kept: np.ndarray, before: Sequence[int], after: int) -> Sentences:
        """The first `kept` [N] pieces of each, between other ids.

        >>> Sentences(np.array([7, 8, 9]), np.array([0, 2, 3])).framed(np.array([1, 1]), [2], 3)
        Sentences(ids=array([2, 7, 3, 2, 9, 3], dtype=int32), boundaries=array([0, 3, 6]))
        """
        boundaries = cumulate(len(before) + kept + 1)
        ids = np.full(boundaries[-1], after, np.int32)
        for k, one in enumerate(before):
            ids[boundaries[:-1] + k] = one
        here = concatenated_ranges(boundaries[:-1] + len(before), kept)
        ids[here] = self.ids[concatenated_ranges(self.boundaries[:-1], kept)]
        return Sentences(ids, boundaries)


@dataclass(frozen=True)
class Language:
    """Texts to pieces and back; a sentence begins with [CLS] and ends with [SEP].

    With a vocabulary of other origin, without joined signs, `decode` sets every sign apart.
    """

    tokenizer: Tokenizer

    @classmethod
    def train(cls, texts: Sequence[str], size: int) -> Language:
        """Learn a cased vocabulary of `size` pieces. Errors: those of `train_vocabulary`."""
        signs = sorted(filter(is_punctuation, set("".join(texts))))
        joined = tuple(form for sign in signs for form in _joined(sign))
        vocabulary = train_vocabulary(texts, size, CASED, VocabularySettings(keep=joined))
        return cls(Tokenizer(vocabulary, CASED))

    def __len__(self) -> int:
        return len(self.tokenizer.vocabulary)

    @property
    def bos(self) -> int:
        return self.tokenizer.vocabulary.cls_id

    @property
    def eos(self) -> int:
        return self.tokenizer.vocabulary.sep_id

    @cached_property
    def _forms(self) -> np.ndarray:
        """Ids of each piece alone, joined before, after, on both sides: int32 [V, 4]."""
        ids = self.tokenizer.vocabulary.ids
        forms = np.repeat(np.arange(len(self), dtype=np.int32)[:, None], 4, axis=1)
        for piece, number in ids.items():
            if len(piece) == 1 and is_punctuation(piece):
                forms[number, 1:] = [ids.get(form, number) for form in _joined(piece)]
        return forms

    def encode(self, texts: Sequence[str]) -> Sentences:
        """The pieces of each text, without those of begin and end."""
        encoded, forms = self.tokenizer.encode_batch(texts), self._forms
        is_sign = forms[encoded.ids, 1] != encoded.ids
        before, after = _joints(encoded, is_sign)
        return Sentences(forms[encoded.ids, before + 2 * after], encoded.boundaries)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of pieces; those of begin, end and padding are left out."""
        kept = [number for number in ids if number not in (PAD, self.bos, self.eos)]
        return join(self.tokenizer.decode(kept).split(" "))

    def sources(self, texts: Sequence[str], max_length: int) -> tuple[Sentences, np.ndarray]:
        """Rows of pieces and end, cut to `max_length`; the indices of those that were cut."""
        pieces = self.encode(texts)
        kept = np.minimum(pieces.lengths, max_length - 1)
        return pieces.framed(kept, [], self.eos), np.flatnonzero(kept < pieces.lengths)

    def targets(self, texts: Sequence[str]) -> Sentences:
        """Rows of begin, pieces and end."""
        pieces = self.encode(texts)
        return pieces.framed(pieces.lengths, [self.bos], self.eos)


@dataclass(frozen=True)
class Languages:
    """The languages of both sides, the same one for a joint vocabulary."""

    source: Language
    target: Language

    @classmethod
    def train(cls, pairs: Pairs, size: int, joint: bool = True) -> Languages:
        """Learn one vocabulary of both sides, or one of each, of `size` pieces."""
        if joint:
            both = Language.train([*pairs.source, *pairs.target], size)
            return cls(both, both)
        return cls(Language.train(pairs.source, size), Language.train(pairs.target, size))

    @classmethod
    def open(cls, folder: Path) -> Languages:
        """Open what `save` wrote. Errors: as `read_tokenizer`."""
        if (folder / JOINT).exists():
            both = Language(Tokenizer.from_pretrained(folder / JOINT))
            return cls(both, both)
        sides = (Tokenizer.from_pretrained(folder / name) for name in (SOURCE, TARGET))
        return cls(*map(Language, sides))

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @staticmethod
    def are_in(folder: Path) -> bool:
        """True if `save` has written all of it there."""
        return (folder / JOINT).exists() or all((folder / one).exists() for one in (SOURCE, TARGET))

    def save(self, folder: Path) -> None:
        """Write the folder `vocab` of a joint vocabulary, or `source` and `target`."""
        sides = {SOURCE: self.source, TARGET: self.target}
        for name, language in ({JOINT: self.source} if self.joint else sides).items():
            language.tokenizer.save(folder / name)


def words(texts: Sequence[str]) -> list[list[str]]:
    """Cut texts into words and signs, which keep what they touch.

    >>> words(['He\u2019s "in".', "3.5 %"])
    [['He', '￭’￭', 's', '"￭', 'in', '￭"', '￭.'], ['3', '￭.￭', '5', '%']]
    """
    encoded = _word_cutter().encode_batch(texts)
    around = np.repeat(np.array(texts, object), np.diff(encoded.boundaries))
    spans = zip(around.tolist(), *encoded.offsets.T.tolist(), strict=True)
    found: list[str] = [text[start:end] for text, start, end in spans]
    signs = {word for word in set(found) if len(word) == 1 and is_punctuation(word)}
    is_sign = np.array([word in signs for word in found], bool)
    joints = zip(found, *(side.tolist() for side in _joints(encoded, is_sign)), strict=True)
    joined = [JOINER * before + word + JOINER * after for word, before, after in joints]
    ends = encoded.boundaries.tolist()
    return [joined[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def join(found: Sequence[str]) -> str:
    """Write words with spaces between them, but where a joiner stands.

    >>> join(words(['He\u2019s "in".'])[0])
    'He\u2019s "in".'
    """
    text = " ".join(found).replace(f" {JOINER}", "").replace(f"{JOINER} ", "")
    return text.replace(JOINER, "")


@functools.cache
def _word_cutter() -> Tokenizer:
    return Tokenizer(Vocabulary(SPECIAL), CASED)  # every word is one [UNK]


def _joined(sign: str) -> tuple[str, str, str]:
    return JOINER + sign, sign + JOINER, JOINER + sign + JOINER


def _joints(encoded: Encoded, is_sign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signs that touch what is before them, and what is after them: bool [T] each.

    Between two signs the second has the joint.
    """
    touches = np.zeros(len(encoded.ids) + 1, bool)
    touches[1:-1] = encoded.offsets[1:, 0] == encoded.offsets[:-1, 1]
    touches[encoded.boundaries] = False
    is_next_sign = np.append(is_sign[1:], False)
    return touches[:-1] & is_sign, touches[1:] & is_sign & ~is_next_sign


@dataclass(frozen=True, eq=False)
class PairRows:
    """N pairs as a translation model reads them."""

    source: Sentences  # x_1 .. x_S [SEP]
    target: Sentences  # [CLS] y_1 .. y_T [SEP]

    def __len__(self) -> int:
        return len(self.source.boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Positions of the longer side of each, int64 [N]; the target's as the model reads it."""
        return np.maximum(self.source.lengths, self.target.lengths - 1)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Some of the pairs, padded with 0, all int64.

        source [B, S], source_lengths [B], target_in [B, T] from [CLS], target_out [B, T] to [SEP]
        """
        target = self.target.padded(indices)
        begun = np.arange(target.shape[1] - 1) < self.target.lengths[indices, None] - 1
        return {
            "source": self.source.padded(indices),
            "source_lengths": self.source.lengths[indices],
            "target_in": np.where(begun, target[:, :-1], PAD),
            "target_out": target[:, 1:],
        }


def encode(pairs: Pairs, languages: Languages, max_length: int) -> PairRows:
    """Encode pairs to train on.

    A pair of which a side has more than `max_length` positions is left out, with a line on stderr:
    half a sentence is not the translation of a whole one.

    Errors: ValueError when no pair fits.
    """
    source, cut = languages.source.sources(pairs.source, max_length)
    target = languages.target.targets(pairs.target)
    is_long = target.lengths - 1 > max_length
    is_long[cut] = True
    if is_long.all():
        raise ValueError(f"{pairs.name}: every pair has more than {max_length} pieces")
    if is_long.any():
        lines = pairs.lines_of(np.flatnonzero(is_long))
        fault = f"more than {max_length} pieces, the end included"
        left_out = f"{is_long.sum():,} of {len(pairs):,} pairs are left out"
        print(f"{pairs.name}: {lines}: {fault}: {left_out}", file=sys.stderr)
        return encode(pairs.of(np.flatnonzero(~is_long)), languages, max_length)
    return PairRows(source, target)


class TokenBatches(Epochs):
    """Batches of at most so many positions a side, padding included, or of one pair."""

    def __init__(self, lengths: np.ndarray, tokens: int, seed: int) -> None:
        """`lengths`: positions of the longer side of each pair, int64 [N]."""
        super().__init__(functools.partial(token_batches, lengths, tokens, seed))


def token_batches(lengths: np.ndarray, tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """An epoch in batches of pairs of about one length, as arrays of indices.

    Which of the pairs of one length meet, and the order of the batches, are random, a pure function
    of (seed, epoch). The sizes are the same in every epoch.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = token_budget_batches(lengths[order], tokens)
    return [order[batches[k]] for k in random.permutation(len(batches))]


SPLITS = {"train": ("train",), "dev": ("dev", "val"), "test": ("test",)}  # beginnings of names
LEAST_DEV, MOST_DEV = 10, 1000  # pairs that are split off for dev


def read_splits(
    data: Path, source: str, target: str, needed: Collection[str] = ()
) -> dict[str, Pairs]:
    """Read a folder, or one table of which every so-manieth pair, at most 1,000, becomes dev.

    Returns "train" and "dev", where they are there, and tests by name ("test_2016_flickr").

    The folder has text files of both languages, train.en and train.de, or tables, train.tsv; also
    packed. dev may be called val or valid. Of a table `source` and `target` are columns.

    Errors: ValueError for a folder without one of "train" and "dev" that is `needed`, or with two;
    as `read_pairs`.
    """
    if not data.exists():
        raise ValueError(f"{data}: no such file or folder{nearby(data)}")
    if data.is_file():
        pairs = read_pairs(data, None, (source, target), skip_empty=True)
        every = max(LEAST_DEV, -(-len(pairs) // MOST_DEV))
        if len(pairs) < 2 * every:
            raise ValueError(f"{data}: {len(pairs)} pairs are too few to train and measure on")
        is_dev = np.arange(len(pairs)) % every == every - 1
        train, dev = (pairs.of(np.flatnonzero(part)) for part in (~is_dev, is_dev))
        return {"train": train, "dev": dev}
    found = {split: _split_files(data, names, source, target) for split, names in SPLITS.items()}
    for split in needed:
        if len(found[split]) != 1:
            there = listed(sorted(found[split])) if found[split] else "none"
            raise ValueError(
                f"{data}: needs one pair of files {split}.{source} and {split}.{target}, or one"
                f" table {split}.tsv, but has {there}"
            )

    files = found.pop("test")
    for split, paths in found.items():
        if len(paths) == 1:
            (files[split],) = paths.values()
    return {
        name: read_pairs(*paths, (source, target), skip_empty=name == "train")
        for name, paths in files.items()
    }


def fingerprint(*splits: Pairs) -> str:
    """SHA-256 of the texts, wherever they are."""
    whole = hashlib.sha256()
    for pairs in splits:
        for pair in zip(pairs.source, pairs.target, strict=True):
            whole.update(json.dumps(pair).encode())
        whole.update(b"\n")
    return whole.hexdigest()


def split_of(data: Mapping[str, Pairs], split: str, origin: Path) -> Pairs:
    """The pairs of a split by name; "test" is the only test set.

    Errors: ValueError with the names that there are.
    """
    tests = [name for name in data if name not in ("train", "dev")]
    if split == "test" and len(tests) == 1:
        return data[tests[0]]
    if split not in data:
        raise ValueError(f"{origin}: no split '{split}': {nearest(split, data)}")
    return data[split]


def _split_files(
    folder: Path, beginnings: tuple[str, ...], source: str, target: str
) -> dict[str, tuple[Path, Path | None]]:
    """The files of a split by their name without endings: both languages' texts, or a table."""
    found: dict[str, tuple[Path, Path | None]] = {}
    for path in sorted(folder.iterdir()):
        name, _, endings = path.name.partition(".")
        if not name.startswith(beginnings):
            continue
        language, _, packing = endings.partition(".")
        other = path.with_name(".".join(filter(None, (name, target, packing))))
        if language == source:
            found[name] = path, other
        elif file_suffix(path) in SUFFIXES:
            found[name] = path, None
    return found
