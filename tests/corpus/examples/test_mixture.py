"""Several stores with weights: pure in the seed, exact on a resume, never repeated in silence."""

import json
import shutil

import numpy as np
import pytest

from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.mixture import Mixture, open_corpus, open_stream
from bertsmith.corpus.examples.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.readers.documents import Document

from ...tiny import word_tokenizer
from ..made import rows, write_shards

SETTINGS = ExampleSettings(24, objective="ltr")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores that share no word, one three times the other."""
    folder = tmp_path_factory.mktemp("stores")
    documents = [[[word, word + 1, word + 2] * 3] * 4 for word in range(0, 1600, 4)]
    small = write_shards(folder / "small", [documents[:100]])
    return small, write_shards(folder / "large", [documents[100:250], documents[250:]])


@pytest.fixture
def mixture(stores):
    small, large = stores
    return open_corpus([f"{small.folder}=0.3", f"{large.folder}=0.7"])


def stream(mixture, seed=3, settings=SETTINGS):
    return open_stream(mixture.train, mixture.tokenizer.vocabulary, settings, seed)


def from_small(batch):
    return np.where(batch.input_ids >= 5, batch.input_ids, 0).max(1) < 405


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm", "mlm+sop", "ltr"])
def test_batches_do_not_depend_on_their_size_or_on_what_was_read_before(mixture, objective):
    settings = ExampleSettings(24, objective=objective)
    whole, end = stream(mixture, settings=settings).batch(Position(), 300)
    expected, found, position = rows(whole), [], Position()
    for size in (1, 7, 50, 3, 200, 39):
        fresh = stream(mixture, settings=settings)  # as after a restart
        assert fresh.advance(position, size) == fresh.batch(position, size)[1]
        assert fresh.positions(position, 2)[1] == fresh.advance(position, 1)
        batch, position = fresh.batch(position, size)
        position = from_mapping(Position, json.loads(json.dumps(to_mapping(position))), "state")
        found += rows(batch)
    assert found == expected
    assert (position.index, position.parts) == (300, end.parts)


def test_shares_are_those_asked_for_and_each_store_is_read_in_its_own_order(mixture):
    mixed = stream(mixture)
    batch, end = mixed.batch(Position(), 400)
    small = from_small(batch)
    assert abs(small.mean() - 0.3) < 4 * (0.3 * 0.7 / 400) ** 0.5  # four standard deviations
    assert small.any() and not small.all()
    for number, part in enumerate((small, ~small)):
        alone, after = mixed.streams[number].batch(Position(), int(part.sum()))
        assert (batch.input_ids[part] == alone.input_ids).all()
        assert end.parts[number] == after


def test_the_seed_changes_the_mixture(mixture):
    first, second = (stream(mixture, seed).batch(Position(), 64)[0] for seed in (3, 4))
    assert rows(first) != rows(second)
    assert (from_small(first) != from_small(second)).any()


def test_a_position_says_which_store_began_again(mixture):
    mixed = stream(mixture)
    used_up = mixed.examples_in_epoch(0)
    position = mixed.advance(Position(), 2 * used_up)
    assert position.epoch == max(part.epoch for part in position.parts) >= 1
    assert {part.epoch for part in position.parts} != {position.epoch}


def test_counts_are_those_of_a_text_with_the_shares(mixture, stores):
    counts = mixture.unigram_counts
    total = sum(int(store.unigram_counts.sum()) for store in stores)
    assert counts[:405].sum() / total == pytest.approx(0.3, abs=0.01)  # rounding to whole counts
    assert counts.dtype == np.int64 and len(counts) == len(stores[0].unigram_counts)


def test_one_store_is_itself(stores):
    small, _ = stores
    for source in (small.folder, str(small.folder), [f"{small.folder}=2"], [small.folder]):
        opened = open_corpus(source)
        assert isinstance(opened, TokenStore) and opened.fingerprint == small.fingerprint
    assert isinstance(stream(small), PretrainingStream)
    assert small.record() == {"path": str(small.folder), "fingerprint": small.fingerprint}


def test_a_folder_may_be_called_like_a_weight(stores, tmp_path):
    small, *_ = stores
    by_year = tmp_path / "year=2020"
    shutil.copytree(small.folder, by_year)
    for source in (str(by_year), [by_year], f"{by_year}=2"):
        assert open_corpus(source).fingerprint == small.fingerprint


def test_weights_and_stores_make_the_fingerprint(stores):
    small, large = stores
    prints = {Mixture([small, large], weights).fingerprint for weights in ([1, 1], [1, 2], [2, 4])}
    assert len(prints) == 2
    assert Mixture([large, small], [1, 1]).fingerprint not in prints


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{small}=0.5", "{large}"], "large: several stores need weights"),
        (["{small}=0", "{large}=1"], "small=0: the weight must be above 0"),
        (["{small}=nan", "{large}=1"], "small=nan: the weight must be above 0"),
        (["{small}=1", "{small}=2"], "small: named twice"),
        (["{small}=1", "{large}s=2"], "larges: no finished token store"),
    ],
)
def test_what_makes_no_mixture_is_named(stores, words, message):
    folders = {"small": stores[0].folder, "large": stores[1].folder}
    with pytest.raises(ValueError, match=message):
        open_corpus([word.format(**folders) for word in words])


def test_a_cache_for_one_remote_store_but_not_for_both_is_refused(stores, cache, monkeypatch):
    sizes = [store.train.bytes_at_once for store in stores]
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str((sum(sizes) - 1) / 1e9))
    remote = open_corpus([f"file://{store.folder}=1" for store in stores])
    with pytest.raises(ValueError, match=r"small, file://.*large: .*are read together.*CACHE_GB"):
        stream(remote)
    stream(open_corpus([f"file://{stores[1].folder}=1", f"{stores[0].folder}=1"]))
    monkeypatch.setenv("BERTSMITH_CACHE_GB", str(sum(sizes) / 1e9))
    stream(open_corpus([f"file://{store.folder}=1" for store in stores]))


def test_stores_of_different_vocabularies_are_refused(stores, tmp_path):
    documents = [Document("text", 1, [f"v{n} v1"]) for n in range(4)]
    other = word_tokenizer(["v0 v1 v2 v3"])
    build_store([], other, tmp_path / "other", BuildSettings(held_out=0.0), documents=documents)
    with pytest.raises(ValueError, match=r"other and .*small were built with different tokenizers"):
        open_corpus([f"{stores[0].folder}=1", f"{tmp_path}/other=1"])
