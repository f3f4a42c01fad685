"""What survives of eleven scripts: encode and decode with a vocabulary trained on them."""

import unicodedata

import pytest

from bertsmith.text.tokenizer.normalize import PRESETS, Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.scripts import alteration_warning
from bertsmith.text.vocabulary.train import train_vocabulary

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
KEEP, LATIN = Normalization(strip_accents="none"), Normalization(strip_accents="latin")


@pytest.fixture(scope="module")
def tokenizers():
    """A vocabulary of all the sentences for each normalisation."""
    text = [*SENTENCES.values()] * 2
    return {
        normalization: Tokenizer(train_vocabulary(text, 350, normalization), normalization)
        for normalization in (PRESETS["multilingual"], KEEP, LATIN)
    }


def round_trip(tokenizer, text):
    encoded = tokenizer.encode_batch([text])
    assert tokenizer.vocabulary.unk_id not in encoded.ids
    return tokenizer.decode(encoded.ids)


@pytest.mark.parametrize("language", SENTENCES)
def test_every_letter_survives_lower_casing(tokenizers, language):
    text = SENTENCES[language]
    composed = unicodedata.normalize("NFC", text)
    assert round_trip(tokenizers[KEEP], text) == text.lower()
    assert round_trip(tokenizers[PRESETS["multilingual"]], text) == composed.lower()
    decomposed = unicodedata.normalize("NFD", text)
    assert round_trip(tokenizers[PRESETS["multilingual"]], decomposed) == composed.lower()


@pytest.mark.parametrize("language", SENTENCES)
def test_only_latin_letters_lose_their_accents(tokenizers, language):
    text = SENTENCES[language]
    assert round_trip(tokenizers[LATIN], text) == WITHOUT_LATIN_ACCENTS.get(language, text.lower())


def warning(text, normalization):
    return alteration_warning([text], normalization)


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
    said = warning(text, PRESETS["google-uncased"])
    assert f"({script}" in said and "--strip-accents none or --preset multilingual" in said
    latin = language in WITHOUT_LATIN_ACCENTS
    assert ("--strip-accents latin" in said) != latin, "the flag helps other scripts only"
    assert bool(warning(text, LATIN)) == latin
    for harmless in ("multilingual", "google-cased"):
        assert warning(text, PRESETS[harmless]) == ""


@pytest.mark.parametrize("text", [ENGLISH, SENTENCES["Hebrew"], "", "1 + 2 = 3 \u0000"])
def test_text_that_loses_nothing_is_not_warned_of(text):
    assert warning(text, PRESETS["google-uncased"]) == ""
