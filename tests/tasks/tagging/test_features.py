"""Rows of tagged words: by hand, and every word once in the middle of its text."""

import numpy as np
import pytest

from bertsmith.tasks.tagging.features import IGNORED, featurize_sentences
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..made import ALPHABET, CLS, JOINED, PAD, SEP, UNK, by_row


def of(*documents: str) -> Sentences:
    """Sentences end with " / ", words are parted by blanks; line k + 1 is word k's."""
    texts = [(d, s.split()) for d, text in enumerate(documents) for s in text.split(" / ")]
    words = [word for _, sentence in texts for word in sentence]
    return Sentences(
        words=words,
        tags=None,
        boundaries=np.cumsum([0, *(len(sentence) for _, sentence in texts)]),
        documents=np.array([d for d, _ in texts]),
        has_documents=True,
        scheme="IOB2",
        lines=np.arange(1, len(words) + 1),
        rows=np.arange(len(texts)),
        num_rows=len(texts),
        source="mem",
    )


def laid_out(sentences, labels=None, **encoding):
    encoding = EncodingSettings(**{"tokens_per_window": 0, **encoding})
    return featurize_sentences(JOINED, sentences, labels, encoding)


def shown(features):
    """Rows as text, the tagged tokens in capitals."""
    pieces = np.array([*("?^", "?", "^", "$", "?"), *ALPHABET, *ALPHABET])[features.ids]
    text = np.where(features.word_numbers >= 0, np.char.upper(pieces), pieces)
    return ["".join(row) for row in by_row(features, text)]


def test_single_sentences_by_hand():
    features = laid_out(of("abc d / e", "f"), np.array([3, 4, 5, 6]), document_context=False)
    assert shown(features) == ["^AbcD$", "^E$", "^F$"]  # the first piece of a word
    out = IGNORED
    assert features.labels.tolist() == [out, 3, out, out, 4, out, out, 5, out, out, 6, out]
    assert features.word_numbers.max() == 3 and not features.token_types.any()
    batch = features.batch(np.array([1, 0]), PAD)
    assert batch["labels"].tolist() == [
        [out, 5, out, out, out, out, out, out],
        [out, 3, out, out, 4, out, out, out],
    ]
    assert batch["lengths"].tolist() == [3, 6]
    assert batch["ids"].shape == batch["types"].shape == (2, 8) and batch["ids"][0, 3] == PAD
    values = np.arange(len(features.ids))
    assert features.by_word(values).tolist() == [1, 4, 7, 10]
    assert features.by_word(np.stack([values, values], 1)).shape == (4, 2)


def test_document_context_by_hand():
    documents = "a b / c d / e f / g h", "a"
    rows = shown(laid_out(of(*documents), max_length=8))
    assert rows == [
        "^ABcdef$",  # nothing before: all room after
        "^abCDef$",
        "^cdEFgh$",
        "^cdefGH$",  # nothing after
        "^A$",  # never another document
    ]
    # odd room: one more after than before; a document that fits is there whole
    rows = shown(laid_out(of(*documents), max_length=7))
    assert rows == ["^ABcde$", "^bCDef$", "^dEFgh$", "^defGH$", "^A$"]
    rows = shown(laid_out(of(*documents), max_length=99))
    assert rows[1] == "^abCDefgh$" and rows[4] == "^A$"


def test_context_has_whole_words_only():
    rows = shown(laid_out(of("abc / d / efg"), max_length=7))
    assert rows == ["^Abcd$", "^D$", "^dEfg$"]
    rows = shown(laid_out(of("a bc / d / efg"), max_length=7))
    assert rows == ["^ABcd$", "^bcD$", "^dEfg$"]


def test_sentences_tagged_together():
    documents = "a b / c d / e f / g h / a", "b / c"
    sentences = of(*documents)
    rows = shown(laid_out(sentences, max_length=10, tokens_per_window=4))
    assert rows == ["^ABCDefgh$", "^bcdEFGHa$", "^bcdefghA$", "^BC$"]
    # never more than half of the row
    assert shown(laid_out(sentences, max_length=10, tokens_per_window=9)) == rows
    rows = shown(laid_out(sentences, max_length=20, tokens_per_window=9))
    assert rows == ["^ABCDEFGHA$", "^BC$"]


def test_a_long_sentence_is_tagged_in_parts():
    rows = shown(laid_out(of("h / a b c d e f g / h"), max_length=8, document_context=False))
    assert rows == ["^H$", "^ABCdef$", "^bcDEFg$", "^bcdefG$", "^H$"]
    # with the document around it: parts of 3 pieces, 1 before and 2 after
    rows = shown(laid_out(of("h / a b c d e f g / h"), max_length=8))
    assert rows == ["^Habcde$", "^hABCde$", "^cDEFgh$", "^cdefGh$", "^cdefgH$"]


