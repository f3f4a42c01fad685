"""Pieces and batches: always cut at the same places, from any of them on."""

import pytest

from bertsmith.corpus.build import batches as sources
from bertsmith.corpus.build.batches import all_batches, cut_into_pieces


@pytest.fixture
def files(tmp_path):
    """Five files of 0, 3, 8, 13 and 18 bytes, with as many documents as their number."""
    found = [tmp_path / f"{k}.txt" for k in range(5)]
    for k, file in enumerate(found):
        file.write_text("\n\n".join(f"{k}-{n}" for n in range(k)))
    return found


def test_pieces_are_files_of_a_size_together(files, monkeypatch):
    def names():
        return [[int(file.stem) for file in piece] for piece in cut_into_pieces(files)]

    assert names() == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(sources, "PIECE", 10)
    assert names() == [[0, 1, 2], [3], [4]]


def test_batches_from_any_place_on_are_those_of_the_whole(files, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 0)
    whole = list(all_batches(files, "text", characters=6))
    assert [one.lines[0] for batch in whole for _, one in batch.documents] == [
        f"{k}-{n}" for k in range(5) for n in range(k)
    ]
    assert [len(batch.documents) for batch in whole] == [1, 2, 2, 1, 2, 2]
    for place, batch in enumerate(whole):
        first = (batch.piece, batch.number)
        assert list(all_batches(files, "text", characters=6, first=first)) == whole[place:]
    assert not list(all_batches(files, "text", characters=6, first=(4, 2)))


def test_a_batch_of_very_short_lines_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_LINES", 4)
    (tmp_path / "a.txt").write_text("a\nb\nc\n\nd\n\ne\n\nf\n")
    batches = [batch.documents for batch in all_batches([tmp_path / "a.txt"], "text")]
    assert [[one.lines for _, one in batch] for batch in batches] == [
        [["a", "b", "c"], ["d"]],
        [["e"], ["f"]],
    ]
