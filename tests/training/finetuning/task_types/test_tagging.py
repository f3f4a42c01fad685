"""The kind that tags words: what it reads, learns, answers, writes and refuses."""

import gzip
import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import BareModel, load_model
from bertsmith.model import heads
from bertsmith.model.heads import FrozenTagger, TokenClassifier
from bertsmith.tasks.metrics import check_metrics
from bertsmith.tasks.tagging.features import IGNORED
from bertsmith.tasks.task import EncodingSettings, find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task_types.base import (
    ModelTask,
    balanced_weights,
    check_columns,
)
from bertsmith.training.finetuning.task_types.losses import LOSSES, Objective
from bertsmith.training.finetuning.task_types.tagging import Tag, Tagged
from bertsmith.training.finetuning.trainer import InitialModel

from ....tiny import bertsmith, refused, write
from ..tagged import columns, write_corpus, write_model

KIND, NER = Tag(), find_task("ner")
NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
PURPOSE = ModelTask(NER, NAMES, EncodingSettings(max_length=64))
LINES = "Ann I-PER\nsees O\nRome I-LOC\n\nBob I-PER\n\nthe O\nhouse O\n"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return Tokenizer.from_pretrained(model_folder)


def read(tmp_path, text, name="train.conll", **settings):
    return KIND.read(write(tmp_path / name, text), NER, **settings)


def read_input(path, content, model_task=PURPOSE):
    return KIND.read_input(str(write(path, content)), model_task)


def tagged(*tags):
    return Tagged(list(tags), np.ones(len(tags), np.float32))


def test_columns_named_for_conll_are_refused(tmp_path, model_folder):
    corpus = write_corpus(tmp_path / "corpus")
    words = ("--model", model_folder, "--out", tmp_path / "run", "--text", "foo")
    line = refused("finetune", "tag", "--data", corpus, *words)
    assert f"--text foo: {corpus / 'train.conll'} is no table and has no column 'foo'" in line
    task = own_task("tag", "words", None, "tags")
    named = write(tmp_path / "a.tsv", "words\ttags\nann\tO\n")
    unnamed = write(tmp_path / "b.tsv", "ann\tO\n")
    assert KIND.is_table(named, task) and not KIND.is_table(unnamed, task)
    assert all(KIND.is_table(tmp_path / name, task) for name in ("a.csv", "a.jsonl"))
    check_columns(KIND, task, [unnamed, named], {"text": "words", "label": None})
    check_columns(KIND, task, [unnamed], {"text": None})


def test_answers_metrics_and_records(tmp_path, tokenizer):
    data = read(tmp_path, LINES)
    assert KIND.label_names(data) == NAMES and KIND.num_outputs(NAMES) == 5
    features = KIND.featurize(tokenizer, data, PURPOSE)
    outputs = np.zeros((len(features.ids), 5), np.float32)
    # right but for Rome, which is taken for a person
    for word, answer in enumerate([3, 0, 3, 3, 0, 0]):
        outputs[features.word_numbers == word, answer] = 10
    answers = KIND.answers(outputs, features, data, PURPOSE)
    assert answers.tags == ["I-PER", "O", "I-PER", "I-PER", "O", "O"]  # as the file: IOB1
    assert answers.probabilities == pytest.approx(np.exp(10) / (np.exp(10) + 4))
    assert KIND.measure(answers, data, PURPOSE) == {
        "entity_f1": pytest.approx(2 / 3),
        "entity_precision": pytest.approx(2 / 3),
        "entity_recall": pytest.approx(2 / 3),
        "tag_accuracy": pytest.approx(5 / 6),
    }
    one = replace(PURPOSE, task=replace(NER, metrics=("tag_accuracy",)))
    assert list(KIND.measure(answers, data, one)) == ["tag_accuracy"]
    records = KIND.to_records(answers, data, PURPOSE)
    assert len(records) == 3
    assert records[0]["words"] == ["Ann", "sees", "Rome"]
    assert records[0]["label"] == ["I-PER", "O", "I-LOC"]
    assert records[0]["predicted"] == ["I-PER", "O", "I-PER"]
    assert len(records[0]["probabilities"]) == 3
    assert KIND.tune(outputs, features, data, PURPOSE) == {}
    json.dumps(records)


def test_the_loss_is_over_labelled_tokens(tmp_path, tokenizer):
    features = KIND.featurize(tokenizer, read(tmp_path, LINES), PURPOSE)
    batch = features.batch(np.array([0, 2]), 0)
    assert KIND.num_labelled(batch["labels"]) == 5
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    logits = torch.randn(*batch["ids"].shape, 5, generator=torch.Generator().manual_seed(1))
    flat = logits.flatten(0, 1), tensors["labels"].flatten()

    def wanted(weights=None):
        return torch.nn.functional.cross_entropy(
            *flat, weights, ignore_index=IGNORED, reduction="sum"
        )

    loss, right = LOSSES[KIND.name](logits, tensors, Objective())
    torch.testing.assert_close(loss, wanted())
    assert right == ((logits.argmax(2) == tensors["labels"]).sum())
    weights = torch.from_numpy(balanced_weights(features.labels[features.labels >= 0], 5))
    loss, _ = LOSSES[KIND.name](logits, tensors, Objective(class_weights=weights))
    torch.testing.assert_close(loss, wanted(weights))


