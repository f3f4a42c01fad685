"""`bertsmith corpus` as it is typed."""

from pathlib import Path

import pytest

from bertsmith.corpus.store.store import TokenStore

from ..corpus.made import TOKENIZER
from ..tiny import bertsmith, cli, refused, write


@pytest.fixture
def text(tmp_path):
    return tmp_path / "text.txt"


@pytest.fixture
def words(text, tmp_path):
    """A command that builds the folder `store` of a text."""
    TOKENIZER.save(tmp_path / "vocab")
    return ["corpus", text, "--vocab", tmp_path / "vocab", "--out", tmp_path / "store"]


@pytest.fixture
def stopped(monkeypatch):
    """A function that is called with the settings in place of the build."""

    def stop(say):
        def build_store(inputs, tokenizer, out, settings):
            raise ValueError(say(settings))

        monkeypatch.setattr("bertsmith.corpus.build.build.build_store", build_store)

    return stop


def test_command_builds_a_store(words, text, tmp_path):
    write(text, "".join(f"w{k} w{k + 1}\nw{k + 2}\n\n" for k in range(30)))
    said = bertsmith(*words, "--workers", 1, "--held-out", 0.2)
    assert "30 documents, 60 sentences, 90 tokens" in said and "kB/s)" in said
    assert "warning" not in said
    store = TokenStore.open(tmp_path / "store")
    assert store.train.num_documents + store.held_out.num_documents == 30


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ([f"w{k} w{k + 1}" for k in range(30)], "1.0 sentences on average, and 30 have one"),
        (
            [f"w{k}" + "\nw1 w2" * 4 * (k >= 16) for k in range(30)],
            "2.9 sentences on average, and 16 have",
        ),
        ([f"w{k}\nw{k + 1}" for k in range(30)], None),
    ],
)
def test_paragraphs_taken_for_documents_are_warned_of(words, text, documents, told):
    write(text, "\n\n".join(documents))
    said = bertsmith(*words, "--workers", 1, "--held-out", 0.2)
    assert ("a blank line ends a document" in said) == (told is not None)
    assert told is None or told in said


def test_altered_letters_are_warned_of(words, text):
    write(text, "w1 w2 학교\n\n" * 9)
    said = bertsmith(*words, "--workers", 1, "--held-out", 0.5)
    assert said.startswith("warning: 50.0% of the letters are altered")


@pytest.mark.parametrize(
    ("small", "more", "workers"), [(600, [], 1), (599, [], 3), (600, ["--workers", "2"], 2)]
)
def test_workers_are_one_a_usable_core_and_one_for_small_files(
    words, text, stopped, monkeypatch, small, more, workers
):
    stopped(lambda settings: f"{settings.workers} workers")
    monkeypatch.setattr("bertsmith.base.processes.usable_cores", lambda: 3)
    monkeypatch.setattr("bertsmith.cli.corpus.SMALL", small)
    write(text, "w1 w2 " * 100)
    assert f"{workers} workers" in refused(*words, *more)


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ([], {"backend": "local", "workers": 1, "memory_mb": None, "exclude": ()}),
        (["--backend", "ray"], {"backend": "ray", "workers": None}),
        (["--backend", "ray", "--workers", "3"], {"backend": "ray", "workers": 3}),
        (["--memory-mb", "900"], {"memory_mb": 900.0}),
        (["--exclude", "a", "b"], {"exclude": (Path("a"), Path("b"))}),
    ],
)
def test_flags_are_given_to_the_build(words, text, stopped, flags, given):
    stopped(lambda settings: given.items() <= vars(settings).items())
    write(text, "w1 w2")
    assert refused(*words, *flags).endswith(": True")


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        (b"", "text.txt: no text"),
        (b"w1 w2\n", "text.txt: 1 document"),
        (b"w1\n\nw2\n\nw\xe4rme\n", "text.txt:5: not UTF-8"),
        (b"w1\n\nw2\n\n\0\1\2", "text.txt:5: NUL byte"),
        (b"w1\n\n" + b"w2 " * 400_000, "text.txt:3: line of more than"),
    ],
    ids=["nothing", "one-document", "latin-1", "binary", "long-line"],
)
def test_bad_text_is_one_line_and_leaves_nothing(words, text, tmp_path, content, culprit):
    write(text, content)
    code, _, said = cli(*words, "--workers", 1)
    assert code == 2 and culprit in said and said.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_an_absent_vocabulary_is_named(words, text, tmp_path):
    write(text, "w1\n\nw2\n")
    assert str(tmp_path / "no") in refused(*words, "--vocab", tmp_path / "no")


def test_the_vocabulary_may_be_that_of_a_model_on_the_hub(words, text, tmp_path, monkeypatch):
    write(text, "w1 w2\n\nw3 w4\n\n" * 9)
    monkeypatch.setattr("bertsmith.checkpoints.hub._download", lambda name: tmp_path / "vocab")
    bertsmith(*words, "--vocab", "lab/mini", "--workers", 1, "--held-out", 0)
    store = TokenStore.open(tmp_path / "store")
    assert store.tokenizer_fingerprint == TOKENIZER.fingerprint


@pytest.mark.parametrize("name", ["vocab.txt", "config.json"])
def test_a_vocabulary_or_model_is_not_written_over(words, text, tmp_path, name):
    write(text, "w1 w2\n\nw3 w4\n\n" * 9)
    out = tmp_path / "store"
    write(out / name, "mine")
    assert f"{out}: holds the {name} of a vocabulary or model" in refused(*words, "--workers", 1)
    assert [file.name for file in out.iterdir()] == [name] and (out / name).read_text() == "mine"
