"""Stores whose ids are known: document = list of sentences, sentence = list of word numbers."""

from contextlib import ExitStack

import numpy as np
import pytest

from bertsmith.corpus.build import build
from bertsmith.corpus.build.encode import Part, ShardWriter, finish_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.pairs import EpochPairs, PairRules, PretrainingBatch
from bertsmith.corpus.examples.rng import KEY_DOCUMENTS, derived, seed_key
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

PAD, _, CLS, SEP, MASK = range(5)
NUM_WORDS = 4000  # word n is "wn" and has the id n + 5; so has the continuation "##cn" behind them


@pytest.fixture(scope="session")
def tokenizer():
    words = [f"w{number}" for number in range(NUM_WORDS)]
    return Tokenizer(Vocabulary([*SPECIAL, *words, "##s", "##t"]))


@pytest.fixture
def make_store(tmp_path, tokenizer, monkeypatch):
    """documents -> TokenStore, everything in the train split, many small shards on request."""

    def make(documents, shard_tokens=1 << 20, name="store"):
        monkeypatch.setattr(build, "BATCH", 100)  # characters, so that shards can be small
        texts = [
            Document(
                "text", 1, [" ".join(f"w{word}" for word in sentence) for sentence in document]
            )
            for document in documents
        ]
        build.build_store(
            [],
            tokenizer,
            tmp_path / name,
            BuildSettings(sentence_per_line=True, held_out=0.0, shard_tokens=shard_tokens),
            documents=texts,
        )
        return TokenStore.open(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def write_store(tokenizer):
    """(folder, shards of documents) -> TokenStore, without any text in between."""

    def write(folder, shards):
        entries = []
        for number, documents in enumerate(shards):
            sentences = [sentence for document in documents for sentence in document]
            part = Part(
                np.concatenate(sentences).astype("<u2") + len(SPECIAL),
                np.array([len(sentence) for sentence in sentences]),
                np.array([len(document) for document in documents]),
            )
            with ExitStack() as stack:
                writer = ShardWriter(stack, folder, f"train-{number:05d}")
                writer.append(part)
                entries.append(writer.finish())
        finish_store(folder, tokenizer, {"train": entries, "held_out": []}, text_bytes=0)
        return TokenStore.open(folder)

    return write


@pytest.fixture(scope="session")
def epoch_key():
    """(seed, epoch) -> the key of an epoch."""
    return lambda seed, epoch=0: derived(seed_key(seed), epoch)


@pytest.fixture(scope="session")
def read_pairs():
    """(`EpochPairs`, max_tokens) -> [(words of A, words of B, label)], read out of one batch."""

    def read(pairs, max_tokens):
        batch = PretrainingBatch.empty(len(pairs), max_tokens + 3, 1, PAD)
        pairs.fill(np.arange(len(pairs)), batch, CLS, SEP)
        words = (batch.input_ids - len(SPECIAL)).tolist()
        starts = batch.token_types.argmax(1).tolist()
        return [
            (row[1 : start - 1], row[start : length - 1], label)
            for row, start, length, label in zip(
                words, starts, batch.lengths.tolist(), batch.next_labels.tolist(), strict=True
            )
        ]

    return read


@pytest.fixture(scope="session")
def make_pairs(read_pairs):
    """The pairs of a store's train split as `read_pairs` gives them."""

    def make(store, max_tokens, short_rate, key, random_b=True, clean=False):
        rules = PairRules(derived(key, KEY_DOCUMENTS), max_tokens, short_rate, random_b, clean)
        return read_pairs(EpochPairs(store.train, rules), max_tokens)

    return make
