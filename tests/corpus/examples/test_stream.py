"""Examples by position, whatever the order, batch size or thread; packed rows; their settings."""

import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.stream import EpochRows, ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store import store as token_store
from bertsmith.corpus.store.store import Shard, TokenStore
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.pretraining.diagnostics import corpus_health

from .. import made
from ..made import CLS, PAD, SEP, ascending, damage, epoch_key, read_pairs, rows, write_shards
from ..made import stream_of as fresh

SETTINGS = ExampleSettings(max_length=24)
CLEAN = replace(SETTINGS, nsp_sampling="clean")
MLM, SOP, LTR = (replace(SETTINGS, objective=name) for name in ("mlm", "mlm+sop", "ltr"))
LENGTHS = np.random.default_rng(0).integers(1, 9, (40, 9))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made.make_store(tmp_path_factory.mktemp("store"), ascending(LENGTHS), shard_tokens=800)


@pytest.fixture
def stream(store):
    return fresh(store)


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


def by_threads(stream, starts):
    """The rows of batches of 7, made in another order by four threads, and the positions after."""
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: stream.batch(start, 7), reversed(starts)))[::-1]
    return [row for batch, _ in batches for row in rows(batch)], [after for _, after in batches]


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


def test_the_shuffled_order_holds_the_pairs_of_the_documents(stream):
    batch, _ = stream.batch(Position(), stream.examples_in_epoch(0))
    in_order = Counter(str(a + b) for a, b, _ in read_pairs(stream.epoch(0), 21))
    assert Counter(segments(batch)) == in_order


def test_seed_changes_the_examples(store, stream):
    other = fresh(store, seed=4)
    assert rows(other.batch(Position(), 8)[0]) != rows(stream.batch(Position(), 8)[0])


def test_positions_name_the_rows_of_a_batch(stream):
    last = Position(0, stream.examples_in_epoch(0) - 1)
    assert stream.positions(last, 3) == [last, Position(1, 0), Position(1, 1)]


def test_whole_words_and_width_of_predictions(store):
    settings = replace(SETTINGS, mlm_probability=0.5, max_predictions_per_seq=7, masking="word")
    batch, _ = fresh(store, settings).batch(Position(), 40)
    assert batch.masked_positions.shape == (40, 7) and batch.masked_weights.sum(1).max() == 7


def test_one_document_makes_no_pairs(make_store):
    store = make_store([[[1, 2], [3]], [[4]]])
    with pytest.raises(ValueError, match=r"0 document.* held_out split.*blank.*holds out more"):
        PretrainingStream(store.held_out, store.tokenizer.vocabulary, SETTINGS, 0)
    batch, _ = fresh(store).batch(Position(), 9)
    assert batch.lengths.min() >= 5


def test_another_vocabulary_is_refused(store):
    other = Vocabulary([*SPECIAL, "a", "b"])
    message = rf"built with vocabulary .*{other.fingerprint[:12]}.*7 pieces"
    with pytest.raises(ValueError, match=message):
        PretrainingStream(store.train, other, SETTINGS, 0)


def by_objective(*settings):
    names = [f"{one.objective}-{one.nsp_sampling}-{one.masking}" for one in settings]
    return pytest.mark.parametrize("settings", settings, ids=names)


EVERY = [
    replace(CLEAN, masking="word"),
    replace(MLM, masking="span", mlm_probability=0.3),
    replace(SOP, masking="span"),
    LTR,
]


@by_objective(SETTINGS, *EVERY)
def test_every_objective_is_a_function_of_the_position(store, settings):
    stream = fresh(store, settings)
    count = stream.examples_in_epoch(0)
    total = count + stream.examples_in_epoch(1) + 10
    expected, end = read(fresh(store, settings), Position(), 1, total)
    assert end == Position(2, 10) == stream.advance(Position(), total)
    # Every row of an epoch once, in another order, and other rows in the next.
    assert len(set(expected[:count])) == count
    again = set(expected[:count]) & set(expected[count:])
    assert len(again) < count / (10 if settings is SETTINGS else 4)
    stream = fresh(store, settings)
    starts = [stream.advance(Position(), first) for first in range(0, total - 7, 7)]
    found, ends = by_threads(stream, starts)
    assert found == expected[: len(found)] and ends[:-1] == starts[1:]
    large, _ = fresh(store, settings).batch(Position(), total)
    assert rows(large) == expected


@by_objective(*EVERY[1::2])
def test_packed_rows_are_full_and_hold_every_word_once(store, settings):
    stream = fresh(store, settings)
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


