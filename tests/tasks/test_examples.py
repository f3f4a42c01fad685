"""Files of labelled texts: found, read with checks, split and summed up."""

import json
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from bertsmith.inference.evaluation import labelled as evaluate
from bertsmith.tasks.answer_files import read_rows
from bertsmith.tasks.examples import (
    Examples,
    find_file,
    is_labelled,
    label_conflicts,
    read_examples,
    split_dev,
    summarize,
)
from bertsmith.tasks.task import find_task, own_task
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.answers import AnswerQuestions
from bertsmith.training.finetuning.task_types.base import read_data
from bertsmith.training.finetuning.task_types.texts import Classify

from ..tiny import write
from .made import DATA, lines, needs, refused

GLUE = DATA / "glue"
OWN = own_task("classify", "text", None, "label")
PAIR = own_task("classify", "text", "other", "label")


def find_evaluation_files(task, data):
    return evaluate.find_evaluation_files(TASK_TYPES[task.task_type], task, data)


def examples(texts, labels, names=("a", "b"), pairs=None) -> Examples:
    return Examples(texts, pairs, labels, names, "mem", list(range(2, len(texts) + 2)))


def write_arrow(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


def test_csv_with_quotes_and_line_breaks(tmp_path):
    text = 'text,label\n"a, b",yes\n\n"two\nlines ""here""",no\r\nlast,yes\n'
    read = read_examples(write(tmp_path / "x.csv", text), OWN)
    assert read.texts == ["a, b", 'two\nlines "here"', "last"]
    assert read.label_names == ("no", "yes")
    assert read.labels.tolist() == [1, 0, 1] and read.labels.dtype == np.int64
    assert read.lines == [2, 4, 6]


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_the_same_rows_in_every_format(tmp_path, ending):
    rows = [{"text": f"t{k}", "other": f"o{k}", "label": k % 3 * 5, "id": k} for k in range(6)]
    table = [list(rows[0]), *(map(str, row.values()) for row in rows)]
    path, first_line = tmp_path / f"x{ending}", 1
    if ending == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ending == ".jsonl":
        write(path, "\n".join(map(json.dumps, rows)))
    else:
        write(path, "\n".join({".tsv": "\t", ".csv": ","}[ending].join(row) for row in table))
        first_line = 2
    read = read_examples(path, PAIR)
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
    test = [row for _, row in read_rows(str(find_file(sst2, tmp_path, "test")), sst2)]
    assert test == [{"index": "0", "sentence": "unseen"}]

    text = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    text += '1\t7\t8\tHe said "no.\tHe said no.\r\n0\t7\t8\tA\tB\r\n'
    path = write(tmp_path / "msr_paraphrase_train.txt", text)
    read = read_examples(path, find_task("mrpc"))
    assert (read.texts, read.pairs) == (['He said "no.', "A"], ["He said no.", "B"])
    assert read.label_names == ("0", "1") and read.labels.tolist() == [1, 0]


# Sizes and label counts as ../shared/data/README.md counted them, without our reader.
REAL = {
    "cola": ("CoLA", 8_551, {"0": 2_528, "1": 6_023}, {"dev": 1_043}),
    "sst2": ("SST-2", 67_349, {"0": 29_780, "1": 37_569}, {"dev": 872}),
    "mrpc": ("MRPC", 4_076, {"0": 1_323, "1": 2_753}, {"test": 1_725}),
    "stsb": ("STS-B", 5_749, None, {"dev": 1_500}),
    "qqp": ("QQP", 23_497, {"0": 14_750, "1": 8_747}, {"dev": 18_993}),
    "mnli": (
        "MNLI",
        9_888,
        {"contradiction": 3_349, "entailment": 3_213, "neutral": 3_326},
        {"dev": 6_238, "dev_mismatched": 1_000},
    ),
    "qnli": ("QNLI", 86_105, {"entailment": 43_482, "not_entailment": 42_623}, {"dev": 5_463}),
    "rte": ("RTE", 2_490, {"entailment": 1_249, "not_entailment": 1_241}, {"dev": 277}),
    "wnli": ("WNLI", 635, {"0": 323, "1": 312}, {"dev": 71}),
}


@needs("glue")
@pytest.mark.parametrize("name", REAL)
def test_counts_of_the_real_files(name):
    folder, size, counts, splits = REAL[name]
    task = find_task(name)
    train = read_examples(find_file(task, GLUE / folder, "train"), task)
    assert len(train) == size
    if counts is None:
        assert (train.labels.dtype, train.labels.min(), train.labels.max()) == (np.float32, 0, 5)
    else:
        assert dict(zip(train.label_names, np.bincount(train.labels), strict=True)) == counts
    found = find_evaluation_files(task, GLUE / folder)
    read = {split: read_examples(file, task, train.label_names) for split, file in found.items()}
    assert {split: len(examples) for split, examples in read.items()} == splits


@needs("glue")
@pytest.mark.parametrize(("name", "size"), [("cola", 1_063), ("stsb", 1_379)])
def test_unlabelled_test_files(name, size):
    task = find_task(name)
    test = list(read_rows(str(find_file(task, GLUE / REAL[name][0], "test")), task))
    assert len(test) == size and task.label not in test[0]


def test_find_file(tmp_path):
    write(tmp_path / "train.jsonl", "")
    write(tmp_path / "dev.csv", "")
    assert find_file(OWN, tmp_path, "train") == tmp_path / "train.jsonl"
    assert find_file(OWN, tmp_path, "test") is None
    assert find_evaluation_files(OWN, tmp_path) == {"dev": tmp_path / "dev.csv"}
    write(tmp_path / "test.csv", "")
    assert find_evaluation_files(OWN, tmp_path) == {"test": tmp_path / "test.csv"}
    assert find_evaluation_files(find_task("sst2"), tmp_path) == {"dev": tmp_path / "dev.csv"}
    single = tmp_path / "train.jsonl"
    assert find_evaluation_files(OWN, single) == {"data": single}
    assert find_file(OWN, single, "train") == single
    assert find_file(OWN, single, "dev") is None  # never train on what is scored
    (tmp_path / "empty").mkdir()
    with refused(match=r"no training file; .*msr_paraphrase_train.txt, train.csv"):
        find_file(find_task("mrpc"), tmp_path / "empty", "train")
    with refused(match="no such file or folder"):
        find_file(OWN, tmp_path / "absent", "train")
    with refused(match="no labelled test or dev file; name the file itself"):
        find_evaluation_files(OWN, tmp_path / "empty")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (OWN, "dev.csv.gz"),
        (OWN, "val.jsonl.zst"),
        (own_task("tag", "tokens", None, "tags"), "dev.conll.bz2"),
        (own_task("answer", "question", "context", "answers"), "dev.json.zst"),
        (find_task("mnli"), "dev_matched.tsv.xz"),
    ],
)
def test_packed_files_of_a_folder_are_found(tmp_path, task, name):
    (tmp_path / "dev.parquet.gz").touch()  # cannot be read
    assert find_file(task, tmp_path, "dev") is None
    packed = write(tmp_path / name, "")
    assert find_file(task, tmp_path, "dev") == packed
    plain = write(tmp_path / name.rpartition(".")[0], "")
    assert find_file(task, tmp_path, "dev") == plain