def test_a_constant_answer_is_seen(tmp_path):
    data, all_out = read(tmp_path, LINES), tagged(*"OOOOOO")
    assert KIND.constant_prediction(all_out, data) == "O"
    assert KIND.constant_prediction(tagged(*data.tags), data) is None
    nothing = replace(data, tags=["O"] * 6)
    assert KIND.constant_prediction(all_out, nothing) is None
    assert KIND.notes(all_out, data, PURPOSE) == {}
    entities = ("entity_f1", "entity_precision", "entity_recall")
    no_entity = dict.fromkeys(entities, "no value, counts 0: there is no entity")
    assert KIND.notes(all_out, nothing, PURPOSE) == no_entity


def test_plain_tags(tmp_path):
    lines = "Ann NNP\nsings VBZ\n\nYes UH\n"
    data = read(tmp_path, lines)
    names = KIND.label_names(data)
    assert names == ("NNP", "UH", "VBZ")
    # a file without a tag that says so is plain too, since training was
    assert read(tmp_path, "Ann NNP\n", "dev.conll", label_names=names).scheme == "plain"
    model_task = replace(PURPOSE, label_names=names)
    assert read_input(tmp_path / "new.conll", lines, model_task).scheme == "plain"
    assert KIND.measure(tagged(*data.tags), data, model_task)["entity_f1"] == 1.0


@pytest.mark.parametrize(
    ("name", "content", "words", "sentences"),
    [
        ("a.txt", "Ann sees Rome\n\nBob\n", ["Ann", "sees", "Rome", "Bob"], 2),
        ("a.txt", "Ann, she sees Rome.", ["Ann", ",", "she", "sees", "Rome", "."], 1),
        ("a.txt", LINES, ["Ann", "sees", "Rome", "Bob", "the", "house"], 3),
        ("a.conll", "Ann\nsees\n\nBob\n", ["Ann", "sees", "Bob"], 2),
        ("a.jsonl", '{"tokens": ["Ann", "New York"]}\n', ["Ann", "New York"], 1),
        ("a.txt.gz", gzip.compress(b"Ann sees\n\nBob\n", mtime=0), ["Ann", "sees", "Bob"], 2),
        ("a.TXT.xz", lzma.compress(b"Ann O\n\nBob O\n"), ["Ann", "Bob"], 2),
    ],
)
def test_what_predict_reads(tmp_path, name, content, words, sentences):
    data = read_input(tmp_path / name, content)
    assert data.words == words and len(data) == sentences


def test_predict_reads_standard_input_and_no_other_columns(tmp_path, standard_input):
    standard_input(b"Ann sees\nRome\n")
    data = KIND.read_input("-", PURPOSE)
    assert data.boundaries.tolist() == [0, 2, 3] and data.tags is None
    with pytest.raises(ValueError, match=r"g\.csv: no column 'tokens' for `text`"):
        read_input(tmp_path / "g.csv", "text\nAnn sees Rome\n")


def test_entities_that_differ_in_case_only(tmp_path, capsys):
    lines = "Ann B-PER\nsees O\n\nRome B-per\n"
    data = read(tmp_path, lines)
    said = "labels that differ in case only are taken as different: B-PER, B-per"
    assert f"warning: {tmp_path / 'train.conll'}: {said}" in capsys.readouterr().err
    read(tmp_path, lines, label_names=KIND.label_names(data))
    assert "warning" not in capsys.readouterr().err


def test_what_predict_writes(tmp_path):
    data = read_input(tmp_path / "a.txt", "Ann sees Rome\nBob\n")
    answers = Tagged(["B-PER", "O", "B-LOC", "B-PER"], np.array([1, 0.5, 0.25, 1], np.float32))
    for name in ("a.conll", "b.jsonl", "c.txt"):
        KIND.check_output(data, tmp_path / name, PURPOSE)
        KIND.write_answers(tmp_path / name, answers, data, PURPOSE)
    assert (tmp_path / "a.conll").read_text() == "Ann B-PER\nsees O\nRome B-LOC\n\nBob B-PER\n\n"
    first = json.loads((tmp_path / "b.jsonl").read_text().splitlines()[0])
    assert first["tags"] == ["B-PER", "O", "B-LOC"] and first["probabilities"] == [1, 0.5, 0.25]
    with pytest.raises(ValueError, match=r"out\.csv: cannot write tags to '\.csv': end `out` in"):
        KIND.check_output(data, tmp_path / "out.csv", PURPOSE)


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("a B-X\n\nb B-X\nc I-X\n\nd I-X\n", None, r":6: tag 'I-X' after the start .*in IOB2"),
        ("a O\nb O\n", None, ": every word has the tag 'O': nothing to learn"),
        ("a O\nb B-ORG\n", NAMES, r":2: tag 'B-ORG' is unknown to the training data"),
        ("\n\n", NAMES, ": no words in this file"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, names, message):
    with pytest.raises(ValueError, match="train.conll" + message):
        read(tmp_path, text, label_names=names)


