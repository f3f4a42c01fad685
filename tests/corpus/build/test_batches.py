"""Pieces and batches, always cut at the same places; lists of documents to leave out."""

import json

import pytest

from bertsmith.corpus.build import batches as sources
from bertsmith.corpus.build.batches import BatchReader, read_lists, unique_inputs, write_list

from ...tiny import write


@pytest.fixture
def files(tmp_path):
    """Five files of 0, 3, 8, 13 and 18 bytes, with as many documents as their number."""
    texts = ("\n\n".join(f"{k}-{n}" for n in range(k)) for k in range(5))
    return [write(tmp_path / f"{k}.txt", text) for k, text in enumerate(texts)]


def test_pieces_are_files_of_a_size_together(files, monkeypatch):
    def names():
        return [[int(file.stem) for file in piece] for piece in BatchReader(files, "text").pieces]

    assert names() == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(sources, "PIECE", 10)
    assert names() == [[0, 1, 2], [3], [4]]


def test_batches_from_any_place_on_are_those_of_the_whole(files, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 0)
    whole = list(BatchReader(files, "text", characters=6))
    assert [one.lines[0] for batch in whole for _, one in batch.documents] == [
        f"{k}-{n}" for k in range(5) for n in range(k)
    ]
    assert [len(batch.documents) for batch in whole] == [1, 2, 2, 1, 2, 2]
    for place, batch in enumerate(whole):
        first = (batch.piece, batch.number)
        assert list(BatchReader(files, "text", characters=6, first=first)) == whole[place:]
    assert not list(BatchReader(files, "text", characters=6, first=(4, 2)))


def test_a_batch_of_very_short_lines_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_LINES", 4)
    file = write(tmp_path / "a.txt", "a\nb\nc\n\nd\n\ne\n\nf\n")
    batches = [batch.documents for batch in BatchReader([file], "text")]
    assert [[one.lines for _, one in batch] for batch in batches] == [
        [["a", "b", "c"], ["d"]],
        [["e"], ["f"]],
    ]


@pytest.fixture
def texts(tmp_path):
    """Two files of five documents each."""
    texts = {name: "\n\n".join(f"{name} {k}" for k in range(5)) for name in "ab"}
    return [write(tmp_path / f"{name}.txt", text) for name, text in texts.items()]


@pytest.fixture
def listed(texts, tmp_path):
    def listed(numbers, name="list.jsonl"):
        entries = (
            {"source": str(file), "document": number, "line": 2 * number + 1, "reason": "test"}
            for file, number in numbers
        )
        write_list(tmp_path / name, "a test", {"k": 1}, unique_inputs(texts), entries)
        return tmp_path / name

    return listed


def read(files, excluded):
    return [
        one.lines[0]
        for batch in BatchReader(files, "text", excluded, characters=8)
        for _, one in batch.documents
    ]


def test_named_documents_are_left_out_and_no_others(texts, listed):
    lists = [listed([(texts[0], 0), (texts[0], 4), (texts[1], 2)]), listed([(texts[1], 1)], "2")]
    excluded = read_lists(lists, texts)
    assert read(texts, excluded) == ["a 1", "a 2", "a 3", "b 0", "b 3", "b 4"]
    assert read_lists([], texts) == {} and len(read(texts, {})) == 10
    assert read(texts, read_lists([listed([])], texts)) == read(texts, {})


def test_a_list_is_lines_of_json_for_people_too(texts, listed):
    head, entry = map(json.loads, listed([(texts[0], 3)]).read_text().splitlines())
    assert head["made_by"] == "a test" and head["settings"] == {"k": 1}
    assert entry["line"] == 7 and entry["reason"] == "test"


def test_a_list_of_other_or_changed_files_is_refused(texts, listed, tmp_path):
    one = listed([(texts[0], 0), (texts[1], 0)])
    changed = one.read_text().replace('"inputs": [', '"inputs": [3, {}], "then": [')
    odd = write(tmp_path / "odd.jsonl", changed)
    with pytest.raises(ValueError, match=r"a.txt has changed since the list was made"):
        read_lists([odd], texts)
    with pytest.raises(ValueError, match=r"list.jsonl:3: names .*b.txt, which is not among"):
        read_lists([one], texts[:1])
    write(texts[1], "b 0\n\nnew")
    with pytest.raises(ValueError, match=r"b.txt has changed since the list was made"):
        read_lists([one], texts)


def test_the_copy_that_stays_must_be_among_the_inputs_as_it_was(texts, tmp_path):
    """Else the text would be in neither file of the store."""
    copy = {"source": str(texts[1]), "document": 2, "of": {"source": str(texts[0]), "document": 0}}

    def made_of(files):
        write_list(tmp_path / "list.jsonl", "a test", {}, unique_inputs(files), [copy])
        return [tmp_path / "list.jsonl"]

    assert read(texts[1:], read_lists(made_of(texts), texts)) == ["b 0", "b 1", "b 3", "b 4"]
    with pytest.raises(ValueError, match=r"list.jsonl:2: names .*a.txt, which is not among"):
        read_lists(made_of(texts), texts[1:])
    older = made_of(texts[1:])  # the copy is in text of --against
    assert read(texts[1:], read_lists(older, texts[1:])) == ["b 0", "b 1", "b 3", "b 4"]
    lists = made_of(texts)
    write(texts[0], "another")
    with pytest.raises(ValueError, match=r"a.txt has changed since the list was made"):
        read_lists(lists, texts)


def test_a_list_numbers_the_texts_of_one_column(texts, listed):
    one = listed([(texts[0], 0)])
    made_of = one.read_text().replace('{"k": 1}', '{"text_column": "body"}')
    assert len(read_lists([write(one, made_of)], texts, "body")) == 1
    with pytest.raises(ValueError, match="of column 'body', not of 'text': make it with `text_col"):
        read_lists([one], texts)


HEAD = '{"format": 1, "settings": {}, "inputs": []}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "list.jsonl:1: damaged"),
        ('{"text": "hello"}\n', "list.jsonl:1: damaged, or not a list"),
        ('{"format": 9, "settings": {}, "inputs": []}\n', "not a list of format 1"),
        ('{"format": 1, "settings": {}, "inputs": 3}\n', "list.jsonl:1: damaged"),
        (HEAD + '{"source": "a', "list.jsonl:2: damaged"),
        (HEAD + "[]\n", "list.jsonl:2: damaged"),
        (HEAD + '{"source": [], "document": 1}', "list.jsonl:2: damaged"),
        (HEAD + '{"source": "a", "document": "1"}', "list.jsonl:2: damaged"),
        (HEAD + "[" * 99_999, "list.jsonl:2: damaged"),
    ],
)
def test_what_is_no_list_is_named(texts, tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_lists([write(tmp_path / "list.jsonl", content)], texts)


def test_an_absent_list_is_named(texts, tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file: make it with corpus dedup"):
        read_lists([tmp_path / "nowhere"], texts)
