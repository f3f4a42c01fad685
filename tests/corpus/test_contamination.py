"""Overlap with evaluation sets: every kind of file, against a search in plain text."""

import json
import lzma

import numpy as np
import pyarrow
import pytest

from bertsmith.corpus.build.batches import BatchReader
from bertsmith.corpus.contamination import EvaluationIndex, OverlapFinder, evaluation_texts


def test_every_kind_of_file_gives_its_strings(tmp_path):
    squad = {"data": [{"paragraphs": [{"context": "The cat.", "qas": [{"question": "Who?"}]}]}]}
    files = {
        "dev.json": (json.dumps(squad, indent=1), ["The cat.", "Who?"]),
        "dev.jsonl": ('{"text": "a b", "label": 1}\n\n{"text": "c"}\n', ["a b", "c"]),
        "dev.csv": ('text,label\n"a, b\nc",1\n', ["text", "label", "a, b\nc", "1"]),
        "dev.tsv": ('1\t"a b\tc\n', ["1", '"a b', "c"]),
        "dev.txt": ("a b\n\nc\n", ["a b", "c"]),
        "eng.testa": ("EU NNP\nrejects VBZ\n\nPeter NNP\n", ["EU rejects", "Peter"]),
    }
    for name, (content, texts) in files.items():
        (tmp_path / name).write_text(content)
        assert list(evaluation_texts(tmp_path / name)) == texts, name
    squad = files["dev.json"][0].encode()
    for name, content in {
        "dev.json.xz": lzma.compress(squad),
        "dev.json.zst": pyarrow.compress(squad, "zstd", asbytes=True),
        "DEV.JSON": squad,
    }.items():
        (tmp_path / name).write_bytes(content)
        assert list(evaluation_texts(tmp_path / name)) == ["The cat.", "Who?"], name


def test_document_marks_and_comments_need_no_columns(tmp_path):
    lines = ["-DOCSTART-", "", "# id 1", "EU NNP", "left VB", "", "# text = No.", "No UH"]
    (tmp_path / "a.conll").write_text("\n".join(lines))
    texts = list(evaluation_texts(tmp_path / "a.conll"))
    assert texts == ["-DOCSTART-", "# EU left", "# No"]


def test_columns_are_those_that_a_tagger_reads(tmp_path):
    """A blank within a word beside tabs, one that does not break without them."""
    tabs, blanks = tmp_path / "a.conll", tmp_path / "b.conll"
    tabs.write_text("New York\tB-LOC\nsleeps\tO\n \nYes\tO\n")
    blanks.write_text("10\u00a0000 O\nmen  O\n")
    assert list(evaluation_texts(tabs)) == ["New York sleeps", "Yes"]
    assert list(evaluation_texts(blanks)) == ["10\u00a0000 men"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json:1: not valid JSON"),
        ("a.jsonl", "{}\n{", "a.jsonl:2: not valid JSON"),
        ("a.csv", 'a\n"b', "a.csv:2: broken row"),
        ("a.parquet", "", "give evaluation sets as json"),
        ("a.txt", "\n", "a.txt: no text in it"),
        ("a.words", "w1 O\n\nw2\n", "a.words:3: unknown type: 1 columns, .*: rename it .txt"),
        ("a.en", "word\n", "a.en:1: unknown type: 1 columns, where CoNLL columns would be 2"),
        ("a.md", "It rains.\nHe goes home.\n", "a.md:2: unknown type: 3 columns, .* be 2: ren"),
        ("a.json", "[" * 99_999, "a.json: JSON nested too deeply"),
        ("a.jsonl", "{}\n" + "[" * 99_999, "a.jsonl:2: JSON nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        EvaluationIndex([tmp_path / name], 3, tmp_path)
    with pytest.raises(ValueError, match="nowhere: no such file"):
        EvaluationIndex([tmp_path / "nowhere"], 3, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: a folder: name the files"):
        EvaluationIndex([tmp_path], 3, tmp_path)


def made(tmp_path, documents, tasks, words, least=1, workers=1):
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents))
    for name, texts in tasks.items():
        (tmp_path / name).write_text("\n".join(texts))
    index = EvaluationIndex([tmp_path / name for name in tasks], words, tmp_path)
    batches = BatchReader([tmp_path / "corpus.txt"], "text", characters=200)
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
    entries, result = made(
        tmp_path, [" ".join(one) for one in documents], {"a.txt": texts[:9], "b.txt": texts[9:]}, 4
    )

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
    assert [one["in_corpus"] for one in result["tasks"]] == [
        sum(test < 9 for test in found),
        sum(test >= 9 for test in found),
    ]
    assert result["listed"] == len(entries) and result["documents"] == 80


def test_signs_case_and_line_breaks_do_not_hide_a_text(tmp_path):
    entries, result = made(
        tmp_path,
        ["Said: THE cat,\nsat on\nthe MAT.", "the cat sat"],
        {"a.txt": ["The cat sat on the mat", "too short"]},
        6,
    )
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
    (tmp_path / "t.txt").write_text("a b c")
    EvaluationIndex([tmp_path / "t.txt"], 3, tmp_path)
    found = OverlapFinder(tmp_path, 3)(["", "..."])
    assert found.shared.tolist() == [0, 0] and found.text.tolist() == [-1, -1]
