"""Tagged sentences -> rows for the model, with as much of the document around them as fits.

    [CLS]  ... words before | words to be tagged | words after ...  [SEP]

The paper feeds "the maximal document context provided by the data" (section 5.3) and says no more;
here the words to be tagged stand in the middle of a full row, as far as the document allows. The
first piece of each of them has a label (of a GPT, which cannot see the others from there, the
last), all others have IGNORED. Each word of the data is tagged in exactly one row, however long its
sentence is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertsmith.tasks.features import Features, cumulate, gather_spans
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.rows import Encoded, concatenated_ranges, make_rows, pad
from bertsmith.text.tokenizer.tokenizer import Tokenizer

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TagFeatures(Features):
    """N rows of T tokens in which each of W words is tagged once.

    `labels` are int64 [T], IGNORED but at the piece that stands for a word tagged in that row.
    `num_truncated` counts words that are longer than a row.
    """

    word_numbers: np.ndarray  # int64 [T], the word tagged at this token, else -1

    def batch(self, units: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        """Rows with the labels of their tokens, int64 [B, S]."""
        assert self.labels is not None
        ids, types, lengths = self.padded(units, pad_id)
        labels = pad(self.labels, self.boundaries, units, ids.shape[1], IGNORED)
        return {"ids": ids, "types": types, "lengths": lengths, "labels": labels}

    def long_note(self, encoding: EncodingSettings) -> str | None:
        words = f"{self.num_truncated:,} of {int(self.word_numbers.max()) + 1:,} words"
        note = f"{words} have more than {self.max_length - 2} pieces and lose their end"
        return note if self.num_truncated else None

    def long_hint(self, encoding: EncodingSettings) -> str:
        return "a larger maximum length reads more of them"

    def by_word(self, values: np.ndarray) -> np.ndarray:
        """Values of every token [T, ...] -> those of every word [W, ...]."""
        tagged = np.flatnonzero(self.word_numbers >= 0)
        result = np.empty((len(tagged), *values.shape[1:]), values.dtype)
        result[self.word_numbers[tagged]] = values[tagged]
        return result


def featurize_sentences(
    tokenizer: Tokenizer,
    sentences: Sentences,
    labels: np.ndarray | None,
    encoding: EncodingSettings,
) -> TagFeatures:
    """Lay sentences out in rows of at most `max_length` tokens; `labels` int64 [W] or None.

    Sentences that follow each other in a document are tagged in one row, while they have at most
    `encoding.tokens_per_window` tokens and leave half of the row to their context; 0: each sentence
    has its own row, as the paper describes, at several times the cost. A sentence that does not
    fit is tagged in parts of at most half a row, with the rest of it around.
    A word without a piece (control characters) becomes [UNK]; of one that is longer than a row,
    such as an address, the first pieces are read.

    Errors: ValueError for a `max_length` without room for a piece.
    """
    max_length = encoding.max_length
    if max_length < 3:
        raise ValueError(f"`max_length={max_length}`: no room for a piece: use at least 3")
    room = max_length - 2
    tokens_per_window = min(encoding.tokens_per_window, room // 2)
    pieces, num_truncated = encode_words(tokenizer, sentences.words, room)
    if not encoding.document_context:
        limits, tokens_per_window = sentences.boundaries, 0
    else:
        changes = np.flatnonzero(np.diff(sentences.documents)) + 1
        limits = sentences.boundaries[np.concatenate([[0], changes, [len(sentences)]])]
    tagged = _spans(pieces.boundaries, sentences, room, tokens_per_window)
    begins, ends = _surround(pieces.boundaries, tagged, limits, room)
    firsts, counts = pieces.boundaries[begins], pieces.boundaries[ends] - pieces.boundaries[begins]
    rows = make_rows(gather_spans(pieces, firsts, counts), None, tokenizer.vocabulary)
    num_words = tagged[:, 1] - tagged[:, 0]
    words = concatenated_ranges(tagged[:, 0], num_words)  # [W]
    starts = np.repeat(rows.boundaries[:-1] + 1 - firsts, num_words)
    positions = starts + pieces.boundaries[words]
    if tokenizer.vocabulary.left_to_right:
        positions = starts + pieces.boundaries[words + 1] - 1
    word_numbers = np.full(len(rows.ids), -1, np.int64)
    word_numbers[positions] = words
    token_labels = None
    if labels is not None:
        token_labels = np.full(len(rows.ids), IGNORED, np.int64)
        token_labels[positions] = labels[words]
    return TagFeatures(
        ids=rows.ids,
        token_types=rows.token_types,
        boundaries=rows.boundaries,
        labels=token_labels,
        max_length=max_length,
        num_truncated=num_truncated,
        word_numbers=word_numbers,
    )


def encode_words(tokenizer: Tokenizer, words: list[str], room: int) -> tuple[Encoded, int]:
    """The pieces of each word, at least one and at most `room`, and how many words have more."""
    encoded = tokenizer.encode_words(words)
    lengths = np.diff(encoded.boundaries)
    pieces = gather_spans(encoded, encoded.boundaries[:-1], np.minimum(lengths, room))
    empty = np.flatnonzero(lengths == 0)
    ids = np.insert(pieces.ids, pieces.boundaries[empty], tokenizer.vocabulary.unk_id)
    boundaries = cumulate(lengths.clip(1, room))
    return Encoded(ids, pieces.offsets, pieces.word_ids, boundaries), int((lengths > room).sum())


def _spans(
    edges: np.ndarray, sentences: Sentences, room: int, tokens_per_window: int
) -> np.ndarray:
    """The words tagged together, from and to: int64 [N, 2], in the order of the text.

    edges: int64 [W + 1], the pieces of all words, counted up.
    """
    spans: list[tuple[int, int]] = []
    before = -1
    ends, documents = sentences.boundaries[1:].tolist(), sentences.documents.tolist()
    begin = 0
    for end, document in zip(ends, documents, strict=True):
        if document == before and edges[end] - edges[spans[-1][0]] <= tokens_per_window:
            spans[-1] = spans[-1][0], end
        elif edges[end] - edges[begin] <= room:
            spans.append((begin, end))
        else:
            while begin < end:
                last = int(np.searchsorted(edges, edges[begin] + room // 2, side="right")) - 1
                cut = min(max(last, begin + 1), end)
                spans.append((begin, cut))
                begin = cut
        begin, before = end, document
    return np.array(spans, np.int64)


def _surround(
    edges: np.ndarray, tagged: np.ndarray, limits: np.ndarray, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """The words from and to that fill each row around what is tagged in it: int64 [N], [N].

    limits: int64 [D + 1], the first words of the texts that context may come from.
    """
    text = np.searchsorted(limits, tagged[:, 0], side="right") - 1
    begin, end = edges[tagged[:, 0]], edges[tagged[:, 1]]  # from here on in pieces
    before, after = begin - edges[limits[text]], edges[limits[text + 1]] - end
    free = room - (end - begin)
    left = np.minimum(before, np.maximum(free // 2, free - after))
    right = np.minimum(after, free - left)
    # Only whole words: a row never begins in the middle of one.
    first = np.searchsorted(edges, begin - left, side="left")
    last = np.searchsorted(edges, end + right, side="right") - 1
    return first, last
