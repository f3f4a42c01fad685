"""Overlap with evaluation sets: every kind of file, against a search in plain text."""

import json
import lzma

import numpy as np
import pyarrow
import pytest

from bertsmith.corpus.build.batches import BatchReader
from bertsmith.corpus.contamination import EvaluationIndex, OverlapFinder, evaluation_texts

from ..tiny import write

SQUAD = {"data": [{"paragraphs": [{"context": "The cat.", "qas": [{"question": "Who?"}]}]}]}
SQUAD_BYTES = json.dumps(SQUAD, indent=1).encode()


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("dev.json", SQUAD_BYTES, ["The cat.", "Who?"]),
        ("dev.json.xz", lzma.compress(SQUAD_BYTES), ["The cat.", "Who?"]),
        ("dev.json.zst", pyarrow.compress(SQUAD_BYTES, "zstd", asbytes=True), ["The cat.", "Who?"]),
        ("DEV.JSON", SQUAD_BYTES, ["The cat.", "Who?"]),
        ("dev.jsonl", '{"text": "a b", "label": 1}\n\n{"text": "c"}\n', ["a b", "c"]),
        ("dev.csv", 'text,label\n"a, b\nc",1\n', ["text", "label", "a, b\nc", "1"]),
        # as fine-tuning reads them: lines end in a carriage return alone, texts begin with a blank
        ("dev.csv", 'text,label\r"a, b",1\r', ["text", "label", "a, b", "1"]),
        ("dev.csv", 'text\n "a" b\n', ["text", ' "a" b']),
        ("dev.tsv", '1\t"a b\tc\n', ["1", '"a b', "c"]),
        ("dev.txt", "a b\n\nc\n", ["a b", "c"]),
        ("eng.testa", "EU NNP\nrejects VBZ\n\nPeter NNP\n", ["EU rejects", "Peter"]),
        (  # document marks and comments need no columns
            "a.conll",
            "-DOCSTART-\n\n# id 1\nEU NNP\nleft VB\n\n# text = No.\nNo UH",
            ["EU left", "No"],
        ),
        # columns as a tagger reads them: a blank within a word beside tabs, else one that is kept
        ("a.conll", "New York\tB-LOC\nsleeps\tO\n \nYes\tO\n", ["New York sleeps", "Yes"]),
        ("b.conll", "10\u00a0000 O\nmen  O\n", ["10\u00a0000 men"]),
    ],
)
def test_every_kind_of_file_gives_its_strings(tmp_path, name, content, texts):
    assert list(evaluation_texts(write(tmp_path / name, content))) == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json:1: not valid JSON"),
        ("a.jsonl", "{}\n{", "a.jsonl:2: not valid JSON"),
        ("a.csv", 'a\n"b', "a.csv:2: broken row"),
        ("a.parquet", "", "give evaluation sets as json"),
        ("a.txt", "\n", "a.txt: no text in it"),
        ("a.words", "w1 O\n\nw2\n", "a.words:3: unknown type: 1 column, .*: rename it .txt"),
        ("a.en", "word\n", "a.en:1: unknown type: 1 column, where CoNLL columns would be 2"),
        ("a.md", "It rains.\nHe goes home.\n", "a.md:2: unknown type: 3 columns, .* be 2: ren"),
        ("a.json", "[" * 99_999, "a.json: JSON nested too deeply"),
        ("a.jsonl", "{}\n" + "[" * 99_999, "a.jsonl:2: JSON nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        EvaluationIndex([write(tmp_path / name, content)], 3, tmp_path)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file"):
        EvaluationIndex([tmp_path / "nowhere"], 3, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: a folder: name the files"):
        EvaluationIndex([tmp_path], 3, tmp_path)


def made(tmp_path, documents, tasks, words, least=1, workers=1):
    corpus = write(tmp_path / "corpus.txt", "\n\n".join(documents))
    sets = [write(tmp_path / name, "\n".join(texts)) for name, texts in tasks.items()]
    index = EvaluationIndex(sets, words, tmp_path)
    batches = BatchReader([corpus], "text", characters=200)
    entries = list(index.entries(batches, least, workers))
    return entries, index.result()


def test_shared_runs_are_those_that_a_plain_search_finds(tmp_path):
    dice = np.random.default_rng(0)
    documents = [[f"w{n}" for n in dice.integers(0, 900, 50)] for _ in range(80)]
    tests = [[f"w{n}" for n in dice.integers(0, 900, 20)] for _ in range(30)]
    for k in range(0, 30, 3):  # planted, five words of them
        documents[2 * k][10:15] = tests[k][7:12]
    documents[7][:3] = tests[0][:3]
    texts = [" ".join(one) for one in tests]
    tasks = {"a.txt": texts[:9], "b.txt": texts[9:]}
    entries, result = made(tmp_path, [" ".join(one) for one in documents], tasks, 4)

    def runs(found):
        return {" ".join(found[k : k + 4]) for k in range(len(found) - 3)}

    shared = {
        d: [t for t, test in enumerate(tests) if runs(one) & runs(test)]
        for d, one in enumerate(documents)
    }
    assert [one["document"] for one in entries] == [d for d in shared if shared[d]]
    for one in entries:
        first = {"a.txt": 0, "b.txt": 9}[one["with"]["task"].rpartition("/")[2]]
        assert one["with"]["text"] + first in shared[one["document"]]
        assert one["runs"] == 2 and one["share"] == round(2 / 47, 4)
    found = {test for one in shared.values() for test in one}
    in_a = sum(test < 9 for test in found)
    assert [one["in_corpus"] for one in result["tasks"]] == [in_a, len(found) - in_a]
    assert result["listed"] == len(entries) and result["documents"] == 80


def test_signs_case_and_line_breaks_do_not_hide_a_text(tmp_path):
    documents = ["Said: THE cat,\nsat on\nthe MAT.", "the cat sat"]
    tasks = {"a.txt": ["The cat sat on the mat", "too short"]}
    entries, result = made(tmp_path, documents, tasks, 6)
    assert [one["document"] for one in entries] == [0]
    assert result["tasks"][0]["too_short"] == 1 and result["tasks"][0]["share"] == 1.0


def test_texts_that_are_all_too_short_match_nothing(tmp_path):
    assert made(tmp_path, ["a b c", "d"], {"a.txt": ["a b", "d"]}, 3)[0] == []


def test_least(tmp_path):
    documents, tasks = ["a b c d e x", "a b c y"], {"t.txt": ["a b c d e"]}
    assert [one["runs"] for one in made(tmp_path, documents, tasks, 3)[0]] == [3, 1]
    assert [one["runs"] for one in made(tmp_path, documents, tasks, 3, least=2)[0]] == [3]


@pytest.mark.slow
def test_two_workers_find_what_one_does(tmp_path):
    documents = ["a b c d e x", "a b c y", *("z" * 50 for _ in range(20))]
    tasks = {"t.txt": ["a b c d e"]}
    assert made(tmp_path, documents, tasks, 3, workers=2) == made(tmp_path, documents, tasks, 3)


def test_an_empty_batch_of_words(tmp_path):
    EvaluationIndex([write(tmp_path / "t.txt", "a b c")], 3, tmp_path)
    found = OverlapFinder(tmp_path, 3)(["", "..."])
    assert found.shared.tolist() == [0, 0] and found.text.tolist() == [-1, -1]
