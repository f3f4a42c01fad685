"""Building a store: what is in it, the same bytes however it is built, restarts and faults."""

import errno
import fcntl
import gzip
import io
import os
import signal
import subprocess
import sys
from itertools import islice

import fsspec
import numpy as np
import pytest

from bertsmith.base.files import FOLDER_LOCK, locked_folder
from bertsmith.cli.main import one_line
from bertsmith.corpus.build import batches as sources
from bertsmith.corpus.build import build
from bertsmith.corpus.build import encode as encoding
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.store import blocks
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.readers.documents import Document

from ...tiny import contents, write
from ..made import TOKENIZER, documents_of


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two files of 120 documents with paragraphs of two sentences each; some are equal."""
    monkeypatch.setattr(build, "BATCH", 1000)
    dice = np.random.default_rng(0)
    for name in ("a.txt", "b.txt"):
        documents = []
        for _ in range(60):
            words = [f"w{word}s" for word in dice.integers(0, 4000, 60)]
            sentences = [" ".join(words[k : k + 6]).capitalize() + "." for k in range(0, 60, 6)]
            documents.append("\n".join(" ".join(sentences[k : k + 2]) for k in range(0, 10, 2)))
        documents[10:15] = documents[:5]
        write(tmp_path / name, "\n\n".join(documents))
    return [tmp_path / "a.txt", tmp_path / "b.txt"]


@pytest.fixture
def make(corpus, tmp_path):
    """(name, inputs, settings) -> the folder of a store that is built."""

    def make(name, inputs=corpus, **settings):
        build_store(inputs, TOKENIZER, tmp_path / name, BuildSettings(**settings))
        return tmp_path / name

    return make


def build_made(out, documents):
    return build_store([], TOKENIZER, out, BuildSettings(held_out=0.0), documents=documents)


@pytest.fixture
def script(corpus, tmp_path):
    """(settings, what else is set) -> the end of a process that builds a.txt and b.txt in `s`."""
    TOKENIZER.save(tmp_path / "vocab")
    lines = (
        "from pathlib import Path",
        "from bertsmith.corpus.build import build",
        "from bertsmith.corpus.build.settings import BuildSettings",
        "from bertsmith.text.tokenizer.tokenizer import Tokenizer",
        "build.BATCH = 1000",
        "files = [Path('a.txt').resolve(), Path('b.txt').resolve()]",
        "vocab = Tokenizer.from_pretrained('vocab')",
    )

    def run(settings, **environment):
        last = f"build.build_store(files, vocab, Path('s'), BuildSettings({settings}))"
        run = [sys.executable, write(tmp_path / "script.py", [*lines, last])]
        how = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(run, cwd=tmp_path, env=os.environ | environment, **how)

    return run


def counted(documents):
    """How often each piece is in ids of documents of sentences."""
    ids = [piece for document in documents for sentence in document for piece in sentence]
    return np.bincount(ids, minlength=len(TOKENIZER.vocabulary))


def test_store_holds_the_sentences_in_order(tmp_path):
    file = write(tmp_path / "text.txt", "W1 w2. W3!\n\u200b\nW4 w5.\n\n\u200b\n\nW6\n")
    manifest = build_store([file], TOKENIZER, tmp_path / "store", BuildSettings(held_out=0.0))
    store = TokenStore.open(tmp_path / "store")
    documents = documents_of(store.train)
    decoded = [[TOKENIZER.decode(sentence) for sentence in document] for document in documents]
    unknown = "[UNK]"  # the punctuation is not in this vocabulary; zero width spaces are no text
    assert decoded == [[f"w1 w2 {unknown}", f"w3 {unknown}", f"w4 w5 {unknown}"], ["w6"]]
    assert (manifest["documents"], manifest["sentences"], manifest["tokens"]) == (2, 4, 9)
    assert (store.unigram_counts == counted(documents)).all()
    assert store.tokenizer_fingerprint == TOKENIZER.fingerprint
    assert type(TOKENIZER).from_pretrained(store.folder).fingerprint == TOKENIZER.fingerprint


def test_one_input_and_names_as_texts_are_taken(corpus, make, tmp_path):
    build_store(str(corpus[0]), TOKENIZER, str(tmp_path / "one"))
    assert contents(tmp_path / "one") == contents(make("listed", corpus[:1]))
    with pytest.raises(ValueError, match=r"build_store\(\): tokenizer = 'vocab': expected Tok"):
        build_store(corpus, "vocab", tmp_path / "none")


def test_bytes_do_not_depend_on_the_number_of_workers(make):
    one, two = (make(f"{k}", workers=k, shard_tokens=3000) for k in (1, 2))
    assert contents(one) == contents(two)
    store = TokenStore.open(one)
    assert len(store.train.shards) > 2
    ids = [shard.tokens.read(0, len(shard.tokens)) for shard in store.train.shards]
    assert (store.unigram_counts == counted([ids])).all()


@pytest.mark.parametrize("sentence_per_line", [True, False])
def test_bytes_do_not_depend_on_the_groups_of_sentences(make, monkeypatch, sentence_per_line):
    whole = contents(make("whole", sentence_per_line=sentence_per_line))
    assert encoding.GROUP == 1 << 15
    for size in (1, 3, 7):
        monkeypatch.setattr(encoding, "GROUP", size)
        assert contents(make(f"{size}", sentence_per_line=sentence_per_line)) == whole


def test_held_out_documents_are_a_share_and_equal_ones_stay_together(make):
    store = TokenStore.open(make("s", held_out=0.3))
    train, held_out = (
        [str(sum(document, [])) for document in documents_of(split)]
        for split in (store.train, store.held_out)
    )
    assert len(train) + len(held_out) == 120 and 20 < len(held_out) < 52
    assert not set(train) & set(held_out)
    assert len(set(train + held_out)) == 110


def test_a_killed_build_goes_on_to_the_same_bytes(make, tmp_path, monkeypatch):
    whole = contents(make("whole", shard_tokens=2000))
    read = sources.read_documents

    def killed(*args, **kwargs):
        yield from islice(read(*args, **kwargs), 70)
        raise KeyboardInterrupt

    out = tmp_path / "killed"
    monkeypatch.setattr(sources, "read_documents", killed)
    with pytest.raises(KeyboardInterrupt):
        make(out, shard_tokens=2000)
    monkeypatch.setattr(sources, "read_documents", read)
    finished = {name: (out / name).stat().st_mtime_ns for name in contents(out)}
    assert "train-00001.tokens" in finished and "manifest.json" not in finished
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(out)
    (out / ".partial-1-train-00002.tokens").write_bytes(b"left by a kill")

    for _ in range(2):  # the second time there is nothing to do
        assert contents(make(out, shard_tokens=2000)) == whole
        assert (out / "train-00001.tokens").stat().st_mtime_ns == finished["train-00001.tokens"]
        assert TokenStore.open(out).manifest["documents"] == 120


def test_the_rate_after_a_restart_is_of_what_is_left(make, monkeypatch):
    starts, progress = [], build.Progress

    def watched(*args, start, **more):
        starts.append(start)
        return progress(*args, start=start, **more)

    monkeypatch.setattr(build, "Progress", watched)
    for _ in range(2):
        out = make("s", shard_tokens=2000)
        text_bytes = TokenStore.open(out).manifest["text_bytes"]
        (out / "manifest.json").unlink()
    assert starts == [0, text_bytes]


def test_a_file_with_a_name_that_is_not_utf_8_is_built(tmp_path, capsys):
    text = tmp_path / os.fsdecode(b"caf\xe9.txt")
    try:
        text.write_text("w1 w2\n\nw3 w4\n\nw5")
    except OSError:
        pytest.skip("this file system refuses such names")
    for _ in range(2):
        build_store([text], TOKENIZER, tmp_path / "s", BuildSettings(held_out=0.0))
    assert "finished before" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"spec": null}'])
def test_a_damaged_record_is_named_with_the_remedy(make, tmp_path, content):
    write(tmp_path / "s" / build.BUILD, content)
    with pytest.raises(ValueError, match=r"corpus-build\.json.*; remove the folder and build it"):
        make("s")


def test_changed_input_starts_an_unfinished_build_anew(corpus, make, capsys):
    (make("s", shard_tokens=2000) / "manifest.json").unlink()
    out = make("s", corpus[:1])
    assert "starts anew" in capsys.readouterr().err
    assert contents(out) == contents(make("fresh", corpus[:1]))


def test_a_finished_store_needs_no_lock(corpus, tmp_path, capsys):
    """It may be another user's, on a disk that cannot be written, or be appended to."""
    manifest = build_store(corpus, TOKENIZER, tmp_path / "s")
    with locked_folder(tmp_path / "s"):
        assert build_store(corpus, TOKENIZER, tmp_path / "s") == manifest
    assert "s: finished before" in capsys.readouterr().err


