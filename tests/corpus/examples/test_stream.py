"""The stream: examples by position, whatever the order, batch size or thread; packed rows."""

import dataclasses
import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.rng import derived, seed_key
from bertsmith.corpus.examples.stream import EpochRows, ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store import store as token_store
from bertsmith.corpus.store.store import Shard, TokenStore
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.pretraining.diagnostics import corpus_health

PAD, _, CLS, SEP, MASK = range(5)
SETTINGS = ExampleSettings(max_length=24)


@pytest.fixture
def store(make_store):
    words = iter(range(4000))
    lengths = np.random.default_rng(0).integers(1, 9, (40, 9))
    documents = [[[next(words) for _ in range(n)] for n in document] for document in lengths]
    return make_store(documents, shard_tokens=800)


def fresh(store, tokenizer, settings=SETTINGS, seed=3):
    return PretrainingStream(store.train, tokenizer.vocabulary, settings, seed)


@pytest.fixture
def stream(store, tokenizer):
    return fresh(store, tokenizer)


def rows(batch):
    """Each example of a batch as bytes."""
    arrays = [np.ascontiguousarray(array) for array in dataclasses.astuple(batch)]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(arrays[0]))]


def segments(batch):
    """The words of A and B of each example."""
    ids = batch.input_ids.copy()
    for row, kept in enumerate(batch.masked_weights == 1):
        ids[row, batch.masked_positions[row, kept]] = batch.masked_labels[row, kept]
    return [str((row[row >= 5] - 5).tolist()) for row in ids]


def read(stream, position, size, count):
    """`count` batches one after the other, and the position after them."""
    examples = []
    for _ in range(count):
        batch, position = stream.batch(position, size)
        examples += rows(batch)
    return examples, position


def test_shapes_types_and_layout(stream, store):
    batch, _ = stream.batch(Position(), 50)
    kinds = {name: (array.shape, str(array.dtype)) for name, array in vars(batch).items()}
    assert kinds == {
        "input_ids": ((50, 24), "int32"),
        "token_types": ((50, 24), "int32"),
        "lengths": ((50,), "int32"),
        "masked_positions": ((50, 4), "int32"),
        "masked_labels": ((50, 4), "int32"),
        "masked_weights": ((50, 4), "float32"),
        "next_labels": ((50,), "int64"),
    }
    for row in range(50):
        ids, length = batch.input_ids[row].copy(), batch.lengths[row]
        kept = batch.masked_weights[row] == 1
        assert kept.sum() == min(4, max(1, round(length * 0.15)))
        ids[batch.masked_positions[row][kept]] = batch.masked_labels[row][kept]
        separators = np.flatnonzero(ids == SEP)
        assert ids[0] == CLS and separators[-1] == length - 1 and len(separators) == 2
        assert (ids[length:] == PAD).all()
        types = np.zeros(24)
        types[separators[0] + 1 : length] = 1
        assert (batch.token_types[row] == types).all()
        a, b = ids[1 : separators[0]], ids[separators[0] + 1 : length - 1]
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
        if batch.next_labels[row] == 0:
            assert a.max() < b.min()
    assert 0.4 < batch.next_labels.mean() < 0.95


def test_an_epoch_holds_every_example_once_and_the_next_one_others(stream, read_pairs):
    count = stream.examples_in_epoch(0)
    first, position = read(stream, Position(), 1, count)
    assert position == Position(1, 0)
    assert len(set(first)) == count
    second, _ = read(stream, position, 1, stream.examples_in_epoch(1))
    assert len(set(first) & set(second)) < count / 10
    # The shuffled order holds the same pairs as the order of the documents.
    in_order = Counter(str(a + b) for a, b, _ in read_pairs(stream.epoch(0), 21))
    batch, _ = stream.batch(Position(), count)
    assert Counter(segments(batch)) == in_order


def test_examples_do_not_depend_on_batch_size_order_or_threads(store, stream, tokenizer):
    total = stream.examples_in_epoch(0) + stream.examples_in_epoch(1) + 10
    expected, end = read(stream, Position(), 1, total)
    assert end == Position(2, 10) == stream.advance(Position(), total)

    other = fresh(store, tokenizer)
    starts = [other.advance(Position(), first) for first in range(0, total - 7, 7)]
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: other.batch(start, 7), reversed(starts)))
    found = [row for batch, _ in reversed(batches) for row in rows(batch)]
    assert found == expected[: len(found)]
    assert [after for _, after in reversed(batches)][:-1] == starts[1:]


def test_seed_changes_the_examples(store, tokenizer, stream):
    other = fresh(store, tokenizer, seed=4)
    assert rows(other.batch(Position(), 8)[0]) != rows(stream.batch(Position(), 8)[0])


def test_positions_name_the_rows_of_a_batch(stream):
    count = stream.examples_in_epoch(0)
    assert stream.positions(Position(0, count - 1), 3) == [
        Position(0, count - 1),
        Position(1, 0),
        Position(1, 1),
    ]


