"""A class, tags and spans of two directions and of a BiLSTM: fine-tuned, stored, and answered."""

import json

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.config_json import read_stored_config
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.inference.export.subject import find_subject
from bertsmith.inference.predictor import load
from bertsmith.model.config import config_for
from bertsmith.model.directions import encoders
from bertsmith.model.heads import SequenceClassifier, TokenClassifier
from bertsmith.tasks.vectors import text_features
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.trainer import InitialModel

from ...tiny import ANIMALS, PLACES, bertsmith, random_model, refused, word_tokenizer, write
from .tagged import OTHERS, columns
from .tagged import PEOPLE as NAMES
from .tagged import PLACES as TOWNS
from .task_types.files import read_rows, squad

TEXTS = ["rain snow wind bread soup fish today there was again where is the"]
QUICK = (
    "--learning-rate", 5e-3, "--precision", "float32", "--threads", 1, "--batch-size", 16,
)  # fmt: skip
READERS = {  # as finetune is asked for it, and the model to start from
    "two directions": ((), {"directions": 2, "causal": True}),
    "BiLSTM": (("--bilstm",), {"causal": True}),
}


@pytest.fixture(scope="module", params=READERS)
def start(request, tmp_path_factory):
    """Flags of finetune, and a model folder."""
    flags, changes = READERS[request.param]
    tokenizer = word_tokenizer([*TEXTS, *NAMES, *TOWNS, *OTHERS, "rossi", *ANIMALS, *PLACES])
    config = config_for("1x64", len(tokenizer.vocabulary), max_positions=48, **changes)
    folder = tmp_path_factory.mktemp("start") / "model"
    return flags, random_model(folder, tokenizer, config=config, std=0.05)


def classes(count):
    kinds = {"weather": ("rain", "snow", "wind"), "food": ("bread", "soup", "fish")}
    for number in range(count):
        label = list(kinds)[number % 2]
        yield f"today there was {kinds[label][number // 2 % 3]} again,{label}"


@pytest.fixture(scope="module")
def classifier(start, tmp_path_factory):
    flags, model = start
    folder = tmp_path_factory.mktemp("classes")
    data = write(folder / "train.csv", ["text,label", *classes(96)])
    dev = write(folder / "dev.csv", ["text,label", *classes(24)])
    out = folder / "run"
    words = ("--model", model, "--data", data, "--dev", dev, "--out", out, "--epochs", 6)
    bertsmith("finetune", "classify", *words, *flags, *QUICK, "--max-length", 16)
    return out, dev


