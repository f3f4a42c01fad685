"""The words of running text: the rules by example, and against CoNLL-2003's own words."""

from pathlib import Path

import pytest

from bertsmith.tasks.tagging.running_text import word_spans

CONLL = Path(__file__).parents[4] / "shared" / "data" / "conll2003"


def words(text):
    return [text[begin:end] for begin, end in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Rome, Paris.", "Rome , Paris ."),
        ('He said: "Go (now)!"', 'He said : " Go ( now ) ! "'),
        ("in the U.S. at 9 a.m. today", "in the U.S. at 9 a.m. today"),
        ("a U.S.-led force", "a U.S.-led force"),
        ("J. K. Rowling and Mr. Smith of Acme Corp. said", None),
        ("It was Plan B.", "It was Plan B ."),
        ("They don't, he CAN'T; it's we'll I'd", "They do n't , he CA N'T ; it 's we 'll I 'd"),
        ("O'Neil's and O\u2019Neil\u2019s", "O'Neil 's and O\u2019Neil \u2019s"),
        ("AT&T, a well-known ex-S&P firm", "AT&T , a well-known ex-S&P firm"),
        ("3.5 1,000 1/2 9:30 6-3 .500 +44 20-month", None),
        ("3.5%, $10 and US$ 5.", "3.5 % , $ 10 and US$ 5 ."),
        ("and/or", "and / or"),
        ("1. Rome won 2.", "1. Rome won 2 ."),
        ("so... -- well", "so ... -- well"),
        ("see https://a.b/c?d=e, ann.lee@x.org.", "see https://a.b/c?d=e , ann.lee@x.org ."),
        (
            "\u201cCaf\u00e9\u201d \u2014 na\u00efve\u2026",
            "\u201c Caf\u00e9 \u201d \u2014 na\u00efve \u2026",
        ),
        ("\u6771\u4eac\u3067\u3059\u3002", "\u6771 \u4eac \u3067\u3059 \u3002"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947 x", "\u0928\u092e\u0938\u094d\u0924\u0947 x"),
        ("a\u00a0b\tc\u3000d", "a b c d"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_words(text, expected):
    assert words(text) == (text if expected is None else expected).split()


def test_spans_are_places_in_the_text_as_it_was_given():
    text = "  \u201cRome\u201d,  he said. "
    assert word_spans(text)[:3] == [(2, 3), (3, 7), (7, 8)]
    assert "".join(words(text)) == "".join(text.split())


def test_words_that_are_parted_already_stay():
    text = "He does n't like Rome , said Mr. O'Neil 's U.S. team ( 3.5 % ) ."
    assert words(text) == text.split()


TO_THE_LEFT = set(""". , ; : ! ? ) ] % ' 's 'S 're 'm 've 'll 'd n't N'T ... /""".split())  # noqa: SIM905


def sentences(path):
    sentence = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("-DOCSTART-"):
            sentence.append(line.split()[0])
        elif sentence:
            yield sentence
            sentence = []


def running(sentence):
    """(text as people write it, where the words stand in it)."""
    text, spans, is_glued, is_quoted = "", [], True, False
    for word in sentence:
        is_glued |= word in TO_THE_LEFT or (word == '"' and is_quoted)
        text += "" if is_glued else " "
        spans.append((len(text), len(text) + len(word)))
        text += word
        is_glued = word in ("(", "[", "$", "/") or (word == '"' and not is_quoted)
        is_quoted ^= word == '"'
    return text, spans


@pytest.mark.skipif(not CONLL.exists(), reason="CoNLL-2003 is not there")
@pytest.mark.parametrize("name", ["eng.testa", "eng.testb"])
def test_the_words_of_conll_come_back_out_of_running_text(name):
    """testa 99.93%, testb 99.74%; blanks alone give 76%."""
    wanted = found = both = 0
    for sentence in sentences(CONLL / name):
        text, spans = running(sentence)
        given = word_spans(text)
        wanted, found = wanted + len(spans), found + len(given)
        both += len(set(spans) & set(given))
    assert both / wanted > 0.997 and both / found > 0.997
