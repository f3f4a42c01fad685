"""Sentences scored one masked row at a time by transformers; accuracies counted by hand."""

import json

import numpy as np
import pytest
import torch
import transformers

import bertsmith as library
from bertsmith.inference.evaluation.minimal_pairs import read_minimal_pairs, sentence_scores
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import BareModel
from bertsmith.tasks.metrics import standard_error

from ...tiny import bertsmith, piece_tokenizer, random_model, refused, write

TOKENIZER = piece_tokenizer("the cat cats dog sat on mat . ca do ##t ##s ##g ##ed ,")
PIECES = TOKENIZER.vocabulary.pieces
CLS, SEP, MASK = (PIECES.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
SENTENCES = ["the dogs sat.", "dog", "the cats doged, sat on the mat", "sated sated.", ""]
WORDS = [[1, 2, 1, 1], [1], [1, 1, 2, 1, 1, 1, 1, 1], [2, 2, 1], []]  # pieces of each word


def made(folder, **changes):
    config = ModelConfig(len(PIECES), 32, 2, changes.pop("heads", 1), 64, max_positions=16)
    return random_model(folder, TOKENIZER, config=config, std=0.4, seed=3, **changes)


@pytest.fixture(scope="module", params=[1, 4], ids=["native", "pytorch"])
def folder(tmp_path_factory, request):
    """Heads of 32 numbers are read by our own engine, those of 8 are not."""
    return made(tmp_path_factory.mktemp("models") / "model", heads=request.param)


@pytest.fixture(scope="module")
def log_p(folder):
    model = transformers.BertForPreTraining.from_pretrained(folder).eval()

    def log_probability(row, place, piece):
        with torch.inference_mode():
            logits = model(torch.tensor([row])).prediction_logits[0, place]
        return float(logits.log_softmax(dim=-1)[piece])

    return log_probability


@pytest.mark.parametrize("masked", ["word", "piece"])
def test_scores_are_those_of_one_row_after_the_other(folder, log_p, masked):
    expected = []
    for sentence, words in zip(SENTENCES, WORDS, strict=True):
        ids = [PIECES.index(piece) for piece in TOKENIZER.tokenize(sentence)]
        assert sum(words) == len(ids)
        row, total, begin = [CLS, *ids, SEP], 0.0, 1
        for size in words if masked == "word" else [1] * len(ids):
            for place in range(begin, begin + size):
                hidden = [MASK if place <= k < begin + size else own for k, own in enumerate(row)]
                total += log_p(hidden, place, row[place])
            begin += size
        expected.append(total)
    scores, rows = sentence_scores(library.load(folder), SENTENCES, masked)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)  # float32 of two programs
    assert rows == sum(map(sum, WORDS))


@pytest.mark.parametrize(("family", "types"), [("bert", 2), ("gpt", 0)])
def test_a_left_to_right_model_gives_its_log_likelihood(tmp_path, family, types):
    """Each token is told from the row cut before it, in which nothing behind can be seen."""
    own = {"causal": True, "family": family, "type_vocab_size": types}
    config = ModelConfig(len(PIECES), 32, 2, 4, 64, max_positions=16, **own)
    model = library.load(random_model(tmp_path / "m", TOKENIZER, config=config, std=0.4, seed=3))
    torch_model = model.pytorch("PreTrainingModel").model
    expected = []
    for sentence in SENTENCES[:-1]:
        ids = [PIECES.index(piece) for piece in TOKENIZER.tokenize(sentence)]
        row, total = ids if family == "gpt" else [CLS, *ids], 0.0
        for end in range(1, len(row)):
            batch = torch.tensor([row[:end]]), torch.zeros(1, end, dtype=torch.long), None
            with torch.inference_mode():
                logits = torch_model(*batch, torch.tensor([[end - 1]])).mlm_logits[0]
            total += float(logits.log_softmax(dim=0)[row[end]])
        expected.append(total)
    scores, rows = sentence_scores(model, SENTENCES[:-1], "word")
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    assert rows == 4


def pair(good, bad, paradigm, field):
    return {"sentence_good": good, "sentence_bad": bad, "UID": paradigm, "field": field}


PAIRS = [
    pair("the cat sat.", "the cats sat on.", "verb", "syntax"),
    pair("the dog sat.", "dog the sat.", "order", "syntax"),
    pair("dogs sat.", "dog sat on.", "verb", "syntax"),
    pair("the mat.", "the mat.", "same", "morphology"),
    pair("mats, cats.", "mats cats.", "verb", "syntax"),
    pair("the mat sat.", "mat the sat.", "order", "syntax/semantics"),
]