def test_whole_words_and_width_of_predictions(store, tokenizer):
    settings = ExampleSettings(
        max_length=24, mlm_probability=0.5, max_predictions_per_seq=7, masking="word"
    )
    batch, _ = fresh(store, tokenizer, settings).batch(Position(), 40)
    counts = batch.masked_weights.sum(1)
    assert batch.masked_positions.shape == (40, 7) and counts.max() == 7


def test_one_document_makes_no_pairs(make_store, tokenizer):
    store = make_store([[[1, 2], [3]], [[4]]])
    with pytest.raises(ValueError, match=r"0 document.* held_out split.*blank line.*--held-out"):
        PretrainingStream(store.held_out, tokenizer.vocabulary, SETTINGS, 0)
    batch, _ = fresh(store, tokenizer).batch(Position(), 9)
    assert batch.lengths.min() >= 5


def test_another_vocabulary_is_refused(store):
    other = Vocabulary([*SPECIAL, "a", "b"])
    with pytest.raises(
        ValueError, match=rf"built with vocabulary .*{other.fingerprint[:12]}.*7 pieces"
    ):
        PretrainingStream(store.train, other, SETTINGS, 0)


EVERY = [
    ExampleSettings(24, nsp_sampling="clean", masking="word"),
    ExampleSettings(24, objective="mlm", masking="span", mlm_probability=0.3),
    ExampleSettings(24, objective="mlm+sop", masking="span"),
    ExampleSettings(24, objective="ltr"),
]
OF_SECTIONS = [
    ExampleSettings(24),
    ExampleSettings(24, nsp_sampling="clean"),
    ExampleSettings(24, objective="mlm"),
    ExampleSettings(24, objective="mlm+sop"),
    ExampleSettings(24, objective="ltr"),
]


@pytest.mark.parametrize("settings", EVERY, ids=lambda settings: settings.objective)
def test_every_objective_is_a_function_of_the_position(store, tokenizer, settings):
    stream = fresh(store, tokenizer, settings)
    count = stream.examples_in_epoch(0)
    total = count + stream.examples_in_epoch(1) + 5
    expected, end = read(fresh(store, tokenizer, settings), Position(), 1, total)
    assert end == Position(2, 5)
    # Every row of an epoch once, in another order, and other rows in the next.
    assert len(set(expected[:count])) == count
    assert len(set(expected[:count]) & set(expected[count:])) < count / 4
    stream = fresh(store, tokenizer, settings)
    starts = [stream.advance(Position(), first) for first in range(0, total - 7, 7)]
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: stream.batch(start, 7)[0], reversed(starts)))
    found = [row for batch in reversed(batches) for row in rows(batch)]
    assert found == expected[: len(found)]
    large, _ = fresh(store, tokenizer, settings).batch(Position(), total)
    assert rows(large) == expected


@pytest.mark.parametrize("settings", EVERY[1::2], ids=lambda settings: settings.objective)
def test_packed_rows_are_full_and_hold_every_word_once(store, tokenizer, settings):
    stream = fresh(store, tokenizer, settings)
    batch, _ = stream.batch(Position(), stream.examples_in_epoch(0))
    assert (batch.lengths == 24).all()
    used = batch.masked_weights[:, :-1] if settings.objective == "ltr" else batch.masked_weights
    assert (used == 1).all()
    assert (batch.token_types == 0).all() and (batch.next_labels == 0).all()
    if settings.objective == "mlm":
        np.put_along_axis(batch.input_ids, batch.masked_positions, batch.masked_labels, 1)
    words = batch.input_ids[batch.input_ids >= 5]
    assert len(set(words.tolist())) == len(words)  # each word is in the text once
    ends = 2 * 21 * len(store.train.shards)  # at most a row less one at either end of a shard
    assert len(words) >= store.train.num_tokens - ends


@pytest.mark.parametrize("settings", [SETTINGS, *EVERY])
def test_a_damaged_block_is_named_by_the_batch_that_reads_it(
    make_store, tokenizer, monkeypatch, settings
):
    monkeypatch.setattr("bertsmith.corpus.store.blocks.BLOCK", 64)
    folder = make_store([[[word, word + 1]] * 8 for word in range(30)]).folder
    file = folder / "train-00000.tokens"
    content = bytearray(file.read_bytes())
    content[200] ^= 4
    file.write_bytes(content)
    stream = fresh(TokenStore.open(folder), tokenizer, settings)
    with pytest.raises(ValueError, match=r"train-00000\.tokens: block 3 .* is damaged"):
        stream.batch(Position(), stream.examples_in_epoch(0))
    numbers = [stream.batch(place, 1) for place in sound_places(stream)]
    assert len(numbers) > 5  # rows elsewhere are read


def sound_places(stream):
    for index in range(stream.examples_in_epoch(0)):
        try:
            stream.batch(Position(0, index), 1)
        except ValueError:
            continue
        yield Position(0, index)


