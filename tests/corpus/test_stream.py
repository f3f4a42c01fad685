"""The stream: examples by position, whatever the order, batch size or thread."""

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bertsmith.corpus.examples.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

PAD, _, CLS, SEP, MASK = range(5)
SETTINGS = ExampleSettings(length=24)


@pytest.fixture
def store(make_store):
    words = iter(range(4000))
    lengths = np.random.default_rng(0).integers(1, 9, (40, 9))
    documents = [[[next(words) for _ in range(n)] for n in document] for document in lengths]
    return make_store(documents, shard_tokens=800)


@pytest.fixture
def stream(store, tokenizer):
    return PretrainingStream(store.train, tokenizer.vocabulary, SETTINGS, seed=3)


def rows(batch):
    """Each example of a batch as bytes."""
    arrays = [np.ascontiguousarray(array) for array in dataclasses.astuple(batch)]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(arrays[0]))]


def segments(batch):
    """A and B of each example as bytes of the store's ids."""
    ids = batch.input_ids.copy()
    for row, kept in enumerate(batch.masked_weights == 1):
        ids[row, batch.masked_positions[row, kept]] = batch.masked_labels[row, kept]
    return [row[row >= 5].astype(np.uint16).tobytes() for row in ids]


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


def test_an_epoch_holds_every_example_once_and_the_next_one_others(stream):
    count = stream.examples_in_epoch(0)
    first, position = read(stream, Position(), 1, count)
    assert position == Position(1, 0)
    assert len(set(first)) == count
    second, _ = read(stream, position, 1, stream.examples_in_epoch(1))
    assert len(set(first) & set(second)) < count / 10
    # The shuffled order holds the same pairs as the order of the documents.
    pairs = stream.epoch(0)
    in_order = Counter(
        pairs[index].a.tobytes() + pairs[index].b.tobytes() for index in range(count)
    )
    batch, _ = stream.batch(Position(), count)
    assert Counter(segments(batch)) == in_order


def test_examples_do_not_depend_on_batch_size_order_or_threads(store, stream, tokenizer):
    total = stream.examples_in_epoch(0) + stream.examples_in_epoch(1) + 10
    expected, end = read(stream, Position(), 1, total)
    assert end == Position(2, 10) == stream.advance(Position(), total)

    fresh = PretrainingStream(store.train, tokenizer.vocabulary, SETTINGS, seed=3)
    starts = [fresh.advance(Position(), first) for first in range(0, total - 7, 7)]
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: fresh.batch(start, 7), reversed(starts)))
    found = [row for batch, _ in reversed(batches) for row in rows(batch)]
    assert found == expected[: len(found)]
    assert [after for _, after in reversed(batches)][:-1] == starts[1:]


def test_seed_changes_the_examples(store, tokenizer, stream):
    other = PretrainingStream(store.train, tokenizer.vocabulary, SETTINGS, seed=4)
    assert rows(other.batch(Position(), 8)[0]) != rows(stream.batch(Position(), 8)[0])


def test_positions_name_the_rows_of_a_batch(stream):
    count = stream.examples_in_epoch(0)
    assert stream.positions(Position(0, count - 1), 3) == [
        Position(0, count - 1),
        Position(1, 0),
        Position(1, 1),
    ]


def test_whole_words_and_width_of_predictions(store, tokenizer):
    settings = ExampleSettings(length=24, mask_rate=0.5, max_predictions=7, masking="word")
    batch, _ = PretrainingStream(store.train, tokenizer.vocabulary, settings, 0).batch(
        Position(), 40
    )
    counts = batch.masked_weights.sum(1)
    assert batch.masked_positions.shape == (40, 7) and counts.max() == 7


def test_one_document_makes_no_pairs(make_store, tokenizer):
    store = make_store([[[1, 2], [3]], [[4]]])
    with pytest.raises(ValueError, match=r"0 document.* held_out split.*blank line.*--held-out"):
        PretrainingStream(store.held_out, tokenizer.vocabulary, SETTINGS, 0)
    batch, _ = PretrainingStream(store.train, tokenizer.vocabulary, SETTINGS, 0).batch(
        Position(), 9
    )
    assert batch.lengths.min() >= 5


def test_another_vocabulary_is_refused(store):
    other = Vocabulary([*SPECIAL, "a", "b"])
    with pytest.raises(
        ValueError, match=rf"built with vocabulary .*{other.fingerprint[:12]}.*7 pieces"
    ):
        PretrainingStream(store.train, other, SETTINGS, 0)


EVERY = [
    ExampleSettings(24, pairs="clean", masking="word"),
    ExampleSettings(24, objective="mlm", masking="span", mask_rate=0.3),
    ExampleSettings(24, objective="mlm+sop", masking="span"),
    ExampleSettings(24, objective="ltr"),
]


@pytest.mark.parametrize("settings", EVERY, ids=lambda settings: settings.objective)
def test_every_objective_is_a_function_of_the_position(store, tokenizer, settings):
    def fresh():
        return PretrainingStream(store.train, tokenizer.vocabulary, settings, seed=3)

    count = fresh().examples_in_epoch(0)
    total = count + fresh().examples_in_epoch(1) + 5
    expected, end = read(fresh(), Position(), 1, total)
    assert end == Position(2, 5)
    # Every row of an epoch once, in another order, and other rows in the next.
    assert len(set(expected[:count])) == count
    assert len(set(expected[:count]) & set(expected[count:])) < count / 4
    stream = fresh()
    starts = [stream.advance(Position(), first) for first in range(0, total - 7, 7)]
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: stream.batch(start, 7)[0], reversed(starts)))
    found = [row for batch in reversed(batches) for row in rows(batch)]
    assert found == expected[: len(found)]
    large, _ = fresh().batch(Position(), total)
    assert rows(large) == expected


@pytest.mark.parametrize("settings", EVERY[1::2], ids=lambda settings: settings.objective)
def test_packed_rows_are_full_and_hold_every_word_once(store, tokenizer, settings):
    stream = PretrainingStream(store.train, tokenizer.vocabulary, settings, seed=3)
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
    train = TokenStore.open(folder).train
    stream = PretrainingStream(train, tokenizer.vocabulary, settings, seed=3)
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
