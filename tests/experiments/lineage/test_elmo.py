"""ELMo from raw text to answers, stopped and resumed; its loss beside plain formulas."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.config_json import read_config
from bertsmith.corpus.examples.stream import Position
from bertsmith.experiments.finetuning import finetune
from bertsmith.experiments.lineage import elmo
from bertsmith.experiments.lineage.elmo import (
    ElmoSettings,
    draw_samples,
    expected_count,
    pretrain_elmo,
    sampled_loss,
)
from bertsmith.experiments.lineage.elmo_text import (
    LEFT_BORDER,
    RIGHT_BORDER,
    UNKNOWN,
    ElmoText,
    SentenceStream,
    Streams,
    WindowStream,
    is_held_out,
)
from bertsmith.inference.evaluation.labelled import evaluate
from bertsmith.inference.export.subject import find_subject
from bertsmith.inference.predictor import load
from bertsmith.model.config import elmo_config
from bertsmith.model.elmo import ElmoLM
from bertsmith.training.engine import choose_engine
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.pretraining.task import model_config

from ...tiny import piece_tokenizer, write

ANIMALS, VERBS = ("cat", "dog", "owl", "fox"), ("sees", "hears", "likes")
SMALL = {"size": "8x12", "batch_size": 8, "precision": "float32", "threads": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    draw = random.Random(2)
    lines = [
        f"The {draw.choice(ANIMALS)} {draw.choice(VERBS)} a {draw.choice(ANIMALS)}"
        + draw.choice((".", ", and sleeps."))
        for _ in range(150)
    ]
    return write(tmp_path_factory.mktemp("text") / "animals.txt", lines)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "elmo"
    result = pretrain_elmo(
        ElmoSettings(text=(text,), out=out, steps=30, learning_rate=2e-2, **SMALL)
    )
    return out, result


def test_a_run_learns_and_is_a_model(trained):
    out, result = trained
    assert result["steps"] == 30 and result["held_out"]["perplexity"] < 13  # of 14 words
    assert read_config(out).family == "elmo" and not list(out.glob("checkpoint-*"))
    assert (out / "words.txt").read_text().splitlines()[:3] == ["</S>", "<S>", "<UNK>"]
    with pytest.raises(ValueError, match="finished run"):
        pretrain_elmo(ElmoSettings(text=(out,), out=out, steps=1))


@pytest.mark.parametrize("how", [{}, {"stateful": True, "softmax": "sampled", "samples": 6}])
def test_a_stopped_run_resumes_bit_for_bit(text, tmp_path, monkeypatch, how):
    def settings(name, steps=6):
        given = {**SMALL, **how, "batch_size": 4, "checkpoint_every": 3}
        return ElmoSettings(text=(text,), out=tmp_path / name, steps=steps, vocab_size=9, **given)

    pretrain_elmo(settings("whole"))
    write_checkpoint = elmo.SeedCheckpoint.write

    def stop(folder, model, optimizer, state, *best):
        write_checkpoint(folder, model, optimizer, state, *best)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(elmo.SeedCheckpoint, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrain_elmo(settings("stopped"))
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == [
        "checkpoint-00000003"
    ]
    with pytest.raises(ValueError, match="was made with steps = 6, not 7"):
        pretrain_elmo(settings("stopped", steps=7))
    other = write(tmp_path / "other.txt", text.read_text() + "The cow sleeps.\n")
    with pytest.raises(ValueError, match="stopped was made with text_sha256 = "):
        pretrain_elmo(replace(settings("stopped"), text=[other]))
    moved = write(tmp_path / "moved.txt", text.read_text())
    pretrain_elmo(replace(settings("stopped"), text=[moved]))
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")
    ]
    assert weights[0] == weights[1]


def task_of(text, **settings):
    settings = ElmoSettings(text=(text,), out=text, steps=1, **{**SMALL, **settings})
    found = ElmoText.read(settings.text)
    model = ElmoLM(elmo_config("8x12"), settings.vocab_size)
    model.initialize(torch.Generator().manual_seed(0))
    held_out = is_held_out(len(found.boundaries) - 1)
    kind = WindowStream if settings.stateful else SentenceStream
    stream = kind(found, np.flatnonzero(~held_out), settings.batch_size, 1)
    engine = choose_engine("cpu", "float32", 1)
    return elmo.ElmoTraining(model, found, stream, np.flatnonzero(held_out), settings, engine)


def test_perplexity_is_that_of_the_next_and_the_previous_word(text):
    task = task_of(text, vocab_size=12)
    nats = {"ahead": [], "back": []}
    lm = task.model.eval()
    with torch.no_grad():
        for sentence in task.held_out:
            words = task.text.with_borders(sentence)
            characters = torch.from_numpy(task.text.characters[words].astype(np.int64))
            numbers = torch.arange(len(words))[None]
            top = lm.encoder(characters, numbers, torch.tensor([len(words)]))[-1][0]
            labels = torch.from_numpy(np.where(words < 12, words, UNKNOWN)).long()
            log_p = [lm.output(half).log_softmax(dim=1) for half in top.chunk(2, dim=1)]
            nats["ahead"] += [-log_p[0][k, labels[k + 1]].item() for k in range(len(words) - 1)]
            nats["back"] += [-log_p[1][k, labels[k - 1]].item() for k in range(1, len(words))]
    found = task.evaluate()
    for name, own in nats.items():
        assert found[f"{name}_perplexity"] == pytest.approx(math.exp(np.mean(own)), rel=1e-5)


def test_windows_go_on_in_their_row_and_differ_in_order(text):
    task = task_of(text, stateful=True, batch_size=4)
    first, second = (task.stream.at(Position(0, k)) for k in range(2))
    for name in ("ahead", "back"):
        assert np.array_equal(first.labels[name][:, -1], second.inputs[name][:, 0])
        assert np.array_equal(first.inputs[name][:, 1:], first.labels[name][:, :-1])
    assert first.inputs["ahead"][0, 0] == LEFT_BORDER
    assert first.inputs["back"][0, 0] == RIGHT_BORDER
    assert task.advance(Position(0, task.stream.per_epoch - 1)) == Position(1, 0)
    with pytest.raises(ValueError, match="do not fill a window of 20 words in each row"):
        task_of(text, stateful=True, batch_size=4000)


def test_the_state_of_one_window_is_read_by_the_next(text):
    task = task_of(text, stateful=True, batch_size=4)
    batches = [task.batch(Position(0, k))[0] for k in range(2)]
    micros = [batch.micro_batches[0] for batch in batches]
    model = task.model.eval()
    fresh, _ = task.loss(model, micros[0], batches[0].counts)
    again, _ = task.loss(model, micros[0], batches[0].counts)
    assert fresh.item() == again.item()  # a pass that is made again reads the same
    carried, _ = task.loss(model, micros[1], batches[1].counts)
    # the same two windows as one of 40 words
    long = {name: micros[0][name] for name in ("carried",)}
    both = [task.stream.at(Position(0, k)) for k in range(2)]
    joined = Streams(
        *(
            {n: np.concatenate([getattr(b, part)[n] for b in both], 1) for n in ("ahead", "back")}
            for part in ("inputs", "labels")
        )
    )
    plain = task_of(text, batch_size=4)
    plain.model.load_state_dict({n: w for n, w in model.state_dict().items() if n != "carried"})
    whole, _ = plain.loss(
        plain.model.eval(), task._micro(joined, np.arange(4)) | long, {"words": 160}
    )
    assert whole.item() == pytest.approx((fresh + carried).item() / 2, rel=1e-5)


def test_sampling_is_log_uniform_and_corrected():
    draws = [draw_samples(5, 30, np.random.default_rng(k)) for k in range(2000)]
    assert all(len(set(drawn.words.tolist())) == 5 for drawn in draws)
    seen = np.bincount(np.concatenate([drawn.words for drawn in draws]), minlength=30) / 2000
    tries = np.mean([drawn.tries for drawn in draws])
    wanted = expected_count(torch.arange(30), tries, 30).numpy()
    # TensorFlow's formula takes the tries as given: 0.02 apart is what 2,000 draws show
    np.testing.assert_allclose(seen, wanted, atol=0.05)
    # all words drawn, and so often that each is expected: the full softmax
    output, hidden = torch.nn.Linear(6, 9), torch.randn(4, 6)
    labels = torch.tensor([0, 3, 3, 8])
    found = sampled_loss(hidden, output, labels, torch.arange(9), 1e9)
    wanted = torch.nn.functional.cross_entropy(output(hidden), labels, reduction="sum")
    torch.testing.assert_close(found, wanted)


def test_settings_that_cannot_be(text, tmp_path):
    given = {"text": (text,), "out": tmp_path / "out"}
    for wrong, fault in (
        ({"size": "huge"}, "unknown size 'huge': known are small, medium, original"),
        ({}, "give exactly one of `steps`, `words` and `minutes`$"),
        ({"steps": 1, "words": 9}, "`steps`, `words` and `minutes` .got `steps`, `words`.$"),
        ({"steps": 1, "vocab_size": 3}, "at least 4"),
        ({"steps": 1, "softmax": "sampled", "vocab_size": 100}, "fewer than `vocab_size=100`"),
    ):
        with pytest.raises(ValueError, match=fault):
            ElmoSettings(**given, **wrong)
    alone = write(tmp_path / "alone.txt", ["One sentence."])
    with pytest.raises(ValueError, match="a single sentence"):
        pretrain_elmo(ElmoSettings(text=(alone,), out=tmp_path / "out", steps=1))
    empty = write(tmp_path / "empty.txt", ["", " "])
    with pytest.raises(ValueError, match="no text in it"):
        pretrain_elmo(ElmoSettings(text=(empty,), out=tmp_path / "out", steps=1))


TRAINING = {"precision": "float32", "threads": 1, "max_retries": 0, "learning_rate": 1e-2}


def test_it_classifies_what_a_word_tells(trained, tmp_path):
    draw = random.Random(1)
    kinds = {"animal": ANIMALS, "verb": VERBS}
    labels = [draw.choice([*kinds]) for _ in range(96)]
    rows = [f"the {draw.choice(kinds[label])} again,{label}" for label in labels]
    write(tmp_path / "train.csv", ["text,label", *rows[:64]])
    write(tmp_path / "dev.csv", ["text,label", *rows[64:]])
    result = finetune(
        "classify",
        data=tmp_path,
        model=trained[0],
        out=tmp_path / "run",
        epochs=5,
        batch_size=16,
        **TRAINING,
    )
    assert result.metrics["accuracy"] > 0.9
    assert evaluate(tmp_path / "run", tmp_path / "dev.csv").metrics == pytest.approx(result.metrics)
    model = load(tmp_path / "run")
    assert model.classify("the owl again").label == "animal"
    assert model.methods == ("classify", "explain") and model.config.max_positions == 1_000_000
    for method in (model.embed, model.attention):
        with pytest.raises(ValueError, match="an ELMo, which only feeds the heads of tasks"):
            method(["a"])
    with pytest.raises(ValueError, match="answers with a head for a task alone"):
        assert load(trained[0]).methods
    words = model.explain("the owl again").words
    assert [word.text for word in words] == ["the", "owl", "again"]
    with pytest.raises(ValueError, match="`method='rollout'`: of a model of the family elmo"):
        model.explain("the owl again", method="rollout")


def test_it_tags_and_answers(trained, tmp_path):
    draw = random.Random(1)
    lines = []
    for _ in range(60):
        animal, verb = draw.choice(ANIMALS), draw.choice(VERBS)
        lines += ["The O", f"{animal} B-ANIMAL", f"{verb} O", ". O", ""]
    write(tmp_path / "tags" / "train.conll", lines[:-50])
    write(tmp_path / "tags" / "dev.conll", lines[-50:])
    how = {**TRAINING, "model": trained[0], "epochs": 6}
    result = finetune("tag", data=tmp_path / "tags", out=tmp_path / "tag", **how)
    assert result.metrics["entity_f1"] > 0.9
    tagged = load(tmp_path / "tag").tag("The dog sees.")
    assert [(entity.text, entity.type) for entity in tagged.entities] == [("dog", "ANIMAL")]

    rows = ["text,context,answer"]
    for _ in range(80):
        animal, verb = draw.choice(ANIMALS), draw.choice(VERBS)
        rows.append(f"Who {verb}?,The {animal} {verb}.,{animal}")
    write(tmp_path / "spans" / "train.csv", rows[:60])
    write(tmp_path / "spans" / "dev.csv", rows[:1] + rows[60:])
    result = finetune(
        "answer",
        data=tmp_path / "spans",
        text_pair="context",
        label="answer",
        out=tmp_path / "span",
        batch_size=8,
        **how,
    )
    assert result.metrics["exact_match"] > 0.8
    assert load(tmp_path / "span").answer("Who sees?", "The owl sees.").text == "owl"


def test_no_pre_training_of_a_bert_begins_with_it(trained):
    tokenizer = piece_tokenizer("the cat")
    with pytest.raises(ValueError, match=f"{trained[0]}: an ELMo, which only feeds the heads"):
        model_config(tokenizer, PretrainSettings(), trained[0])


def test_settings_of_layers_and_export_are_refused(trained, tmp_path):
    write(tmp_path / "train.csv", ["text,label", *(f"a{k},{'xy'[k % 2]}" for k in range(80))])
    with pytest.raises(ValueError, match="`reinit_layers`: fine-tuning never changes the layers"):
        finetune("classify", data=tmp_path, model=trained[0], out=tmp_path / "o", reinit_layers=1)
    with pytest.raises(ValueError, match="`reinit_layers`: fine-tuning never changes the layers"):
        given = {"data": tmp_path, "model": trained[0], "out": tmp_path / "o"}
        finetune("classify", **given, sweep="reinit_layers=0|1")
    with pytest.raises(ValueError, match="an ELMo is not exported: PyTorch answers"):
        find_subject(load(trained[0], device="cpu"), None)
