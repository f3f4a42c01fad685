"""Stores whose ids are known: document = list of sentences, sentence = list of word numbers."""

import dataclasses
from contextlib import ExitStack
from unittest.mock import patch

import fsspec
import numpy as np

from bertsmith.corpus.build import build
from bertsmith.corpus.build.encode import Part, ShardWriter, finish_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.pairs import EpochPairs, PairRules, PretrainingBatch
from bertsmith.corpus.examples.rng import KEY_DOCUMENTS, derived, seed_key
from bertsmith.corpus.examples.stream import ExampleSettings, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = [f"w{number}" for number in range(4000)]  # word n has the id n + 5
URL = "memory://bucket/store"
TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, *WORDS, "##s", "##t"]))


def make_store(folder, documents, shard_tokens=1 << 20):
    """A store with everything in the train split, in many small shards on request."""
    lines = ([" ".join(WORDS[k] for k in sentence) for sentence in one] for one in documents)
    settings = BuildSettings(sentence_per_line=True, held_out=0.0, shard_tokens=shard_tokens)
    with patch.object(build, "BATCH", 100):  # characters, so that shards can be small
        texts = (Document("text", 1, text) for text in lines)
        build.build_store([], TOKENIZER, folder, settings, documents=texts)
    return TokenStore.open(folder)


def write_shards(folder, shards):
    """A store of shards of documents, without any text in between."""
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
    finish_store(folder, TOKENIZER, {"train": entries, "held_out": []}, text_bytes=0)
    return TokenStore.open(folder)


def ascending(lengths):
    """Documents of sentences of these lengths in which every word stands once, in order."""
    words = iter(range(len(WORDS)))
    return [[[next(words) for _ in range(n)] for n in document] for document in lengths]


def damage(file, offset):
    """One bit of a file is another one."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 4
    file.write_bytes(content)


def stored(name):
    """What a file of the store at `URL` holds."""
    return fsspec.filesystem("memory").cat_file(f"{URL}/{name}")


def replace_stored(name, content):
    fsspec.filesystem("memory").pipe_file(f"{URL}/{name}", content)


def documents_of(split):
    """The ids of a split's sentences, by document."""
    numbers = range(split.num_documents)
    return [[sentence.tolist() for sentence in split.document(number)] for number in numbers]


def stream_of(store, settings=ExampleSettings(24), seed=3):  # noqa: B008
    return PretrainingStream(store.train, store.tokenizer.vocabulary, settings, seed)


def rows(batch):
    """Each example of a batch as bytes."""
    arrays = [np.ascontiguousarray(array) for array in dataclasses.astuple(batch)]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(arrays[0]))]


def epoch_key(seed, epoch=0):
    return derived(seed_key(seed), epoch)


def read_pairs(pairs, max_tokens):
    """[(words of A, words of B, label)] of the pairs of an epoch, read out of one batch."""
    batch = PretrainingBatch.empty(len(pairs), max_tokens + 3, 1, PAD)
    pairs.fill(np.arange(len(pairs)), batch, CLS, SEP)
    words = (batch.input_ids - len(SPECIAL)).tolist()
    starts, ends = batch.token_types.argmax(1).tolist(), batch.lengths.tolist()
    found = zip(words, starts, ends, batch.next_labels.tolist(), strict=True)
    return [(row[1 : b - 1], row[b : end - 1], label) for row, b, end, label in found]


def pairs_of(store, max_tokens, short_rate, key, random_b=True, clean=False):
    """The pairs of a store's train split as `read_pairs` gives them."""
    rules = PairRules(derived(key, KEY_DOCUMENTS), max_tokens, short_rate, random_b, clean)
    return read_pairs(EpochPairs(store.train, rules), max_tokens)