UNLABELLED = [  # without the column 'label', or with nothing in it
    ("test.csv", "text,id\na,1\n"),
    ("test.tsv", "text\na\n"),
    ("test.jsonl", '{"text": "a"}\n'),
    ("test.csv", "text,label\na,-1\nb,-1\n"),
    ("test.csv", "text,label\na,\nb, \n"),
    ("test.csv", "text,label\na,-1.0\nb,-1.0\n"),  # as pandas writes a column of scores
    ("test.jsonl", '{"text": "a", "label": -1}\n{"text": "b", "label": null}\n'),
]


@pytest.mark.parametrize(("name", "content"), UNLABELLED)
def test_a_test_file_without_labels_is_passed_over(tmp_path, name, content, capsys):
    test = write(tmp_path / name, content)
    with refused(match="no labelled test or dev file"):
        find_evaluation_files(OWN, tmp_path)
    dev = write(tmp_path / "dev.csv", "text,label\na,1\n")
    assert find_evaluation_files(OWN, tmp_path) == {"dev": dev}
    assert capsys.readouterr().err == f"{test}: no labels (column 'label'): measured on {dev}\n"
    assert find_evaluation_files(OWN, test) == {"data": test}  # named: refused when it is read
    other = own_task("classify", "body", None, "label")  # a mistake to be told, not a choice
    assert find_evaluation_files(other, tmp_path) == {"test": test}


