"""A split above `SECTION_TOKENS` is read in sections: all of it, in bounded time and memory."""

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bertsmith.corpus.examples.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store import store as token_store
from bertsmith.corpus.store.store import Shard, TokenStore
from bertsmith.training.pretraining.diagnostics import corpus_health

EVERY = [
    ExampleSettings(24),
    ExampleSettings(24, pairs="clean"),
    ExampleSettings(24, objective="mlm"),
    ExampleSettings(24, objective="mlm+sop"),
    ExampleSettings(24, objective="ltr"),
]


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
def store(folder, monkeypatch):
    """In 4 sections."""
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 800)
    store = TokenStore.open(folder)
    assert store.train.num_sections == 4
    return store


def fresh(store, tokenizer, settings=EVERY[0]):
    return PretrainingStream(store.train, tokenizer.vocabulary, settings, seed=3)


def rows(batch):
    arrays = [np.ascontiguousarray(array) for array in dataclasses.astuple(batch)]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(arrays[0]))]


@pytest.mark.parametrize("settings", EVERY, ids=lambda settings: settings.objective)
def test_rows_are_a_function_of_the_position(store, tokenizer, settings):
    stream = fresh(store, tokenizer, settings)
    count = stream.examples_in_epoch(0)
    total = count + 100
    whole, end = stream.batch(Position(), total)
    expected = rows(whole)
    assert len(set(expected[:count])) == count
    assert end == stream.advance(Position(), total) and end.epoch == 1
    places = stream.positions(Position(), total)
    assert [place.section for place in places[:count]] == sorted(p.section for p in places[:count])
    starts = [fresh(store, tokenizer, settings).advance(Position(), n) for n in range(0, total, 7)]
    assert starts == places[::7]
    other = fresh(store, tokenizer, settings)
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda start: other.batch(start, 7)[0], reversed(starts)))
    found = [row for batch in reversed(batches) for row in rows(batch)]
    assert found[:total] == expected


def test_an_epoch_reads_every_word_and_mixes_the_shards_anew(store, tokenizer):
    stream = fresh(store, tokenizer, ExampleSettings(24, objective="ltr"))
    divided = []
    for epoch in range(2):
        found = []
        for section in range(4):
            part = stream.epoch(epoch, section)
            batch, _ = stream.batch(Position(epoch, 0, section), len(part))
            found.append(frozenset(batch.input_ids[batch.input_ids >= 5].tolist()))
        assert not any(a & b for a in found for b in found if a is not b)
        lost = store.train.num_tokens - sum(map(len, found))
        assert 0 <= lost <= 2 * 21 * len(store.train.shards)  # at the ends of the shards
        divided.append(found)
    assert set(divided[0]) != set(divided[1])


def test_a_random_b_comes_from_the_section_of_a(store, tokenizer):
    stream = fresh(store, tokenizer)
    for section in range(4):
        pairs = stream.epoch(0, section)
        documents = {number for number in range(pairs.section.num_documents)}
        segments = pairs.segments(np.arange(len(pairs)))
        assert set(segments["b_document"].tolist()) <= documents
        assert (segments["label"] == 1).any()


def test_a_late_position_opens_one_section_and_drops_what_is_behind(store, tokenizer, monkeypatch):
    opened = []
    contents = Shard.contents
    monkeypatch.setattr(Shard, "contents", lambda self: opened.append(self._name) or contents(self))
    stream = fresh(store, tokenizer)
    stream.batch(Position(epoch=1000, index=5, section=2), 8)
    assert len(opened) == len(set(opened)) <= 4
    shards = [weakref.ref(shard) for shard in stream.epoch(1000, 2).section.shards]
    for section in (0, 1, 3):
        stream.epoch(1001, section)
    gc.collect()
    assert not any(shard() for shard in shards)


def test_the_health_of_a_large_store_is_judged_by_its_first_section(store, tokenizer, monkeypatch):
    read = set()
    files = Shard.contents
    monkeypatch.setattr(Shard, "contents", lambda self: read.add(self._name) or files(self))
    health = corpus_health(fresh(store, tokenizer))
    assert health["duplicate_sentences"] == 0.0
    assert len(read) <= 4


def test_there_are_no_more_sections_than_shards(folder, monkeypatch):
    monkeypatch.setattr(token_store, "SECTION_TOKENS", 10)
    store = TokenStore.open(folder)
    assert (store.train.num_sections, store.held_out.num_sections) == (13, 1)
