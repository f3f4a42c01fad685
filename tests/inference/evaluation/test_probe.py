"""A probe of states that tell the tag, and of ones that do not; files that are refused."""

import json
import random

import pytest

import bertsmith as library
from bertsmith.inference.evaluation.probe import most_frequent_tags
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.tagging.sentences import read_sentences

from ...tiny import bertsmith, piece_tokenizer, random_model, refused, write

NOUNS, VERBS = ("cat", "dog", "owl", "fox"), ("sat", "ran", "saw", "ate")
TOKENIZER = piece_tokenizer(" ".join([*NOUNS, *VERBS, "play"]))


def sentences(count, seed):
    """Lines of CoNLL-2003: "play" is a noun after a verb, and a verb after a noun."""
    draw = random.Random(seed)
    for _ in range(count):
        noun, verb = draw.choice(NOUNS), draw.choice(VERBS)
        yield from draw.choice(
            [
                [f"{noun} NN I-NP O", f"{verb} VBD I-VP O", "play NN I-NP O"],
                [f"{noun} NN I-NP O", "play VB I-VP O"],
            ]
        )
        yield ""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conll")
    for seed, (name, count) in enumerate((("train", 150), ("testa", 40), ("testb", 40))):
        write(folder / f"eng.{name}", sentences(count, seed))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelConfig(len(TOKENIZER.vocabulary), 32, 1, 1, 64, max_positions=16)
    path = tmp_path_factory.mktemp("models") / "model"
    return random_model(path, TOKENIZER, config=config, std=0.4, seed=3)


def test_a_layer_that_sees_the_neighbours_tells_what_the_word_does_not(folder, data):
    """In the embeddings "play" after a noun and after a verb differ by their places alone."""
    found = library.evaluate_probe(library.load(folder), data)
    again = library.evaluate_probe(str(folder), str(data))
    assert found == again and found["words"] == sum(map(bool, sentences(40, 2)))
    for name in ("pos", "chunk"):
        own = found["columns"][name]
        assert own["accuracy"] == 1.0 and own["without_network"] < 0.95
        assert len(own["dev"]) == 2 and own["dev"][own["layer"]] == max(own["dev"])


def test_the_most_frequent_tag_of_a_word(tmp_path):
    train = write(tmp_path / "train", ["a X", "a Y", "a X", "b Z", "c X"])
    test = write(tmp_path / "test", ["a X", "a Y", "b Z", "new X"])
    read = [read_sentences(file, True, "plain") for file in (train, test)]
    assert most_frequent_tags(*read) == 0.75


def test_the_command(folder, data):
    words = ("evaluate", folder, "--probe", data)
    found = json.loads(bertsmith(*words, "--json"))["columns"]
    pos, layers, chunk, _ = bertsmith(*words).splitlines()
    layer = found["pos"]["layer"]
    assert pos.startswith("pos    100.0% ± 0.0 of") and f"layer {layer};" in pos
    assert layers.endswith(
        ", ".join(f"{k}: {100 * x:.1f}" for k, x in enumerate(found["pos"]["dev"]))
    )
    assert chunk.startswith("chunk")


def test_other_files_are_refused(folder, data, tmp_path):
    write(tmp_path / "train.txt", ["cat NN"])
    assert "no dev file: a probe needs" in refused("evaluate", folder, "--probe", tmp_path)
    write(tmp_path / "dev.txt", ["cat NN"])
    write(tmp_path / "test.txt", ["cat NN"])
    line = refused("evaluate", folder, "--probe", tmp_path)
    assert "train.txt:1: 2 columns, expected 3" in line
    line = refused("evaluate", folder, "--probe", tmp_path / "no")
    assert "no: no such file or folder" in line and "--data" not in line
