"""The kernel against the plain reference, on texts that nobody would write.

A small part runs always; the whole (a million strings a pool, every code point, every data set)
is marked slow, about half an hour in two processes:

    python -m pytest -n 2 -m slow tests/text/tokenizer/test_kernel.py
"""

import functools
import gzip
import lzma
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from bertsmith.text.tokenizer import tokenizer as tokenizer_module
from bertsmith.text.tokenizer.normalize import CHUNK, PRESETS, Normalization, split_words
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, encode_text

from ..letters import letter_vocabulary

DATA = Path(__file__).parents[4] / "shared" / "data"
BLOCK = 25_000  # strings compared at a time

NORMALIZATIONS = {
    **PRESETS,
    "latin-nfkc": Normalization(strip_accents="latin", unicode="nfkc", split_cjk=False),
}


def characters(*ranges: tuple[int, int]) -> str:
    """Code points first..last of every range."""
    return "".join(chr(code) for first, last in ranges for code in range(first, last + 1))


MARKS = "\u0300\u0301\u0308\u0323\u0327\u0328\u0345\u034f\u0591\u05b4\u0651\u064d\u093c\u0e38\u3099"
MARKS += "\U0001d165\U0001d167\U0001d16d\U0001d17b\U0001e8d0\u302e\u1cf7\u20dd"
POOLS = {
    "latin": characters((0x41, 0x24F), (0x1E00, 0x1EFF), (0x300, 0x36F), (0xFB00, 0xFB06)) + "KÅ",
    "greek": characters((0x370, 0x3FF), (0x1F00, 0x1FFF)) + "ΣΣΣΣσς" * 20 + ".'\u0345\u0301\u00ad",
    "cyrillic": characters((0x400, 0x52F), (0x483, 0x489)),
    "arabic and hebrew": characters((0x5B0, 0x6FF), (0xFB1D, 0xFBFF), (0xFE70, 0xFEFF)),
    "indic": characters((0x900, 0x9FF), (0xB82, 0xBFA), (0xD00, 0xD7F)) + "\u200c\u200d" * 9,
    "thai": characters((0xE00, 0xEFF), (0xF00, 0xFBC)),
    "hangul": characters((0xAC00, 0xAC80), (0xD780, 0xD7FB), (0x1100, 0x11FF), (0x3130, 0x318F)),
    "ideographs and kana": characters((0x3000, 0x30FF), (0x4DF0, 0x4E40), (0x9FF0, 0xA010))
    + characters((0xF900, 0xFA20), (0xFF00, 0xFFEF), (0x2B738, 0x2B748), (0x2B818, 0x2B828))
    + characters((0x2F7F8, 0x2F808), (0x2FA18, 0x2FA28), (0x33F8, 0x3408), (0x2CEA8, 0x2CEB8)),
    "controls and spaces": characters((0, 0x20), (0x7F, 0xA0), (0x2000, 0x2010), (0x2028, 0x202F))
    + characters((0x205F, 0x206F), (0xFFF0, 0xFFFF), (0xD7FF, 0xD801), (0xDFFF, 0xE001))
    + "\u00ad\u061c\u1680\u180e\u3000\ufeff\U000e0001\U000e0041\U0010ffff",
    "emoji and joiners": characters((0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF), (0x1F440, 0x1F480))
    + characters((0x2600, 0x2640), (0x1F600, 0x1F640)) + "\u200d\ufe0f\u20e3" * 20,
    "punctuation": characters((0x21, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0xA1, 0xBF))
    + characters((0x2010, 0x2060), (0x2190, 0x21A0), (0x3001, 0x3020), (0xFE10, 0xFE52)) + "$^`+",
    "marks": MARKS + "eaoéêñ\u1100\u1161\u11a8가かがक",
    "special tokens": "",
    "long words": "",
    "any": "",
}  # fmt: skip
PLAIN = " aAbBe.iß"  # among every pool, so that there are words with something around them
LONG = ["a", "ab", "abé", "aaaaaaa\u0301", "αΣб", "가a", "ab." + PLAIN]  # letters of long words


