"""Letters that a normalization alters, by definition and in sentences of eleven scripts."""

import functools
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED, PRESETS, Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.scripts import LetterCounts, letter_script, lost_letters_warning
from bertsmith.text.vocabulary.train import train_vocabulary

LETTERS = "eéÉßğñ ạİ\nйёΆს가ᄀが゙プァ한字豈द्किா்ํำأَשָׁ\u0301\u0323\u094d\u00ad1.ﬁＡｶﾞ"
LATIN = Normalization(strip_accents="latin")
COMPATIBILITY = Normalization(strip_accents="none", unicode="nfkc")


def counted(texts):
    letters = LetterCounts()
    letters.add(texts)
    return letters


def by_hand(text, normalization):
    """(letters, altered) from the definitions in the Unicode standard alone."""
    total = altered = 0
    after_latin = False
    for character in unicodedata.normalize("NFC", text):
        category = unicodedata.category(character)
        base = unicodedata.normalize("NFD", character)[0]
        if category != "Mn":
            after_latin = base.isalpha() and "LATIN" in unicodedata.name(base, "").split()
        if category[0] not in "LM":
            continue
        taken_apart = unicodedata.normalize("NFD", character) != character
        total += 1
        if normalization.strip_accents == "all":
            altered += category == "Mn" or taken_apart
        elif normalization.strip_accents == "latin":
            altered += after_latin and (category == "Mn" or taken_apart)
        elif normalization.unicode == "nfkc":
            altered += unicodedata.normalize("NFKC", character) != character
    return total, altered


@pytest.mark.parametrize("normalization", [GOOGLE_UNCASED, LATIN, COMPATIBILITY, GOOGLE_CASED])
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(LETTERS), max_size=40))
def test_counts_are_those_of_the_definition(normalization, text):
    # A soft hyphen between letter and mark vanishes before the mark is looked at.
    text = text.replace("\u00ad", "")
    found = counted(text.split("\n")).lost_letters(normalization)
    lines = [by_hand("\n" + line, normalization) for line in text.split("\n")]
    assert (found.letters, found.altered) == tuple(map(sum, zip(*lines, strict=True)))
    assert sum(one.altered for one in found.scripts) == found.altered


def test_the_form_of_the_text_does_not_matter():
    text = "Việt Nam, 한국, मैं, ёлка"
    composed, decomposed = (counted([unicodedata.normalize(f, text)]) for f in ("NFC", "NFD"))
    assert composed.counts == decomposed.counts
    nfc = Normalization(strip_accents="none", unicode="nfc")
    assert counted([text]).lost_letters(nfc).fraction == 0


def test_batches_add_up():
    letters, lines = LetterCounts(), ["\u0301e", "e\u0323\u0301", "", "가"]
    for line in lines:
        letters.add([line])
    assert letters.counts == counted(lines).counts
    assert letters.counts["\n\u0301"] == 1 and letters.counts["\u1eb9\u0301"] == 1


def test_scripts_and_examples():
    found = counted(["가나가 ab é", "ﬁ"]).lost_letters(GOOGLE_UNCASED)
    hangul, latin = found.scripts
    assert (hangul.script, hangul.letters, hangul.altered) == ("Hangul", 3, 3)
    assert (hangul.before, hangul.after) == ("가", "ᄀ ᅡ")
    assert (latin.script, latin.letters, latin.altered) == ("Latin", 4, 1)
    assert (latin.before, latin.after) == ("é", "e")
    assert letter_script("字") == "Han" and letter_script("ｶ") == letter_script("カ") == "Katakana"
    assert letter_script("\ue000") == "Other"


def test_what_the_warning_recommends():
    letters = counted(["ＡＢＣ 가나다"])
    uncased = Normalization(unicode="nfkc")
    assert "with `strip_accents='none'` `unicode='none'` keeps" in letters.warning(uncased)
    cased = Normalization(lowercase=False, strip_accents="all", unicode="nfkc")
    assert "with `strip_accents='none'` `unicode='none'` keeps" in letters.warning(cased)
    assert "with `unicode='none'` keeps" in letters.warning(COMPATIBILITY)
    assert "(Hangul" not in letters.warning(COMPATIBILITY)
    assert "\u0301 -> (none)" in counted(["\u0301"]).warning(GOOGLE_UNCASED)


def test_a_lone_surrogate_is_no_letter():
    assert counted(["a\ud800"]).lost_letters(GOOGLE_UNCASED).letters == 1


