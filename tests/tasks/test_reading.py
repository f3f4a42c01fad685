import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from bertsmith.tasks.reading import (
    Examples,
    find_evaluation_file,
    find_file,
    read_examples,
    split_dev,
    summarise,
)
from bertsmith.tasks.table import find_task, own_task

GLUE = Path(__file__).parents[2].parent / "shared" / "data" / "glue"
OWN = own_task("text", None, "label")
PAIR = own_task("text", "other", "label")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def examples(texts: list[str], labels: list[int], names=("a", "b")) -> Examples:
    return Examples(
        texts, None, np.array(labels, np.int64), names, "mem", list(range(2, len(texts) + 2))
    )


def test_csv_with_quotes_and_line_breaks(tmp_path):
    path = write(
        tmp_path / "x.csv", 'text,label\n"a, b",yes\n\n"two\nlines ""here""",no\r\nlast,yes\n'
    )
    read = read_examples(path, OWN)
    assert read.texts == ["a, b", 'two\nlines "here"', "last"]
    assert read.label_names == ("no", "yes")
    assert read.labels.tolist() == [1, 0, 1] and read.labels.dtype == np.int64
    assert read.lines == [2, 4, 6]


def test_the_same_rows_in_every_format(tmp_path):
    rows = [{"text": f"t{k}", "other": f"o{k}", "label": k % 3 * 5, "id": k} for k in range(6)]
    tsv = ["\t".join(rows[0])] + ["\t".join(map(str, row.values())) for row in rows]
    write(tmp_path / "x.tsv", "\n".join(tsv))
    write(tmp_path / "x.csv", "\n".join(line.replace("\t", ",") for line in tsv) + "\n")
    write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    for suffix, first_line in ((".tsv", 2), (".csv", 2), (".jsonl", 1), (".parquet", 1)):
        read = read_examples(tmp_path / f"x{suffix}", PAIR)
        assert read.texts == ["t0", "t1", "t2", "t3", "t4", "t5"]
        assert read.pairs == ["o0", "o1", "o2", "o3", "o4", "o5"]
        assert read.label_names == ("0", "5", "10")  # by size, not "0", "10", "5"
        assert read.labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert read.lines == list(range(first_line, first_line + 6))


def test_glue_formats(tmp_path):
    """Loose quotes are text; MRPC begins with a byte order mark."""
    write(tmp_path / "train.tsv", 'sentence\tlabel\n"loose quote \t1\nplain \t0\n')
    write(tmp_path / "test.tsv", "index\tsentence\n0\tunseen\n")
    sst2 = find_task("sst2")
    read = read_examples(find_file(sst2, tmp_path, "train"), sst2)
    assert read.texts == ['"loose quote ', "plain "] and read.labels.tolist() == [1, 0]
    unlabelled = read_examples(find_file(sst2, tmp_path, "test"), sst2, need_labels=False)
    assert unlabelled.texts == ["unseen"] and unlabelled.labels is None

    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    path = write(
        tmp_path / "msr_paraphrase_train.txt",
        header + '1\t7\t8\tHe said "no.\tHe said no.\r\n0\t7\t8\tA\tB\r\n',
    )
    read = read_examples(path, find_task("mrpc"))
    assert (read.texts, read.pairs) == (['He said "no.', "A"], ["He said no.", "B"])
    assert read.label_names == ("0", "1") and read.labels.tolist() == [1, 0]


@pytest.mark.skipif(not GLUE.is_dir(), reason="the shared GLUE files are not on this machine")
def test_counts_of_the_real_files():
    for name, folder, train_size, dev_size, positives in (
        ("sst2", "SST-2", 67_349, 872, 444),
        ("mrpc", "MRPC", 4_076, 1_725, 1_147),
    ):
        task = find_task(name)
        train = read_examples(find_file(task, GLUE / folder, "train"), task)
        dev = read_examples(find_evaluation_file(task, GLUE / folder), task, train.label_names)
        assert (len(train), len(dev), dev.labels.sum()) == (train_size, dev_size, positives)


def test_find_file(tmp_path):
    write(tmp_path / "train.jsonl", "")
    write(tmp_path / "dev.csv", "")
    assert find_file(OWN, tmp_path, "train") == tmp_path / "train.jsonl"
    assert find_file(OWN, tmp_path, "test") is None
    assert find_evaluation_file(OWN, tmp_path) == tmp_path / "dev.csv"
    write(tmp_path / "test.csv", "")
    assert find_evaluation_file(OWN, tmp_path) == tmp_path / "test.csv"
    assert find_evaluation_file(find_task("sst2"), tmp_path) == tmp_path / "dev.csv"
    single = tmp_path / "train.jsonl"
    assert find_file(OWN, single, "train") == single
    assert find_file(OWN, single, "dev") is None  # never train on what is scored
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no training file .*msr_paraphrase_train.txt, train.csv"):
        find_file(find_task("mrpc"), tmp_path / "empty", "train")
    with pytest.raises(ValueError, match="no such file or folder"):
        find_file(OWN, tmp_path / "absent", "train")