@by_objective(SETTINGS, *EVERY)
def test_a_damaged_block_is_named_by_the_batch_that_reads_it(make_store, monkeypatch, settings):
    monkeypatch.setattr("bertsmith.corpus.store.blocks.BLOCK", 64)
    folder = make_store([[[word, word + 1]] * 8 for word in range(30)]).folder
    damage(folder / "train-00000.tokens", 200)
    stream = fresh(TokenStore.open(folder), settings)
    with pytest.raises(ValueError, match=r"train-00000\.tokens: block 3 .* is damaged"):
        stream.batch(Position(), stream.examples_in_epoch(0))
    sound = 0
    for index in range(stream.examples_in_epoch(0)):
        try:
            stream.batch(Position(0, index), 1)
        except ValueError:
            continue
        sound += 1
    assert sound > 5  # rows elsewhere are read


# --- a split above `SECTION_TOKENS`, read in sections ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """13 shards of 7 documents; every word stands in the text once."""
    documents = ascending(np.random.default_rng(0).integers(1, 9, (13 * 7, 9)))
    shards = [documents[first : first + 7] for first in range(0, 13 * 7, 7)]
    return write_shards(tmp_path_factory.mktemp("store"), shards).folder


@pytest.fixture
def sectioned(folder, monkeypatch):
    """In 4 sections."""
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 800)
    sectioned = TokenStore.open(folder)
    assert sectioned.train.num_sections == 4
    return sectioned


@pytest.fixture
def opened(sectioned, monkeypatch):
    """The names of the shards that are opened from now on."""
    names, contents = [], Shard.contents
    monkeypatch.setattr(Shard, "contents", lambda self: names.append(self._name) or contents(self))
    return names


@by_objective(SETTINGS, CLEAN, MLM, SOP, LTR)
def test_rows_of_sections_are_a_function_of_the_position(sectioned, settings):
    stream = fresh(sectioned, settings)
    count = stream.examples_in_epoch(0)
    total = count + 100
    whole, end = stream.batch(Position(), total)
    expected = rows(whole)
    assert len(set(expected[:count])) == count
    assert end == stream.advance(Position(), total) and end.epoch == 1
    places = stream.positions(Position(), total)
    assert [place.section for place in places[:count]] == sorted(p.section for p in places[:count])
    starts = [fresh(sectioned, settings).advance(Position(), n) for n in range(0, total, 7)]
    assert starts == places[::7]
    assert by_threads(fresh(sectioned, settings), starts)[0][:total] == expected


def test_an_epoch_reads_every_word_and_mixes_the_shards_anew(sectioned):
    stream = fresh(sectioned, LTR)
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


def test_a_random_b_comes_from_the_section_of_a(sectioned):
    stream = fresh(sectioned)
    for section in range(4):
        pairs = stream.epoch(0, section)
        segments = pairs.segments(np.arange(len(pairs)))
        assert set(segments["b_document"].tolist()) <= set(range(pairs.section.num_documents))
        assert (segments["label"] == 1).any()


def test_a_late_position_opens_one_section_and_drops_what_is_behind(sectioned, opened):
    stream = fresh(sectioned)
    stream.batch(Position(epoch=1000, index=5, section=2), 8)
    assert len(opened) == len(set(opened)) <= 4
    shards = [weakref.ref(shard) for shard in stream.epoch(1000, 2).section.shards]
    for section in (0, 1, 3):
        stream.epoch(1001, section)
    gc.collect()
    assert not any(shard() for shard in shards)


def test_the_health_of_a_large_store_is_judged_by_its_first_section(sectioned, opened):
    assert corpus_health(fresh(sectioned))["duplicate_sentences"] == 0.0
    assert len(set(opened)) <= 4


def test_there_are_no_more_sections_than_shards(folder, monkeypatch):
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 10)
    store = TokenStore.open(folder)
    assert (store.train.num_sections, store.held_out.num_sections) == (13, 1)


# --- packed rows: the text of a shard end to end, cut at every epoch's own offset ---


def packed(store, length, epoch, bare=False):
    """All rows of an epoch in the order of the text, and their lengths."""
    rows = EpochRows(store.train, length, epoch_key(1, epoch), bare)
    batch = PretrainingBatch.empty(len(rows), length, 1, PAD)
    keys = rows.fill(np.arange(len(rows)), batch, CLS, SEP)
    assert len(set(keys.tolist())) == len(rows)
    assert (batch.token_types == 0).all() and (batch.next_labels == 0).all()
    return batch.input_ids, batch.lengths


def as_items(documents):
    """The documents end to end, a separator behind each, as ids."""
    return [item for one in documents for item in [*(word + 5 for s in one for word in s), SEP]]


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


def test_bare_rows_are_text_alone(make_store):
    store = make_store([[[0, 1, 2], [3]], [[10, 11]], [[20, 21, 22, 23]]])
    items, seen = [5, 6, 7, 8, SEP, 15, 16, SEP, 25, 26, 27, 28, SEP], set()
    for epoch in range(30):
        ids, lengths = packed(store, 4, epoch, bare=True)
        offset = ids[0, 0] - 5
        cuts = range(offset, len(items) - 3, 4)
        assert (lengths == 4).all() and ids.tolist() == [items[k : k + 4] for k in cuts]
        seen.add(offset)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("bare", [False, True])
