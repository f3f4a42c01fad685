"""Several masks together, whole words and candidates, against sums made by transformers' model."""

import itertools

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.fill import fill_candidates, fill_words
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..tiny import piece_tokenizer, random_model

# "do" with "##g" is what the tokenizer makes of no text, since "dog" is a piece.
WORDS = "the cat dog sat on mat do ca . ##s ##g ##ed ##ts"
PIECES = piece_tokenizer(WORDS).vocabulary.pieces
CLS, SEP, MASK = (PIECES.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
STARTS = [k for k, piece in enumerate(PIECES) if k >= len(SPECIAL) and not piece.startswith("##")]
RESTS = [k for k, piece in enumerate(PIECES) if piece.startswith("##")]


def saved(folder, words=WORDS, heads=4, **changes):
    """With rows without a piece, as models padded for speed have them."""
    tokenizer = piece_tokenizer(words)
    rows = len(tokenizer.vocabulary) + 3
    config = ModelConfig(rows, 32, 2, heads, 64, max_positions=24, **changes)
    return random_model(folder, tokenizer, config=config, std=0.4, seed=3)


@pytest.fixture(scope="module", params=[1, 4], ids=["native", "pytorch"])
def folder(tmp_path_factory, request):
    """Heads of 32 numbers are read by our own engine, those of 8 are not."""
    return saved(tmp_path_factory.mktemp("models") / "model", heads=request.param)


@pytest.fixture(scope="module")
def filler(folder):
    return bertsmith.load(folder).filler


@pytest.fixture(scope="module")
def log_p(folder):
    """(ids of a row, place) -> log-probabilities [V] of transformers' model."""
    model = transformers.BertForPreTraining.from_pretrained(folder).eval()

    def log_probabilities(row, place):
        with torch.inference_mode():
            logits = model(torch.tensor([row])).prediction_logits[0, place]
        return logits.log_softmax(dim=-1).numpy()

    return log_probabilities


def row_of(text):
    return [CLS, *(PIECES.index(word) for word in text.split()), SEP]


def with_pieces(row, begin, pieces):
    return [*row[:begin], *pieces, *row[begin + len(pieces) :]]


def likelihood(log_p, row, begin, pieces):
    """Kauf and Ivanova's sum, straight from its definition."""
    total = 0.0
    for k, piece in enumerate(pieces):
        masked = with_pieces(row, begin, [*pieces[:k], *[MASK] * (len(pieces) - k)])
        total += log_p(masked, begin + k)[piece]
    return total


def test_joint_is_the_exhaustive_search_by_confidence(filler, log_p):
    row = row_of("the [MASK] sat on [MASK] .")
    answers = [1, *range(len(SPECIAL), len(PIECES))]  # [UNK] and the words

    def fill(row, open_places):
        """Every filling of the open places with its sum, the surest place first."""
        if not open_places:
            yield tuple(row), 0.0
            return
        scores = {place: log_p(row, place) for place in open_places}
        surest = max(open_places, key=lambda place: scores[place][answers].max())
        others = [place for place in open_places if place != surest]
        for piece in answers:
            filled = with_pieces(row, surest, [piece])
            for result, total in fill(filled, others):
                yield result, total + scores[surest][piece]

    expected = sorted(fill(row, [2, 5]), key=lambda item: -item[1])[:8]
    given = filler.joint("the [MASK] sat on [MASK] .", top=8)
    # a beam of 20 holds all 14 pieces at the first mask, so nothing is lost
    assert [answer["tokens"] for answer in given] == [
        [PIECES[result[2]], PIECES[result[5]]] for result, _ in expected
    ]
    totals = [total for _, total in expected]
    np.testing.assert_allclose([answer["log_probability"] for answer in given], totals, rtol=1e-4)
    for answer in given:
        assert answer["probability"] == pytest.approx(np.exp(answer["log_probability"]))


def test_int8_is_near(filler, folder):
    if reason := filler.model.why_not(Processor("cpu", "int8", 1, "bertsmith")):
        pytest.skip(reason)
    text = "the [MASK] sat on [MASK] ."
    exact, near = filler.pieces([text], 20), bertsmith.load(folder, precision="int8").fill(text, 20)
    for one, other in zip(exact[0], near, strict=True):
        found = {candidate.id: candidate.probability for candidate in other}
        for candidate in one:
            assert found[candidate.id] == pytest.approx(candidate.probability, abs=0.05)


def test_joint_with_one_mask_is_the_plain_answer(filler):
    ((plain,),) = filler.pieces(["the [MASK] sat"], top=4)
    joint = filler.joint("the [MASK] sat", top=4)
    assert [row["tokens"] for row in joint] == [[row.token] for row in plain]
    expected = [row.probability for row in plain]
    np.testing.assert_allclose([row["probability"] for row in joint], expected, rtol=1e-5)


def test_words_are_the_exhaustive_search_over_whole_words(filler, log_p):
    expected = {}
    for size in (1, 2):
        row = row_of(" ".join(["the", *["[MASK]"] * size, "sat"]))
        for pieces in itertools.product(STARTS, *[RESTS] * (size - 1)):
            expected[tuple(PIECES[p] for p in pieces)] = likelihood(log_p, row, 2, pieces)
    # of these the tokenizer makes "dog" and "cat ##s", and no word goes on after punctuation
    others = [("do", "##g"), ("ca", "##ts"), *((".", PIECES[rest]) for rest in RESTS)]
    for other in others:
        del expected[other]
    given = fill_words(filler, "the [MASK] sat", 2, top=1000)
    spelled = [tuple(answer["pieces"][0]) for answer in given]
    assert sorted(spelled) == sorted(expected)
    for answer, pieces in zip(given, spelled, strict=True):
        assert answer["log_probability"] == pytest.approx(expected[pieces], rel=1e-4)
        assert answer["score"] == pytest.approx(expected[pieces] / len(pieces), rel=1e-4)
    scores = [answer["score"] for answer in given]
    assert scores == sorted(scores, reverse=True)


def test_words_at_two_masks_are_scored_with_each_other_in_place(filler, log_p):
    given = fill_words(filler, "[MASK] sat on [MASK]", 2, top=6)
    assert len({tuple(map(len, answer["pieces"])) for answer in given}) > 1  # of unlike lengths
    for answer in given:
        first, second = ([PIECES.index(p) for p in pieces] for pieces in answer["pieces"])
        middle = row_of("sat on")[1:-1]
        row = [CLS, *first, *middle, *second, SEP]
        total = likelihood(log_p, row, 1, first)
        total += likelihood(log_p, row, 1 + len(first) + 2, second)
        assert answer["log_probability"] == pytest.approx(total, rel=1e-4)


def test_words_of_a_vocabulary_without_continuations(tmp_path):
    folder = saved(tmp_path / "model", "the cat sat")
    answers = fill_words(bertsmith.load(folder).filler, "the [MASK]", 3)
    assert sorted(answer["words"] for answer in answers) == [["cat"], ["sat"], ["the"]]


def test_candidates_are_scored_and_normalised_over_themselves(filler, log_p):
    spelled = {"cat": "cat", "dogs": "dog ##s", "mat": "mat", "Cated": "cat ##ed"}
    spelled["the cat"] = "the cat"
    pieces = {candidate: names.split() for candidate, names in spelled.items()}
    given = fill_candidates(filler, "the [MASK] sat .", list(pieces))
    scores = {}
    for candidate, names in pieces.items():
        ids = [PIECES.index(name) for name in names]
        row = row_of(" ".join(["the", *["[MASK]"] * len(ids), "sat", "."]))
        scores[candidate] = likelihood(log_p, row, 2, ids) / len(ids)
    total = sum(np.exp(score) for score in scores.values())
    assert sorted(answer["candidate"] for answer in given) == sorted(pieces)
    for answer in given:
        name = answer["candidate"]
        assert answer["pieces"] == pieces[name]
        assert answer["score"] == pytest.approx(scores[name], rel=1e-4)
        total_score = scores[name] * len(pieces[name])
        assert answer["log_probability"] == pytest.approx(total_score, rel=1e-4)
        assert answer["probability"] == pytest.approx(np.exp(scores[name]) / total, rel=1e-4)
    probabilities = [answer["probability"] for answer in given]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1.0)


