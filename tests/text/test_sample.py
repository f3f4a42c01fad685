from bertsmith.text.readers import documents as sample
from bertsmith.text.readers.documents import sample_lines


def test_every_file_gives_an_equal_share(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa\naaaa\n\naaaa\n")
    (tmp_path / "b.txt").write_text("bb\n\nbb\n")
    (tmp_path / "c.jsonl").write_text('{"t": "cccccccc"}\n{"t": "c"}\n')
    assert sample_lines([tmp_path], text_column="t", characters=18) == [
        *("aaaa", "aa"),
        *("bb", "bb"),
        "cccccc",
    ]
    everything = ["aaaa"] * 3 + ["bb"] * 2 + ["cccccccc", "c"]
    assert sample_lines([tmp_path], text_column="t") == everything


def test_of_too_many_files_some_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MAX_FILES", 3)
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(str(number))
    assert sample_lines([tmp_path]) == ["0", "3", "6"]
