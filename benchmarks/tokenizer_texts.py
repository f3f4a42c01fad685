"""The texts of `benchmarks/tokenizer.py`: published sets, many scripts, and what could be slow."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from bertsmith.text.readers.documents import read_documents
from bertsmith.text.tokenizer.wordpiece import Vocabulary

MIXED = "26 languages"

# "All human beings are born free and equal in dignity and rights", and plain sentences.
SENTENCES = """
All human beings are born free and equal in dignity and rights.
Alle Menschen sind frei und gleich an Würde und Rechten geboren, schön und groß.
Tous les êtres humains naissent libres et égaux en dignité et en droits.
Todos los seres humanos nacen libres e iguales en dignidad y derechos, ¿verdad?
Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.
Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.
Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İSTANBUL
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.
Все люди рождаются свободными и равными в своём достоинстве и правах.
Всі люди народжуються вільними і рівними у своїй гідності та правах.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.
يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.
تمام افراد بشر آزاد به دنیا می‌آیند و از لحاظ حیثیت و حقوق با هم برابرند.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।
மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ
人人生而自由,在尊严和权利上一律平等。
人人生而自由,在尊嚴和權利上一律平等。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.
Բոլոր մարդիկ ծնվում են ազատ ու հավասար՝ իրենց արժանապատվությամբ և իրավունքներով։
የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው።
Great 👍🏽 trip 👩‍👩‍👧 to 🇫🇷, 10€ – “so cheap” … x² ≤ y ⇒ ½ √n
""".strip().split("\n")


def measured_files(data: Path, megabytes: float) -> dict[str, list[str]]:
    """Texts by the name of their set, each set of about that size; absent sets are left out."""
    files: dict[str, Iterable[str]] = {}
    sst = data / "glue" / "SST-2" / "train.tsv"
    if sst.exists():
        lines = sst.read_text(encoding="utf-8").splitlines()[1:]
        files["SST-2"] = (line.split("\t")[0] for line in lines)
    for name, path in {
        "WikiText-2": data / "wikitext-2",
        "novels": data / "corpus" / "books-eltec-eng-00.txt.xz",
    }.items():
        if path.exists():
            files[name] = (line for document in read_documents([path]) for line in document.lines)
    if not files:
        topics = "\n\n".join(pydoc_data.topics.topics.values())
        files["Python's documentation"] = topics.split("\n\n")
    files[MIXED] = mixed_scripts()
    return {name: list(first_bytes(texts, megabytes * 1e6)) for name, texts in files.items()}


def mixed_scripts() -> Iterable[str]:
    """Texts without end, each of one to five sentences in scripts drawn at random."""
    generator = random.Random(0)
    while True:
        yield " ".join(generator.choices(SENTENCES, k=generator.randrange(1, 6)))


def first_bytes(texts: Iterable[str], size: float) -> Iterable[str]:
    """The first texts with about that many bytes together."""
    taken = 0
    for text in texts:
        if taken >= size:
            return
        taken += len(text.encode())
        yield text


def worst_cases(vocabulary: Vocabulary, size: int) -> dict[str, list[str]]:
    """Texts of about `size` bytes a case that ask the most of one step of the tokenizer."""
    generator = random.Random(1)
    long = sorted((p for p in vocabulary.pieces if p.isascii() and p.isalpha()), key=len)[-300:]
    inner = [p[2:] for p in vocabulary.pieces if p.startswith("##") and p[2:].isalpha()]
    inner = sorted((p for p in inner if p.isascii()), key=len)[-300:]

    def near_miss() -> str:
        word = generator.choice(long)[:-1]
        while len(word) < 180:
            word += generator.choice(inner)[:-1]
        return word

    def drawn(characters: str, length: int) -> str:
        return "".join(generator.choices(characters, k=length))

    hangul, ideographs = (
        "".join(map(chr, range(first, first + 3000))) for first in (0xAC00, 0x4E00)
    )
    assigned = "".join(chr(code) for code in range(0x20, 0x3000) if chr(code).isprintable())
    greek = "αβγδεζηθικλμνξοπρστυφχψω"
    words = {
        "words of 199 times a": lambda: "a" * 199,
        "near misses": near_miss,
        "unknown character at the end": lambda: near_miss() + "\U00010348",
        "words of 201 letters": lambda: drawn("abcdefgh", 201),
        "punctuation": lambda: drawn("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~", 100),
        "words of one letter": lambda: generator.choice("abcdefghij"),
        "rare letters": lambda: drawn("zqxjvkw", 10),
        "accented capitals": lambda: drawn("ÀÉÎÕÜÇÑŠŽĄĘŁØÅẤỆỠ", 8),
        "letters with five marks": lambda: "".join(
            drawn("aeiou", 1) + drawn("\u0301\u0323\u0308\u0327\u0331", 5) for _ in range(5)
        ),
        "control characters": lambda: "\u200d\u00ad\x07".join(drawn("abcde", 8)),
        "Hangul": lambda: drawn(hangul, 5),
        "ideographs": lambda: drawn(ideographs, 30),
        "Devanagari": lambda: drawn("कखगघङचछजझञािीुूेैोौ्ं़", 9),
        "emoji and joiners": lambda: drawn("😀👍👩🏽\u200d\ufe0f🇫🇷❤", 6),
        "any characters": lambda: drawn(assigned, 12),
        "final sigmas (reference path)": lambda: drawn(greek, 6).upper() + "Σ",
        "marks that reorder (reference path)": lambda: (
            drawn("abc", 3) + "\U0001d16d\U0001d165\u0323"
        ),
    }
    cases = {}
    for name, word in words.items():
        stream = iter(lambda word=word: " ".join(word() for _ in range(30)), None)
        cases[name] = list(first_bytes(stream, size))
    letters = (drawn("abcdefgh,. ", 2) for _ in iter(int, 1))
    cases["texts of two characters"] = list(first_bytes(letters, size))
    cases["one text without a space"] = ["ab," * (size // 3)]
    cases["one word"] = ["a" * size]
    return cases


def sample(texts: list[str], count: int) -> list[str]:
    """Up to `count` of the texts, evenly spread over them."""
    return list(islice(texts, 0, None, max(1, len(texts) // count)))[:count]
