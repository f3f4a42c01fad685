"""Questions out of tables: the same data in every format, and every way a cell can be wrong."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from bertsmith.tasks.squad.files import read_question_rows
from bertsmith.tasks.task import own_task

TASK = own_task("answer", "ask", "about", "right")
CONTEXT = "Ann met Bob in Rome. Later Bob left."


def dump(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(right, ask="Who?", about=CONTEXT):
    return {"ask": ask, "about": about, "right": right}


def test_answers_in_all_their_forms(tmp_path):
    path = dump(
        tmp_path / "a.jsonl",
        row("Bob"),
        row(["Rome", "in Rome"]),
        row({"text": ["Bob"], "answer_start": [27]}, ask="Who left?"),
        row({"text": ["Bob"], "answer_start": [25]}),  # not there
        row({"text": [], "answer_start": []}),
        row("", about="Nobody."),
        row(None),
        row("Eve"),
    )
    questions = read_question_rows(path, TASK)
    assert questions.ids == [str(line) for line in range(1, 9)]
    assert questions.answers[:3] == [["Bob"], ["Rome", "in Rome"], ["Bob"]]
    assert questions.answers[3:] == [["Bob"], [], [], [], ["Eve"]]
    found = [(8, 11), (15, 19), (27, 30), (27, 30), *[(-1, -1)] * 4]
    assert questions.spans.tolist() == [list(span) for span in found]
    assert questions.repairs == [""] * 3 + ["elsewhere"] + [""] * 4
    assert questions.problems()[0].endswith("found elsewhere (first: line 4)")
    assert questions.is_lost.tolist() == [False] * 7 + [True]
    assert questions.contexts == [CONTEXT, "Nobody."] and questions.texts[2] == "Who left?"
    assert questions.context_numbers.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]

    blind = read_question_rows(path, TASK, need_answers=False)
    assert blind.answers is None and blind.texts == questions.texts


def test_an_answer_without_a_place_is_whole_words(tmp_path):
    notice = row("1", ask="Which platform?", about="The train leaves at 11:15 from platform 1.")
    questions = read_question_rows(dump(tmp_path / "a.jsonl", notice), TASK)
    assert questions.spans.tolist() == [[40, 41]] and not any(questions.repairs)


def test_the_other_formats(tmp_path):
    (tmp_path / "a.csv").write_text(f'ask,about,right\nWho?,"{CONTEXT}",Bob\nWhy?,"{CONTEXT}",\n')
    column = [{"text": ["Bob"], "answer_start": [8]}, {"text": [], "answer_start": []}]
    table = pa.table({"ask": ["Who?", "Why?"], "about": [CONTEXT] * 2, "right": column})
    parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        questions = read_question_rows(tmp_path / name, TASK)
        assert questions.answers == [["Bob"], []] and questions.spans[0].tolist() == [8, 11]
        assert len(questions.contexts) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("Bob"), row(7)], ":2: column 'right' holds 7: give a text, a list of texts, or"),
        ([row(["Bob", ""])], r":1: column 'right' holds \['Bob', ''\]"),
        ([row({"text": ["Bob"], "answer_start": ["8"]})], ":1: column 'right' holds {'text'"),
        ([row("Bob", ask=" ")], ":1: empty text in column 'ask'"),
        ([row("Bob", about=3)], ":1: column 'about' holds 3, not a text"),
        ([{"ask": "Who?", "about": "x"}], ":1: no column 'right' for --label"),
    ],
)
def test_bad_rows(rows, message, tmp_path):
    with pytest.raises(ValueError, match=f"a.jsonl.*{message}") as caught:
        read_question_rows(dump(tmp_path / "a.jsonl", *rows), TASK)
    assert "\n" not in str(caught.value)
