"""Files in SQuAD's and TriviaQA's formats, and tables of questions."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from bertsmith.tasks.examples import find_file
from bertsmith.tasks.squad.files import has_answers, is_json, read_question_rows, read_questions
from bertsmith.tasks.squad.questions import locate_answer, split_questions, summarize_questions
from bertsmith.tasks.task import find_task, own_task

from ...tiny import write
from ..made import DATA, jsonl, needs, refused, write_packed

CONTEXT = "Ann met Bob in Rome. Later Bob left."


def qa(identity="q1", **fields):
    return {"id": identity, "question": "Who?", **fields}


def answers(*pairs):
    return [{"text": text, "answer_start": start} for text, start in pairs]


def dump(path: Path, *paragraphs):
    """One article a paragraph."""
    data = [{"paragraphs": [{"context": context, "qas": qas}]} for context, qas in paragraphs]
    return write(path, json.dumps({"data": data}))


@pytest.fixture
def read(tmp_path):
    """Paragraphs -> the questions of their file."""
    return lambda *paragraphs: read_questions(dump(tmp_path / "a.json", *paragraphs))


def test_a_file_of_both_versions(tmp_path):
    plausible = qa("q2", answers=[], is_impossible=True, plausible_answers=answers(("No", 0)))
    path = dump(
        tmp_path / "a.json",
        (CONTEXT, [qa("q1", answers=answers(("Bob", 27), ("Ann", 0)))]),
        ("No answer here.", [plausible, qa("q3", is_impossible=True), qa("q4", answers=[])]),
    )
    questions = read_questions(path)
    assert questions.ids == ["q1", "q2", "q3", "q4"]
    assert questions.answers == [["Bob", "Ann"], [], [], []]
    assert questions.spans.tolist() == [[27, 30]] + [[-1, -1]] * 3  # the second Bob
    assert questions.context_numbers.tolist() == [0, 1, 1, 1]
    assert not any(questions.repairs) and not questions.is_lost.any()
    assert questions.describe().startswith(
        "4 questions about 2 contexts; 3 without an answer (75.0%); context words: median"
    )
    chosen = questions.select([3, 1])
    assert chosen.ids == ["q4", "q2"] and chosen.contexts == ["No answer here."]
    assert chosen.context_numbers.tolist() == [0, 0]

    unlabelled = read_questions(path, need_answers=False)
    assert unlabelled.answers is None and (unlabelled.spans == -1).all()
    assert "answer" not in unlabelled.describe()
    assert unlabelled.select([0]).answers is None


@pytest.mark.parametrize("name", ["a.json.xz", "a.json.gz", "A.JSON.GZ"])
def test_compressed_files(tmp_path, name):
    plain = dump(tmp_path / "a.json", (CONTEXT, [qa(answers=answers(("Ann", 0)))]))
    packed = write_packed(tmp_path / name, plain.read_bytes())
    assert is_json(packed) and read_questions(packed).texts == ["Who?"]
    whole = bytearray(packed.read_bytes())
    whole[20:24] = b"\xff" * 4
    for damaged in (b"{}", whole, whole[:18]):
        packed.write_bytes(damaged)
        with refused(match=r"(a\.json|A\.JSON).*: damaged .* file"):
            read_questions(packed)


def test_answers_in_the_wrong_place_are_found_or_counted(read):
    near, lost, of_bytes = (
        qa(name, answers=answers(pair))
        for name, pair in (("near", ("Bob", 25)), ("lost", ("Eve", 0)), ("bytes", ("Noël", 8)))
    )
    questions = read((CONTEXT, [near, lost]), ("Zoë et Noël", [of_bytes]))  # 7 characters, 8 bytes
    assert questions.spans.tolist() == [[27, 30], [-1, -1], [7, 11]]
    assert questions.repairs == ["elsewhere", "", "bytes"]
    assert questions.is_lost.tolist() == [False, True, False]
    assert questions.answers == [["Bob"], ["Eve"], ["Noël"]]  # still scored
    assert questions.describe().endswith("; ".join(questions.problems()))
    assert "; ".join(questions.problems()) == (
        "1 answers whose answer_start counts bytes, not characters"
        " (first: 'bytes' at data[1].paragraphs[0].qas[0]);"
        " 1 answers not at their answer_start, found elsewhere"
        " (first: 'near' at data[0].paragraphs[0].qas[0]);"
        " 1 answers not in their context, left out of training"
        " (first: 'lost' at data[0].paragraphs[0].qas[1])"
    )


@pytest.mark.parametrize(
    ("context", "answer", "start", "expected"),
    [
        ("a b a b", "b", 2, ((2, 3), "")),
        ("a b a b", "b", 5, ((6, 7), "elsewhere")),
        ("a b a b", "b", -7, ((2, 3), "elsewhere")),
        ("a  new\ncity", "new city", 0, ((3, 11), "elsewhere")),  # white space is white space
        ("a b", " b ", 1, ((2, 3), "")),  # spaces are no part of an answer
        ("éébxxb", "b", 4, ((2, 3), "bytes")),  # byte 4, not the nearer one
        ("é b", "b", 0, ((2, 3), "elsewhere")),
        ("ab", "b", 99, ((1, 2), "elsewhere")),
        ("ab", "B", 1, (None, "")),
        ("at 11:15 from platform 1", "1", 0, ((3, 4), "elsewhere")),  # a given place: the nearest
        ("at 11:15 from platform 1", "1", None, ((23, 24), "")),  # none: a word of its own
        ("the party of\nthe art", "the art", None, ((13, 20), "")),
        ("東京都の人", "京", None, ((1, 2), "")),  # no spaces between the words
        ("ab", "B", None, (None, "")),
    ],
)
def test_where_an_answer_is(context, answer, start, expected):
    assert locate_answer(context, answer, start) == expected


def one(*qas, **fields):
    qas = [*qas] or [fields]
    return json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]})


GOOD = {"id": "q", "question": "Who?"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r":1: not valid JSON \(Expecting property name"),
        ("[" * 100_000, ": JSON nested too deeply"),
        ("9" * 5_000, r": not valid JSON \(Exceeds the limit"),
        ("[]", ": no 'data' here, as SQuAD's format has it"),
        ('{"data": {}}', r": 'data' is \{\}, not a list"),
        ('{"data": [{}]}', r": data\[0\]: no 'paragraphs' here"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r"data\[0\].paragraphs\[0\]: no 'context'"),
        ('{"data": []}', ": no questions in this file"),
        (one(id="q", question=" "), r"qas\[0\]: 'question' is empty"),
        (one(id="q", question="a\ud800"), r"'question' holds half a character"),
        (one(id=7, question="Who?"), r"qas\[0\]: 'id' is 7, not a text"),
        (one(**GOOD), r"qas\[0\]: no 'answers' here"),
        (one(**GOOD, answers=[{"text": "Ann"}]), r"answers\[0\]: no 'answer_start' here"),
        (one(**GOOD, answers=answers(("Ann", "0"))), r"'answer_start' is '0', not a whole number"),
        (one(**GOOD, answers=answers(("", 0))), r"answers\[0\]: 'text' is empty"),
        (one(**GOOD, answers=answers(("Ann", 0)), is_impossible=True), "is_impossible, yet it has"),
        (one({**GOOD, "answers": []}, {**GOOD, "answers": []}), "two questions have the id 'q'"),
        (b'{"data": "\xff"}', ":1: not UTF-8 text"),
        (None, ": no such file"),
    ],
)
def test_bad_files(tmp_path, text, message):
    message = message if message[0] == ":" else f".*{message}"
    with refused(match=f"bad.json{message}"):
        path = tmp_path / "bad.json"
        read_questions(path if text is None else write(path, text))


def test_a_folder_is_no_file(tmp_path):
    with refused(match=r": no such file \(it is a folder: name a file in it\)$"):
        read_questions(tmp_path)


def test_finding_files(tmp_path):
    squad2 = find_task("SQuAD-2")
    with refused(match=r"no training file; .*train-v2.0.json, train.json, .*\(text also with .gz"):
        find_file(squad2, tmp_path, "train")
    for name in ("train-v1.1.json", "train-v2.0.json.xz", "train.json", "dev.json"):
        (tmp_path / name).touch()
    assert find_file(squad2, tmp_path, "train") == tmp_path / "train-v2.0.json.xz"
    assert find_file(find_task("squad1"), tmp_path, "train") == tmp_path / "train-v1.1.json"
    assert find_file(squad2, tmp_path, "dev") == tmp_path / "dev.json"
    own = own_task("answer", "question", "context", "answers")
    assert find_file(own, tmp_path, "train") == tmp_path / "train.json"
    assert find_file(own, tmp_path, "test") is None
    (tmp_path / "dev.json").rename(tmp_path / "validation.json")
    for task in (squad2, own):
        assert find_file(task, tmp_path, "dev") == tmp_path / "validation.json"


def test_contexts_without_questions_are_passed_over(read):
    questions = read(("Empty.", []), (CONTEXT, [qa("q", answers=[])]), ("Too.", []))
    assert questions.contexts == [CONTEXT]
    with refused(match="single context cannot be split"):
        split_questions(questions, 0.5, seed=1)


def test_every_answer_lost(read):
    questions = read((CONTEXT, [qa("q", answers=answers(("Eve", 0)))]))
    assert questions.is_lost.all()  # to be scored
    with refused(match=r"a.json: not one answer is in its context .*'q'"):
        questions.check_learnable()


@pytest.mark.parametrize(
    ("value", "has"),
    [
        ({"data": [{"paragraphs": [{"qas": [qa(), qa(answers=answers(("Ann", 0)))]}]}]}, True),
        ({"data": [{"paragraphs": [{"qas": [qa(), qa(answers=[])]}]}]}, False),
        ({"data": [{"paragraphs": [{"context": "x"}, 7]}, {"paragraphs": None}]}, False),
        ({"Data": [{"Question": "Who?"}]}, False),
        ({"Data": [{"Question": "Who?", "Answer": {"Value": "Ann"}}]}, True),
        ({"data": [{"paragraphs": [{"qas": [qa(is_impossible=True)]}]}]}, True),
        ({"data": None}, False),
        ([], False),
    ],
)
def test_whether_a_file_has_answers(tmp_path, value, has):
    assert has_answers(write(tmp_path / "test.json", json.dumps(value))) == has


def test_splitting_keeps_contexts_together(read):
    contexts = [f"Text {c % 8}." for c in range(10)]  # 8 and 9 repeat 0 and 1
    asked = ([qa(f"{c}-{k}", answers=[]) for k in range(3)] for c in range(10))
    questions = read(*zip(contexts, asked, strict=True))
    train, dev = split_questions(questions, 0.25, seed=1)
    assert not set(train.contexts) & set(dev.contexts)
    assert len(set(dev.contexts)) == 2 and sorted(train.ids + dev.ids) == sorted(questions.ids)
    assert split_questions(questions, 0.25, seed=1)[1].ids == dev.ids
    assert split_questions(questions, 0.25, seed=2)[1].ids != dev.ids
    with refused(match="single context cannot be split"):
        split_questions(dev.select([0]), 0.5, seed=1)


def test_the_summary(read):
    train = read((CONTEXT, [qa("1", answers=[])]), ("x", [qa("2", answers=[])]))
    dev = read((CONTEXT, [qa("3", answers=[]), {**qa("4", answers=[]), "question": "Why?"}]))
    lines = summarize_questions(train, dev).split("\n")
    assert lines[0].startswith("train: 2 questions about 2 contexts")
    assert lines[1].startswith("dev:   2 questions about 1 contexts")
    duplicates = "1 contexts of dev are also in train, 1 questions with theirs"
    assert lines[2] == f"exact duplicates: {duplicates}"


def trivia(folder: Path, documents: dict[str, str], **item) -> Path:
    for name, text in documents.items():
        write(folder / "evidence" / name, text)
    content = {"Data": [{"QuestionId": "t1", "Question": "Where?", **item}]}
    return write(folder / "qa" / "wikipedia-train.json", json.dumps(content))


ANSWER = {"Value": "New York", "Aliases": ["NYC", "York", "new york city"], "HumanAnswers": ["NY"]}


def test_trivia(tmp_path):
    path = trivia(
        tmp_path,
        {
            "wikipedia/a.txt": "He saw Yorkshire, then NEW  YORK City, York.",
            "wikipedia/b.txt": "Nothing of it.",
            "wikipedia/late.txt": "word " * 400 + "NYC",  # the paper reads 400 words
            "web/1/c.txt": "word " * 399 + "NYC and more",
        },
        Answer=ANSWER,
        EntityPages=[{"Filename": f"{name}.txt"} for name in ("a", "b", "late")],
        SearchResults=[{"Filename": "1/c.txt"}],
    )
    questions = read_questions(path)
    assert questions.ids == ["t1--a.txt", "t1--1/c.txt"]
    texts = [c[b:e] for c, (b, e) in zip(questions.contexts, questions.spans, strict=True)]
    assert texts == ["NEW  YORK City", "NYC"]
    assert questions.contexts[1].endswith("word NYC")
    assert questions.answers[1] == ["NYC", "New York", "York", "new york city", "NY"]
    asked = read_questions(path, need_answers=False)  # all documents, of the test set too
    assert asked.ids == [f"t1--{name}.txt" for name in ("a", "b", "late", "1/c")]
    assert asked.contexts[:2] == [questions.contexts[0], "Nothing of it."]
    content = json.loads(path.read_text())
    del content["Data"][0]["Answer"]
    write(path, json.dumps(content))
    assert read_questions(path, need_answers=False).ids == asked.ids


BAD_TRIVIA = [
    ({"Answer": {}}, r"Data\[0\]: not as TriviaQA has it: 'Value' is missing"),
    ({"Answer": ANSWER, "EntityPages": [{"Filename": "no.txt"}]}, "no document .*no.txt"),
    ({"Answer": ANSWER, "EntityPages": [{"Filename": "../../x"}]}, "'wikipedia/../../x' is out"),
    ({"Answer": ANSWER}, "no document has an answer to its question in its first 400 words"),
    ({"Answer": ANSWER | {"Value": None}}, r"Data\[0\]: .*: id, question, answers are texts"),
    ({"Answer": ANSWER, "Question": ["Who?"]}, r"Data\[0\]: .*: id, question, answers are texts"),
]


@pytest.mark.parametrize(("item", "message"), BAD_TRIVIA)
def test_bad_trivia(tmp_path, item, message):
    with pytest.raises(ValueError, match=message):
        read_questions(trivia(tmp_path, {"wikipedia/a.txt": "x"}, **item))


def test_what_is_no_list_of_questions(tmp_path):
    path = trivia(tmp_path, {"wikipedia/a.txt": "x"})
    write(path, '{"Data": {"QuestionId": "t1"}}')
    with refused(match=r"train\.json: 'Data' is {'QuestionId': 't1'}, not a list"):
        read_questions(path)


def test_trivia_without_its_documents(tmp_path):
    with refused(match="no folder .*evidence with the documents"):
        read_questions(trivia(tmp_path, {}, Answer=ANSWER))


@needs("squad")
def test_the_real_dev_set():
    questions = read_questions(DATA / "squad" / "v2.0" / "dev-v2.0.json")
    assert len(questions) == 11_873 and len(questions.contexts) == 1_204  # as published
    without = np.array([not answers for answers in questions.answers])
    assert without.sum() == 5_945
    assert not questions.is_lost.any() and not any(questions.repairs)


TASK = own_task("answer", "ask", "about", "right")


def row(right, ask="Who?", about=CONTEXT):
    return {"ask": ask, "about": about, "right": right}


def test_answers_in_all_their_forms(tmp_path):
    path = jsonl(
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
    questions = read_question_rows(jsonl(tmp_path / "a.jsonl", notice), TASK)
    assert questions.spans.tolist() == [[40, 41]] and not any(questions.repairs)


def test_the_other_formats(tmp_path):
    write(tmp_path / "a.csv", f'ask,about,right\nWho?,"{CONTEXT}",Bob\nWhy?,"{CONTEXT}",\n')
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
        ([{"ask": "Who?", "about": "x"}], ":1: no column 'right' for `label`"),
    ],
)
def test_bad_rows(rows, message, tmp_path):
    with refused(match=f"a.jsonl.*{message}"):
        read_question_rows(jsonl(tmp_path / "a.jsonl", *rows), TASK)
