"""Choices among options: files, rows and batches by hand."""

import numpy as np
import pytest

from bertsmith.tasks.choice import featurize_choice, read_choices
from bertsmith.tasks.examples import find_file, split_dev, summarize
from bertsmith.tasks.features import training_batches
from bertsmith.tasks.task import EncodingSettings, find_task, own_task

from ..tiny import write
from .made import CLS, DATA, LETTERS, SEP, by_row, jsonl, needs, refused

LISTS = own_task("choice", "text", None, "label", options=("options",))


def row(**changes) -> dict:
    return {"text": "a", "options": ["b", "c d", "e"], "label": 1} | changes


def test_swag_by_hand(tmp_path):
    header = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,"
    rows = (
        header + "ending0,ending1,ending2,ending3,label",
        '0,v,1,He sits. He,He sits.,He,gold,"stands up, now.",eats.,runs.,sleeps.,2',
        "1,v,2,Rain.,Rain.,,gold,falls.,ends.,is.,was.,0",
    )
    path = write(tmp_path / "val.csv", rows)
    swag = find_task("SWAG")
    read = read_choices(find_file(swag, tmp_path, "dev"), swag)
    assert read.contexts == ["He sits. He", "Rain."]  # what B goes on from
    assert read.options[0] == ["stands up, now.", "eats.", "runs.", "sleeps."]
    assert (read.labels.tolist(), read.labels.dtype) == ([2, 0], np.int64)
    assert (len(read), read.num_options, read.lines) == (2, 4, [2, 3])
    assert read.select([1]).options == [["falls.", "ends.", "is.", "was."]]
    unlabelled = read_choices(path, swag, need_labels=False)
    assert unlabelled.labels is None and unlabelled.select([0]).labels is None


def test_the_start_of_the_sentence_may_be_missing(tmp_path):
    task = own_task("choice", "text", "start", "label", options=("options",))
    path = jsonl(tmp_path / "x.jsonl", row(start="He"), row(start=None), row(start=""))
    for need_labels in (True, False):
        assert read_choices(path, task, need_labels).contexts == ["a He", "a", "a"]
    with refused(match=r"y\.jsonl:2: column 'start' holds 5, not a text"):
        read_choices(jsonl(tmp_path / "y.jsonl", row(start="He"), row(start=5)), task)


@pytest.mark.parametrize(
    ("rows", "options", "labels"),
    [
        ([row(), row(label="2"), row(label=2.0)], ("options",), [1, 2, 2]),
        ([row(options={"A": "b", "B": "c"}, label="B")], ("options",), [1]),
        ([{"text": "a", "good": "b", "bad": "c", "label": "bad"}], ("good", "bad"), [1]),
    ],
    ids=["numbers", "keys", "columns"],
)
def test_labels_are_numbers_keys_or_columns(tmp_path, rows, options, labels):
    task = own_task("choice", "text", None, "label", options=options)
    assert read_choices(jsonl(tmp_path / "a.jsonl", *rows), task).labels.tolist() == labels


@needs("swag")
def test_the_real_files():
    """Sizes and label counts as ../shared/data/README.md gives them."""
    swag = find_task("swag")
    read = read_choices(find_file(swag, DATA / "swag", "dev"), swag)
    assert np.bincount(read.labels).tolist() == [123, 109, 144, 124]
    codah = find_task("codah")
    read = read_choices(find_file(codah, DATA / "multichoice-extra", "train"), codah)
    assert (len(read), read.num_options) == (2_776, 4)
    task = own_task("choice", "question", None, "answer", options=("choices",))
    for split in ("dev", "test"):
        path = DATA / "multichoice-extra" / f"hellaswag-abstainqa-{split}.jsonl"
        assert len(read_choices(path, task)) == 1_000


