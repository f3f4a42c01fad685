"""Full rows: the text of a shard end to end, cut at every epoch's own offset."""

import numpy as np
import pytest

from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.rng import derive, seed_key
from bertsmith.corpus.examples.stream import EpochRows, ExampleSettings, Position, PretrainingStream

PAD, _, CLS, SEP, MASK = range(5)
FIRST_WORD = 5  # id of w0


def packed(store, length, epoch):
    """All rows of an epoch in the order of the text, and their lengths."""
    rows = EpochRows(store.train, length, np.uint64(derive(seed_key(1), epoch)))
    batch = PretrainingBatch.empty(len(rows), length, 1, PAD)
    keys = rows.fill(np.arange(len(rows)), batch, CLS, SEP)
    assert len(set(keys.tolist())) == len(rows)
    assert (batch.token_types == 0).all() and (batch.next_labels == 0).all()
    return batch.input_ids, batch.lengths


def items_of(documents):
    """The documents end to end, a separator behind each, as ids."""
    return [
        item
        for document in documents
        for item in [*(word + FIRST_WORD for sentence in document for word in sentence), SEP]
    ]


def test_three_documents_by_hand(make_store):
    store = make_store([[[0, 1, 2], [3]], [[10, 11]], [[20, 21, 22, 23]]])
    # The items, w0 having the id 5:  5 6 7 8 [SEP] 15 16 [SEP] 25 26 27 28 [SEP]
    by_offset = {
        0: [[5, 6, 7, 8], [SEP, 15, 16, SEP], [25, 26, 27, 28]],
        1: [[6, 7, 8, SEP], [15, 16, SEP, 25], [26, 27, 28, SEP]],
        2: [[7, 8, SEP, 15], [16, SEP, 25, 26]],
        3: [[8, SEP, 15, 16], [SEP, 25, 26, 27]],
    }
    seen = set()
    for epoch in range(30):
        ids, lengths = packed(store, 6, epoch)
        assert (lengths == 6).all()
        offset = ids[0, 1] - FIRST_WORD
        assert ids.tolist() == [[CLS, *items, SEP] for items in by_offset[offset]]
        seen.add(offset)
    assert seen == {0, 1, 2, 3}


@pytest.fixture
def documents():
    words = iter(range(4000))
    lengths = np.random.default_rng(0).integers(1, 9, (60, 6))
    return [[[next(words) for _ in range(n)] for n in document] for document in lengths]


@pytest.mark.parametrize("length", [5, 24, 100])
def test_rows_are_the_text_of_each_shard_without_its_ends(make_store, documents, length):
    store = make_store(documents, shard_tokens=400)
    assert len(store.train.shards) > 2
    ids, lengths = packed(store, length, epoch=2)
    assert (lengths == length).all()
    assert (ids[:, 0] == CLS).all() and (ids[:, -1] == SEP).all()
    found, first = ids[:, 1:-1], 0
    for shard in store.train.shards:
        text = np.array(items_of(documents[first : first + shard.num_documents]))
        first += shard.num_documents
        count = (found.max(1) <= text.max()).sum()  # words ascend through the text
        mine, found = found[:count].ravel(), found[count:]
        starts = [k for k in range(length - 2) if np.array_equal(text[k : k + len(mine)], mine)]
        assert len(starts) == 1  # every token of the run, once and in order
        assert len(text) - starts[0] - len(mine) < length - 2
    assert len(found) == 0


def test_a_shard_shorter_than_a_row_is_padded(make_store):
    store = make_store([[[0, 1]], [[2]]])
    for epoch in range(5):
        ids, lengths = packed(store, 12, epoch)
        assert ids.tolist() == [[CLS, 5, 6, SEP, 7, SEP, SEP, PAD, PAD, PAD, PAD, PAD]]
        assert lengths.tolist() == [7]
    ids, lengths = packed(store, 7, 0)  # exactly one row
    assert ids.tolist() == [[CLS, 5, 6, SEP, 7, SEP, SEP]]


def test_left_to_right_predicts_the_next_token_of_each(make_store, tokenizer):
    store = make_store([[[0, 1]], [[2]]])
    settings = ExampleSettings(12, objective="ltr")
    stream = PretrainingStream(store.train, tokenizer.vocabulary, settings, 0)
    batch, following = stream.batch(Position(), 2)
    assert following == Position(2, 0)
    row = [CLS, 5, 6, SEP, 7, SEP, SEP, PAD, PAD, PAD, PAD, PAD]
    assert batch.input_ids.tolist() == [row, row]
    assert batch.masked_positions.tolist() == [list(range(11))] * 2
    assert batch.masked_labels.tolist() == [row[1:]] * 2
    # not the [SEP] that ends the row: where it is cut is nobody's to know
    assert batch.masked_weights.tolist() == [[1.0] * 5 + [0.0] * 6] * 2


def test_one_document_is_enough(make_store, tokenizer):
    store = make_store([[[0, 1, 2, 3]], [[9]]])
    for objective in ("mlm", "ltr"):
        settings = ExampleSettings(5, objective=objective)
        with pytest.raises(ValueError, match=r"0 document.*none gives no rows.*--held-out"):
            PretrainingStream(store.held_out, tokenizer.vocabulary, settings, 0)
        stream = PretrainingStream(store.train, tokenizer.vocabulary, settings, 0)
        assert stream.examples_in_epoch(0) in (1, 2)