def test_a_word_without_pieces_is_unknown():
    features = laid_out(of("\x01 a \x01\x02"), np.array([7, 8, 9]))
    assert features.ids.tolist() == [CLS, UNK, 5, UNK, SEP]
    assert features.labels.tolist() == [IGNORED, 7, 8, 9, IGNORED]


def test_a_cased_model_sees_capitals():
    cased = Tokenizer(Vocabulary([*SPECIAL, *"Aab", "##b"]), GOOGLE_CASED)
    encoding = EncodingSettings(tokens_per_window=0)
    rows = featurize_sentences(cased, of("Ab ab / C"), None, encoding)
    words = rows.word_numbers >= 0
    assert [cased.vocabulary.pieces[number] for number in rows.ids[words]] == ["A", "a", "[UNK]"]


def test_a_word_longer_than_a_row_is_read_in_part():
    features = laid_out(of("a abcdefgh b"), max_length=9)
    assert shown(features) == ["^A$", "^Abcdefg$", "^B$"]
    note = "1 of 3 words have more than 7 pieces and lose their end"
    assert features.long_note(EncodingSettings()) == note and features.num_truncated == 1
    assert "larger" in features.long_hint(EncodingSettings())
    features = laid_out(of("a abcdefgh b"), max_length=10)
    assert len(features) == 3 and features.long_note(EncodingSettings()) is None
    with pytest.raises(ValueError, match="`max_length=2`: no room for a piece"):
        laid_out(of("a"), max_length=2)


@pytest.mark.parametrize("seed", range(30))
def test_every_word_is_tagged_once_in_the_middle(seed):
    random = np.random.default_rng(seed)

    def word():
        return "".join(random.choice([*ALPHABET], random.integers(1, 5)))

    def sentence():
        return " ".join(word() for _ in range(random.integers(1, 15)))

    documents = (" / ".join(sentence() for _ in range(random.integers(1, 6))) for _ in range(8))
    sentences = of(*documents)
    context = bool(seed % 3)
    room = int(random.integers(6, 40))
    together = int(random.integers(0, room + 1)) if seed % 2 else 0
    features = laid_out(
        sentences,
        np.arange(len(sentences.words)),
        max_length=room + 2,
        document_context=context,
        tokens_per_window=together,
    )
    tagged = features.word_numbers[features.word_numbers >= 0]
    assert tagged.tolist() == list(range(len(sentences.words)))  # each once, in order
    assert (features.labels >= 0).tolist() == (features.word_numbers >= 0).tolist()
    assert features.lengths.max() <= room + 2

    pieces = [JOINED.encode_batch([word]).ids.tolist() for word in sentences.words]
    numbers = np.repeat(np.arange(len(sentences)), np.diff(sentences.boundaries))
    text_of = sentences.documents[numbers] if context else numbers
    for row in map(slice, features.boundaries, features.boundaries[1:]):
        ids = features.ids[row].tolist()
        assert ids[0] == CLS and ids[-1] == SEP
        words = features.word_numbers[row][features.word_numbers[row] >= 0]
        assert len(set(text_of[words])) == 1
        # the row is these words with whole words of their text around them
        inner = [piece for w in range(words[0], words[-1] + 1) for piece in pieces[w]]
        begin = int(np.flatnonzero(features.word_numbers[row] == words[0])[0])
        first, left = words[0], begin - 1
        while left > 0:
            first -= 1
            left -= len(pieces[first])
        last, right = words[-1], len(ids) - 1 - begin - len(inner)
        while right > 0:
            last += 1
            right -= len(pieces[last])
        assert left == right == 0 and text_of[first] == text_of[last] == text_of[words[0]]
        assert [p for w in range(first, last + 1) for p in pieces[w]] == ids[1:-1]
        # what could not be taken on a side: no text, or no room for one more word there
        free = room - len(inner)
        has_more_left = first > 0 and text_of[first - 1] == text_of[first]
        has_more_right = last + 1 < len(pieces) and text_of[last + 1] == text_of[last]
        left, right = begin - 1, len(ids) - 1 - begin - len(inner)
        if has_more_left:
            assert left + len(pieces[first - 1]) > free // 2
        if has_more_right:
            assert right + len(pieces[last + 1]) > free // 2
        if has_more_left or has_more_right:
            assert len(ids) - 2 > room - 8  # full, but for two half words
