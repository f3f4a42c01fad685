"""Full rows without padding: the text of a shard end to end, cut every length - 2 tokens.

    shard   w w w w [SEP] w w [SEP] w w w w w ...      each document is followed by one [SEP]
    row k   [CLS] items offset + k n .. offset + (k + 1) n [SEP]      n = length - 2

This is the FULL-SENTENCES packing of RoBERTa (arXiv 1907.11692, section 4.2), but for the cuts:
there a row holds whole sentences and may end early; here it ends at any token, and no row does.
The offset is drawn for each epoch and shard, so that the rows of two epochs are cut elsewhere.
What lies before the offset and after the last whole row waits for another epoch. A shard that has
less than one row gives one, padded.
"""

from __future__ import annotations

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.batch import PretrainingBatch
from bertsmith.corpus.draws import between, derive
from bertsmith.corpus.store import Section, by_number

DERIVE_PACKED_SHARDS, DERIVE_ROWS = 1, 2  # keys under an epoch's; stream.py has the other
DRAW_OFFSET = 0


@compiled
def pack_rows(tokens, begins, documents, starts, stops, rows, cls_id, sep_id, input_ids, lengths):
    """Write items starts[k]:stops[k] of a shard to input_ids[rows[k]], between [CLS] and [SEP].

    begins: int64 [D + 1], the item at which each document begins, `Shard.packed_documents`;
    documents[k]: the document in which items start.
    """
    for k in range(len(rows)):
        row, document = rows[k], documents[k]
        input_ids[row, 0] = cls_id
        column = 1
        for item in range(starts[k], stops[k]):
            if item == begins[document + 1] - 1:
                input_ids[row, column] = sep_id
                document += 1
            else:
                input_ids[row, column] = tokens[item - document]
            column += 1
        input_ids[row, column] = sep_id
        lengths[row] = column + 1


@compiled
def row_keys(key, numbers):
    """uint64 [B]: the key of each row's draws."""
    keys = np.empty(len(numbers), np.uint64)
    for k in range(len(numbers)):
        keys[k] = derive(key, numbers[k])
    return keys


class EpochRows:
    """The packed rows of one epoch (of one section), in text order; found in constant memory."""

    def __init__(self, section: Section, length: int, epoch_key: np.uint64) -> None:
        self.section, self._width = section, length - 2
        self._key = np.uint64(derive(epoch_key, DERIVE_ROWS))
        shards_key = np.uint64(derive(epoch_key, DERIVE_PACKED_SHARDS))
        self._offsets, counts = [], [0]
        for number, shard in enumerate(section.shards):
            spare = max(0, shard.num_tokens + shard.num_documents - self._width)
            key = np.uint64(derive(shards_key, number))
            offset = between(key, DRAW_OFFSET, 0, min(spare, self._width - 1))
            self._offsets.append(offset)
            counts.append((spare - offset) // self._width + 1 if shard.num_documents else 0)
        self._first_rows = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def fill(
        self, numbers: np.ndarray, batch: PretrainingBatch, cls_id: int, sep_id: int
    ) -> np.ndarray:
        """Write the rows of these numbers (int64 [B]); returns uint64 [B], the keys of draws.

        Errors: ValueError that names a damaged file.
        """
        places = np.searchsorted(self._first_rows, numbers, side="right") - 1
        for number, rows in by_number(places):
            shard, local = self.section.shards[number], numbers[rows] - self._first_rows[number]
            begins = shard.packed_documents
            starts = self._offsets[number] + local * self._width
            stops = np.minimum(starts + self._width, begins[-1])
            documents, last = (
                np.searchsorted(begins, items, side="right") - 1 for items in (starts, stops)
            )  # as many separators lie before an item
            tokens = shard.tokens.verified(starts - documents, stops - last)
            pack_rows(
                tokens,
                begins,
                documents,
                starts,
                stops,
                rows,
                cls_id,
                sep_id,
                batch.input_ids,
                batch.lengths,
            )
        return row_keys(self._key, numbers)