def test_rows_of_json_may_lack_their_label(tmp_path, capsys):
    """Also the first, whose keys are all that other readers look at."""
    rows = {"text": "a"}, {"text": "b", "label": 1}, {"text": "c", "label": 0}, {"text": "d"}
    write(tmp_path / "dev.csv", "text,label\na,1\n")
    test = write(tmp_path / "test.jsonl", lines(*rows))
    assert find_evaluation_files(OWN, tmp_path) == {"test": test}
    with refused(match=r"test\.jsonl:1: no column 'label' for `label`"):
        read_examples(test, OWN)
    found = read_examples(test, replace(OWN, skip_unlabelled=True))
    assert (found.texts, found.labels.tolist(), found.lines) == (["b", "c"], [1, 0], [2, 3])
    assert capsys.readouterr().err == f"{test}: 2 of 4 rows have no label and are left out\n"
    other = own_task("classify", "body", None, "label")
    with refused(match=r"test\.jsonl:1: no column 'body' for `text`"):
        read_examples(test, replace(other, skip_unlabelled=True))
    with refused(match=r"no row has a label in column 'labl': name another with `label`"):
        read_examples(test, replace(OWN, label="labl", skip_unlabelled=True))


EMPTY = {"question": "a", "context": "b"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.json", '{"data": [{"paragraphs": [{"qas": [{"id": "1"}]}]}]}'),
        ("test.jsonl", lines({**EMPTY, "answers": {"text": [], "answer_start": []}})),
        ("test.jsonl", lines({**EMPTY, "answers": []})),
    ],
)
def test_questions_whose_answers_are_withheld(tmp_path, name, content):
    own = own_task("answer", "question", "context", "answers")
    dev = write(tmp_path / "dev.json", "{}")
    assert not AnswerQuestions().is_labelled(write(tmp_path / name, content), own)
    assert find_evaluation_files(own, tmp_path) == {"dev": dev}
    (tmp_path / name).unlink()
    some = [{**EMPTY, "answers": answers} for answers in ([], {"text": ["b"]})]
    test = write(tmp_path / "test.jsonl", lines(*some))
    assert find_evaluation_files(own, tmp_path) == {"test": test}


def test_a_test_file_with_some_labels_is_measured_on(tmp_path):
    write(tmp_path / "dev.csv", "text,label\na,1\n")
    test = write(tmp_path / "test.csv", "text,label\na,-1\nb,1\n")  # refused when it is read
    assert find_evaluation_files(OWN, tmp_path) == {"test": test}


@pytest.mark.parametrize("name", ["test.conll", "test.txt"])
def test_columns_without_names_may_be_labelled(tmp_path, name):
    words = own_task("tag", "tokens", None, "tags")
    assert is_labelled(write(tmp_path / name, "Ann\tB-PER\n"), words)


