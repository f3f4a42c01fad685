"""Sentences in five languages, each case divided by hand at the bars."""

import time

import pytest

from bertsmith.text.sentences import split_sentences

CASES = [
    # English
    "It rained. | We stayed in! | Why not? | Nobody knew.",
    "Mr. Brown met Dr. J. R. R. Smith at St. James. | They talked.",
    "The U.S. Army left. | He lives in the U.S. | The end came at 5 p.m. | They slept.",
    "Pi is 3.14, e.g. in Fig. 3 or No. 5 (see www.example.com). | No. | Nothing, i.e. zero.",
    'He said "Go." | Then he left. | (It was late.) | "Why?!" she asked. | "Because."',
    "“Did it work?” he cried. | “Yes!” | ‘Good.’",
    "Wait... what? | I see... | And then it ended… | Really.",
    "Apples, pears, etc. | The rest is in Smith et al. 2019 and Brown vs. Board.",
    "So do I. | Margaret too. | Acme Inc. Holdings paid. | Version 1.2.3 is out.",
    "1. Boil water. | 2. Add salt. | The answer is 3. | The next is 1999. | Then came more.",
    # What stands before an abbreviation is not always a space, and its capitals vary
    "Ask (Dr. Brown). | MR. BROWN said “Prof. Green”. | Miss\tMrs. Gray\xa0Jr. met 'em.",
    "The Emr. | Ran. | Mr.-Brown. | Antidisestablishmentarianisms. | So be it (etc.). | He left.",
    # German
    "Am 3. Oktober war Dr. Meier da. | Im 19. Jahrhundert, d. h. früher, z. B. in Bonn.",
    "„Wirklich?“ | Er nickte. | »Ja.« | Sie auch usw. | Das kostet ca. 5 Euro bzw. Nr. 7.",
    # French
    "« Oui. » | Il part. | À demain !",
    # Korean
    "안녕하세요. | 저는 학생입니다! | 정말요? | “가자.”라고 말했다. | 오늘은 2024. 3. 1. 입니다.",
    # Chinese and Japanese: no space stands between sentences
    "你好！|他说。|“真的吗？”|她问。|“是。”，然后走了……又回来。|圆周率是３．１４。|完",
    "今日は暑い。|「行こう！」と言った。|「はい。」|彼は去った。|本当？！|ﾊｲ｡|（終わり。）",
    "全角の空白。　|次の文．|最後",
    # Hindi and Sanskrit (with the number of a verse), Bengali
    "मैं जाता हूँ। | वह आता है। | “सच?” | हाँ। | ३ लोग आए। | धर्मक्षेत्रे कुरुक्षेत्रे ॥ १ ॥ | सञ्जय उवाच।",
    "আমি যাই। | সে আসে!",
    # Urdu, Arabic
    "میں جاتا ہوں۔ | وہ آتا ہے۔ | کیوں؟! | ٹھیک ہے۔",
    "هل تأتي؟ | نعم، اليوم. | شكرا!",
    # Armenian, Amharic, Burmese, Khmer
    "Ես գնում եմ։ | Նա գալիս է։ | Լավ։",
    "እኔ እሄዳለሁ። | አንተስ፧ | እሱ ይመጣል።",
    "ကျွန်တော် သွားမယ်။ | သူ လာမယ်။",
    "ខ្ញុំទៅ។ | គាត់មក។",
]


@pytest.mark.parametrize("case", CASES)
def test_sentences(case):
    parts = case.split("|")
    text = "".join(parts)
    assert split_sentences(text) == [part.strip() for part in parts]


@pytest.mark.parametrize("text", ["", "  \t", "\u3000"])
def test_nothing(text):
    assert split_sentences(text) == []


UNITS = [".", ". ", '."', ". (", "A. ", "...\n", "。", "。」", "J.", "(", "। ", "॥ १ ", "?!”"]
UNITS += [". " + " " * 99]


@pytest.mark.parametrize("unit", UNITS)
def test_nothing_is_lost_and_the_time_is_linear(unit):
    text = unit * (200_000 // len(unit))
    started = time.process_time()
    sentences = split_sentences(text)
    assert time.process_time() - started < 2.0  # a quadratic search would take minutes
    assert "".join("".join(sentences).split()) == "".join(text.split())
