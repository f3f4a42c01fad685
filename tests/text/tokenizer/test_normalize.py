import random
import unicodedata

import pytest

from bertsmith.text.tokenizer.normalize import (
    CHUNK,
    Normalization,
    is_dropped,
    is_punctuation,
    split_words,
)

UNCASED, CASED = Normalization(), Normalization(False, "none")
KEEPING, LATIN = Normalization(strip_accents="none"), Normalization(strip_accents="latin")
NFC = Normalization(strip_accents="none", unicode="nfc")
NFKC = Normalization(strip_accents="none", unicode="nfkc")


@pytest.mark.parametrize(
    ("normalization", "text", "expected"),
    [
        (UNCASED, "Déjà-vu, Ångström", ["deja", "-", "vu", ",", "angstrom"]),
        (UNCASED, "cafe\u0301 \u0301 x", ["cafe", "x"]),
        (UNCASED, "中文abc字", ["中", "文", "abc", "字"]),
        (UNCASED, "a\x00b\ufffdc\u200dd\x0ce\x85f", ["abcdef"]),  # dropped, not split at
        (UNCASED, "a\u2028b\u2029c\u3000d\u00a0e\tf\r\ng", list("abcdefg")),
        (UNCASED, "ΟΔΟΣ ΟΔΟΣ中Α ΣΑ", ["οδος", "οδος", "中", "α", "σα"]),  # final sigma
        (UNCASED, "ΑΣ\u00adΑ", ["ασα"]),  # the soft hyphen goes before the sigma is looked at
        (UNCASED, "İstanbul", ["istanbul"]),
        (UNCASED, "$9.50+x^2~`", ["$", "9", ".", "50", "+", "x", "^", "2", "~", "`"]),
        (UNCASED, "«x»、y…\u1fef", ["«", "x", "»", "、", "y", "…", "`"]),  # NFD of U+1FEF: a grave
        (UNCASED, "[MASK]", ["[", "mask", "]"]),
        (UNCASED, "", []),
        (UNCASED, " \x00 \u0301 ", []),
        (CASED, "İÉ が中", ["İÉ", "が", "中"]),
        (KEEPING, "İÉ が中", ["i\u0307é", "が", "中"]),
        (Normalization(lowercase=False, strip_accents="all"), "İÉ が中", ["IE", "か", "中"]),
        (Normalization(False, "none", split_cjk=False), "が中x", ["が中x"]),
        # only Latin letters lose their marks
        (LATIN, "Café Ångström İ", ["cafe", "angstrom", "i"]),
        (LATIN, "cafe\u0301\u0323x", ["cafex"]),
        (LATIN, "Việt Nam", ["viet", "nam"]),
        (LATIN, "한국어 がぎ", ["한국어", "がぎ"]),
        (LATIN, "йод и\u0306", ["йод", "и\u0306"]),  # Cyrillic is as it was, composed or not
        (LATIN, "हिन्दी", ["हिन्दी"]),
        (LATIN, "3\u0301 \u0301a\u0301", ["3\u0301", "\u0301a"]),  # marks on what is no letter stay
        (LATIN, "a\u200d\u0301é-\u0301", ["ae", "-", "\u0301"]),
        (LATIN, "ΌΣ", ["ός"]),
        # the form of Unicode is taken before all else but the clean-up
        (NFC, "Cafe\u0301 \u1112\u1161\u11ab =\u0338", ["café", "한", "≠"]),
        (NFC, "e\u200d\u0301", ["é"]),
        (NFKC, "ﬁ ㈱x Ⅳ a\u00a8b", ["fi", "(", "株", ")", "x", "iv", "a", "\u0308b"]),
    ],
)
def test_words(normalization, text, expected):
    assert [word.characters for word in split_words(text, normalization)] == expected


@pytest.mark.parametrize(
    ("normalization", "text", "characters", "origins"),
    [
        (UNCASED, "\u200bİ\u0301한\x00é", "i\u1112\u1161\u11abe", [1, 3, 3, 3, 5]),
        (KEEPING, "İx", "i\u0307x", [0, 0, 1]),
        (NFKC, "xe\u0301\u0323ﬁ", "xẹ\u0301fi", [0, 1, 2, 4, 4]),
        # U+1D16D (class 226) and U+1D165 (class 216) are of category Mc: sorted, not dropped
        (UNCASED, "a\U0001d16d\u0301\U0001d165", "a\U0001d165\U0001d16d", [0, 3, 1]),
    ],
    ids=["dropped", "added", "joined", "sorted"],
)
def test_origins(normalization, text, characters, origins):
    assert list(split_words(text, normalization)) == [(characters, origins)]


def test_character_classes_agree_with_unicode_for_every_code_point():
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)
        control = category in ("Cc", "Cf") and character not in "\t\n\r"
        splits = character.isspace() and not control
        assert bool(CHUNK.match(character)) != splits, hex(code)
        if not splits:
            assert is_dropped(character) == (control or code == 0xFFFD), hex(code)
            ascii_sign = code < 128 and category[0] in "PS"
            assert is_punctuation(character) == (ascii_sign or category[0] == "P"), hex(code)


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
def test_normalising_by_stretches_is_normalising_the_whole(form):
    # Of what no step but this one touches: neither space, control, punctuation nor ideograph.
    settings = Normalization(False, "none", form, split_cjk=False)
    interesting = [
        character
        for character in map(chr, range(0x30000))
        if not is_dropped(character)
        and CHUNK.match(character)
        and (unicodedata.combining(character) or unicodedata.decomposition(character))
    ]
    interesting += list("aeo\u1100\u1161\u11a8\u09c7\u09be\u0dd9\u0dca") * 300
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choices(interesting, k=generator.randrange(1, 9)))
        whole = unicodedata.normalize(form.upper(), text)
        found = split_words(text, settings)
        assert "".join(word.characters for word in found) == "".join(whole.split()), ascii(text)
        origins = [origin for word in found for origin in word.origins]
        assert origins == sorted(origins) and max(origins, default=0) < len(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lowercase", "no"), ("strip_accents", True), ("unicode", "NFD"), ("split_cjk", None)],
)
def test_an_unknown_setting_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}: known are"):
        Normalization(**{name: value})
