import json
import random
from collections import Counter

import pytest

from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, Normalization, split_words
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary import report
from bertsmith.text.vocabulary.report import WORD_LENGTHS, DuplicateLines, measure

from ..letters import longest_match

LETTERS = "abcéß가"
# No piece for ß or z, none for a b that begins a word.
PIECES = [*SPECIAL, "[unused0]", "a", "##a", "##b", "c", "##c", "e", "##e", "##ab", "가", ".", "aa"]
TOKENIZER = Tokenizer(Vocabulary(PIECES), GOOGLE_UNCASED)
KEEPING = Normalization(strip_accents="none")


def random_documents(seed, count=40):
    draw = random.Random(seed)

    def word():
        return "".join(draw.choices(LETTERS, k=draw.choice((1, 2, 3, 4, 9, 14, 30))))

    def line():
        return " ".join(word() + draw.choice(("", ".")) for _ in range(draw.choice((1, 3, 60))))

    documents = [[line() for _ in range(draw.choice((1, 2, 5)))] for _ in range(count)]
    documents[3][0] = documents[5][0] = "\u0085"  # a line of no words
    return [Document("x.txt", 1, lines) for lines in documents]


def by_hand(documents, normalization):
    """The same figures, a word at a time."""
    figures = Counter()
    by_length, pieces_by_length = Counter(), Counter()
    lines, whole, used, unknown, words = [], [], set(), Counter(), set()
    for document in documents:
        lengths = []
        for line in document.lines:
            length = 0
            for word in split_words(line, normalization):
                raw = line[word.origins[0] : word.origins[-1] + 1]
                pieces = longest_match(word.characters, PIECES[5:])
                figures["unknown"] += pieces is None
                figures["characters"] += len(raw)
                figures["unknown characters"] += len(raw) * (pieces is None)
                row = max(k for k, begin in enumerate(WORD_LENGTHS) if begin <= len(raw))
                by_length[row] += 1
                pieces_by_length[row] += len(pieces or [1])
                length += len(pieces or [1])
                used.update(pieces or [])
                words.add(raw)
                if pieces is None:
                    unknown.update(raw)
            lengths.append(length)
        lines += [length + 2 for length in lengths]
        whole.append(sum(lengths) + 2)
    return figures, by_length, pieces_by_length, lines, whole, used, unknown, words