def test_what_dev_names(tmp_path):
    data = write(tmp_path / "train.csv", "text,label\na,1\nb,2\n")
    with refused(match=r"^`dev=\S+`: a folder: name the file in it$"):
        read_data(Classify(), OWN, data, tmp_path)
    with refused(match="absent.csv: no such file"):
        read_data(Classify(), OWN, data, tmp_path / "absent.csv")
    split = tmp_path / "validation"
    write(split / "state.json", "{}")
    table = pyarrow.Table.from_pylist([{"text": "c", "label": "2"}])
    write_arrow(split / "data-00000-of-00001.arrow", table)
    _, sets, record = read_data(Classify(), OWN, data, split)
    assert sets["dev"].texts == ["c"] and record["dev"] == str(split / "data-*.arrow")


def test_other_names_of_the_dev_set(tmp_path):
    for name in ("val.csv", "valid.tsv", "validation.jsonl"):
        path = write(tmp_path / name, "")
        assert find_file(OWN, tmp_path, "dev") == path


def test_broken_rows_of_qqp_are_left_out_with_a_warning(tmp_path, capsys):
    rows = ["7\t1\t2\tWhy?\tHow?\t1", "8\t1\t2\tWhy? How?\t0", "9\t1\t2\tWhy?\t\t0"]
    rows += ["10\t\t\tWhen?\tWhere?\t0"]  # without question numbers, which nobody reads
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = write(tmp_path / "train.tsv", "\n".join([header, *rows]))
    read = read_examples(path, find_task("qqp"))
    assert (read.texts, read.labels.tolist(), read.lines) == (["Why?", "When?"], [1, 0], [2, 5])
    assert "train.tsv: 2 broken rows are left out, the first in line 3\n" in capsys.readouterr().err
    with refused(match=r"train.tsv:3: 5 cells"):  # never a test example
        list(read_rows(str(path), find_task("qqp")))


def test_mnli_has_two_dev_sets(tmp_path):
    task = find_task("mnli")
    assert task.dev_splits == ("dev", "dev_mismatched")
    official = "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tneutral\n"
    dev, other = (write(tmp_path / f"dev_{k}matched.tsv", official) for k in ("", "mis"))
    assert find_evaluation_files(task, tmp_path) == {"dev": dev, "dev_mismatched": other}
    read = read_examples(other, task, task.labels)
    assert read.label_names == ("contradiction", "entailment", "neutral")
    assert read.labels.tolist() == [2]


def test_a_hugging_face_folder(tmp_path):
    """The two layouts as `datasets` 5.2 writes them (compared with its own files by hand)."""
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["sad", "glad", "calm"], "_type": "ClassLabel"},
        "tags": {"feature": {"names": ["x", "y"], "_type": "ClassLabel"}, "_type": "List"},
    }
    rows = [{"text": f"t{k}", "label": k % 2, "tags": [0, 1][: k % 3]} for k in range(6)]
    table = pyarrow.Table.from_pylist(rows)

    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    described = table.replace_schema_metadata(metadata)
    parquet.write_table(described.slice(0, 4), hub / "train-00000-of-00002.parquet")
    parquet.write_table(described.slice(4), hub / "train-00001-of-00002.parquet")
    parquet.write_table(described, hub / "validation-00000-of-00001.parquet")
    withheld = described.set_column(1, "label", pyarrow.array([-1] * 6))
    parquet.write_table(withheld, hub / "test-00000-of-00001.parquet")
    assert find_evaluation_files(OWN, hub.parent) == {"dev": hub / "validation-*.parquet"}

    saved = tmp_path / "saved"
    for split in ("train", "validation"):
        write(saved / split / "dataset_info.json", json.dumps({"features": features}))
        write(saved / split / "state.json", "{}")
        write_arrow(saved / split / "data-00000-of-00001.arrow", table)

    for folder in (tmp_path / "hub", saved):
        train = read_examples(find_file(OWN, folder, "train"), OWN)
        assert train.texts == ["t0", "t1", "t2", "t3", "t4", "t5"]
        assert train.label_names == ("sad", "glad", "calm")  # their order, also the unused one
        assert train.labels.tolist() == [0, 1, 0, 1, 0, 1]
        dev = read_examples(find_file(OWN, folder, "dev"), OWN, train.label_names)
        assert len(dev) == 6
        sets = own_task("multilabel", "text", None, "tags")
        read = read_examples(find_file(sets, folder, "train"), sets)
        assert read.label_names == ("x", "y")
        assert read.labels[:3].tolist() == [[False, False], [True, False], [True, True]]
    one_split = saved / "train"
    assert len(read_examples(find_file(OWN, one_split, "train"), OWN)) == 6
    assert find_file(OWN, one_split, "dev") is None
    assert find_evaluation_files(OWN, one_split) == {"data": one_split / "data-*.arrow"}


