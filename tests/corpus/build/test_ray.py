"""A build on Ray: the same bytes as without it."""

import sys

import pytest

from bertsmith.base import cluster
from bertsmith.corpus.build import build
from bertsmith.corpus.build import ray as ray_encoding
from bertsmith.corpus.build.batches import BatchReader, unique_inputs, write_list
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.encode import Encoder, encode_in_order
from bertsmith.corpus.build.ray import PieceReader, TextEncoder
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.store.store import token_type

from ...tiny import contents, write
from ..made import TOKENIZER


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.corpus.build.batches.PIECE", 100)  # a file a piece, here
    files = []
    for number, name in enumerate("abc"):
        lines = (f"W{number} w{k}. W{k + 1} w{k + 2} {'w3 ' * (k % 7)}" for k in range(60))
        files.append(write(tmp_path / f"{name}.txt", "\n\n".join(lines)))
    return files


@pytest.fixture
def make(texts, tmp_path):
    """(name, settings) -> the folder of a store that is built."""

    def make(name, **settings):
        build_store(texts, TOKENIZER, tmp_path / name, BuildSettings(**settings))
        return tmp_path / name

    return make


@pytest.mark.slow
def test_a_store_built_on_ray_has_the_same_bytes(texts, make, tmp_path, monkeypatch):
    pytest.importorskip("ray.data", reason="the extra ray is not installed")
    monkeypatch.setattr(build, "BATCH", 200)
    listed = tmp_path / "list.jsonl"
    entry = {"source": str(texts[1]), "document": 5, "line": 11, "reason": "test"}
    write_list(listed, "a test", {}, unique_inputs(texts), [entry])
    options = {"shard_tokens": 300, "held_out": 0.1, "exclude": [listed]}
    local = contents(make("local", **options))
    assert contents(make("ray", backend="ray", workers=2, **options)) == local

    # begun here, killed, finished there
    write_json = build.write_json

    def killed(path, value):
        write_json(path, value)
        if path.name == build.BUILD and len(value["shards"]["train"]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(build, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        make("both", **options)
    monkeypatch.setattr(build, "write_json", write_json)
    assert contents(make("both", backend="ray", **options)) == local

    write(texts[2], b"good\n\n\xff\n")
    with pytest.raises(ValueError, match=r"c.txt:3: not UTF-8"):
        make("bad", backend="ray", held_out=0.1)


def test_rows_hold_what_the_local_backend_makes(texts):
    """The parts that run on the cluster, without one."""
    local = Encoder(TOKENIZER, sentence_per_line=False, held_out=0.3)
    expected = list(encode_in_order(BatchReader(texts, "text", {}, 200), local, 1))
    actor = TextEncoder(ray_encoding._files(TOKENIZER), False, 0.3)
    for skipped in (0, 5):
        first = expected[skipped][0]
        reader = PieceReader(BatchReader(texts, "text", {}, 200, first))
        rows = [actor(row) for piece in range(first[0], 3) for row in reader({"piece": piece})]
        found = [ray_encoding._from_row(row, token_type(len(TOKENIZER.vocabulary))) for row in rows]
        assert len(found) == len(expected) - skipped
        for (place, encoded), (position, wanted) in zip(found, expected[skipped:], strict=True):
            assert place == position and encoded.num_bytes == wanted.num_bytes
            for ours, theirs in zip(encoded[1:], wanted[1:], strict=True):
                for values, others in zip(ours, theirs, strict=True):
                    assert values.dtype == others.dtype and (values == others).all()


def test_a_cluster_of_another_version_loses_nothing(make, fake_ray, monkeypatch):
    out = make("store", shard_tokens=300)
    (out / "manifest.json").unlink()  # as if it were unfinished
    before = contents(out)
    monkeypatch.setattr(cluster, "_versions_of_nodes", lambda: {"node c": {"Python": "2"}})
    with pytest.raises(ValueError, match="node c of the Ray cluster: Python 2"):
        make("store", shard_tokens=300, backend="ray")
    assert contents(out) == before and fake_ray.connected == [True, False]


def test_a_file_that_a_machine_does_not_have_is_no_fault_of_the_input(texts, monkeypatch):
    """A ValueError would be one, and the finished shards would be removed."""
    monkeypatch.setattr("bertsmith.corpus.build.batches.PIECE", 1 << 20)
    reader = PieceReader(BatchReader(texts, "text", {}, 200))
    assert reader.reader.pieces == [texts]  # cut before, as the command does
    texts[1].unlink()
    with pytest.raises(OSError, match=r"b.txt: not on .*: put it where all can read it"):
        list(reader({"piece": 0}))


def test_without_ray_the_extra_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="ray"):
        make("s", backend="ray")
