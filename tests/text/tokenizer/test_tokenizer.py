"""`Tokenizer` against a slow reference, in groups, by threads; the texts that people hand over."""

import pickle
import pydoc_data.topics
import random
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.text.tokenizer import tokenizer
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED, Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer, as_texts

from ..letters import letter_vocabulary, longest_match, vocabulary_of

PIECES = ["un", "##aff", "##able", "want", "##ed", "runn", "##ing", "a", "##a", "b", "##b", "c"]
PIECES += ["[unused1]", ",", "中", "i", "##c", "##i", "é", "e", "##e", "α", "ας", "##σ", "`"]
JAMO = [chr(code) for code in range(0x1100, 0x1200)]
SMALL = vocabulary_of(*PIECES, *JAMO, *("##" + letter for letter in JAMO))
UNCASED, CASED = Tokenizer(SMALL), Tokenizer(SMALL, GOOGLE_CASED)

ALPHABET = (
    "abcABC,,.!   \t\n\r\u00a0\u2028\u3000\x00\x07\x85\u200b\ufffd\u00ad中文가각힣がガé́É̈İıΑαΣςΩ"
    "ßẞﬁ`\u1fef$^~\u0301\u0345\U0001d16d\U0001d165\U0002f800\U0002b820\ud800😀नि"
)
texts = st.text(st.sampled_from(ALPHABET) | st.characters(), max_size=30)


IDEOGRAPHS = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)]
IDEOGRAPHS += [(0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]
ASCII_SIGNS = [(33, 47), (58, 64), (91, 96), (123, 126)]


def is_in(character, ranges):
    return any(first <= ord(character) <= last for first, last in ranges)


def reference_words(text, lowercase):
    """The basic tokenizer once more, from its description: whole strings, nothing remembered."""
    cleaned = ""
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned += " "
        elif category not in ("Cc", "Cf") and ord(character) not in (0, 0xFFFD):
            cleaned += f" {character} " if is_in(character, IDEOGRAPHS) else character
    words = []
    for token in cleaned.split():
        if lowercase:
            token = unicodedata.normalize("NFD", token.lower())
            token = "".join(c for c in token if unicodedata.category(c) != "Mn")
        for character in token:
            sign = unicodedata.category(character)[0] == "P" or is_in(character, ASCII_SIGNS)
            words.append(f" {character} " if sign else character)
        words.append(" ")
    return "".join(words).split()


def reference_pieces(text, vocabulary, lowercase):
    """(piece ids, word numbers) of a text, each word matched from the front by trial."""
    ids, numbers = [], []
    for number, word in enumerate(reference_words(text, lowercase)):
        row = longest_match(word, vocabulary.ids) if len(word) <= 200 else None
        ids += [vocabulary.ids[piece] for piece in row or ["[UNK]"]]
        numbers += [number] * len(row or ["[UNK]"])
    return ids, numbers


def random_texts(seed, letters, longest, count):
    random_ = random.Random(seed)
    return ["".join(random_.choices(letters, k=random_.randrange(longest))) for _ in range(count)]


def assert_equal(encoded, expected):
    for name in ("ids", "offsets", "word_ids", "boundaries"):
        assert np.array_equal(getattr(encoded, name), getattr(expected, name)), name


def assert_is_reference(batch, tokenizer):
    """The ids and numbers of words of each text in its batch; what there is for further checks."""
    encoded, lowercase = tokenizer.encode_batch(batch), tokenizer.normalization.lowercase
    for text, one in zip(batch, encoded, strict=True):
        expected = reference_pieces(text, tokenizer.vocabulary, lowercase)
        assert (one.ids.tolist(), one.word_ids.tolist()) == expected, ascii(text)
    return encoded


WORD = ["a"] + ["##a"] * 199


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("unwanted running", ["[UNK]", "runn", "##ing"]),
        ("UNaffable, unaffableX", ["un", "##aff", "##able", ",", "[UNK]"]),
        ("", []),
        (" \u200b\n", []),
        # special tokens in the text are split
        ("[MASK]", ["[UNK]"] * 3),
        ("[CLS]a[unused1]", ["[UNK]"] * 3 + ["a"] + ["[UNK]"] * 3),
        # a word of 200 characters is matched and one of 201 is unknown, counted after
        # normalization: accents that go do not count, Hangul counts three letters each
        ("a" * 200, WORD),
        ("a" * 201, ["[UNK]"]),
        ("a\u0301" * 200, WORD),
        ("각" * 67, ["[UNK]"]),
        ("각" * 66, ["\u1100", "##\u1161", "##\u11a8", *["##\u1100", "##\u1161", "##\u11a8"] * 65]),
    ],
)
def test_pieces_by_hand(text, pieces):
    assert [SMALL.pieces[number] for number in UNCASED.encode_batch([text]).ids] == pieces