BAD = [
    (row(options="b"), r"x.jsonl:2: 'b' in column 'options' is not a list of options"),
    (row(options=["b"]), r"x.jsonl:2: 1 options: a choice needs two or more"),
    (row(options=["b", "c"]), r"x.jsonl:2: 2 options, but the first row has 3"),
    (row(options=["b", " ", "c"]), r"x.jsonl:2: option '1' is ' ', not a text"),
    (row(options=["b", 3, "c"]), r"x.jsonl:2: option '1' is 3, not a text"),
    (row(label=3), r"x.jsonl:2: label 3 is no option: they are numbered 0 to 2 \(names: 0, 1, 2\)"),
    (row(label=-1), r"x.jsonl:2: label -1 is no option"),
    (row(label="c d"), r"x.jsonl:2: label 'c d' is no option"),
    (row(label=""), r"x.jsonl:2: empty label '': number the right option from 0"),
    (row(label=None), r"x.jsonl:2: empty label None"),
    (row(label=True), r"x.jsonl:2: empty label True"),
    (row(text=" "), r"x.jsonl:2: empty text in column 'text'"),
    ({"text": "a", "label": 1}, r"x.jsonl:2: no column 'options' for `options`"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_rows_are_one_line_errors(tmp_path, bad, message):
    with refused(match=message):
        read_choices(jsonl(tmp_path / "x.jsonl", row(), bad), LISTS)


def test_rows_by_hand(tmp_path):
    second = row(text="f g", options=["a b c d e", "a b c d e f g", "a"], label=2)
    examples = read_choices(jsonl(tmp_path / "x.jsonl", row(), second), LISTS)
    encoding = EncodingSettings(max_length=9)
    features = featurize_choice(LETTERS, examples, encoding)
    assert len(features) == 6 and features.labels.tolist() == [1, 2]
    rows = by_row(features, features.ids)
    assert rows[1] == [CLS, 5, SEP, 7, 8, SEP]  # a, then c d
    assert by_row(features, features.token_types)[1] == [0, 0, 0, 1, 1, 1]
    assert rows[4] == [CLS, 10, 11, SEP, 5, 6, 7, 8, SEP]  # f g, then a b c d (cut)
    assert features.num_truncated == 1  # two options of one text
    note = "1 of 2 examples have more than 9 tokens and lose their end"
    assert features.long_note(encoding) == note

    assert features.unit_lengths.tolist() == [6, 9]
    (units,) = training_batches(features.unit_lengths, 2, seed=1, epoch=0)
    batch = features.batch(units, pad_id=0)
    place = units.tolist().index(1)
    assert batch["ids"].shape == batch["types"].shape == (6, 9)
    assert batch["ids"][3 * place + 2].tolist() == [CLS, 10, 11, SEP, 5, SEP, 0, 0, 0]
    assert batch["lengths"].reshape(2, 3)[place].tolist() == [9, 9, 6]
    assert batch["labels"][place] == 2
    outputs = np.arange(6.0)[:, None]
    assert features.pooled(outputs, "mean").tolist() == outputs.tolist()  # an example has one unit


def test_summary_and_split_by_hand(tmp_path):
    rows = [row(), row(label=0), row(text="h")]
    train = read_choices(jsonl(tmp_path / "train.jsonl", *rows), LISTS)
    dev = read_choices(jsonl(tmp_path / "dev.jsonl", row(), row(text="b c")), LISTS)
    assert summarize(train, dev).splitlines() == [
        "train: 3 examples; 3 options, the right one is 1 66.7%, 0 33.3%, 2 0.0%;"
        " words: median 2, 95% up to 3, longest 3",
        "dev:   2 examples; 3 options, the right one is 1 100.0%, 0 0.0%, 2 0.0%;"
        " words: median 3, 95% up to 4, longest 4",
        "exact duplicates: 1 rows of train repeat an earlier one, 1 of dev are also in train",
        "label conflicts: 1 texts of train have two labels or more, the first in lines 1 and 2",
    ]
    many = [row(text=f"t{k}") for k in range(20)]
    whole = read_choices(jsonl(tmp_path / "many.jsonl", *many, many[3]), LISTS)
    train, dev = split_dev(whole, 0.25, seed=1)
    assert len(train) + len(dev) == 21 and not set(train.contexts) & set(dev.contexts)
    assert 5 <= len(dev) <= 6
