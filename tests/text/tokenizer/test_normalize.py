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

UNCASED = Normalization()
CASED = Normalization(False, "none")


def words(text, normalization=UNCASED):
    return [word.characters for word in split_words(text, normalization)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Déjà-vu, Ångström", ["deja", "-", "vu", ",", "angstrom"]),
        ("cafe\u0301 \u0301 x", ["cafe", "x"]),
        ("中文abc字", ["中", "文", "abc", "字"]),
        ("a\x00b\ufffdc\u200dd\x0ce\x85f", ["abcdef"]),  # dropped, not split at
        ("a\u2028b\u2029c\u3000d\u00a0e\tf\r\ng", list("abcdefg")),
        ("ΟΔΟΣ ΟΔΟΣ中Α ΣΑ", ["οδος", "οδος", "中", "α", "σα"]),  # final sigma
        ("ΑΣ\u00adΑ", ["ασα"]),  # the soft hyphen is gone before the sigma is looked at
        ("İstanbul", ["istanbul"]),
        ("$9.50+x^2~`", ["$", "9", ".", "50", "+", "x", "^", "2", "~", "`"]),
        ("«x»、y…\u1fef", ["«", "x", "»", "、", "y", "…", "`"]),  # NFD of U+1FEF is a grave
        ("[MASK]", ["[", "mask", "]"]),
        ("", []),
        (" \x00 \u0301 ", []),
    ],
)
def test_uncased_words(text, expected):
    assert words(text) == expected


def test_the_switches():
    text = "İÉ が中"
    assert words(text, CASED) == ["İÉ", "が", "中"]
    assert words(text, Normalization(strip_accents="none")) == ["i\u0307é", "が", "中"]
    assert words(text, Normalization(lowercase=False, strip_accents="all")) == ["IE", "か", "中"]
    assert words("が中x", Normalization(False, "none", split_cjk=False)) == ["が中x"]


def test_origins_follow_dropped_added_and_joined_characters():
    [word] = split_words("\u200bİ\u0301한\x00é", Normalization(strip_accents="all"))
    assert word.characters == "i" + unicodedata.normalize("NFD", "한") + "e"
    assert word.origins == [1, 3, 3, 3, 5]
    [word] = split_words("İx", Normalization(strip_accents="none"))
    assert word == ("i\u0307x", [0, 0, 1])


def test_combining_characters_that_stay_are_put_in_canonical_order():
    # U+1D16D (class 226) and U+1D165 (class 216) are of category Mc: sorted, not dropped.
    text = "a\U0001d16d\u0301\U0001d165"
    [word] = split_words(text, UNCASED)
    assert word == ("a\U0001d165\U0001d16d", [0, 3, 1])


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


LATIN = Normalization(strip_accents="latin")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Café Ångström İ", ["cafe", "angstrom", "i"]),
        ("cafe\u0301\u0323x", ["cafex"]),
        ("Việt Nam", ["viet", "nam"]),
        ("한국어 がぎ", ["한국어", "がぎ"]),
        ("йод и\u0306", ["йод", "и\u0306"]),  # nothing of Cyrillic changes, composed or not
        ("हिन्दी", ["हिन्दी"]),
        ("3\u0301 \u0301a\u0301", ["3\u0301", "\u0301a"]),  # marks on what is no letter stay
        ("a\u200d\u0301é-\u0301", ["ae", "-", "\u0301"]),
        ("ΌΣ", ["ός"]),
    ],
)
def test_only_latin_letters_lose_their_marks(text, expected):
    assert words(text, LATIN) == expected


def test_the_form_of_unicode_is_taken_before_all_else():
    nfc = Normalization(strip_accents="none", unicode="nfc")
    assert words("Cafe\u0301 \u1112\u1161\u11ab =\u0338", nfc) == ["café", "한", "≠"]
    assert words("e\u200d\u0301", nfc) == ["é"]  # after clean-up
    nfkc = Normalization(strip_accents="none", unicode="nfkc")
    assert words("ﬁ ㈱x Ⅳ a\u00a8b", nfkc) == ["fi", "(", "株", ")", "x", "iv", "a", "\u0308b"]
    [word] = split_words("xe\u0301\u0323ﬁ", nfkc)
    assert word == ("xẹ\u0301fi", [0, 1, 2, 4, 4])


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
def test_normalising_by_stretches_is_normalising_the_whole(form):
    # Of what no step but this one touches: neither space, control, punctuation nor ideograph.
    settings = Normalization(False, "none", form, split_cjk=False)
    interesting = [
        chr(code)
        for code in range(0x30000)
        if not is_dropped(chr(code))
        and CHUNK.match(chr(code))
        and (unicodedata.combining(chr(code)) or unicodedata.decomposition(chr(code)))
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
