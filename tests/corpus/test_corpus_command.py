"""`bertsmith corpus` as it is typed."""

from pathlib import Path

import pytest

from bertsmith.cli.main import main
from bertsmith.corpus.store.store import TokenStore


@pytest.fixture
def vocab(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "vocab")
    return tmp_path / "vocab"


def corpus(*words):
    return main(["corpus", *map(str, words), "--workers", "1"])


def test_command_builds_a_store(vocab, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"w{k} w{k + 1}\nw{k + 2}\n\n" for k in range(30)))
    out = tmp_path / "store"
    assert corpus(text, "--vocab", vocab, "--out", out, "--held-out", "0.2") == 0
    said = capsys.readouterr().out
    assert "30 documents, 60 sentences, 90 tokens" in said and "MB/s" in said
    assert "warning" not in said
    store = TokenStore.open(out)
    assert store.train.num_documents + store.held_out.num_documents == 30


def test_altered_letters_are_warned_of(vocab, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("w1 w2 학교\n\n" * 9, encoding="utf-8")
    out = tmp_path / "store"
    assert corpus(tmp_path / "text.txt", "--vocab", vocab, "--out", out, "--held-out", "0.5") == 0
    assert capsys.readouterr().out.startswith("warning: 50.0% of the letters are altered")


def test_workers_are_one_a_usable_core_and_one_for_small_files(
    vocab, tmp_path, monkeypatch, capsys
):
    def build_store(inputs, tokenizer, out, settings):
        raise ValueError(f"{settings.workers} workers")

    monkeypatch.setattr("bertsmith.base.processes.usable_cores", lambda: 3)
    monkeypatch.setattr("bertsmith.corpus.build.build.build_store", build_store)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 " * 100)
    words = ["corpus", str(text), "--vocab", str(vocab), "--out", str(tmp_path / "store")]
    for small, more, expected in (
        (600, [], "1 workers"),
        (599, [], "3 workers"),
        (600, ["--workers", "2"], "2 workers"),
    ):
        monkeypatch.setattr("bertsmith.cli.corpus.SMALL", small)
        assert main(words + more) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {"engine": "local", "workers": 1, "memory_mb": None, "exclude": ()}),
        (["--engine", "ray"], {"engine": "ray", "workers": None}),
        (["--engine", "ray", "--workers", "3"], {"engine": "ray", "workers": 3}),
        (["--memory-mb", "900"], {"memory_mb": 900.0}),
        (["--exclude", "a", "b"], {"exclude": (Path("a"), Path("b"))}),
    ],
)
def test_flags_are_given_to_the_build(vocab, tmp_path, monkeypatch, words, given):
    def build_store(inputs, tokenizer, out, settings):
        assert given.items() <= vars(settings).items()
        raise ValueError("enough")

    monkeypatch.setattr("bertsmith.corpus.build.build.build_store", build_store)
    (tmp_path / "text.txt").write_text("w1 w2")
    text, out = str(tmp_path / "text.txt"), str(tmp_path / "s")
    assert main(["corpus", text, "--vocab", str(vocab), "--out", out, *words]) == 2


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        (b"", "text.txt: no text"),
        (b"w1 w2\n", "text.txt: 1 document"),
        (b"w1\n\nw2\n\nw\xe4rme\n", "text.txt:5: not UTF-8"),
        (b"w1\n\nw2\n\n\0\1\2", "text.txt:5: NUL byte"),
        (b"w1\n\n" + b"w2 " * 400_000, "text.txt:3: line of more than"),
    ],
)
def test_bad_text_is_one_line_and_leaves_nothing(vocab, tmp_path, capsys, content, culprit):
    (tmp_path / "text.txt").write_bytes(content)
    out = tmp_path / "store"
    assert corpus(tmp_path / "text.txt", "--vocab", vocab, "--out", out) == 2
    said = capsys.readouterr().err
    assert culprit in said and said.count("\n") == 1
    assert not out.exists()


def test_an_absent_vocabulary_is_named(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("w1\n\nw2\n")
    assert corpus(tmp_path / "text.txt", "--vocab", tmp_path / "no", "--out", tmp_path / "s") == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vocab.txt", "config.json"])
def test_a_vocabulary_or_model_is_not_written_over(vocab, tmp_path, capsys, name):
    text, out = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("w1 w2\n\nw3 w4\n\n" * 9)
    out.mkdir()
    (out / name).write_text("mine")
    assert corpus(text, "--vocab", vocab, "--out", out) == 2
    assert f"{out}: holds the {name} of a vocabulary or model" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == [name] and (out / name).read_text() == "mine"
