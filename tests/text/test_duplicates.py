import random
from collections import Counter

from bertsmith.text.vocabulary.report import DuplicateLines


def test_counts_are_those_of_a_counter():
    draw = random.Random(1)
    lines = [f"line {draw.randrange(300)}" for _ in range(1000)] + ["\ud800", "é", "é"]
    found = DuplicateLines()
    found.add(lines[:400])
    found.add(iter(lines[400:]))
    counts = Counter(lines)
    result = found.result(most=5)
    assert result["count"] == len(lines) - len(counts)
    assert result["share"] == result["count"] / len(lines) and result["counted"] == 1
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert [(one["line"], one["count"]) for one in result["most_frequent"]] == expected


def test_beyond_the_limit_a_fixed_part_is_counted_whole():
    lines = [f"line {k}" for k in range(4000)] * 3
    found, again = DuplicateLines(limit=1000), DuplicateLines(limit=1000)
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
