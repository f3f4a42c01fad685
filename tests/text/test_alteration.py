import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED, Normalization
from bertsmith.text.vocabulary.scripts import LetterCounts, script_of

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
    found = counted(text.split("\n")).alteration(normalization)
    lines = [by_hand("\n" + line, normalization) for line in text.split("\n")]
    assert (found.letters, found.altered) == tuple(map(sum, zip(*lines, strict=True)))
    assert sum(one.altered for one in found.scripts) == found.altered


def test_the_form_of_the_text_does_not_matter():
    text = "Việt Nam, 한국, मैं, ёлка"
    forms = [counted([unicodedata.normalize(form, text)]).counts for form in ("NFC", "NFD")]
    assert forms[0] == forms[1]
    assert counted([text]).alteration(Normalization(strip_accents="none", unicode="nfc")).share == 0


def test_batches_add_up():
    letters = LetterCounts()
    for line in ("\u0301e", "e\u0323\u0301", "", "가"):
        letters.add([line])
    assert letters.counts == counted(["\u0301e", "e\u0323\u0301", "", "가"]).counts
    assert letters.counts["\n\u0301"] == 1 and letters.counts["\u1eb9\u0301"] == 1


def test_scripts_and_examples():
    found = counted(["가나가 ab é", "ﬁ"]).alteration(GOOGLE_UNCASED)
    hangul, latin = found.scripts
    assert (hangul.script, hangul.letters, hangul.altered) == ("Hangul", 3, 3)
    assert (hangul.before, hangul.after) == ("가", "ᄀ ᅡ")
    assert (latin.script, latin.letters, latin.altered) == ("Latin", 4, 1)
    assert (latin.before, latin.after) == ("é", "e")
    assert script_of("字") == "Han" and script_of("ｶ") == script_of("カ") == "Katakana"
    assert script_of("\ue000") == "Other"


def test_what_the_warning_recommends():
    letters = counted(["ＡＢＣ 가나다"])
    uncased = Normalization(unicode="nfkc")
    assert "with --preset multilingual keeps" in letters.warning(uncased)
    cased = Normalization(lowercase=False, strip_accents="all", unicode="nfkc")
    assert "with --strip-accents none --unicode none keeps" in letters.warning(cased)
    assert "with --unicode none or" in letters.warning(COMPATIBILITY)
    assert "(Hangul" not in letters.warning(COMPATIBILITY)
    assert "\u0301 -> (none)" in counted(["\u0301"]).warning(GOOGLE_UNCASED)


def test_a_lone_surrogate_is_no_letter():
    assert counted(["a\ud800"]).alteration(GOOGLE_UNCASED).letters == 1


def test_english_prose_is_left_in_peace():
    file = Path(__file__).parents[3] / "shared/data/wikitext-2/valid.txt"
    if not file.exists():
        pytest.skip("shared/data/wikitext-2 is not there")
    letters = counted(file.read_text(encoding="utf-8").splitlines()[:2000])
    assert letters.counts["\u00e9"] and letters.warning(GOOGLE_UNCASED) == ""
