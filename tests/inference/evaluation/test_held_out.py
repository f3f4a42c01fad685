"""Nats of whole masked words against transformers' model, one row at a time."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers

import bertsmith as library
from bertsmith.inference.evaluation.held_out import (
    ROW_WORDS,
    SHARE,
    evaluate_held_out,
    masked_words,
    word_nats,
)
from bertsmith.model.config import ModelConfig

from ...gpt import write_openai
from ...tiny import bertsmith, piece_tokenizer, random_model, refused, write

COARSE = piece_tokenizer("the cats dogs sat on mat .")
FINE = piece_tokenizer("the c d ##ats ##ogs sat on m ##at .")
SENTENCE = "the cats sat on the mat . dogs sat on cats . "
TEXT = "\n\n".join(SENTENCE * count for count in (9, 1, 30))


def made(folder, tokenizer=FINE, positions=256, **changes):
    config = ModelConfig(
        len(tokenizer.vocabulary), 32, 1, 1, 64, max_positions=positions, **changes
    )
    return random_model(folder, tokenizer, config=config, std=0.4, seed=3)


def test_masks_are_the_words_own():
    """They depend on the text and the key alone, and on no vocabulary."""
    rows, is_masked = masked_words(TEXT, [0, 1])
    assert [len(row) for row in rows] == [64, 44, 12, *[64] * 5, 40] and ROW_WORDS == 64
    again, other = masked_words(TEXT, [0, 1])[1], masked_words(TEXT, [1, 1])[1]
    assert np.array_equal(is_masked, again) and not np.array_equal(is_masked, other)
    firsts = np.cumsum([0, *map(len, rows)])[:-1]
    assert not is_masked[firsts].any()
    # of 480 words; the standard deviation of the share is 0.016
    assert is_masked.mean() == pytest.approx(SHARE, abs=0.05)


@pytest.mark.parametrize("positions", [256, 24])
def test_nats_are_those_of_one_row_after_the_other(tmp_path, positions):
    """24 positions do not hold a row of 64 words, which is divided between words."""
    folder = made(tmp_path / "model", positions=positions)
    theirs = transformers.BertForPreTraining.from_pretrained(folder).eval()
    rows, is_masked = masked_words(TEXT, [0, 1])
    pieces = [[FINE.encode(word)[1:-1] for word in row] for row in rows]
    expected, number = [], 0
    for row in pieces:
        part, begin = [], number
        for word in [*row, None]:
            if word is None or sum(map(len, part)) + len(word) > positions - 2:
                expected += naive(theirs, part, is_masked[begin : begin + len(part)])
                begin, part = begin + len(part), []
            part.append(word)
        number += len(row)
    found, unknown = word_nats(library.load(folder), rows, is_masked)
    assert unknown == 0
    np.testing.assert_allclose(found, expected, rtol=1e-3)  # float32 of two programs


def naive(model, words, is_masked):
    """The nats of each masked word of a row of words, lists of pieces."""
    cls, sep, mask = (FINE.vocabulary.pieces.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    shown = [
        mask if hidden else piece
        for word, hidden in zip(words, is_masked, strict=True)
        for piece in word
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([[cls, *shown, sep]])).prediction_logits[0, 1:-1]
    log_p, nats, place = logits.log_softmax(dim=1).numpy(), [], 0
    for word, hidden in zip(words, is_masked, strict=True):
        if hidden:
            nats.append(-sum(log_p[place + k, piece] for k, piece in enumerate(word)))
        place += len(word)
    return nats


def test_models_of_any_vocabulary_and_direction_predict_the_same_words(tmp_path):
    """Weights of 0 give every piece the same share, so the nats of a word tell its pieces."""
    text = write(tmp_path / "text.txt", TEXT)
    counts = {}
    for name, tokenizer, changes in (
        ("coarse", COARSE, {}),
        ("fine", FINE, {}),
        ("ltr", FINE, {"causal": True}),
        ("gpt", FINE, {"causal": True, "family": "gpt", "type_vocab_size": 0}),
    ):
        config = ModelConfig(len(tokenizer.vocabulary), 32, 1, 1, 64, max_positions=256, **changes)
        folder = random_model(tmp_path / name, tokenizer, config=config, std=0.0)
        (found,) = evaluate_held_out(library.load(folder), text)["texts"].values()
        counts[name] = found["words"]
        assert found["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
        nats = found["nats_per_word"] / np.log(len(tokenizer.vocabulary))
        is_whole = tokenizer is COARSE
        assert nats == pytest.approx(1.0, rel=1e-5) if is_whole else 1.2 < nats < 1.7
    assert len(set(counts.values())) == 1


def test_a_word_that_cannot_be_spelled_is_counted_apart(tmp_path):
    folder = made(tmp_path / "model")
    rows, is_masked = masked_words("the zebra sat on the zebra . " * 20, [0])
    words = [word for row in rows for word in row]
    masked = [word for word, hidden in zip(words, is_masked, strict=True) if hidden]
    nats, unknown = word_nats(library.load(folder), rows, is_masked)
    assert unknown == masked.count("zebra") > 0 and len(nats) == len(masked) - unknown


def test_a_gpt_is_not_asked_for_the_first_piece_of_a_row(tmp_path):
    """62 pieces a row of 64 words, so the first word of what is left is told by nothing."""
    write_openai(tmp_path / "gpt")
    model = library.load(tmp_path / "gpt")
    model.piece_log_probabilities = lambda features, places, ids, counts: -np.ones(len(ids))
    rows = [["house"] * 64]
    pieces = len(model.tokenizer.encode_batch(["house"], offsets=False).ids)
    is_masked = np.arange(64) > 0
    room = model.config.max_positions - 2
    starts = np.arange(0, 64, room // pieces)[1:]  # of the parts behind the first
    nats, unknown = word_nats(model, rows, is_masked)
    assert len(starts) and unknown == 0 and len(nats) == 63 - len(starts)
    assert (nats == pieces).all()


def test_the_command(tmp_path):
    folder, texts = made(tmp_path / "model"), [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, text in enumerate(texts):
        write(text, TEXT + " cats" * number)
    words = ("evaluate", folder, "--held-out", *texts)
    found = json.loads(bertsmith(*words, "--json"))["texts"]
    assert [*found] == [str(text) for text in texts]
    assert library.evaluate_held_out(str(folder), texts)["texts"] == found
    lines = bertsmith(*words).splitlines()
    for line, own in zip(lines, found.values(), strict=True):
        assert f"{own['nats_per_word']:.3f} nats a word" in line
        assert line.endswith(own["sha256"][:12])
    short = write(tmp_path / "short.txt", "cats")
    assert "short.txt: no word to predict" in refused("evaluate", folder, "--held-out", short)
    line = refused("evaluate", folder, "--held-out", tmp_path / "shot.txt")
    assert "shot.txt: no such file (did you mean 'short.txt'?)" in line
    line = refused("evaluate", folder, "--held-out", tmp_path)
    assert "no such file (it is a folder: name a file in it)" in line
    assert "--engine onnx" in refused("evaluate", folder, "--held-out", short, "--engine", "onnx")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.TSV.gz", "a.parquet"])
def test_tables_are_refused(tmp_path, name):
    table = write(tmp_path / name, "text\n")
    line = refused("evaluate", made(tmp_path / "model"), "--held-out", table)
    assert f"{table}: a table is no running text: write its texts to a .txt" in line