# --- a split above `SECTION_TOKENS`, read in sections ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_store):
    """13 shards of 7 documents; every word stands in the text once."""
    words, dice = iter(range(4000)), np.random.default_rng(0)
    shards = [
        [[[next(words) for _ in range(n)] for n in dice.integers(1, 9, 9)] for _ in range(7)]
        for _ in range(13)
    ]
    return write_store(tmp_path_factory.mktemp("store"), shards).folder


@pytest.fixture
def sectioned(folder, monkeypatch):
    """In 4 sections."""
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 800)
    sectioned = TokenStore.open(folder)
    assert sectioned.train.num_sections == 4
    return sectioned


@pytest.mark.parametrize("settings", OF_SECTIONS, ids=lambda settings: settings.objective)
def test_rows_are_a_function_of_the_position(sectioned, tokenizer, settings):
    stream = fresh(sectioned, tokenizer, settings)
    count = stream.examples_in_epoch(0)
    total = count + 100
    whole, end = stream.batch(Position(), total)
    expected = rows(whole)
    assert len(set(expected[:count])) == count
    assert end == stream.advance(Position(), total) and end.epoch == 1
    places = stream.positions(Position(), total)
    assert [place.section for place in places[:count]] == sorted(p.section for p in places[:count])
    starts = [
        fresh(sectioned, tokenizer, settings).advance(Position(), n) for n in range(0, total, 7)
    ]
    assert starts == places[::7]
    other = fresh(sectioned, tokenizer, settings)
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: other.batch(start, 7)[0], reversed(starts)))
    found = [row for batch in reversed(batches) for row in rows(batch)]
    assert found[:total] == expected


def test_an_epoch_reads_every_word_and_mixes_the_shards_anew(sectioned, tokenizer):
    stream = fresh(sectioned, tokenizer, ExampleSettings(24, objective="ltr"))
    divided = []
    for epoch in range(2):
        found = []
        for section in range(4):
            part = stream.epoch(epoch, section)
            batch, _ = stream.batch(Position(epoch, 0, section), len(part))
            found.append(frozenset(batch.input_ids[batch.input_ids >= 5].tolist()))
        assert not any(a & b for a in found for b in found if a is not b)
        lost = sectioned.train.num_tokens - sum(map(len, found))
        assert 0 <= lost <= 2 * 21 * len(sectioned.train.shards)  # at the ends of the shards
        divided.append(found)
    assert set(divided[0]) != set(divided[1])


def test_a_random_b_comes_from_the_section_of_a(sectioned, tokenizer):
    stream = fresh(sectioned, tokenizer)
    for section in range(4):
        pairs = stream.epoch(0, section)
        documents = {number for number in range(pairs.section.num_documents)}
        segments = pairs.segments(np.arange(len(pairs)))
        assert set(segments["b_document"].tolist()) <= documents
        assert (segments["label"] == 1).any()


def test_a_late_position_opens_one_section_and_drops_what_is_behind(
    sectioned, tokenizer, monkeypatch
):
    opened = []
    contents = Shard.contents
    monkeypatch.setattr(Shard, "contents", lambda self: opened.append(self._name) or contents(self))
    stream = fresh(sectioned, tokenizer)
    stream.batch(Position(epoch=1000, index=5, section=2), 8)
    assert len(opened) == len(set(opened)) <= 4
    shards = [weakref.ref(shard) for shard in stream.epoch(1000, 2).section.shards]
    for section in (0, 1, 3):
        stream.epoch(1001, section)
    gc.collect()
    assert not any(shard() for shard in shards)


def test_the_health_of_a_large_store_is_judged_by_its_first_section(
    sectioned, tokenizer, monkeypatch
):
    read = set()
    files = Shard.contents
    monkeypatch.setattr(Shard, "contents", lambda self: read.add(self._name) or files(self))
    health = corpus_health(fresh(sectioned, tokenizer))
    assert health["duplicate_sentences"] == 0.0
    assert len(read) <= 4


def test_there_are_no_more_sections_than_shards(folder, monkeypatch):
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 10)
    store = TokenStore.open(folder)
    assert (store.train.num_sections, store.held_out.num_sections) == (13, 1)


# --- packed rows: the text of a shard end to end, cut at every epoch's own offset ---


def packed(store, length, epoch):
    """All rows of an epoch in the order of the text, and their lengths."""
    rows = EpochRows(store.train, length, derived(seed_key(1), epoch))
    batch = PretrainingBatch.empty(len(rows), length, 1, PAD)
    keys = rows.fill(np.arange(len(rows)), batch, CLS, SEP)
    assert len(set(keys.tolist())) == len(rows)
    assert (batch.token_types == 0).all() and (batch.next_labels == 0).all()
    return batch.input_ids, batch.lengths


def as_items(documents):
    """The documents end to end, a separator behind each, as ids."""
    return [
        item
        for document in documents
        for item in [*(word + 5 for sentence in document for word in sentence), SEP]
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
        offset = ids[0, 1] - 5
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
        text = np.array(as_items(documents[first : first + shard.num_documents]))
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
    stream = fresh(store, tokenizer, settings)
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
        stream = fresh(store, tokenizer, settings)
        assert stream.examples_in_epoch(0) in (1, 2)