BAD = [
    ("x.csv", "text,lable\na,1\n", r"x.csv: no column 'label' for --label: did you mean 'lable'\?"),
    ("x.csv", "a,b\n1,2\n", r"no column 'text' for --text: .* \(columns: a, b\)"),
    ("x.csv", "text,label,label\na,1,2\n", r"column 'label' \(--label\) is there twice"),
    ("x.csv", "text,label\na,1\nb\n", r"x.csv:3: 1 cells, but the header has 2"),
    ("x.tsv", "text\tlabel\na\tb\t1\n", r"x.tsv:2: 3 cells, but the header has 2"),
    ("x.csv", 'text,label\na,1\n"b,0\nc,1\n', r"x.csv:3: broken row \(unexpected end of data\)"),
    ("x.csv", "text,label\na,1\n  ,0\n", r"x.csv:3: empty text in column 'text'"),
    ("x.csv", "text,label\na,1\nb, \n", r"x.csv:3: empty label in column 'label'"),
    ("x.csv", "text,label\na,1\nb,1\n", r"every example has the label '1'"),
    ("x.csv", "text,label\n", r"no examples in this file"),
    ("x.csv", "", r"no examples in this file"),
    ("x.csv", "text,label\na\0,1\n", r"x.csv:2: a NUL byte"),
    ("x.docx", "text", r"cannot read '.docx': use one of .csv"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"text": \n', r"x.jsonl:2: not valid JSON"),
    ("x.jsonl", '{"text": "a", "label": 1}\n[1]\n', r"x.jsonl:2: expected a JSON object"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', r"x.jsonl:2: no column 'label'"),
    ("x.jsonl", '{"text": 3, "label": 1}\n', r"x.jsonl:1: column 'text' holds 3, not a text"),
    ("x.jsonl", '{"text": "a", "label": [1, 2]}\n', r"x.jsonl:1: label \[1, 2\]"),
    ("x.parquet", "not parquet", r"x.parquet: not a readable parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_files_are_one_line_errors(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_examples(write(tmp_path / name, content), OWN)
    assert "\n" not in str(error.value)


def test_wrong_encoding_and_missing_file(tmp_path):
    (tmp_path / "x.csv").write_bytes("text,label\nok,1\ncaf\xe9,0\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"x.csv:3: not UTF-8"):
        read_examples(tmp_path / "x.csv", OWN)
    with pytest.raises(ValueError, match="absent.csv: no such file"):
        read_examples(tmp_path / "absent.csv", OWN)


def test_unknown_label_in_a_dev_file(tmp_path):
    path = write(tmp_path / "dev.csv", "text,label\na,yes\nb,maybe\n")
    with pytest.raises(ValueError, match=r"dev.csv:3: unknown label 'maybe' \(known: no, yes\)"):
        read_examples(path, OWN, label_names=("no", "yes"))
    one_class = write(tmp_path / "one.csv", "text,label\na,yes\n")
    assert read_examples(one_class, OWN, ("no", "yes")).labels.tolist() == [1]


def test_split_dev_is_stratified_and_keeps_copies_together():
    texts = [f"text {k}" for k in range(100)] + ["text 7"] * 5 + ["once"]
    whole = examples(texts, [0] * 80 + [1] * 20 + [0] * 5 + [2], ("a", "b", "c"))
    train, dev = split_dev(whole, 0.1, seed=3)
    assert sorted(train.lines + dev.lines) == whole.lines
    assert not set(train.texts) & set(dev.texts)
    distinct = {text: label for text, label in zip(dev.texts, dev.labels, strict=True)}
    assert np.bincount(list(distinct.values()), minlength=3).tolist() == [8, 2, 0]
    assert split_dev(whole, 0.1, seed=3)[1].texts == dev.texts
    assert split_dev(whole, 0.1, seed=4)[1].texts != dev.texts
    with pytest.raises(ValueError, match="too few examples.*--dev"):
        split_dev(examples(["x", "y"], [0, 1]), 0.1, seed=0)


def test_summary_by_hand():
    train = examples(["one two", "one two", "three", "a b c"], [0, 0, 1, 1])
    dev = examples(["three", "new", " a b c"], [1, 0, 0])
    assert summarise(train, dev).splitlines() == [
        "train: 4 examples; a 50.0%, b 50.0%; words: median 2, 95% up to 3, longest 3",
        "dev:   3 examples; a 66.7%, b 33.3%; words: median 1, 95% up to 3, longest 3",
        "exact duplicates: 1 rows of train repeat an earlier one, 2 of dev are also in train",
    ]
