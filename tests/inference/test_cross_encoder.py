"""Scores of sentence-transformers' cross-encoders, beside that library and by a sigmoid of ours."""

import json
import shutil

import numpy as np
import pytest

import bertsmith
from bertsmith.checkpoints.convert import convert
from bertsmith.experiments.distillation import Teacher
from bertsmith.inference.embeddings.pooling import similarity_training
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import own_task
from bertsmith.training.engine import choose_engine

from ..tiny import bertsmith as command
from ..tiny import piece_tokenizer, random_model, write

PAIRS = [
    ("the cat", "a dog sat"),
    ("the cat sat on the mat . " * 4, "a dog"),  # cut
    ("good", "the cats sat . " * 9),
    ("bad", ""),
]
ACTIVATIONS = {"Sigmoid": "torch.nn.modules.activation.Sigmoid", "Identity": "torch.nn.Identity"}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    tokenizer = piece_tokenizer("the a cat dog sat on mat . ##s good bad")
    config = ModelConfig(len(tokenizer.vocabulary), 16, 2, 2, 32, max_positions=48)
    folder = tmp_path_factory.mktemp("models") / "scorer"
    random_model(folder, tokenizer, SequenceClassifier, 1, config=config, std=0.3)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    del stored["bertsmith"], stored["problem_type"]
    write(path, json.dumps(stored))
    return folder


def scores(folder, pairs=PAIRS):
    first, second = map(list, zip(*pairs, strict=True))
    return np.array(bertsmith.load(folder).score(first, second))


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_scores_are_those_of_the_cross_encoder(scorer, tmp_path, activation):
    package = pytest.importorskip("sentence_transformers")
    function = getattr(pytest.importorskip("torch").nn, activation)()
    theirs = package.CrossEncoder(str(scorer), max_length=20, activation_fn=function, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    expected = package.CrossEncoder(str(tmp_path / "theirs"), device="cpu").predict(PAIRS)
    np.testing.assert_allclose(scores(tmp_path / "theirs"), expected, atol=1e-5)
    table = write(tmp_path / "pairs.csv", ["text,text_pair", "the cat,a dog sat"])
    out = tmp_path / "out.jsonl"
    command("predict", tmp_path / "theirs", table, "--out", out)
    (answer,) = map(json.loads, out.read_text().splitlines())
    assert answer["label"] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("name", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("version", [3, 5, 6])
def test_every_version_says_what_makes_a_score(scorer, tmp_path, version, name):
    folder = shutil.copytree(scorer, tmp_path / "theirs")
    logits, path = scores(scorer), folder / "config.json"
    stored, activation = json.loads(path.read_text()), ACTIVATIONS[name]
    if version == 6:
        own = {"model_type": "CrossEncoder", "activation_fn": activation, "prompts": {}}
        write(folder / "config_sentence_transformers.json", json.dumps(own))
    elif version == 5:
        own = {"version": "5.0.0", "activation_fn": activation}
        write(path, json.dumps(stored | {"sentence_transformers": own}))
    else:
        write(path, json.dumps(stored | {"sbert_ce_default_activation_function": activation}))
    expected = 1 / (1 + np.exp(-logits)) if name == "Sigmoid" else logits
    np.testing.assert_allclose(scores(folder), expected, atol=1e-6)
    with pytest.raises(ValueError, match="trained on pairs of texts: give `text_pair`"):
        bertsmith.load(folder).score("the cat")
    first, second = map(list, zip(*PAIRS, strict=True))
    data = Examples(first, second, None, (), "made", list(range(len(first))))
    teacher = Teacher.open(
        folder, own_task("regress", "a", "b", "c"), (), choose_engine("cpu", "float32")
    )
    np.testing.assert_allclose(teacher.outputs(data)[:, 0], expected, atol=1e-6)
    for to in ("hugging-face", "tensorflow"):
        convert(folder, tmp_path / to, to)
        np.testing.assert_allclose(scores(tmp_path / to), expected, atol=1e-6)


@pytest.mark.parametrize("version", [5, 6])
def test_the_length_of_a_cross_encoder_travels_along(scorer, tmp_path, version):
    """A converted folder's tokenizer knows all positions of the model."""
    folder = shutil.copytree(scorer, tmp_path / "theirs")

    def add(name, **entries):
        path = folder / name
        stored = json.loads(path.read_text()) if path.exists() else {}
        write(path, json.dumps(stored | entries))

    own = {"activation_fn": ACTIVATIONS["Identity"]}
    if version == 6:
        add("config_sentence_transformers.json", model_type="CrossEncoder", **own)
        add("sentence_bert_config.json", transformer_task="sequence-classification")
    else:
        add("config.json", sentence_transformers=own)
    add("tokenizer_config.json", model_max_length=20)
    convert(folder, tmp_path / "new")
    np.testing.assert_allclose(scores(tmp_path / "new"), scores(folder), atol=1e-6)
    assert not np.allclose(scores(folder), scores(scorer), atol=1e-3)  # some were cut


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"activation_fn": "torch.nn.Tanh"}, "scores are made by torch.nn.Tanh: known are"),
        ({"default_prompt_name": "q"}, "default_prompt_name 'q': pairs have no prompt here"),
    ],
)
def test_scores_that_are_made_otherwise_are_refused(scorer, tmp_path, own, message):
    folder = shutil.copytree(scorer, tmp_path / "theirs")
    own = {"model_type": "CrossEncoder"} | own
    write(folder / "config_sentence_transformers.json", json.dumps(own))
    with pytest.raises(ValueError, match=message):
        scores(folder)


def test_a_cross_encoder_is_not_trained_for_vectors(scorer, tmp_path):
    folder = shutil.copytree(scorer, tmp_path / "theirs")
    write(folder / "modules.json", "[]")
    assert similarity_training(folder) is not None
    own = {"model_type": "CrossEncoder"}
    write(folder / "config_sentence_transformers.json", json.dumps(own))
    assert similarity_training(folder) is None