def test_a_word_of_600_pieces_is_read_in_part(tmp_path, tokenizer):
    data = read(tmp_path, f"a O\n{'.' * 600} B-X\n")
    long = ModelTask(NER, ("O", "B-X", "I-X"), EncodingSettings(max_length=256))
    rows = KIND.featurize(tokenizer, data, long)
    assert rows.lengths.tolist() == [3, 256] and rows.num_truncated == 1


def test_metrics_are_checked_by_name():
    check_metrics(NER.metrics, "tag", 5)
    with pytest.raises(ValueError, match="unknown metric 'entity_f': did you mean 'entity_f1'"):
        check_metrics(["entity_f"], "tag", 5)
    with pytest.raises(ValueError, match="metric 'accuracy' is not for tag: use one of entity_f1"):
        check_metrics(["accuracy"], "tag", 5)
    assert own_task("tag", "tokens", None, "tags").metrics == NER.metrics


def test_a_frozen_model_by_commands(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(heads, "HIDDEN_SIZE", 32)  # for speed
    data, out = write_corpus(tmp_path / "data"), tmp_path / "run"
    words = ("--freeze-encoder", "--model", model_folder, "--data", data, "--out", out)
    settings = ("--epochs", 12, "--batch-size", 2, "--learning-rate", 1e-2, "--threads", 1)
    bertsmith("finetune", "ner", *words, *settings, "--precision", "float32")
    before, after = (load_model(folder, BareModel).model for folder in (model_folder, out))
    for name, weight in before.encoder.state_dict().items():
        assert torch.equal(weight, after.encoder.state_dict()[name]), name
    found = json.loads(bertsmith("evaluate", out, "--data", data, "--json"))
    assert found["metrics"]["entity_f1"] > 0.9
    text = write(tmp_path / "new.txt", "today ann rossi sees rome\n")
    bertsmith("predict", out, text, "--out", tmp_path / "new.conll")
    wanted = "today O\nann B-PER\nrossi I-PER\nsees O\nrome B-LOC\n\n"
    assert (tmp_path / "new.conll").read_text() == wanted
    # its encoder is the start of a plain tagger like any other, with a head of its own
    start, options = InitialModel(out), FinetuneSettings()
    model = start.model(TokenClassifier, 5, options, 1, NAMES)
    assert torch.equal(model.encoder.layers[0].qkv.weight, before.encoder.layers[0].qkv.weight)
    assert model.classifier.in_features == 64
    assert start.model(FrozenTagger, 5, options, 1, NAMES).classifier.in_features == 64


NO_DOCUMENTS = "--tokens-per-window 20: without effect: no -DOCSTART- line says"
NO_CONTEXT = "--tokens-per-window: without effect with --no-document-conte"
FROZEN, WINDOWS = "finetune ner --freeze-encoder", "--tokens-per-window 20"
NO_DROPOUT = "--attention-dropout: without effect with --freeze-encoder"
CLASSIFY = "--freeze-encoder: without effect on a task of kind 'classify'"
TRIALS = "freeze_encoder is the same in every trial"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{FROZEN} --reinit-layers 1", "layers do not learn: leave --reinit-layers and"),
        (f"{FROZEN} --layer-decay 0.9", "layers do not learn"),
        (f"{FROZEN} --attention-dropout 0", NO_DROPOUT),
        ("finetune sst2 --freeze-encoder", CLASSIFY),
        (f"{FROZEN} --sweep freeze_encoder=true|false", TRIALS),
        (f"finetune ner {WINDOWS}", NO_DOCUMENTS),
        (f"finetune ner {WINDOWS} --no-document-context", NO_CONTEXT),
        (f"features ner {WINDOWS}", NO_DOCUMENTS),
        (f"features ner {WINDOWS} --no-document-context", NO_CONTEXT),
    ],
)
def test_flags_without_effect_are_refused(tmp_path, model_folder, command, message):
    data = write(tmp_path / "train.conll", "Ann I-PER\n\nRome I-LOC\n\nsees O\n")
    out, words = tmp_path / "run", command.split()
    assert message in refused(*words, "--model", model_folder, "--data", data, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("scheme", ["IOB1", "IOB2", "BIOES"])
def test_a_made_up_corpus_is_what_it_says(tmp_path, scheme):
    data = read(tmp_path, columns(40, 1, scheme))
    assert data.scheme == scheme and data.has_documents and KIND.label_names(data) == NAMES