@pytest.mark.parametrize("normalization", [GOOGLE_UNCASED, KEEPING])
@pytest.mark.parametrize("batch", [1, 500, 1 << 20])
def test_the_figures_are_those_of_counting_by_hand(monkeypatch, normalization, batch):
    monkeypatch.setattr(report, "BATCH", batch)
    documents = random_documents(7)
    figures = measure(documents, {"mine": Tokenizer(Vocabulary(PIECES), normalization)})
    json.dumps(figures, allow_nan=False)
    counted = by_hand(documents, normalization)
    expected, by_length, pieces, lines, whole, used, unknown, words = counted
    [side] = figures["vocabularies"]
    num_words, num_pieces = sum(by_length.values()), sum(pieces.values())
    assert (side["name"], side["size"]) == ("mine", len(PIECES))
    assert (side["words"], side["pieces"]) == (num_words, num_pieces)
    assert side["pieces_per_word"] == num_pieces / num_words
    assert side["characters_per_piece"] == expected["characters"] / num_pieces
    assert side["word_coverage"] == 1 - expected["unknown"] / num_words
    unknown_share = expected["unknown characters"] / expected["characters"]
    assert side["character_coverage"] == pytest.approx(1 - unknown_share)
    assert side["unknown_pieces"] == expected["unknown"] / num_pieces
    assert side["unused_pieces"] == (len(PIECES) - 5 - len(used)) / (len(PIECES) - 5)
    for row, found in enumerate(side["by_word_length"]):
        assert found["words"] == by_length[row]
        assert found["pieces_per_word"] == (pieces[row] / by_length[row] if by_length[row] else 0)
    for unit, lengths in (("lines", lines), ("documents", whole)):
        found = side[unit]
        assert found["count"] == len(lengths) and found["longest"] == max(lengths)
        assert found["median"] == sorted(lengths)[(len(lengths) - 1) // 2]
        assert found["over_128"] == sum(n > 128 for n in lengths) / len(lengths)
        assert found["over_512"] == sum(n > 512 for n in lengths) / len(lengths)
        for bar in found["histogram"]:
            assert bar["count"] == sum(bar["from"] <= n <= bar["to"] for n in lengths)
        assert sum(bar["count"] for bar in found["histogram"]) == len(lengths)
    unheld = ["ß", "é"] if normalization == KEEPING else ["ß", "가"]
    found = {one["character"]: one["count"] for one in side["unknown_characters"]}
    assert found == {character: unknown[character] for character in unheld}
    longest = figures["text"]["longest_words"]
    assert [one["characters"] for one in longest] == sorted(map(len, words))[::-1][:10]
    assert len({one["word"] for one in longest}) == 10 and words >= {w["word"] for w in longest}


def test_the_text_itself_and_names_of_characters():
    lines = ["aa ß\ud800ß.", "aa ß\ud800ß.", "\U0001f642 z\u0301\ue000"]  # the mark is dropped
    documents = [Document("x", 1, lines[:2]), Document("x", 4, lines[2:])]
    figures = measure(documents, {"a": TOKENIZER, "b": TOKENIZER})
    text, (side, other) = figures["text"], figures["vocabularies"]
    assert (text["documents"], text["lines"], text["characters"]) == (2, 3, 19)
    assert text["bytes"] == 2 * (3 + 2 + 3 + 2 + 1) + 4 + 1 + 1 + 2 + 3
    assert text["duplicate_lines"]["count"] == 1
    assert {**side, "name": "b"} == other
    names = {one["code_point"]: one["name"] for one in side["unknown_characters"]}
    assert list(names) == ["U+00DF", "U+D800", "U+007A", "U+E000", "U+1F642"]
    assert names["U+1F642"] == "SLIGHTLY SMILING FACE"
    assert (names["U+D800"], names["U+E000"]) == ("Cs", "Co")
    assert [(one["word"], one["pieces"]) for one in text["longest_words"]] == [
        ("z\u0301\ue000", [None, None]),
        ("ß\ud800ß", [None, None]),
        ("aa", [1, 1]),
        (".", [1, 1]),
        ("\U0001f642", [None, None]),
    ]


def test_reading_stops_at_the_limit():
    def documents():
        while True:
            yield Document("x", 1, ["a" * 20_000, "ß" * 10_000])

    figures = measure(documents(), {"a": TOKENIZER}, megabytes=0.23)
    assert (figures["text"]["documents"], figures["text"]["bytes"]) == (6, 240_000)


def test_altered_letters_are_part_of_the_figures():
    figures = measure([Document("x", 1, ["가a"])], {"a": TOKENIZER})
    altered = figures["vocabularies"][0]["altered_letters"]
    assert (altered["share"], altered["letters"]) == (0.5, 2)
    assert altered["scripts"][0]["script"] == "Hangul" and "warning: 50.0%" in altered["warning"]


def test_nothing_read_gives_figures_of_nothing():
    figures = measure([], {"a": TOKENIZER})
    [side] = figures["vocabularies"]
    assert (figures["text"]["documents"], side["words"], side["pieces_per_word"]) == (0, 0, 0.0)
    assert side["lines"]["histogram"] == [] and side["altered_letters"]["share"] == 0


def test_counts_are_those_of_a_counter():
    draw = random.Random(1)
    lines = [f"line {draw.randrange(300)}" for _ in range(1000)] + ["\ud800", "é", "é"]
    found = DuplicateLines()
    found.add(lines[:400])
    found.add(iter(lines[400:]))
    counts = Counter(lines)
    result = found.result()
    assert result["count"] == len(lines) - len(counts)
    assert result["share"] == result["count"] / len(lines) and result["counted"] == 1
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]
    assert [(one["line"], one["count"]) for one in result["most_frequent"]] == expected


def test_beyond_the_limit_a_fixed_part_is_counted_whole(monkeypatch):
    monkeypatch.setattr(report, "MAX_LINES", 1000)
    lines = [f"line {k}" for k in range(4000)] * 3
    found, again = DuplicateLines(), DuplicateLines()
    found.add(lines)
    for line in lines:
        again.add([line])
    result = found.result()
    assert result == again.result()
    assert len(found.counts) <= 1000 and set(found.counts.values()) == {3}
    assert len(found.repeated) == len(found.counts)
    assert result["share"] == 2 / 3
    assert result["counted"] in (1 / 4, 1 / 8, 1 / 16)
    assert abs(result["count"] / 8000 - 1) < 0.15


def test_a_long_line_is_kept_in_part():
    found = DuplicateLines()
    found.add(["x" * 1000] * 2)
    assert found.result()["most_frequent"] == [{"line": "x" * 80, "count": 2}]
    assert DuplicateLines().result()["share"] == 0