def test_english_prose_is_left_in_peace():
    file = Path(__file__).parents[4] / "shared/data/wikitext-2/valid.txt"
    if not file.exists():
        pytest.skip("shared/data/wikitext-2 is not there")
    letters = counted(file.read_text(encoding="utf-8").splitlines()[:2000])
    assert letters.counts["\u00e9"] and letters.warning(GOOGLE_UNCASED) == ""


# No punctuation, which `decode` would set apart. Japanese is as it is after ideographs were.
SENTENCES = {
    "Korean": "나는 매일 학교에 가서 친구를 만납니다",
    "Japanese": "毎 日 がんばってプールで 泳 ぎます",
    "Hindi": "मैं हर दिन विद्यालय जाता हूँ",
    "Tamil": "நான் தினமும் பள்ளிக்குச் செல்கிறேன்",
    "Vietnamese": "Tôi đi học mỗi ngày bằng xe đạp",
    "Russian": "Мой младший брат ещё ходит в школу",
    "Greek": "Ο μικρός αδελφός μου πηγαίνει στο σχολείο",
    "Arabic": "أذهبُ إلى المدرسة كلَّ يوم",
    "Hebrew": "אני הולך לבית הספר כל יום",
    "Pointed Hebrew": "שָׁלוֹם לְכָל הַיְלָדִים",
    "Thai": "ฉันไปโรงเรียนทุกวัน กับเพื่อน",
    "German": "Mein jüngerer Bruder fährt täglich über die Brücke",
}
WITHOUT_LATIN_ACCENTS = {
    "Vietnamese": "toi đi hoc moi ngay bang xe đap",
    "German": "mein jungerer bruder fahrt taglich uber die brucke",
}
ENGLISH = (
    "The café at the corner is open every day, and my younger brother, who likes long walks by "
    "the sea in the quiet of the early morning, never goes home without his coffee."
)
KEEP, MULTILINGUAL = Normalization(strip_accents="none"), PRESETS["multilingual"]


@functools.cache
def tokenizer_of(normalization):
    """One whose vocabulary is of all the sentences."""
    text = [*SENTENCES.values()] * 2
    return Tokenizer(train_vocabulary(text, 350, normalization), normalization)


def round_trip(normalization, text):
    tokenizer = tokenizer_of(normalization)
    encoded = tokenizer.encode_batch([text])
    assert tokenizer.vocabulary.unk_id not in encoded.ids
    return tokenizer.decode(encoded.ids)


@pytest.mark.parametrize("language", SENTENCES)
def test_letters_survive_lower_casing_and_only_latin_ones_lose_accents_where_told(language):
    text = SENTENCES[language]
    composed, decomposed = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert round_trip(KEEP, text) == text.lower()
    assert round_trip(MULTILINGUAL, text) == composed.lower()
    assert round_trip(MULTILINGUAL, decomposed) == composed.lower()
    assert "が" not in round_trip(GOOGLE_UNCASED, text)
    assert round_trip(LATIN, text) == WITHOUT_LATIN_ACCENTS.get(language, text.lower())


def warning(text, normalization):
    return lost_letters_warning([text], normalization)


@pytest.mark.parametrize(
    ("language", "script", "example"),
    [
        ("Korean", "Hangul 100.0%", "-> ᄂ ᅡ"),
        ("Japanese", "Hiragana", "が -> か"),
        ("Hindi", "Devanagari", "द् -> द"),
        ("Tamil", "Tamil", "் -> "),
        ("Vietnamese", "Latin", "à -> a"),
        ("Russian", "Cyrillic", "й -> и"),
        ("Greek", "Greek", "ό -> ο"),
        ("Arabic", "Arabic", "أ -> ا"),
        ("Pointed Hebrew", "Hebrew", "ל"),
        ("Thai", "Thai", "ื่"),
        ("German", "Latin", "ü -> u"),
    ],
)
def test_the_uncased_rules_are_warned_of(language, script, example):
    text = SENTENCES[language]
    said = warning(text, GOOGLE_UNCASED)
    assert f"({script}" in said and "`strip_accents='none'` keeps" in said
    latin = language in WITHOUT_LATIN_ACCENTS
    assert ("`strip_accents='latin'`" in said) != latin, "the setting helps other scripts only"
    assert bool(warning(text, LATIN)) == latin
    assert warning(text, MULTILINGUAL) == warning(text, GOOGLE_CASED) == ""


@pytest.mark.parametrize("text", [ENGLISH, SENTENCES["Hebrew"], "", "1 + 2 = 3 \u0000"])
def test_text_that_loses_nothing_is_not_warned_of(text):
    assert warning(text, GOOGLE_UNCASED) == ""