def test_the_next_token_is_predicted_wherever_there_is_one(make_store, bare):
    store = make_store([[[0, 1, 2], [3]], [[10, 11]], [[20, 21, 22, 23]]])
    settings = ExampleSettings(5, objective="ltr", bare=bare)
    stream = PretrainingStream(store.train, store.tokenizer.vocabulary, settings, 1)
    batch, _ = stream.batch(Position(), 8)
    assert (batch.lengths == 5).all()
    # the [SEP] that was put at the end of a row follows from nothing
    assert batch.masked_weights.sum(axis=1).tolist() == [4 if bare else 3] * 8
    assert (batch.masked_labels == batch.input_ids[:, 1:]).all()


@pytest.mark.parametrize("length", [5, 24, 100])
def test_rows_are_the_text_of_each_shard_without_its_ends(make_store, length):
    documents = ascending(np.random.default_rng(0).integers(1, 9, (60, 6)))
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
    row = [CLS, 5, 6, SEP, 7, SEP, SEP]
    for epoch in range(5):
        ids, lengths = packed(store, 12, epoch)
        assert (ids.tolist(), lengths.tolist()) == ([[*row, *[PAD] * 5]], [7])
    assert packed(store, 7, 0)[0].tolist() == [row]  # exactly one row


def test_left_to_right_predicts_the_next_token_of_each(make_store):
    stream = fresh(make_store([[[0, 1]], [[2]]]), replace(LTR, max_length=12))
    batch, following = stream.batch(Position(), 2)
    assert following == Position(2, 0)
    row = [CLS, 5, 6, SEP, 7, SEP, SEP, PAD, PAD, PAD, PAD, PAD]
    assert batch.input_ids.tolist() == [row, row]
    assert batch.masked_positions.tolist() == [list(range(11))] * 2
    assert batch.masked_labels.tolist() == [row[1:]] * 2
    # not the [SEP] that ends the row: where it is cut is nobody's to know
    assert batch.masked_weights.tolist() == [[1.0] * 5 + [0.0] * 6] * 2


@pytest.mark.parametrize("objective", ["mlm", "ltr"])
def test_one_document_is_enough(make_store, objective):
    store = make_store([[[0, 1, 2, 3]], [[9]]])
    settings = ExampleSettings(5, objective=objective)
    with pytest.raises(ValueError, match=r"0 document.*none gives no rows.*holds out more"):
        PretrainingStream(store.held_out, store.tokenizer.vocabulary, settings, 0)
    assert fresh(store, settings).examples_in_epoch(0) in (1, 2)


# --- settings ---


NSP, MASKS = "mlm+nsp", {"mlm_probability": 0.3}
FULL = {"max_length": 24, "max_predictions_per_seq": 22}


@pytest.mark.parametrize(
    ("objective", "values", "message"),
    [
        ("clm", {}, "objective"),
        (NSP, {"max_length": 4}, "max_length"),
        (NSP, {"mlm_probability": 0.0}, "mlm_probability"),
        (NSP, {"short_seq_prob": 1.5}, "short_seq_prob"),
        (NSP, {"max_predictions_per_seq": 0}, "max_predictions_per_seq"),
        (NSP, {"mask_replace_prob": 0.9, "random_replace_prob": 0.2}, "mask_replace_prob"),
        (NSP, {"masking": "phrase"}, "masking"),
        (NSP, {"nsp_sampling": "dirty"}, "nsp_sampling"),
        (NSP, FULL, "`max_length=24` has 21 tokens.*1 to 21, or raise"),
        ("ltr", MASKS, "`mlm_probability=0.3`.*masks nothing: leave `mlm_probability`"),
        ("ltr", {"masking": "span"}, "`masking=span`"),
        ("ltr", {"max_predictions_per_seq": 9}, "`max_predictions_per_seq=9`"),
        ("mlm", {"bare": True}, r"`bare=True`: the objective mlm needs \[CLS\]"),
        ("mlm", {"short_seq_prob": 0.5}, "`short_seq_prob=0.5`: .*mlm has no pairs.*take"),
        ("mlm", {"nsp_sampling": "clean"}, "mlm has no pairs: leave `nsp_sampling` out, or"),
    ],
)
def test_impossible_settings_are_named(objective, values, message):
    with pytest.raises(ValueError, match=message):
        ExampleSettings(objective=objective, **values)


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({"max_length": 128, "mlm_probability": 0.3}, 38),
        ({"max_predictions_per_seq": 21}, 21),
        ({"mlm_probability": 1.0}, 21),  # all but the special ones
        ({"objective": "ltr"}, 23),
    ],
)
def test_width_of_predictions(values, width):
    assert ExampleSettings(**{"max_length": 24, **values}).num_predictions == width