def written(path, pairs=PAIRS):
    return write(path, map(json.dumps, pairs))


def test_accuracies_are_counted(folder, tmp_path):
    model = library.load(folder)
    found = library.evaluate_blimp(model, written(tmp_path / "pairs.jsonl"))
    good, bad = (sentence_scores(model, [p[n] for p in PAIRS], "word")[0]
                 for n in ("sentence_good", "sentence_bad"))  # fmt: skip
    right = (good > bad).tolist()
    assert not right[3]  # equal sentences
    counts = {"verb": [0, 2, 4], "order": [1, 5], "same": [3]}
    for name, own in counts.items():
        share = np.mean([right[k] for k in own])
        error = standard_error(share, len(own))
        expected = {"accuracy": share, "standard_error": error, "pairs": len(own)}
        assert found["paradigms"][name] == pytest.approx(expected)
    assert found["accuracy"] == np.mean(right) and found["pairs"] == 6
    assert {name: own["pairs"] for name, own in found["fields"].items()} == {
        "syntax": 4,
        "morphology": 1,
        "syntax_semantics": 1,
    }


def test_a_folder_is_its_files_and_first_takes_of_each_paradigm(tmp_path):
    whole = read_minimal_pairs(written(tmp_path / "pairs.jsonl"))
    for name in ("order", "same", "verb"):
        written(tmp_path / f"data/{name}.jsonl", [own for own in PAIRS if own["UID"] == name])
    parts = read_minimal_pairs(tmp_path / "data")
    assert sorted(zip(parts.good, parts.bad, strict=True)) == sorted(
        zip(whole.good, whole.bad, strict=True)
    )
    few = read_minimal_pairs(tmp_path / "pairs.jsonl", first=1)
    assert few.good == ["the cat sat.", "the dog sat.", "the mat."] and few.sha256 == whole.sha256


def test_the_command(folder, tmp_path):
    file = written(tmp_path / "pairs.jsonl")
    words = ("evaluate", folder, "--blimp", file)
    found = json.loads(bertsmith(*words, "--json", "--masked", "piece"))
    assert found["masked"] == "piece" and found["rows"] > 0
    same = library.evaluate_blimp(str(folder), str(file), masked="piece")
    assert same | {"rows_per_second": 0} == found | {"rows_per_second": 0}
    with pytest.raises(ValueError, match="`first=0`: must be at least 1"):
        library.evaluate_blimp(folder, file, first=0)
    lines = bertsmith(*words, "--first", 1).splitlines()
    assert [line.split()[0] for line in lines if "%" in line] == [
        *("verb", "order", "same", "syntax", "morphology", "all")
    ]
    assert "3 pairs" in lines[-3]


def test_what_is_no_minimal_pair_or_has_no_head_is_refused(folder, tmp_path):
    bad = written(tmp_path / "bad.jsonl", [*PAIRS, {"sentence": "the cat"}])
    assert "bad.jsonl:7: no column 'sentence_good'" in refused("evaluate", folder, "--blimp", bad)
    number = written(tmp_path / "number.jsonl", [PAIRS[0] | {"sentence_bad": 3}])
    assert "number.jsonl:1: column 'sentence_bad' holds 3" in refused(
        "evaluate", folder, "--blimp", number
    )
    (tmp_path / "empty").mkdir()
    assert "no .jsonl of minimal pairs" in refused(
        "evaluate", folder, "--blimp", tmp_path / "empty"
    )
    file = written(tmp_path / "pairs.jsonl")
    long = written(tmp_path / "long.jsonl", [PAIRS[0] | {"sentence_bad": "cat " * 15}])
    assert "a row of 17 tokens, but the model knows 16" in refused(
        "evaluate", folder, "--blimp", long
    )
    bare = random_model(tmp_path / "bare", TOKENIZER, BareModel)
    assert "no masked-LM head" in refused("evaluate", bare, "--blimp", file)
    config = ModelConfig(len(PIECES), 32, 2, 4, 64, causal=True, directions=2)
    both = random_model(tmp_path / "both", TOKENIZER, config=config)
    assert "two directions" in refused("evaluate", both, "--blimp", file)
    assert "give one of --data, --held-out, --blimp and --probe" in refused("evaluate", both)
    line = refused("evaluate", folder, "--blimp", file, "--label", "x")
    assert "--label: only with --data" in line
    line = refused("evaluate", folder, "--data", file, "--first", 3)
    assert "--first: only with --blimp" in line
