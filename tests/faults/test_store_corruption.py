"""Bytes of a token store changed and files cut: every fault named, none trained on."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.stream import ExampleSettings, Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import verify_store

from ..tiny import piece_tokenizer, write

NOT_OF_THE_STORE = {"corpus-build.json"}  # how far a build came
FLIPS, CUTS = 200, 50


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two generations, each with train and held-out shards."""
    folder = tmp_path_factory.mktemp("store")
    tokenizer = piece_tokenizer(" ".join(f"w{number}" for number in range(500)))
    texts, out = [], folder / "store"
    for number in range(2):
        dice = np.random.default_rng(number)
        lines = [" ".join(f"w{k}" for k in dice.integers(0, 500, 9)) for _ in range(320)]
        documents = "\n\n".join("\n".join(lines[k : k + 8]) for k in range(0, 320, 8))
        texts.append(write(folder / f"{number}.txt", documents))
    settings = BuildSettings(sentence_per_line=True, held_out=0.2, shard_tokens=1000)
    build_store(texts[:1], tokenizer, out, settings)
    append_text(texts[1:], out)
    assert list(verify_store(out)) == []
    return out


def files(store):
    """The store's files, those of the generations' own manifests apart, which nothing reads."""
    tops = {store / name for name in ("manifest.json", "manifest-0001.json")}
    return sorted(
        path
        for path in store.rglob("*")
        if path.is_file()
        and path.name not in NOT_OF_THE_STORE
        and (path in tops or path.parent == store or path.suffix not in (".json", ".txt"))
    )


def rows(folder):
    """All rows of both splits of an epoch."""
    store, found = TokenStore.open(folder), []
    for split in (store.train, store.held_out):
        settings = ExampleSettings(max_length=32)
        stream = PretrainingStream(split, store.tokenizer.vocabulary, settings, seed=1)
        batch, _ = stream.batch(Position(), stream.examples_in_epoch(0))
        found += [array.tobytes() for array in vars(batch).values()]
    return found, store.unigram_counts.tobytes()


def check(store, path, content, expected):
    """The fault is named by who verifies, and by who trains, unless nothing of it is read."""
    sound = path.read_bytes()
    path.write_bytes(content)
    name = str(path.relative_to(store))
    try:
        with (
            pytest.raises(ValueError, match=f"{name}: ")
            if name == "manifest.json"
            else nullcontext()
        ):
            faults = list(verify_store(store))
            assert faults and all(name in fault for fault in faults), (name, faults)
        if name == "manifest-0001.json":  # the newest generation does without it
            earlier = TokenStore.open(store).manifest["earlier"][0]
            with pytest.raises(ValueError, match=f"{name}: "):
                TokenStore.open(store, earlier)
            assert rows(store) == expected
        else:
            with pytest.raises(ValueError, match=f"{name}: "):
                rows(store)
    finally:
        path.write_bytes(sound)


def flipped(content, dice):
    offset = dice.randrange(len(content))
    value = content[offset] ^ dice.randrange(1, 256)
    return content[:offset] + bytes([value]) + content[offset + 1 :]


def cut(content, dice):
    return content[: dice.randrange(len(content))]


def damaged(store, count, damage, seed):
    """(file, its damaged content), every file in turn."""
    dice, paths = random.Random(seed), [path for path in files(store) if path.stat().st_size]
    for number in range(count):
        path = paths[number % len(paths)]
        yield path, damage(path.read_bytes(), dice)


@pytest.mark.parametrize(
    ("damage", "seed"), [(flipped, 0), (cut, 1)], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_in_every_kind_of_file_is_named(store, damage, seed):
    expected = rows(store)
    kinds = {
        path.suffix + path.stem[:5]: (path, content)
        for path, content in damaged(store, 40, damage, seed)
    }
    assert len(kinds) >= 12
    for path, content in kinds.values():
        check(store, path, content, expected)
    assert rows(store) == expected


@pytest.mark.faults
@pytest.mark.parametrize(
    ("damage", "count", "what"),
    [
        (flipped, FLIPS, "single-byte corruptions of a store, each named, none trained on"),
        (cut, CUTS, "truncations of a store, each named, none trained on"),
    ],
    ids=["flips", "truncations"],
)
def test_every_fault_is_named_and_none_is_trained_on(store, tally, damage, count, what):
    expected = rows(store)
    for path, content in damaged(store, count, damage, seed=2):
        check(store, path, content, expected)
        tally(what)
    assert rows(store) == expected
