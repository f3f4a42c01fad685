import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from bertsmith.tasks.examples import find_file
from bertsmith.tasks.tagging.sentences import (
    has_columns,
    read_sentences,
    read_words,
    write_columns,
    write_tagged,
)
from bertsmith.tasks.task import find_task, own_task

CONLL = Path(__file__).parents[3].parent / "shared" / "data" / "conll2003"

NEWS = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- O O
Bonn NNP I-NP I-LOC
"""


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_four_columns_and_documents(tmp_path):
    sentences = read_sentences(write(tmp_path / "eng.train", NEWS))
    assert sentences.words == ["EU", "rejects", "Peter", "Blackburn", "Bonn"]
    assert sentences.tags == ["I-ORG", "O", "I-PER", "I-PER", "I-LOC"]
    assert sentences.boundaries.tolist() == [0, 2, 4, 5]
    assert sentences.documents.tolist() == [1, 1, 2] and sentences.has_documents
    assert sentences.lines.tolist() == [3, 4, 6, 7, 10] and sentences.scheme == "IOB1"
    labels, names = sentences.labels()
    assert names == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")
    assert labels.tolist() == [3, 0, 5, 6, 1]
    assert sentences.sentence_tags(labels, names) == sentences.tags
    part = sentences.select([2, 1])
    assert part.words == ["Bonn", "Peter", "Blackburn"] and part.boundaries.tolist() == [0, 1, 3]
    assert part.tags == ["I-LOC", "I-PER", "I-PER"] and part.lines.tolist() == [10, 6, 7]
    assert part.documents.tolist() == [2, 1] and len(part) == 2


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffAnn B-PER\r\nsings O\r\n\r\n\r\n \t\r\nYes O",  # Windows, no line end
        "Ann\tB-PER\nsings\tO\n\nYes\tO\n",
        "  Ann   x   y B-PER\nsings x y O \n\nYes \t x\ty\tO\n".replace(" \t x", "\tx"),
    ],
)
def test_other_columns(tmp_path, text):
    sentences = read_sentences(write(tmp_path / "train.txt", text))
    assert sentences.words == ["Ann", "sings", "Yes"] and sentences.tags == ["B-PER", "O", "O"]
    assert sentences.boundaries.tolist() == [0, 2, 3] and sentences.scheme == "IOB2"
    assert sentences.documents.tolist() == [0, 1] and not sentences.has_documents


def test_words_may_hold_odd_characters(tmp_path):
    text = "1\u00a0000 B-X\n\u2028 O\n\x01 O\n# O\nNew York\tO\n"
    sentences = read_sentences(write(tmp_path / "a.txt", text))
    assert sentences.words == ["1\u00a0000", "\u2028", "\x01", "#", "New York"]


def test_words_alone(tmp_path):
    path = write(tmp_path / "new.txt", "Ann\nsings\n\nYes\n")
    sentences = read_sentences(path, need_tags=False)
    assert sentences.words == ["Ann", "sings", "Yes"] and sentences.tags is None
    assert sentences.select([1]).tags is None
    write_columns(tmp_path / "out.txt", sentences, ["B-PER", "O", "O"])
    assert (tmp_path / "out.txt").read_text() == "Ann B-PER\nsings O\n\nYes O\n\n"
    bare = write(tmp_path / "new.jsonl", '{"tokens": ["Ann"]}\n')
    assert read_sentences(bare, need_tags=False, scheme="BIOES").scheme == "BIOES"


@pytest.mark.parametrize("need_tags", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll.gz", "Ann B-PER\nsings O\n"),
        ("A.TSV.XZ", "Ann\tB-PER\nsings\tO\n"),
        ("a.jsonl.gz", '{"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}\n'),
        ("A.JSONL", '{"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}\n'),
        ("a.jsonl.zst", '{"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}\n'),
    ],
)
def test_packed_files_are_read_by_what_is_in_them(tmp_path, name, text, need_tags):
    packers = {".gz": gzip.compress, ".XZ": lzma.compress, ".zst": zstandard.compress}
    pack = packers.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(text.encode()))
    sentences = read_sentences(tmp_path / name, need_tags)
    assert sentences.words == ["Ann", "sings"]
    assert sentences.tags == (["B-PER", "O"] if need_tags else None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,id\nAnn sings,1\n", "a.csv: no column 'tokens' for --text: "),
        ("a.csv.gz", "text,id\nAnn sings,1\n", "a.csv.gz: no column 'tokens' for --text"),
        ("a.json.gz", '{"tokens": ["Ann", "sings"]}\n', "a.json.gz: words are not read from a"),
        ("a.md", "Ann sings\nBob does not\n", "a.md:2: 3 columns, expected 2: a word a line; sen"),
        ("a.tsv", "id\ttext\n1\tAnn sings\n", "a.tsv:2: the last column holds 'Ann sings', not a"),
    ],
)
def test_what_cannot_hold_words(tmp_path, name, text, message):
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(text.encode()))
    with pytest.raises(ValueError, match=message):
        read_sentences(tmp_path / name, need_tags=False)


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_cells_of_words(tmp_path, name, between):
    rows = [
        ("id", "tags", "tokens"),
        ("1", "B-PER O", "Ann sings"),
        ("2", "", " "),
        ("3", "O", "Eh"),
    ]
    text = "".join(between.join(row) + "\n" for row in rows)
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(text.encode()))
    sentences = read_sentences(tmp_path / name)
    assert sentences.words == ["Ann", "sings", "Eh"] and sentences.tags == ["B-PER", "O", "O"]
    assert sentences.lines.tolist() == [2, 2, 4] and sentences.rows.tolist() == [0, 2]
    assert sentences.num_rows == 3
    assert read_sentences(tmp_path / name, need_tags=False).words == sentences.words


def test_json_lines_and_columns_again(tmp_path):
    rows = [
        {"tokens": ["Ann", "B C"], "tags": ["S-PER", "O"], "more": 1},
        {"tokens": ["Rome"], "tags": ["S-LOC"]},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    sentences = read_sentences(path)
    assert sentences.words == ["Ann", "B C", "Rome"] and sentences.scheme == "BIOES"
    assert sentences.lines.tolist() == [1, 1, 2]
    write_columns(tmp_path / "out.txt", sentences, ["O", "O", "S-LOC"])
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert text == "Ann S-PER O\nB_C O O\n\nRome S-LOC S-LOC\n\n"


def test_documents_are_written(tmp_path):
    sentences = read_sentences(write(tmp_path / "a", NEWS))
    write_columns(tmp_path / "b", sentences, sentences.tags)
    again = read_sentences(tmp_path / "b")
    assert (again.words, again.tags) == (sentences.words, sentences.tags)
    assert again.documents.tolist() == sentences.documents.tolist()
    first = (tmp_path / "b").read_text().split("\n")[:4]
    assert first == ["-DOCSTART- O O", "", "EU I-ORG I-ORG", "rejects O O"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "a.txt: no words in this file"),
        ("a.txt", "-DOCSTART- O\n\n", "a.txt: no words in this file"),
        ("a.txt", "Ann\n", "a.txt:1: 1 columns, expected 2: the word first, its tag last"),
        ("a.txt", "Ann x O\n\nBob O\n", "a.txt:3: 2 columns, expected 3"),
        ("a.txt", "Ann\tO\n\tO\n", "a.txt:2: an empty word or tag"),
        ("a.tsv", "1\tAnn sings\n", "a.tsv:1: the last column holds 'Ann sings', not a tag: the"),
        ("a.csv", "tokens,id\nAnn,1\n", "a.csv: no column 'tags' for --label: name one"),
        ("a.csv", "tokens,tags\nAnn sings,O\n", "a.csv:2: 2 tokens, but 1 tags: one tag a token"),
        ("a.tsv", "tokens\ttags\nAnn\tB-X\nBob sings\tO\n", "a.tsv:3: 2 tokens, but 1 tags"),
        ("a.txt", "Ann\t\n", "a.txt:1: an empty word or tag"),
        ("a.txt", "A B-X\nB I-X\n\nC I-X\n\nD B-X\n", r"a.txt:4: tag 'I-X' after the start"),
        ("a.txt", "A B-X\nB I-Y\nC B-X\n", r"a.txt:2: tag 'I-Y' after 'B-X' is .* \(word 'B'\)"),
        ("a.txt", "A B-X\nB X\nC I-Y\n", "a.txt:2: unknown tag 'X': in IOB2"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '["a"]', "a.jsonl:1: expected a JSON object"),
        (
            "a.jsonl",
            '{"tokens": ["a"], "tag": []}',
            "1: no column 'tags' for --label: did you mean",
        ),
        (
            "a.jsonl",
            '{"tokens": ["a", ""], "tags": []}',
            r"a.jsonl:1: .*'tokens' holds \['a', ''\]",
        ),
        ("a.jsonl", r'{"tokens": ["\ud800"], "tags": ["O"]}', r"1: .*'tokens' holds \['.ud800'\]"),
        (
            "a.jsonl",
            '{"tokens": ["a"], "tags": [1]}',
            r"a.jsonl:1: .*'tags' holds \[1\], not a list",
        ),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', "a.jsonl:1: 1 tokens, but 0 tags"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_sentences(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_other_bad_files(tmp_path):
    with pytest.raises(ValueError, match=r"no\.txt: no such file"):
        read_sentences(tmp_path / "no.txt")
    (tmp_path / "latin.txt").write_bytes(b"Ann O\ncaf\xe9 O\n")
    with pytest.raises(ValueError, match=r"latin\.txt:2: not UTF-8 text"):
        read_sentences(tmp_path / "latin.txt")
    path = write(tmp_path / "a.txt", "A B-X\nB I-X\n")
    with pytest.raises(ValueError, match=r"a\.txt:1: tag 'B-X' after the start .* in IOB1"):
        read_sentences(path, scheme="IOB1")
    with pytest.raises(ValueError, match=r"a\.txt:1: tag 'B-X' is unknown .*\(its tags: O, B-Y\)"):
        read_sentences(path).labels(("O", "B-Y"))


def test_plain_tags(tmp_path):
    sentences = read_sentences(write(tmp_path / "a.txt", "Ann NNP\nsings VBZ\n"))
    labels, names = sentences.labels()
    assert sentences.scheme == "plain" and names == ("NNP", "VBZ") and labels.tolist() == [0, 1]
    assert sentences.sentence_tags(labels, names) == ["NNP", "VBZ"]
    with pytest.raises(ValueError, match="tag 'VBZ' is unknown to the training data"):
        sentences.labels(("NNP",))


def test_tables_of_other_columns(tmp_path):
    rows = {"words": [["Ann", "sings"], ["Rome"]], "ner": [["B-PER", "O"], ["B-LOC"]]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "train-00000-of-00001.parquet")
    sentences = read_sentences(tmp_path / "train-*.parquet", columns=("words", "ner"))
    assert sentences.words == ["Ann", "sings", "Rome"] and sentences.tags == ["B-PER", "O", "B-LOC"]
    assert sentences.boundaries.tolist() == [0, 2, 3] and sentences.lines.tolist() == [1, 1, 2]


def test_text_without_tags(tmp_path):
    (tmp_path / "a.txt").write_text("Ann  sings\n\n Yes\n")
    sentences, counts = read_words(tmp_path / "a.txt")
    assert counts.tolist() == [2, 0, 1]
    assert sentences.words == ["Ann", "sings", "Yes"] and sentences.tags is None
    assert sentences.boundaries.tolist() == [0, 2, 3] and sentences.lines.tolist() == [1, 1, 3]
    (tmp_path / "a.csv").write_text('text\n" "\n')
    with pytest.raises(ValueError, match=r"a\.csv: no words in this file"):
        read_words(tmp_path / "a.csv")
    assert has_columns(["-DOCSTART- -X-", "", "Ann NNP B-PER", "is VB O"], ["O", "B-LOC"])
    for text in (["Ann B-PER", "is here"], ["O", "B-PER"], [""], ["and so am I", "he said"]):
        assert not has_columns(text, ["O", "B-PER"])
    write_tagged(tmp_path / "a.jsonl", sentences, ["B-X", "O", "O"], np.array([0.5, 1, 0.25]))
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "tokens": ["Ann", "sings"],
        "tags": ["B-X", "O"],
        "probabilities": [0.5, 1.0],
    }
    assert json.loads(lines[1]) == {"tokens": [], "tags": [], "probabilities": []}  # the blank line
    assert json.loads(lines[2])["tokens"] == ["Yes"] and len(lines) == 3
    again = read_sentences(tmp_path / "a.jsonl")
    assert again.tags == ["B-X", "O", "O"]
    assert again.rows.tolist() == [0, 2] and again.num_rows == 3
    assert again.select([1]).rows.tolist() == [2]


def test_a_row_of_the_answer_for_each_of_a_table(tmp_path):
    """Also behind the last one that has words; columns have no such rows."""
    table = write(tmp_path / "t.jsonl", '{"tokens": []}\n{"tokens": ["a"]}\n{"tokens": []}\n')
    sentences = read_sentences(table, need_tags=False)
    write_tagged(tmp_path / "a.jsonl", sentences, ["O"], np.array([1.0]))
    rows = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [row["tokens"] for row in rows] == [[], ["a"], []]
    columns = read_sentences(write(tmp_path / "c.conll", "\n\na O\n\n\nb O\n"))
    assert columns.rows.tolist() == [0, 1] and columns.num_rows == 2


def test_finding_files(tmp_path):
    task = find_task("NER")
    with pytest.raises(ValueError, match=r"no training file .*eng\.train, train, .*train\.conll"):
        find_file(task, tmp_path, "train")
    for name in ("eng.train", "dev.conll", "valid.txt", "test.jsonl"):
        (tmp_path / name).touch()
    for row in (task, own_task("tag", "tokens", None, "tags")):
        assert find_file(row, tmp_path, "train") == tmp_path / "eng.train"
        assert find_file(row, tmp_path, "dev") == tmp_path / "dev.conll"
        assert find_file(row, tmp_path, "test") == tmp_path / "test.jsonl"
    (tmp_path / "test.jsonl").unlink()
    assert find_file(task, tmp_path, "test") is None


@pytest.mark.skipif(not CONLL.is_dir(), reason="the shared data are not on this machine")
def test_the_real_test_set():
    sentences = read_sentences(CONLL / "eng.testb")
    # as published: sentences, words, documents, entities of each type
    assert (len(sentences), len(sentences.words)) == (3453, 46435)
    assert len(np.unique(sentences.documents)) == 231 and sentences.scheme == "IOB1"
    labels, names = sentences.labels()
    first = {names[k]: int((labels == k).sum()) for k in range(len(names)) if names[k][0] == "B"}
    assert first == {"B-LOC": 1668, "B-MISC": 702, "B-ORG": 1661, "B-PER": 1617}
    assert sentences.sentence_tags(labels, names) == sentences.tags