def test_offsets_point_into_the_original():
    text = "\u200bUN\u00adaffable  İİ中é\u0301é X\x00Y."
    encoded = UNCASED.encode_batch([text])
    spans = [text[start:end] for start, end in encoded.offsets]
    assert [SMALL.pieces[number] for number in encoded.ids] == (
        ["un", "##aff", "##able", "i", "##i", "中", "e", "##e", "[UNK]", "[UNK]"]
    )
    assert spans == ["UN", "aff", "able", "İ", "İ", "中", "é", "é", "X\x00Y", "."]
    assert encoded.word_ids.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 5]


def test_an_unknown_word_has_the_offsets_of_all_its_characters():
    assert UNCASED.encode_batch(["b " + "a" * 201]).offsets.tolist() == [[0, 1], [2, 203]]


@pytest.mark.parametrize("tokenizer", [UNCASED, CASED], ids=["uncased", "cased"])
@given(batch=st.lists(texts, max_size=4))
@settings(max_examples=150, deadline=None)
def test_same_as_the_slow_reference(tokenizer, batch):
    encoded = assert_is_reference(batch, tokenizer)
    assert len(encoded) == len(batch) and encoded.boundaries[-1] == len(encoded.ids)
    for text, one in zip(batch, encoded, strict=True):  # what no piece covers is dropped
        covered = np.zeros(len(text), bool)
        for start, end in one.offsets:
            assert 0 <= start < end <= len(text)
            covered[start:end] = True
        for character, is_covered in zip(text, covered, strict=True):
            assert is_covered or not reference_words(character, tokenizer.normalization.lowercase)


def test_same_as_the_slow_reference_for_every_unusual_code_point():
    unusual = [
        chr(code)
        for code in range(0x30000)
        if unicodedata.category(chr(code)) not in ("Lo", "Cn", "Co", "Cs")
        or (unicodedata.decomposition(chr(code)) and not 0xAC00 < code < 0xD7A4)
        or code in (0xAC00, 0xD7A3, 0xD800, 0xE000)
        or any(code in (first - 1, first, last, last + 1) for first, last in IDEOGRAPHS)
    ]
    batch = [f"a{character}b" for character in unusual]
    # A vocabulary that knows every letter tells the words apart that [UNK] would hide.
    letters = sorted({c for text in batch for word in reference_words(text, True) for c in word})
    letters.remove("\ud800")  # no file can hold it
    assert_is_reference(batch, Tokenizer(letter_vocabulary(letters)))


@given(st.text(st.sampled_from("abcABCÉé ,,中 "), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_piece_is_its_span_normalised(text):
    encoded = UNCASED.encode_batch([text])
    for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if number != SMALL.unk_id:
            span = "".join(reference_words(text[start:end], True))
            assert SMALL.pieces[number].removeprefix("##") == span


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_its_parts_one_after_the_other(first, second):
    whole, a, b = (UNCASED.encode_batch(batch) for batch in (first + second, first, second))
    for name in ("ids", "offsets", "word_ids"):
        parts = [getattr(a, name), getattr(b, name)]
        assert np.array_equal(getattr(whole, name), np.concatenate(parts))
    assert whole.boundaries.tolist() == [*a.boundaries, *(b.boundaries[1:] + len(a.ids))]


def test_groups_change_nothing(monkeypatch):
    batch = random_texts(0, "abc ,é", 30, 200)
    expected = Tokenizer(SMALL).encode_batch(batch)
    monkeypatch.setattr(tokenizer, "GROUP", 50)
    monkeypatch.setattr(tokenizer, "FEW", 20)
    for threads in (1, 3):
        assert_equal(Tokenizer(SMALL).encode_batch(batch, threads=threads), expected)


def test_units_that_do_not_fit_and_rare_words_between_them(monkeypatch):
    pieces = ["ΑΣ", "a\U0001d16d\U0001d165", "中", "a,b" * 40, "한" * 30, "b" * 250, " ", "c"]
    monkeypatch.setattr(tokenizer, "BLOCK", 16)  # symbols at a time
    monkeypatch.setattr(tokenizer, "GROUP", 32)  # characters of a group, pieces there is room for
    assert_is_reference(random_texts(1, pieces, 12, 80), Tokenizer(SMALL))


@pytest.mark.parametrize("wrong", [{"max_pieces": -1}, {"threads": 0}])
def test_a_limit_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="expected [01] or more"):
        UNCASED.encode_batch(["a"], **wrong)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [b"bytes", None, 3, float("nan")])