def test_a_finished_store_is_not_overwritten_by_another(make):
    before = contents(out := make("s"))
    with pytest.raises(ValueError, match=r"finished token store.*remove the folder.*`out`"):
        make("s", held_out=0.1)
    assert contents(out) == before


def test_a_full_disk_keeps_the_finished_shards(make, tmp_path, monkeypatch):
    whole = contents(make("whole", shard_tokens=2000))
    append, written = blocks.BlockWriter.write, []

    def full(self, values):
        written.append(values.nbytes)
        if sum(written) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, values)

    out = tmp_path / "s"
    monkeypatch.setattr(blocks.BlockWriter, "write", full)
    with pytest.raises(OSError, match="No space left") as error:
        make(out, shard_tokens=2000)
    assert str(out) in error.value.filename
    assert one_line(error.value).endswith("free some space and run the command again")
    with pytest.raises(ValueError, match="no finished token store"):
        TokenStore.open(out)
    kept = contents(out)
    assert "train-00001.tokens" in kept and not any(name.startswith(".") for name in kept)
    assert all(kept[name] == whole[name] for name in kept if name != build.BUILD)
    monkeypatch.setattr(blocks.BlockWriter, "write", append)
    assert contents(make(out, shard_tokens=2000)) == whole


def test_a_storage_that_fails_keeps_the_finished_shards(corpus, make, tmp_path, monkeypatch):
    class Slow(io.BytesIO):
        def read(self, *_):
            raise TimeoutError("no answer")

        readinto = read1 = read

    storage = fsspec.filesystem("memory")
    for file in corpus:
        storage.pipe(f"/slow/{file.name}.gz", gzip.compress(file.read_bytes()))
    whole = contents(make("whole", ["memory://slow"], shard_tokens=2000))
    opened = type(storage)._open

    def open_slowly(self, path, *rest, **more):
        return Slow() if "b.txt" in path else opened(self, path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "_open", open_slowly)
        with pytest.raises(OSError, match=r"^memory:.*slow/b\.txt\.gz: TimeoutError: no answer$"):
            make("s", ["memory://slow"], shard_tokens=2000)
    kept = contents(tmp_path / "s")
    assert "train-00001.tokens" in kept and "manifest.json" not in kept
    assert contents(make("s", ["memory://slow"], shard_tokens=2000)) == whole
    storage.rm("/slow", recursive=True)