def strings(pool: str, count: int, seed: int) -> list[str]:
    """Random strings of a pool, mostly of 1 to 12 characters."""
    generator = random.Random(f"{pool} {seed}")
    plain = generator.choices(PLAIN, k=len(POOLS[pool]) // 3 + 1)
    letters = [*POOLS[pool], *plain]
    if pool == "special tokens":
        letters = [*SPECIAL, "[unused1]", "[", "]", "mask", "##", "##a", "[mask", "a", " ", "Z"]
    made = []
    for _ in range(count):
        if pool == "any":
            letters = [*map(chr, generator.choices(range(sys.maxunicode + 1), k=4)), *PLAIN]
        if pool == "long words":
            letters = generator.choice(LONG)
        length = generator.randrange(150, 401) if letters in LONG else generator.randrange(1, 13)
        made.append("".join(generator.choices(letters, k=length)))
    return made


def adversarial() -> Vocabulary:
    """Long pieces that are almost there, and pieces that no word can reach."""
    jamo = characters((0x1100, 0x1112), (0x1161, 0x1175), (0x11A8, 0x11C2))
    starts = [*"abei.,!?$#[]中國가각がαбяकनमก😀ßéAÉ", "aaaab", "ab", "aaa", "a" * 180]
    starts += ["mask", "unk", "a.b", "a b", "a中", "中中", "ας", "ασ", "aαб", "e\u0301", "a\u0301b"]
    starts += ["#", "##", "###", "##a#", "\u0301", "a\u200db", "\U0001d165", "ﬁ", "fi", "ss", "k"]
    inner = [*"abei中가αбяकनमกค.", "aaaaab", "aab", "ba", "a" * 150, "\u0301", "\u0323\u0301"]
    inner += ["ς", "σ", "ασ", "б\u0301", "\u0651", "\u093c", "\u200d", "😀", "\ufe0f", "\u3099"]
    inner += ["i\u0307", "\u0307", "ab.", "A", "é", "bé", "\U0001d165", "b" * 12 + "c"]
    pieces = [*SPECIAL, *starts, *jamo, *("##" + piece for piece in [*inner, *jamo])]
    return Vocabulary(list(dict.fromkeys(pieces)))


@functools.cache
def tokenizer(normalization: str, vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(vocabulary, NORMALIZATIONS[normalization])


ADVERSARIAL = adversarial()
ALL = pytest.mark.parametrize("normalization", NORMALIZATIONS)


@pytest.fixture(scope="module", params=["adversarial", "published"])
def vocabulary(request, published) -> Vocabulary:
    return ADVERSARIAL if request.param == "adversarial" else published


def check(ours: Tokenizer, texts: list[str]) -> None:
    """The kernel's pieces of all texts, in one batch, are those of the reference."""
    settings = ours.vocabulary, ours.normalization
    expected = [encode_text(text, *settings) for text in texts]
    encoded = ours.encode_batch(texts)
    rows = np.array(list(chain.from_iterable(expected)), np.int64).reshape(-1, 4)
    boundaries = np.cumsum([0, *map(len, expected)])
    found = (encoded.ids, encoded.offsets, encoded.word_ids, encoded.boundaries)
    parts = (rows[:, 0], rows[:, 1:3], rows[:, 3], boundaries)
    if all(map(np.array_equal, found, parts)):
        return
    for text, pieces, one in zip(texts, expected, encoded, strict=True):
        got = np.column_stack([one.ids, one.offsets, one.word_ids])
        assert got.tolist() == list(map(list, pieces)), ascii(text)
    raise AssertionError("a text is right alone and wrong in its batch")


@ALL
def test_random_strings(normalization):
    texts = [text for pool in POOLS for text in strings(pool, 50, 0)]
    check(tokenizer(normalization, ADVERSARIAL), texts)


def test_random_strings_with_a_published_vocabulary(published):
    ours = tokenizer("google-uncased", published)
    check(ours, [text for pool in POOLS for text in strings(pool, 25, 1)])


@ALL
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("blocks", ["whole", "small"])
def test_a_part_of_the_result_is_the_same_part(normalization, threads, blocks, monkeypatch):
    """Without offsets, and with the first pieces alone."""
    ours = Tokenizer(ADVERSARIAL, NORMALIZATIONS[normalization])
    texts = [text for pool in POOLS for text in strings(pool, 12, 2)]
    if blocks == "small":
        monkeypatch.setattr(tokenizer_module, "BLOCK", 24)
        monkeypatch.setattr(tokenizer_module, "GROUP", 200)
    whole = ours.encode_batch(texts, threads=1)
    bare = ours.encode_batch(texts, offsets=False, threads=threads)
    assert np.array_equal(bare.ids, whole.ids)
    assert np.array_equal(bare.boundaries, whole.boundaries)
    assert bare.offsets.shape == (0, 2) and bare.word_ids.shape == (0,)
    for most in (0, 1, 3, 7, 1000, sys.maxsize):
        cut = ours.encode_batch(texts, max_pieces=most, threads=threads)
        for text, one, full in zip(texts, cut, whole, strict=True):
            for name in ("ids", "offsets", "word_ids"):
                same = np.array_equal(getattr(one, name), getattr(full, name)[:most])
                assert same, ascii(text)


def check_code_points(normalization: str, codes: Iterable[int]) -> None:
    """Each alone, between letters and doubled, with every letter that arises in the vocabulary.

    [UNK] would hide what became of a letter that is not.
    """
    rules = NORMALIZATIONS[normalization]
    texts = [text for c in map(chr, codes) for text in (c, f"a{c}b", c + c, f"A{c} é{c}")]
    words = {word.characters for text in texts for word in split_words(text, rules)}
    letters = sorted({c for word in words for c in word if not "\ud800" <= c <= "\udfff"})
    letters = [c for c in letters if c == c.strip() and c != "\n"]
    check(Tokenizer(letter_vocabulary(letters), rules), texts)


PAGES = (0x0, 0x1, 0x3, 0x9, 0x11, 0x1E, 0x20, 0x30, 0xAC, 0xD8, 0xF9, 0x1D1, 0x2B8, 0xE00)
CODES = [code for page in PAGES for code in range(page << 8, (page + 1) << 8)]
PLANES = [
    pytest.param(range(plane << 16, (plane + 1) << 16), marks=pytest.mark.slow)
    for plane in range(17)
]


@ALL
@pytest.mark.parametrize(
    "codes",
    [random.Random(1).sample(CODES, 300), *PLANES],
    ids=["some", *(f"plane {plane}" for plane in range(17))],
)
def test_code_points(normalization, codes):
    for start in range(0, len(codes), 1 << 13):
        check_code_points(normalization, codes[start : start + (1 << 13)])


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("pool", POOLS)
def test_a_million_random_strings(pool, normalization, vocabulary):
    """Over the four normalisations and two vocabularies together."""
    ours = tokenizer(normalization, vocabulary)
    for seed in range(3, 8):
        check(ours, strings(pool, BLOCK, seed))


def data_files() -> list[Path]:
    files = [path for path in DATA.rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix not in (".md", ".hdf5")]  # notes, arrays
    return sorted(files)


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not on this machine")


def read_lines(path: Path):
    """Lines as texts, labels and JSON and all."""
    open_it = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with open_it(path, "rt", encoding="utf-8", newline="\n") as lines:
        yield from lines


@needs_data
def test_some_lines_of_every_data_set():
    texts = [line[:400] for path in data_files() for line in islice(read_lines(path), 0, 300, 30)]
    check(tokenizer("google-uncased", ADVERSARIAL), texts)


@needs_data
@pytest.mark.slow
@ALL
def test_every_line_of_every_data_set(normalization, published):
    """The reference, with the pieces of a stretch between white space remembered."""
    ours = tokenizer(normalization, published)
    known = functools.cache(
        lambda chunk: [p.id for p in encode_text(chunk, ours.vocabulary, ours.normalization)]
    )
    for path in data_files():
        lines = read_lines(path)
        while texts := list(islice(lines, BLOCK)):
            encoded = ours.encode_batch(texts)
            pieces = [[known(chunk) for chunk in CHUNK.findall(text)] for text in texts]
            sizes = [sum(map(len, chunks)) for chunks in pieces]
            assert encoded.boundaries.tolist() == np.cumsum([0, *sizes]).tolist(), path
            ids = chain.from_iterable(chain.from_iterable(pieces))
            assert np.array_equal(encoded.ids, np.fromiter(ids, np.int32, sum(sizes))), path


# Characters that Unicode 3.2 assigned and that are of the same category today: `tokenizers` knows
# them as Python does. No controls, formats or private use; no capital sigma, whose end of a word
# `tokenizers` does not know.
KNOWN = frozenset(
    character
    for character in map(chr, range(sys.maxunicode + 1))
    if unicodedata.category(character)[0] != "C"
    and unicodedata.category(character) == unicodedata.ucd_3_2_0.category(character)
) - {"Σ"}
MOVING = {c for c in KNOWN if unicodedata.combining(c) and unicodedata.category(c) != "Mn"}
KNOWN_TO_BOTH = pytest.mark.parametrize(
    "normalization", ["google-uncased", "google-cased", "multilingual"]
)


@functools.cache
def peer(normalization: str, vocabulary: Vocabulary):
    """Our tokenizer as `tokenizers` reads it."""
    tokenizers = pytest.importorskip("tokenizers")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer(normalization, vocabulary).save(folder)
        return tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


def check_peer(normalization: str, vocabulary: Vocabulary, texts: list[str]) -> None:
    """Ids are those of `tokenizers`, and offsets where normalization sorts or joins no marks.

    `tokenizers` gives sorted marks the offsets of the places they come to, we those they left; a
    letter made of several has all of their offsets there, and those of the first one here.
    """
    composes = NORMALIZATIONS[normalization].unicode != "none"
    encoded = tokenizer(normalization, vocabulary).encode_batch(texts)
    others = peer(normalization, vocabulary).encode_batch(texts, add_special_tokens=False)
    for text, one, other in zip(texts, encoded, others, strict=True):
        assert one.ids.tolist() == other.ids, ascii(text)
        if unicodedata.is_normalized("NFC", text) if composes else MOVING.isdisjoint(text):
            assert one.offsets.tolist() == list(map(list, other.offsets)), ascii(text)


def known_strings(pool: str, count: int, seed: int) -> list[str]:
    """The characters of a pool's strings that both know, in words of at most 100."""
    texts = (text[:100] for text in strings(pool, count, seed))
    known = ("".join(c for c in text if c in KNOWN or c in " \t\n") for text in texts)
    return [text for text in known if "[" not in text]


@KNOWN_TO_BOTH
def test_same_as_tokenizers(normalization):
    texts = [text for pool in POOLS for text in known_strings(pool, 40, 10)]
    check_peer(normalization, ADVERSARIAL, texts)


@pytest.mark.slow
@KNOWN_TO_BOTH
@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != "long words"])
def test_many_strings_same_as_tokenizers(pool, normalization, vocabulary):
    for seed in range(11, 13):
        check_peer(normalization, vocabulary, known_strings(pool, BLOCK, seed))


@pytest.mark.slow
@KNOWN_TO_BOTH
def test_every_known_code_point_same_as_tokenizers(normalization):
    known = sorted(KNOWN)
    texts = [text for c in known for text in (c, f"a{c}b", c + c)]
    rules = NORMALIZATIONS[normalization]
    letters = {c for text in texts for word in split_words(text, rules) for c in word.characters}
    check_peer(normalization, letter_vocabulary(sorted(letters)), texts)


@needs_data
@pytest.mark.slow
@KNOWN_TO_BOTH
def test_lines_of_every_data_set_same_as_tokenizers(normalization, published):
    for path in data_files():
        lines = islice(read_lines(path), 20_000)
        words = (chunk for line in lines for chunk in CHUNK.findall(line))
        texts = list(dict.fromkeys(w for w in words if len(w) <= 100 and KNOWN.issuperset(w)))
        texts = [text for text in texts if not any(token in text for token in SPECIAL)]
        check_peer(normalization, published, texts)