def test_a_text_that_is_no_text_or_too_long_is_named(monkeypatch, bad, threads):
    monkeypatch.setattr(tokenizer, "GROUP", 200)
    batch = random_texts(2, "abc ,Σ中é", 60, 98)
    for before in (batch, batch[:1]):
        says = f"text {len(before)} of the batch is {type(bad).__name__}"
        with pytest.raises(ValueError, match=says):
            UNCASED.encode_batch([*before, bad], threads=threads)
    monkeypatch.setattr(tokenizer, "MAX_TEXT", 50)
    with pytest.raises(ValueError, match="a text of more than 50 characters"):
        UNCASED.encode_batch(batch, threads=threads)


def test_one_string_is_no_batch():
    with pytest.raises(ValueError, match="one string"):
        UNCASED.encode_batch("a b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "times", "last", "count", "span"),
    [
        ("a b, ", 20_000_000, ["a", "b", ","], 60_000_000, [99_999_998, 99_999_999]),
        ("a", 100_000_000, ["[UNK]"], 1, [0, 100_000_000]),
    ],
    ids=["words", "word"],
)
def test_a_text_of_100_megabytes(unit, times, last, count, span):
    encoded = UNCASED.encode_batch([unit * times])
    assert encoded.ids[-3:].tolist() == [SMALL.ids[piece] for piece in last]
    assert len(encoded.ids) == count and encoded.offsets[-1].tolist() == span


@pytest.mark.parametrize(
    "batch",
    [
        [chr(0xAC00 + k) + chr(0x1E00 + k % 256) + chr(0x900 + k % 128) for k in range(3000)],
        [chr(97 + k % 3) * (k % 40) + f" {k}" for k in range(300)],
    ],
    ids=["a page of the table filled", "short words"],
)
def test_shared_by_many_threads_at_once(batch):
    expected = Tokenizer(SMALL).encode_batch(batch)
    for _ in range(5):
        shared = Tokenizer(SMALL)
        with ThreadPoolExecutor(8) as pool:
            for encoded in pool.map(shared.encode_batch, [batch] * 8):
                assert_equal(encoded, expected)


def test_sent_to_processes():
    other = Tokenizer(SMALL, Normalization(True, "latin", "nfc", False))
    again = pickle.loads(pickle.dumps(other))
    assert again.fingerprint == other.fingerprint != UNCASED.fingerprint


def test_encoded_is_flat_typed_and_indexable():
    encoded = UNCASED.encode_batch(["a b", "", "c,"])
    types = [encoded.ids.dtype, encoded.offsets.dtype, encoded.word_ids.dtype]
    assert types == [np.int32] * 3 and encoded.boundaries.dtype == np.int64
    assert encoded.boundaries.tolist() == [0, 2, 2, 4]
    assert [len(one.ids) for one in encoded] == [2, 0, 2]
    assert np.shares_memory(encoded[2].ids, encoded.ids)
    assert encoded[-1].offsets.tolist() == [[0, 1], [1, 2]]
    for k in (3, -4):
        with pytest.raises(IndexError, match=f"text {k} of 3"):
            encoded[k]
    empty = UNCASED.encode_batch([])
    assert empty.boundaries.tolist() == [0] and empty.offsets.shape == (0, 2)


def test_a_long_text_without_spaces():
    ids = UNCASED.encode_batch(["a," * 20_000, "\ud800a", "b" * 100_000]).ids
    assert ids[:4].tolist() == [SMALL.ids["a"], SMALL.ids[","]] * 2
    assert len(ids) == 40_000 + 2 and (ids[-2:] == SMALL.unk_id).all()


def test_decode():
    assert UNCASED.decode(UNCASED.encode_batch(["Unaffable,running"]).ids) == "unaffable , running"
    assert UNCASED.decode(np.array([], np.int32)) == ""
    assert UNCASED.decode([SMALL.cls_id, SMALL.ids["##ing"]]) == "[CLS]ing"
    for wrong in ([5.7], [[5, 6]]):
        with pytest.raises(ValueError, match="expected a list of ints"):
            UNCASED.decode(wrong)
    for number in (-1, len(SMALL)):
        with pytest.raises(ValueError, match=f"id {number} is outside"):
            UNCASED.decode([SMALL.pad_id, number])