@pytest.mark.parametrize("again", ["a.txt", "../{folder}/a.txt", "link.txt"])
def test_a_file_given_twice_is_refused(make, tmp_path, monkeypatch, again):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.txt").symlink_to("a.txt")
    again = again.format(folder=tmp_path.name)
    with pytest.raises(ValueError, match=f"^{again}: given twice.*: name each file once$"):
        make("s", ["a.txt", "b.txt", again])
    assert not (tmp_path / "s").exists()


def test_two_builds_into_one_folder_are_one_too_many(tmp_path):
    out, refused = tmp_path / "s", []

    def documents():
        for number in range(4):
            yield Document("text", number, [f"w{number} w1"])
            with pytest.raises(ValueError, match=f"^{out}: in use, another process writes here"):
                build_made(out, documents())
            refused.append(number)

    assert (build_made(out, documents())["documents"], refused) == (4, [0, 1, 2, 3])
    assert FOLDER_LOCK not in contents(out)


def test_a_file_system_without_locks_is_written_with_a_warning(make, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    out = make("s")
    said = capsys.readouterr().err
    assert f"{FOLDER_LOCK}: no locks on this file system (No locks available): see that" in said
    assert TokenStore.open(out).train.num_documents > 0


def test_a_killed_process_is_gone_on_with_to_the_same_bytes(make, script, tmp_path):
    killed = script("shard_tokens=2000", BERTSMITH_KILL_AT="write-train-00001.sentences:1")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "s" / "manifest.json").exists()
    one, whole = (make(name, shard_tokens=2000) for name in ("s", "whole"))
    assert contents(one) == contents(whole)


def test_an_unguarded_script_is_told_so_and_does_not_hang(script, tmp_path):
    ended = script("workers=2")
    assert ended.returncode == 1
    assert "ValueError: `workers=2` within a worker process: put the script's" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("OSError: a worker process died")
    assert not (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text"),
        (["\u200b"], "no text"),
        (["w1 w2"], "1 document.*blank line"),
        (["w1 w2. w3 w4."], "1 document.*blank line"),
    ],
)
def test_text_without_pairs_is_refused_and_leaves_nothing(tmp_path, texts, message):
    with pytest.raises(ValueError, match=message):
        build_made(tmp_path / "s", [Document("text", 1, [text]) for text in texts])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("share", "hint"), [(0.0, ""), (0.9999, ", or lower `held_out`")])
def test_to_hold_out_less_is_advised_where_something_is_held_out(tmp_path, share, hint):
    documents = [Document("text", 1, ["w1 w2. w3 w4."])]
    settings = BuildSettings(held_out=share)
    with pytest.raises(ValueError, match=f": put a blank line between documents{hint}$"):
        build_store([], TOKENIZER, tmp_path / "s", settings, documents=documents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 1.0}, "held_out"),
        ({"workers": 0}, "workers"),
        ({"backend": "spark"}, "`backend='spark'`: known are local, ray"),
        ({"backend": "ray", "memory_mb": 900}, "`memory_mb` has no effect with `backend='ray'`"),
        ({"backend": "ray", "documents": []}, "documents are of this process"),
        ({"memory_mb": 10}, "`memory_mb=10`: a build needs"),
        ({"memory_mb": float("nan")}, "`memory_mb=nan`: a build needs"),
        ({"memory_mb": float("inf")}, "`memory_mb=inf`: a build needs"),
    ],
)
def test_impossible_settings_are_named(tmp_path, settings, message):
    documents = settings.pop("documents", None)
    with pytest.raises(ValueError, match=message):
        build_store([], TOKENIZER, tmp_path, BuildSettings(**settings), documents=documents)