def test_candidates_are_a_list_of_words_and_not_the_letters_of_one(filler):
    (answer,) = fill_candidates(filler, "the [MASK] sat", "cat")
    assert answer["candidate"] == "cat"
    with pytest.raises(ValueError, match=r"candidates\[1\] is int 3"):
        fill_candidates(filler, "the [MASK] sat", ["cat", 3])


def test_a_candidate_of_one_piece_has_its_plain_probability(filler):
    ((plain,),) = filler.pieces(["the [MASK] sat"], top=100)
    (answer,) = fill_candidates(filler, "the [MASK] sat", ["mat"])
    plain = {row.token: row.probability for row in plain}
    assert np.exp(answer["log_probability"]) == pytest.approx(plain["mat"], rel=1e-4)
    assert answer["probability"] == 1.0


def test_no_word_that_the_tokenizer_would_make(tmp_path):
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, "Cat", "Dog"]))  # which lower-cases
    model = bertsmith.load(random_model(tmp_path / "model", tokenizer))
    assert fill_words(model.filler, "[MASK]", 2) == []


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (["cat", "zebra"], r"candidate 'zebra': .*cannot spell it \(its pieces: \[UNK\]\)"),
        (["cat", "the zebra"], r"candidate 'the zebra': .*the \[UNK\]"),
        (["cat", " "], "candidate ' ': no word in it"),
        (["cat", "mat", "Cat"], "candidate 'Cat': the same pieces as 'cat'"),
        (["cat", "cat"], "candidate 'cat': the same pieces as 'cat'"),
        ([], "no candidates"),
        (["cat " * 30], "32 tokens .* knows 24 positions"),
    ],
)
def test_candidates_are_never_replaced_or_dropped(filler, candidates, message):
    with pytest.raises(ValueError, match=message):
        fill_candidates(filler, "[MASK]", candidates)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda filler: filler.joint(["[MASK]"]), "text is list: expected one text"),
        (lambda filler: filler.joint("the cat"), r'no \[MASK\] in "the cat"'),
        (lambda filler: fill_words(filler, "the cat", 2), r'no \[MASK\] in "the cat"'),
        (lambda filler: fill_candidates(filler, "the cat", ["mat"]), r'no \[MASK\] in "the cat"'),
        (
            lambda filler: fill_candidates(filler, "[MASK] " * 2, ["mat"]),
            r"2 \[MASK\] in the text: candidates are for one",
        ),
        (lambda filler: filler.joint("a [MASK]", top=0), "top=0"),
        (lambda filler: fill_words(filler, "a [MASK]", 0), "max_pieces=0"),
        (lambda filler: fill_words(filler, "[MASK] " * 4, 3), "81 combinations, at most 64"),
        # which no memory holds
        (
            lambda filler: fill_words(filler, "[MASK] " * 40, 2),
            r"40 masks .* 1,099,511,627,776 comb",
        ),
    ],
)
def test_what_together_refuses(filler, call, message):
    with pytest.raises(ValueError, match=message):
        call(filler)


def test_a_left_to_right_model_fills_nothing(tmp_path):
    causal = saved(tmp_path / "causal", causal=True)
    with pytest.raises(ValueError, match=r"causal: a left-to-right model, which sees nothing"):
        bertsmith.load(causal).fill("the [MASK]")