def test_korean_and_japanese():
    korean, japanese = "한국어 문장, 각", "東京で カレーを 食べました。"
    assert UNCASED.decode(UNCASED.encode_batch(["한국어 각각"]).ids) == "한국어 각각"
    vocabulary = letter_vocabulary(sorted(set(korean + japanese) - {" "}))
    tokenizer = Tokenizer(vocabulary, Normalization(strip_accents="none"))
    encoded = tokenizer.encode_batch([korean, japanese])
    assert vocabulary.unk_id not in encoded.ids
    assert tokenizer.decode(encoded[0].ids) == "한국어 문장 , 각"
    assert tokenizer.decode(encoded[1].ids) == "東 京 で カレーを 食 べました 。"
    spans = [korean[start:end] for start, end in encoded[0].offsets]
    assert spans == list(korean.replace(" ", ""))


# Characters on which `tokenizers` agrees with Google's code; see `write_tokenizer` for the others.
AGREED = ALPHABET.translate({ord(c): None for c in "Σ\ud800\U0002b820\U0001d16d\U0001d165"})


@pytest.mark.parametrize("lowercase", [True, False])
def test_same_ids_and_offsets_as_tokenizers(published, lowercase, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    ours = Tokenizer(published, GOOGLE_UNCASED if lowercase else GOOGLE_CASED)
    ours.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    generator = random.Random(1)
    batch = ["".join(generator.choices(AGREED, k=20)) for _ in range(3000)]
    batch += "".join(pydoc_data.topics.topics.values())[:200_000].split("\n\n")
    batch += ["a" * 200, "a" * 201, "Zürich's naïve façade", "ΟΔΟΣ".lower()]
    others = theirs.encode_batch(batch, add_special_tokens=False)
    for text, one, other in zip(batch, ours.encode_batch(batch), others, strict=True):
        assert one.ids.tolist() == other.ids, ascii(text)
        assert one.offsets.tolist() == [list(span) for span in other.offsets], ascii(text)


class Series:
    """A stand-in for a column of pandas: no Sequence, but it has values, an order and an index."""

    ndim = 1

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        raise KeyError(label)  # labels that do not begin at 0


class Table(Series):
    """A stand-in for pandas' DataFrame, which iterates over the names of its columns."""

    ndim = 2


TWO = ["one", "two"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TWO, TWO),
        (tuple(TWO), TWO),
        (np.array(TWO), TWO),
        (np.array(TWO, object), TWO),
        (Series(TWO), TWO),
        ((text for text in TWO), TWO),
        (dict(enumerate(TWO)).values(), TWO),
        ("a text", ["a text"]),
        (np.str_("a text"), ["a text"]),
        ("", [""]),
        ([], []),
    ],
)
def test_one_string_and_all_that_has_an_order_is_texts(given, expected):
    assert as_texts(given) == expected


def test_a_column_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["one", "two", "three"]}, index=[7, 8, 9])
    assert as_texts(table["text"][1:]) == ["two", "three"]
    with pytest.raises(ValueError, match="not DataFrame"):
        as_texts(table)
    with pytest.raises(ValueError, match=r"texts\[1\] is (None|float nan): expected a text"):
        as_texts(pandas.Series(["one", None]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"texts: expected a text \(str\) or a list, array or Series of texts, not None"),
        (3, "expected .* not int 3"),
        (b"bytes", "not bytes b'bytes'"),
        ({"a": 1}, "not dict {'a': 1}"),
        ({"a", "b"}, "not set"),
        (Table(["text"]), "not Table"),
        (np.array([["a", "b"]]), "not ndarray"),
        (np.array("a"), "not ndarray"),
        (["a", None], r"^texts\[1\] is None: expected a text \(str\)$"),
        (["a", "b", float("nan")], r"texts\[2\] is float nan"),
        (np.array([b"a"]), r"texts\[0\] is bytes_ "),
        ([["a"]], r"texts\[0\] is list \['a'\]"),
    ],
)
def test_anything_else_is_refused_by_the_callers_name(given, message):
    with pytest.raises(ValueError, match=message):
        as_texts(given)
    with pytest.raises(ValueError, match=message.replace("texts", "pairs", 1)):
        as_texts(given, "pairs")
