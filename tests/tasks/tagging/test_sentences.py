"""Sentences with tags: read from columns and tables, written, split and summed up."""

import json
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from bertsmith.tasks.examples import find_file
from bertsmith.tasks.tagging import sentences as tagging
from bertsmith.tasks.tagging.sentences import read_sentences, write_columns, write_tagged
from bertsmith.tasks.tagging.summary import case_warning, split_sentences, summarize_sentences
from bertsmith.tasks.task import find_task, own_task
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED

from ...tiny import write
from ..made import DATA, jsonl, needs, refused, write_packed

NEWS = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- O O
Bonn NNP I-NP I-LOC
"""


def test_the_tag_of_another_column(tmp_path):
    """As the probe reads parts of speech."""
    path = write(tmp_path / "a.conll", "Ann\tNNP \tI-NP\nsings\tVBZ\tI-VP\n")
    assert read_sentences(path, scheme="plain", tag_column=1).tags == ["NNP", "VBZ"]
    path = write(tmp_path / "b.conll", "Ann\t\tI-NP\n")
    with pytest.raises(ValueError, match="b.conll:1: an empty word or tag"):
        read_sentences(path, scheme="plain", tag_column=1)


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
        "Ann\tB-PER \nsings\t O\n\nYes\tO  \r\n",  # blanks that nobody sees
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


ROW = '{"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}\n'


@pytest.mark.parametrize("need_tags", [True, False])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll.gz", "Ann B-PER\nsings O\n"),
        ("A.TSV.XZ", "Ann\tB-PER\nsings\tO\n"),
        ("a.jsonl.gz", ROW),
        ("A.JSONL", ROW),
        ("a.jsonl.zst", ROW),
    ],
)
def test_packed_files_are_read_by_what_is_in_them(tmp_path, name, text, need_tags):
    sentences = read_sentences(write_packed(tmp_path / name, text), need_tags)
    assert sentences.words == ["Ann", "sings"]
    assert sentences.tags == (["B-PER", "O"] if need_tags else None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,id\nAnn sings,1\n", "a.csv: no column 'tokens' for `text`: "),
        ("a.csv.gz", "text,id\nAnn sings,1\n", "a.csv.gz: no column 'tokens' for `text`"),
        ("a.json.gz", '{"tokens": ["Ann", "sings"]}\n', "a.json.gz: words are not read from a"),
        ("a.md", "Ann sings\nBob does not\n", "a.md:2: 3 columns, expected 2: a word a line; sen"),
        ("a.tsv", "id\ttext\n1\tAnn sings\n", "a.tsv:2: the last column holds 'Ann sings', not a"),
    ],
)
def test_what_cannot_hold_words(tmp_path, name, text, message):
    with refused(match=message):
        read_sentences(write_packed(tmp_path / name, text), need_tags=False)


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_cells_of_words(tmp_path, name, between):
    rows = ("id", "tags", "tokens"), ("1", "B-PER O", "Ann sings"), ("2", "", " "), ("3", "O", "Eh")
    path = write_packed(tmp_path / name, "".join(between.join(row) + "\n" for row in rows))
    sentences = read_sentences(path)
    assert sentences.words == ["Ann", "sings", "Eh"] and sentences.tags == ["B-PER", "O", "O"]
    assert sentences.lines.tolist() == [2, 2, 4] and sentences.rows.tolist() == [0, 2]
    assert sentences.num_rows == 3
    assert read_sentences(path, need_tags=False).words == sentences.words


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


def tagged(tokens, **tags):
    return json.dumps({"tokens": tokens, **tags})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "a.txt: no words in this file"),
        ("a.txt", "-DOCSTART- O\n\n", "a.txt: no words in this file"),
        ("a.txt", "Ann\n", "a.txt:1: 1 column, expected 2: the word first, its tag last"),
        ("a.txt", "Ann x O\n\nBob O\n", "a.txt:3: 2 columns, expected 3"),
        ("a.txt", "Ann\tO\n\tO\n", "a.txt:2: an empty word or tag"),
        ("a.tsv", "1\tAnn sings\n", "a.tsv:1: the last column holds 'Ann sings', not a tag: the"),
        ("a.csv", "tokens,id\nAnn,1\n", "a.csv: no column 'tags' for `label`: name one"),
        (
            "a.csv",
            "tokens,tags\n" + "Ann,X\n\nEh,O\n" * 10,
            "a.csv: no row holds two words, but a row is a",
        ),
        (
            "a.tsv",
            "tokens\ttags\n" + "Ann\tX\nis\tO\n" * 10,
            "a.tsv: no row holds two .* CoNLL columns wi",
        ),
        ("a.tsv", "word\tpos\nAnn\tN\nis\tV\n", "a.tsv:1: the header 'word', 'pos' would be a"),
        ("a.conll", "\nToken x Tag\nAnn x N\n", "a.conll:2: the header .*: CoNLL columns have no"),
        (
            "a.csv",
            "tokens,tags\nAnn sings,B-X O\n\"['Bob', 'is']\",\"['B-X', 'O']\"\n",
            r"a.csv:3: .*'Bob', 'is'.* in column 'tokens' is a list written as a text: write",
        ),
        ("a.tsv", "tokens\ttags\nBob is\t['O' 'O']\n", r"a.tsv:2: .* in column 'tags' is a list"),
        ("a.csv", "tokens,tags\nAnn sings,O\n", "a.csv:2: 2 tokens, but 1 tags: one tag a token"),
        ("a.tsv", "tokens\ttags\nAnn\tB-X\nBob sings\tO\n", "a.tsv:3: 2 tokens, but 1 tags"),
        ("a.txt", "Ann\t\n", "a.txt:1: an empty word or tag"),
        ("a.txt", "Ann\tN\nsings\t \n", "a.txt:2: an empty word or tag"),
        ("a.txt", "A B-X\nB I-X\n\nC I-X\n\nD B-X\n", r"a.txt:4: tag 'I-X' after the start"),
        ("a.txt", "A B-X\nB I-Y\nC B-X\n", r"a.txt:2: tag 'I-Y' after 'B-X' is .* \(word 'B'\)"),
        ("a.txt", "A B-X\nB X\nC I-Y\n", "a.txt:2: unknown tag 'X': in IOB2"),
        ("a.jsonl", tagged(["a"], tag=[]), "1: no column 'tags' for `label`: did you mean"),
        ("a.jsonl", tagged(["a", ""], tags=[]), r"a.jsonl:1: .*'tokens' holds \['a', ''\]"),
        ("a.jsonl", tagged(["\ud800"], tags=["O"]), r"1: .*'tokens' holds \['.ud800'\]"),
        (
            "a.jsonl",
            tagged(["a"], tags=[1]),
            r"a.jsonl:1: .*'tags' holds \[1\], .* by their names$",
        ),
        ("a.jsonl", tagged("Ann is", tags="O O"), r"1: .*'tokens' holds 'Ann is', .* such as \["),
        ("a.jsonl", tagged(["a"], tags=[]), "a.jsonl:1: 1 tokens, but 0 tags"),
        ("no.txt", None, r"no\.txt: no such file"),
        ("latin.txt", b"Ann O\ncaf\xe9 O\n", r"latin\.txt:2: not UTF-8 text"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    with refused(match=message):
        read_sentences(tmp_path / name if text is None else write(tmp_path / name, text))


def test_tags_of_another_scheme_or_model(tmp_path):
    path = write(tmp_path / "a.txt", "A B-X\nB I-X\n")
    with refused(match=r"a\.txt:1: tag 'B-X' after the start .* in IOB1"):
        read_sentences(path, scheme="IOB1")
    with refused(match=r"a\.txt:1: tag 'B-X' is unknown .*\(its tags: O, B-Y\)"):
        read_sentences(path).labels(("O", "B-Y"))


def test_classes_of_iob1(tmp_path):
    """As models of transformers may have them: no B- where no two entities touch."""
    sentences = read_sentences(write(tmp_path / "a.txt", "A I-X\nB I-X\nC O\nD I-Y\n"))
    labels, names = sentences.labels(("B-X", "I-X", "I-Y", "O"))
    assert labels.tolist() == [0, 1, 3, 2]
    assert sentences.sentence_tags(labels, names) == sentences.tags
    with refused(match=r"a\.txt:4: tag 'I-Y' \('B-Y' in IOB2\) is unknown .*: B-X, I-X, O\)"):
        sentences.labels(("B-X", "I-X", "O"))


def test_plain_tags(tmp_path):
    sentences = read_sentences(write(tmp_path / "a.txt", "Ann NNP\nsings VBZ\n"))
    labels, names = sentences.labels()
    assert sentences.scheme == "plain" and names == ("NNP", "VBZ") and labels.tolist() == [0, 1]
    assert sentences.sentence_tags(labels, names) == ["NNP", "VBZ"]
    with refused(match="tag 'VBZ' is unknown to the training data"):
        sentences.labels(("NNP",))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.conll", "text label\nAnn value\nname label\n"),  # a form of two kinds of fields
        ("a.conll", "pos N\ntag N\n"),
        ("a.csv", "tokens,tags\nAnn,N\n"),  # a single sentence may be short
        ("a.jsonl", '{"tokens": ["Ann"], "tags": ["N"]}\n' * 2),
        ("a.csv", 'tokens,tags\n"[ Ann \'s ]",X X X X\n'),
    ],
)
def test_what_looks_like_a_header_or_a_word_a_row(tmp_path, name, text):
    assert read_sentences(write(tmp_path / name, text)).words


def test_tables_of_other_columns(tmp_path):
    rows = {"words": [["Ann", "sings"], ["Rome"]], "ner": [["B-PER", "O"], ["B-LOC"]]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "train-00000-of-00001.parquet")
    sentences = read_sentences(tmp_path / "train-*.parquet", columns=("words", "ner"))
    assert sentences.words == ["Ann", "sings", "Rome"] and sentences.tags == ["B-PER", "O", "B-LOC"]
    assert sentences.boundaries.tolist() == [0, 2, 3] and sentences.lines.tolist() == [1, 1, 2]


def test_text_without_tags(tmp_path):
    sentences, counts = tagging.read_words(write(tmp_path / "a.txt", "Ann  sings\n\n Yes\n"))
    assert counts.tolist() == [2, 0, 1]
    assert sentences.words == ["Ann", "sings", "Yes"] and sentences.tags is None
    assert sentences.boundaries.tolist() == [0, 2, 3] and sentences.lines.tolist() == [1, 1, 3]
    with refused(match=r"a\.csv: no text in it"):
        tagging.read_words(write(tmp_path / "a.csv", 'text\n" "\n'))
    write_tagged(tmp_path / "a.jsonl", sentences, ["B-X", "O", "O"], np.array([0.5, 1, 0.25]))
    first, blank, last = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert first == {"tokens": ["Ann", "sings"], "tags": ["B-X", "O"], "probabilities": [0.5, 1.0]}
    assert blank == {"tokens": [], "tags": [], "probabilities": []}
    assert last["tokens"] == ["Yes"]
    again = read_sentences(tmp_path / "a.jsonl")
    assert again.tags == ["B-X", "O", "O"]
    assert again.rows.tolist() == [0, 2] and again.num_rows == 3
    assert again.select([1]).rows.tolist() == [2]


def test_text_that_has_columns():
    columns = ["-DOCSTART- -X-", "", "Ann NNP B-PER", "is VB O"]
    assert tagging.has_columns(columns, ["O", "B-LOC"])
    assert tagging.has_columns(["Ann NNP", "sings VBZ", ". ."], ["NNP", "VBZ", "."])
    assert tagging.has_columns(["Ann\tB-PER", "New York\tB-LOC"], ["O"])
    single, sentences = ["World War I"], ["Ann sings .", "Bob runs ."]
    ragged = ["plan B", "the other plan B"]
    others = ["Ann B-PER", "is here"], ["O", "B-PER"], [""], ["and so am I", "he said"]
    for text in (single, sentences, ragged, *others):
        assert not tagging.has_columns(text, ["O", "B-PER", "."])


def test_a_row_of_the_answer_for_each_of_a_table(tmp_path):
    """Also behind the last one that has words; columns have no such rows."""
    table = jsonl(tmp_path / "t.jsonl", *({"tokens": tokens} for tokens in ([], ["a"], [])))
    sentences = read_sentences(table, need_tags=False)
    write_tagged(tmp_path / "a.jsonl", sentences, ["O"], np.array([1.0]))
    rows = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [row["tokens"] for row in rows] == [[], ["a"], []]
    columns = read_sentences(write(tmp_path / "c.conll", "\n\na O\n\n\nb O\n"))
    assert columns.rows.tolist() == [0, 1] and columns.num_rows == 2


def test_finding_files(tmp_path):
    task = find_task("NER")
    with refused(match=r"no training file; .*eng\.train, train, .*train\.conll"):
        find_file(task, tmp_path, "train")
    for name in ("eng.train", "dev.conll", "valid.txt", "test.jsonl"):
        (tmp_path / name).touch()
    for row in (task, own_task("tag", "tokens", None, "tags")):
        assert find_file(row, tmp_path, "train") == tmp_path / "eng.train"
        assert find_file(row, tmp_path, "dev") == tmp_path / "dev.conll"
        assert find_file(row, tmp_path, "test") == tmp_path / "test.jsonl"
    (tmp_path / "test.jsonl").unlink()
    assert find_file(task, tmp_path, "test") is None


@pytest.mark.parametrize("name", ["dev.bio", "validation.conll", "valid.txt", "val.iob2.gz"])
def test_a_dev_file_has_any_of_the_names_that_tables_have(tmp_path, name):
    """By another one it would be passed over, and a part of train be taken for it."""
    for path in (tmp_path / "train.conll", tmp_path / name):
        path.touch()
    assert find_file(find_task("ner"), tmp_path, "dev") == tmp_path / name


@needs("conll2003")
def test_the_real_test_set():
    sentences = read_sentences(DATA / "conll2003" / "eng.testb")
    # as published: sentences, words, documents, entities of each type
    assert (len(sentences), len(sentences.words)) == (3453, 46435)
    assert len(np.unique(sentences.documents)) == 231 and sentences.scheme == "IOB1"
    labels, names = sentences.labels()
    first = {names[k]: int((labels == k).sum()) for k in range(len(names)) if names[k][0] == "B"}
    assert first == {"B-LOC": 1668, "B-MISC": 702, "B-ORG": 1661, "B-PER": 1617}
    assert sentences.sentence_tags(labels, names) == sentences.tags


# --- split and summed up ---


def read(path, text):
    return read_sentences(write(path, text))


def texts(sentences):
    return [" ".join(sentences.words[a:b]) for a, b in pairwise(sentences.boundaries)]


def test_documents_stay_whole(tmp_path):
    documents = [f"-DOCSTART- O\n\nd{d % 6} B-X\n\ns{d % 6} O\n\n" for d in range(8)]
    sentences = read(tmp_path / "a", "".join(documents))  # the last two repeat the first
    train, dev = split_sentences(sentences, 0.3, seed=1)
    assert len(set(texts(dev))) == 4 and not set(texts(train)) & set(texts(dev))
    assert sorted(texts(train) + texts(dev)) == sorted(texts(sentences))
    assert texts(split_sentences(sentences, 0.3, seed=1)[1]) == texts(dev)
    assert texts(split_sentences(sentences, 0.3, seed=2)[1]) != texts(dev)
    with refused(match="a: a single document cannot be split: name a dev set"):
        split_sentences(sentences.select([0, 1]), 0.3, seed=1)


def test_without_documents_sentences_are_split(tmp_path):
    sentences = read(tmp_path / "a", "".join(f"w{k} O\n\n" for k in range(10)))
    train, dev = split_sentences(sentences, 0.2, seed=1)
    assert (len(train), len(dev)) == (8, 2)


@pytest.mark.parametrize(
    "rare", ["w B-Y\nw I-Y\n\n", "-DOCSTART- O\n\nw B-Y\n\nw O\n\n", "w B-Y\n\nw B-Y\n\n"]
)
def test_a_tag_of_one_place_stays_in_train(tmp_path, rare):
    border = "-DOCSTART- O\n\n" if "DOCSTART" in rare else ""
    rest = "".join(f"{border}v{k} B-X\nv I-X\n\n" for k in range(5))
    sentences = read(tmp_path / "a", rest + rare)
    for seed in range(20):
        train, dev = split_sentences(sentences, 0.5, seed)
        assert set(train.tags) == set(sentences.tags) and "B-Y" not in dev.tags
        assert len(set(texts(dev))) == 3
        assert texts(split_sentences(sentences, 0.5, seed)[1]) == texts(dev)


def test_when_every_document_has_a_tag_of_its_own(tmp_path):
    sentences = read(tmp_path / "a", "a NN\n\nb VB\n\nc JJ\n")
    with refused(match="a: every document has a tag that no other has: name a"):
        split_sentences(sentences, 0.5, seed=1)
    named = read(tmp_path / "b", "a B-X\n\nb B-Y\n\nc O\n")  # O is a class whatever train has
    assert texts(split_sentences(named, 0.5, seed=1)[1]) == ["c"]
    unnamed = read(tmp_path / "c", "a O\n\nb O\n")
    assert len(split_sentences(unnamed, 0.5, seed=1)[1]) == 1


def test_the_summary(tmp_path):
    train = read(tmp_path / "a", "-DOCSTART- O\n\nAnn B-PER\nB I-PER\nYes O\n\nRome B-LOC\n")
    dev = read(tmp_path / "b", "Rome B-LOC\n\nRome B-LOC\n\nNo O\n")
    assert summarize_sentences(train, dev).split("\n") == [
        "train: 2 sentences in 1 documents, 4 words; IOB2, 2 entities: PER 50.0%, LOC 50.0%;"
        " words in a sentence: median 2, longest 3",
        "dev:   3 sentences, 3 words; IOB2, 2 entities: LOC 100.0%;"
        " words in a sentence: median 1, longest 1",
        "exact duplicates: 2 sentences of dev are also in train",
    ]
    plain = read(tmp_path / "c", "Ann NNP\nsings VBZ\n")
    nothing = read(tmp_path / "d", "no O\n")
    text = summarize_sentences(plain, nothing)
    assert "plain, 2 tags: NNP 50.0%, VBZ 50.0%;" in text
    assert "IOB2, 0 entities; words" in text
    unnamed = read(tmp_path / "e", "a B\nb B\n")
    assert "2 entities: unnamed 100.0%" in summarize_sentences(unnamed, plain)


def test_an_uncased_model_for_names_is_said(tmp_path):
    names = read(tmp_path / "a", "Ann B-PER\nsings O\n")
    assert case_warning(names, GOOGLE_UNCASED).startswith("warning: the model's vocabulary is unc")
    assert not case_warning(names, GOOGLE_CASED)
    assert not case_warning(read(tmp_path / "b", "ann B-PER\nsings O\n"), GOOGLE_UNCASED)
    assert not case_warning(read(tmp_path / "c", "Ann NNP\nsings VBZ\n"), GOOGLE_UNCASED)
