"""Stores whose ids are known: document = list of sentences, sentence = list of word numbers."""

from contextlib import ExitStack

import numpy as np
import pytest

from bertsmith.corpus.build import build
from bertsmith.corpus.build.encode import Part, ShardWriter, finish_store
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

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
            workers=1,
            sentence_per_line=True,
            held_out=0.0,
            documents=texts,
            shard_tokens=shard_tokens,
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