BAD = [
    ("x.csv", "text,lable\na,1\n", r"x.csv: no column 'label' for `label`: did you mean 'lable'\?"),
    ("x.csv", "a,b\n1,2\n", r"no column 'text' for `text`: .* \(columns: a, b\)"),
    ("x.csv", "text,label,label\na,1,2\n", r"column 'label' \(`label`\) is there twice"),
    ("x.tsv", "text\tlabel\na\tb\t1\n", r"x.tsv:2: 3 cells, but the header has 2"),
    ("x.csv", "text,label\na,1\n  ,0\n", r"x.csv:3: empty text in column 'text'"),
    ("x.csv", "text,label\na,1\nb, \n", r"x.csv:3: empty label in column 'label'"),
    ("x.csv", "text,label\na,1\nb,1\n", r"every example has the label '1'"),
    ("x.csv", "text,label\n", r"no examples in this file"),
    ("x.csv", "", r"no examples in this file"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', r"x.jsonl:2: no column 'label'"),
    ("x.jsonl", '{"text": 3, "label": 1}\n', r"x.jsonl:1: column 'text' holds 3, not a text"),
    ("x.jsonl", '{"text": "a", "label": [1, 2]}\n', r"x.jsonl:1: \[1, 2\] in .* is not one label"),
    ("absent.csv", None, "absent.csv: no such file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_files_are_one_line_errors(tmp_path, name, content, message):
    with refused(match=message):
        read_examples(tmp_path / name if content is None else write(tmp_path / name, content), OWN)


def test_unknown_label_in_a_dev_file(tmp_path):
    path = write(tmp_path / "dev.csv", "text,label\na,yes\nb,maybe\n")
    with refused(match=r"dev.csv:3: unknown label 'maybe' \(known: no, yes\)"):
        read_examples(path, OWN, label_names=("no", "yes"))
    one_class = write(tmp_path / "one.csv", "text,label\na,yes\n")
    assert read_examples(one_class, OWN, ("no", "yes")).labels.tolist() == [1]


def test_split_dev_is_stratified_and_keeps_copies_together():
    texts = [f"text {k}" for k in range(100)] + ["text 7"] * 5 + ["once"]
    labels = np.array([0] * 80 + [1] * 20 + [0] * 5 + [2])
    whole = examples(texts, labels, ("a", "b", "c"))
    train, dev = split_dev(whole, 0.1, seed=3)
    assert sorted(train.lines + dev.lines) == whole.lines
    assert not set(train.texts) & set(dev.texts)
    distinct = dict(zip(dev.texts, dev.labels, strict=True))
    assert np.bincount(list(distinct.values()), minlength=3).tolist() == [8, 2, 0]
    assert split_dev(whole, 0.1, seed=3)[1].texts == dev.texts
    assert split_dev(whole, 0.1, seed=4)[1].texts != dev.texts
    with refused(match="too few examples.*`dev`"):
        split_dev(examples(["x", "y"], np.array([0, 1])), 0.1, seed=0)


@pytest.mark.parametrize("as_sets", [False, True])
def test_split_dev_leaves_every_class_in_train(as_sets):
    """A text with two labels counts for the first, but may be all that the second one has."""
    texts = [f"text {k}" for k in range(10)] + ["other 0", "other 1", "text 3", "text 4"]
    labels = np.array([0] * 10 + [1] * 2 + [2] * 2)
    if as_sets:  # text 10 counts for b, text 12 for c, and d for no text
        texts, labels = [f"text {k}" for k in range(14)], np.zeros((14, 4), bool)
        labels[:10, 0] = labels[10:12, 1] = labels[12:, 2] = labels[[10, 12], 3] = True
    whole = examples(texts, labels, tuple("abcd"))
    for seed in range(30):
        train, dev = split_dev(whole, 0.5, seed)
        assert train.labels.any(axis=0).all() if as_sets else {*train.labels.tolist()} == {0, 1, 2}
        assert len(dev) >= 4
        assert not set(train.texts) & set(dev.texts)
        assert sorted(train.lines + dev.lines) == whole.lines


def test_split_dev_of_label_sets_and_scores():
    texts = [f"text {k}" for k in range(100)]
    labels = np.zeros((100, 3), bool)
    labels[:90, 0] = True
    labels[50:70, 1] = True
    labels[60:64, 2] = True  # with both others; the rarest, so these four are a stratum
    train, dev = split_dev(examples(texts, labels, ("a", "b", "c")), 0.25, seed=1)
    assert dev.labels.sum(axis=0).tolist()[1:] == [5, 1]  # 16 / 4 + the one of c; 4 / 4
    assert (~dev.labels.any(axis=1)).sum() == 2  # round(10 / 4): those without are a stratum too
    assert len(train) + len(dev) == 100

    scores = np.linspace(0, 1, 100, dtype=np.float32)
    train, dev = split_dev(examples(texts, scores, ()), 0.1, seed=1)
    assert (len(train), len(dev)) == (90, 10) and dev.labels.dtype == np.float32


def test_classes_by_hand():
    train = examples(["one two", "one two", "three", "a b c"], np.array([0, 0, 1, 1]))
    dev = examples(["three", "new", " a b c"], np.array([1, 0, 0]))
    assert summarize(train, dev).splitlines() == [
        "train: 4 examples; a 50.0%, b 50.0%; words: median 2, 95% up to 3, longest 3",
        "dev:   3 examples; a 66.7%, b 33.3%; words: median 1, 95% up to 3, longest 3",
        "exact duplicates: 1 rows of train repeat an earlier one, 2 of dev are also in train",
    ]


def test_scores_and_sets_by_hand():
    scores = examples(["a", "b", "c", "d", "e"], np.array([0, 1, 2, 3, 4.5], np.float32), ())
    assert summarize(scores, scores).startswith(
        "train: 5 examples; scores 0 to 4.5, mean 2.1, quartiles 1, 2, 3; words:"
    )
    sets = examples(["a", "b", "c", "d"], np.array([[0, 1], [1, 1], [0, 0], [0, 1]], bool))
    assert summarize(sets, sets).startswith(
        "train: 4 examples; 1.00 labels a text, 1 without; b 75.0%, a 25.0%; words:"
    )


def test_the_same_text_with_two_labels():
    texts, classes = ["x", "y", "x ", "x", "y"], np.array([0, 1, 0, 1, 1])
    sets = np.array([[0, 1], [1, 1], [1, 1], [1, 0], [1, 1]], bool)
    assert label_conflicts(examples(texts, classes)) == [[0, 3]]
    assert label_conflicts(examples(texts, np.float32([0, 1, 0, 0, 2]), ())) == [[1, 4]]
    assert label_conflicts(examples(texts, sets)) == [[0, 2, 3]]
    assert not label_conflicts(examples(texts, classes, pairs=list("pqrst")))
    train = examples(texts, classes)
    assert summarize(train, train).endswith(
        "\nlabel conflicts: 1 texts of train have two labels or more, the first in lines 2 and 5"
    )
