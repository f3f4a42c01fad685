"""Data folders for benchmarks/finetune.py and finetune_table.py, cut out of public data sets.

A folder is what `bertsmith finetune --data` and the peer both read. The data sets lie in glue/,
squad/, conll2003/ and multichoice-extra/, with the files that this script names.

A slice of a GLUE file is rows at equal distances over it (the derived QNLI file goes article by
article), of SQuAD the first questions. MRPC's original files have no dev set: their labelled test
file is used. SQuAD 2.0's training set is not at hand: train is the slice of 1.1 and 20 articles
of the 2.0 dev file, dev (the threshold) its next 5 articles, test its last 10.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bertsmith.base.files import atomic_folder, write_json, write_text
from bertsmith.text.readers.files import read_text

GLUE = {  # task: folder, {file there: name here}
    "cola": ("CoLA", {"train.tsv": "train.tsv", "dev.tsv": "dev.tsv"}),
    "sst2": ("SST-2", {"train.tsv": "train.tsv", "dev.tsv": "dev.tsv"}),
    "mrpc": (
        "MRPC",
        {"msr_paraphrase_train.txt": "train.tsv", "msr_paraphrase_test.txt": "dev.tsv"},
    ),
    "stsb": ("STS-B", {"train.tsv": "train.tsv", "dev.tsv": "dev.tsv"}),
    "qqp": ("QQP", {"train.tsv": "train.tsv", "dev.tsv": "dev.tsv"}),
    "mnli": (
        "MNLI",
        {
            "train.subset.tsv": "train.tsv",
            "dev_matched.subset.tsv": "dev_matched.tsv",
            "dev_mismatched.subset.tsv": "dev_mismatched.tsv",
        },
    ),
    "qnli": ("QNLI", {"train.derived.tsv.xz": "train.tsv", "dev.tsv": "dev.tsv"}),
    "rte": ("RTE", {"train.tsv": "train.tsv", "dev.tsv": "dev.tsv"}),
}
WHOLE = {  # files taken as they are
    "conll": ("conll2003", ("eng.train", "eng.testa", "eng.testb")),
    "codah": ("multichoice-extra", ("codah.tsv",)),
}
NAMES = (*GLUE, "squad1", "squad2", *WHOLE)


def prepare(
    name: str, source: Path, work: Path, examples: int | None = None, dev: int | None = None
) -> Path:
    """Write the folder of `name` below `work`, unless it is there; `examples` and `dev` None: all.

    Errors: ValueError for an unknown name; FileNotFoundError when `source` lacks a file.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data '{name}': known are {', '.join(NAMES)}")
    folder = work / f"{name}-{examples or 'all'}-{dev or 'all'}"
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            if name in GLUE:
                directory, files = GLUE[name]
                for there, here in files.items():
                    count = examples if here == "train.tsv" else dev
                    text = read_text(source / "glue" / directory / there)
                    write_text(temporary / here, slice_rows(text, count))
            elif name in WHOLE:
                directory, wanted = WHOLE[name]
                for file in wanted:
                    shutil.copyfile(source / directory / file, temporary / file)
            else:
                splits = squad1 if name == "squad1" else squad2
                for file, found in splits(source / "squad", examples, dev).items():
                    write_json(temporary / file, {"data": found})
    return folder


def slice_rows(text: str, count: int | None) -> str:
    r"""A file with a header cut to `count` rows at equal distances.

    >>> slice_rows("a\n1\n2\n3\n4\n", 2)
    'a\n1\n3\n'
    """
    if count is None:
        return text
    head, *rows = text.rstrip("\n").split("\n")
    count = min(count, len(rows))
    return "\n".join([head, *(rows[k * len(rows) // count] for k in range(count))]) + "\n"


def squad1(source: Path, examples: int | None, dev: int | None) -> dict[str, Any]:
    """{file: articles} of SQuAD 1.1."""
    return {
        "train.json": first_questions(articles(source / "v1.1/train-v1.1.json.xz"), examples),
        "dev.json": first_questions(articles(source / "v1.1/dev-v1.1.json"), dev),
    }


def squad2(source: Path, examples: int | None, dev: int | None) -> dict[str, Any]:
    """{file: articles} of the makeshift SQuAD 2.0; `dev` questions of the test articles."""
    old = first_questions(articles(source / "v1.1/train-v1.1.json.xz"), examples)
    new = articles(source / "v2.0/dev-v2.0.json")
    return {
        "train.json": old + new[:20],
        "dev.json": new[20:25],
        "test.json": first_questions(new[-10:], dev),
    }


def articles(path: Path) -> list[dict[str, Any]]:
    return json.loads(read_text(path))["data"]


def first_questions(found: list[dict[str, Any]], count: int | None) -> list[dict[str, Any]]:
    """The first `count` questions with their paragraphs and articles."""
    if count is None:
        return found
    kept: list[dict[str, Any]] = []
    for article in found:
        paragraphs = []
        for paragraph in article["paragraphs"]:
            questions = paragraph["qas"][:count]
            count -= len(questions)
            if questions:
                paragraphs.append({**paragraph, "qas": questions})
        if paragraphs:
            kept.append({**article, "paragraphs": paragraphs})
    return kept