def test_a_class(start, classifier, tmp_path):
    (out, dev), (flags, _) = classifier, start
    found = json.loads(bertsmith("evaluate", out, "--data", dev, "--json"))
    assert found["metrics"]["accuracy"] == 1.0
    text = write(tmp_path / "new.txt", ["today there was soup again", "today there was snow again"])
    bertsmith("predict", out, text, "--out", tmp_path / "new.csv")
    assert [row["label"] for row in read_rows(tmp_path / "new.csv")] == ["food", "weather"]
    stored = read_stored_config(out)
    assert stored["model_type"] == "bertsmith" and stored["model"]["bilstm"] == bool(flags)
    # what is read again is what was saved, of whatever length the rows beside it are
    predictor = load(out)
    alone = [predictor.classify(text) for text in ("snow today", "today there was soup again")]
    both = predictor.classify(["snow today", "today there was soup again"])
    for one, other in zip(alone, both, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_words_of_an_answer_are_explained(classifier):
    predictor = load(classifier[0], precision="float32")
    scores = predictor.explain("today there was soup again").words
    assert max(scores, key=lambda word: word.score).text == "soup"
    with pytest.raises(ValueError, match="left-to-right model"):
        predictor.explain("soup", method="rollout")


def test_a_gradient_is_how_fast_the_logit_falls_as_a_token_fades(classifier):
    """Of both directions, each of which has embeddings of its own; the right's are backwards."""
    predictor = load(classifier[0], precision="float32")
    row = text_features(predictor.tokenizer, ["today there was soup again"], 16)
    loaded, weights = predictor.pytorch("SequenceClassifier"), np.float32([1, -1])
    found = loaded.gradient_times_input(row, weights)
    read, count, fading = encoders(loaded.model.encoder), len(row.ids), 3e-2

    def faded(states, place, scale):
        is_place = torch.arange(states.shape[1]) == place
        return states * torch.where(is_place, scale, 1.0)[:, None]

    def explained(token, scale):
        hooks = [
            one.embeddings.register_forward_hook(
                lambda _, __, states, place=place: faded(states, place, scale)
            )
            for one, place in zip(read, (token, count - 1 - token), strict=False)
        ]
        outputs = loaded.outputs(row)[0]
        for hook in hooks:
            hook.remove()
        return float(outputs @ weights)

    for token in range(count):
        fallen = explained(token, 1 + fading) - explained(token, 1 - fading)
        # float32's last digits over the step
        assert found[token] == pytest.approx(fallen / (2 * fading), rel=0.02, abs=2e-3)


def test_what_such_a_model_cannot_do_is_said(start, classifier, tmp_path):
    (out, _), (flags, _) = classifier, start
    what = "a BiLSTM below its head" if flags else "two directions"
    assert what in refused("convert", out, tmp_path / "theirs")
    assert "left-to-right" in refused("convert", out, tmp_path / "theirs", "--to", "tensorflow")
    with pytest.raises(ValueError, match="an LSTM reads its layers" if flags else "two directions"):
        find_subject(load(out), None)
    text = write(tmp_path / "new.txt", ["soup"])
    line = refused("predict", out, text, "--out", tmp_path / "new.csv", "--precision", "int8")
    assert "layers are not the paper's" in line
    assert not [*tmp_path.glob("theirs*")]


def test_a_later_fine_tuning_has_what_it_is_asked_for(start, classifier):
    (out, _), (flags, _) = classifier, start
    names = ("food", "weather")
    asked = FinetuneSettings(bilstm=bool(flags)), FinetuneSettings(bilstm=not flags)
    same, other = (
        InitialModel(out).model(SequenceClassifier, 2, settings, 9, names) for settings in asked
    )
    saved = load_model(out, SequenceClassifier).model.state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in same.state_dict().items())
    assert (other.reader is None) == bool(flags)
    assert not torch.equal(other.classifier.weight, saved["classifier.weight"])
    tagger = InitialModel(out).model(TokenClassifier, 2, asked[0], 9, names)
    for name, weight in tagger.state_dict().items():  # of another kind of head
        assert name.startswith("encoder.") == torch.equal(weight, saved.get(name, weight + 1)) or (
            name.endswith("bias")
        )


def test_tags(start, tmp_path):
    flags, model = start
    for split, count, seed in (("train", 60, 1), ("dev", 15, 2)):
        write(tmp_path / "data" / f"{split}.conll", columns(count, seed))
    out = tmp_path / "run"
    words = ("--model", model, "--data", tmp_path / "data", "--out", out, "--epochs", 6)
    bertsmith("finetune", "ner", *words, *flags, *QUICK[:-1], 4, "--max-length", 48)
    found = json.loads(
        bertsmith("evaluate", out, "--data", tmp_path / "data" / "dev.conll", "--json")
    )
    assert found["metrics"]["entity_f1"] > 0.9
    text = write(tmp_path / "new.txt", "today ann rossi sees rome\n")
    bertsmith("predict", out, text, "--out", tmp_path / "new.conll")
    wanted = "today O\nann B-PER\nrossi I-PER\nsees O\nrome B-LOC\n\n"
    assert (tmp_path / "new.conll").read_text() == wanted


def test_spans(start, tmp_path):
    flags, model = start
    rows = [
        ("where", f"the {ANIMALS[k % 5]} is near the {PLACES[k % 4]} today", PLACES[k % 4])
        for k in range(80)
    ]
    data, dev = squad(tmp_path / "train.json", rows[:64]), squad(tmp_path / "dev.json", rows[64:80])
    out = tmp_path / "run"
    words = ("--model", model, "--data", data, "--dev", dev, "--out", out, "--epochs", 8)
    bertsmith("finetune", "squad1", *words, *flags, *QUICK, "--max-length", 24)
    found = json.loads(bertsmith("evaluate", out, "--data", dev, "--json"))
    assert found["metrics"]["answer_f1"] > 0.9
    assert load(out).answer("where", "the owl is near the tree again").text == "tree"
