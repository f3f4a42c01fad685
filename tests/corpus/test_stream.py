"""The stream: examples by position, whatever the order, batch size or thread."""

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bertsmith.corpus.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.text.vocabulary import SPECIAL, Vocabulary

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
    pairs = stream._pairs(0)
    in_order = Counter(
        pairs[index].a.tobytes() + pairs[index].b.tobytes() for index in range(count)
    )
    shuffled = [pairs.shuffled(index) for index in range(count)]
    assert Counter(pair.a.tobytes() + pair.b.tobytes() for pair in shuffled) == in_order


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
    settings = ExampleSettings(length=24, mask_rate=0.5, max_predictions=7, whole_word=True)
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


@pytest.mark.parametrize(
    "values",
    [
        {"length": 4},
        {"mask_rate": 0.0},
        {"short_rate": 1.5},
        {"max_predictions": 0},
        {"mask_share": 0.9, "keep_share": 0.2},
    ],
)
def test_impossible_settings_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ExampleSettings(**values)
