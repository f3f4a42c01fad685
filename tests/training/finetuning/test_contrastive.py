"""Sentence vectors trained from pairs: the loss by hand, its groups, a run that learns."""

import hashlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.base.files import read_json_lines
from bertsmith.checkpoints.model_folder import BareModel, load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.examples.stream import Position
from bertsmith.inference.embeddings.pooling import pooling_settings, pooling_warning, training_of
from bertsmith.inference.embeddings.train import as_the_start
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.contrastive import (
    Contrastive,
    Kept,
    PairFeatures,
    Pairs,
    ranking_loss,
    read_pairs,
    write_pooling,
)
from bertsmith.training.finetuning.hidden_states import pooled
from bertsmith.training.finetuning.settings import ContrastiveSettings

from ...tiny import bertsmith as command
from ...tiny import cli, refused, write

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FRENCH = ["un", "deux", "trois", "quatre", "cinq", "sixte", "sept", "huit"]
TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, *ENGLISH, *FRENCH]))
CONFIG = ModelConfig(
    vocab_size=len(TOKENIZER.vocabulary), hidden_size=32, num_layers=1, num_heads=2,
    intermediate_size=64, max_positions=16, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return initialize(BareModel(CONFIG), 0.1, torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "start"
    start = initialize(PreTrainingModel(CONFIG), 0.1, torch.Generator().manual_seed(2))
    save_model(start, TOKENIZER, path)
    return path


def translations(count, seed):
    """Pairs of three numbers, the same in two languages."""
    random = np.random.default_rng(seed)
    every = list(itertools.permutations(range(8), 3))
    rows = [every[k] for k in random.permutation(len(every))[:count]]  # none twice
    return [[" ".join(language[k] for k in row) for row in rows] for language in (ENGLISH, FRENCH)]


def test_the_loss_by_hand():
    firsts = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    seconds = torch.tensor([[5.0, 0.0], [3.0, 3.0]])  # cosines [[1, .7071], [0, .7071]]
    loss, right = ranking_loss(firsts, seconds, torch.arange(4), scale=2.0)
    root = 0.5**0.5
    first = -np.log(np.exp(2.0) / (np.exp(2.0) + np.exp(2 * root)))
    second = -np.log(np.exp(2 * root) / (np.exp(0.0) + np.exp(2 * root)))
    assert loss.item() == pytest.approx(first + second, rel=1e-6) and right == 2
    swapped, right = ranking_loss(firsts, seconds.flip(0), torch.arange(4), scale=2.0)
    assert swapped > loss and right == 0


@pytest.mark.parametrize(
    "texts",
    [
        [7, 7, 1, 2],  # one first text with two partners
        [5, 6, 1, 1],  # one second text with two partners
        [5, 6, 6, 5],  # each second text is the other's first
    ],
)
def test_texts_that_belong_together_are_no_negatives(texts):
    random = torch.Generator().manual_seed(1)
    firsts, seconds = torch.randn(2, 2, 4, generator=random)
    loss, right = ranking_loss(firsts, seconds, torch.tensor(texts), scale=20.0)
    assert loss == 0 and right == 2
    loss, _ = ranking_loss(firsts, seconds, torch.arange(4), scale=20.0)
    assert loss > 0


def test_pooling_leaves_padding_out():
    hidden = torch.tensor([[[1.0], [3.0], [50.0]], [[1.0], [2.0], [6.0]]])
    lengths = torch.tensor([2, 3])
    assert pooled(hidden, lengths, "mean").tolist() == [[2.0], [3.0]]
    assert pooled(hidden, lengths, "cls").tolist() == [[1.0], [1.0]]
    assert pooled(hidden, lengths, "max").tolist() == [[3.0], [6.0]]
    assert pooled(hidden, lengths, "mean", skip=1).tolist() == [[3.0], [4.0]]
    assert pooled(-hidden, lengths, "max", skip=1).tolist() == [[-3.0], [-2.0]]
    assert pooled(hidden, lengths, "cls", skip=1).tolist() == [[3.0], [2.0]]


def task_of(model, threads):
    pairs = PairFeatures.of(TOKENIZER, Pairs(*translations(18, 1), None, "made"), max_length=8)
    engine = Engine(torch.device("cpu"), "float32", threads)
    return Contrastive(model, pairs, None, engine, ContrastiveSettings(batch_size=8, negatives=4))


def test_a_batch_is_groups_that_do_not_hang_on_the_cores(model):
    one, two = (task_of(model, threads) for threads in (1, 2))
    assert one.batches.per_epoch == 3
    position, seen = Position(0, 0), []
    for _ in range(3):
        batch, _ = one.batch(position)
        same, after = two.batch(position)
        assert after == one.advance(position)
        for group, other in zip(batch.micro_batches, same.micro_batches, strict=True):
            assert all((group[name] == other[name]).all() for name in group)
            assert len(group["lengths"]) <= 2 * 4
            english, french = np.split(group["ids"], 2)
            assert (french[:, 1:4] - english[:, 1:4] == 8).all()  # a pair's texts meet again
            seen += english[:, 1:4].tolist()
        assert batch.counts["pairs"] == sum(len(g["lengths"]) // 2 for g in batch.micro_batches)
        assert batch.tokens == 10 * batch.counts["pairs"]
        position = after
    assert position == Position(1, 0) and len(seen) == 18


@pytest.mark.parametrize(("count", "batch", "negatives"), [(17, 8, 4), (33, 32, 32), (5, 4, 2)])
def test_every_pair_has_a_negative(model, count, batch, negatives):
    pairs = PairFeatures.of(TOKENIZER, Pairs(*translations(count, 1), None, "made"), max_length=8)
    settings = ContrastiveSettings(batch_size=batch, negatives=negatives)
    task = Contrastive(model, pairs, None, Engine(torch.device("cpu"), "float32", 1), settings)
    position, sizes = Position(), []
    while position.epoch == 0:
        step, position = task.batch(position)
        sizes += [len(group["lengths"]) // 2 for group in step.micro_batches]
    assert min(sizes) > 1 and max(sizes) <= max(negatives, 3) and sum(sizes) == count


def test_the_loss_of_a_batch_is_the_mean_over_its_pairs(model):
    task = task_of(model, 1)
    batch, _ = task.batch(Position(0, 0))
    model.eval()
    losses, expected = [], 0.0
    for group in batch.micro_batches:
        loss, parts = task.loss(model, group, batch.counts)
        losses.append(loss.item())
        assert task.metrics({name: float(value) for name, value in parts.items()})["accuracy"] <= 1
        with torch.no_grad():
            vectors = [
                model.encoder(torch.from_numpy(ids[:length][None].copy()))[0].mean(dim=0)
                for ids, length in zip(group["ids"], group["lengths"], strict=True)
            ]
        a, b = torch.nn.functional.normalize(torch.stack(vectors), dim=1).chunk(2)
        expected += -(20 * a @ b.T).log_softmax(dim=1).diagonal().sum().item()
    assert sum(losses) == pytest.approx(expected / 8, rel=1e-4)
    assert task.flops(batch) > 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = zip(*translations(200, 3), strict=True)
    path = tmp_path_factory.mktemp("data") / "pairs.csv"
    return write(path, ["a,b", *map(",".join, rows)])


@pytest.fixture
def dev(tmp_path):
    """Half are translations (5), half two numbers' worth of nothing in common (0)."""
    english, french = translations(60, 4)
    _, other = translations(60, 5)
    rows = [f"{english[k]},{french[k]},5" if k % 2 else f"{english[k]},{other[k]},0"
            for k in range(60)]  # fmt: skip
    return write(tmp_path / "dev.csv", ["a,b,score", *rows])


def train_words(folder, data, out, *more):
    words = ("embed", "train", "--model", folder, "--data", data, "--text", "a", "--text-pair", "b")
    words += ("--max-length", 12, "--precision", "float32", "--threads", 1)
    return (*words, "--out", out, *more)


def test_a_run_learns_and_is_read_as_trained_for_similarity(tmp_path, folder, data, dev):
    out = tmp_path / "out"
    flags = ("--epochs", 6, "--batch-size", 16, "--negatives", 8, "--learning-rate", 3e-3)
    printed = command(*train_words(folder, data, out, *flags, "--dev", dev))
    result = json.loads((out / "result.json").read_text())
    assert result["metrics"]["spearman"] > 0.75 > result["metrics_before"]["spearman"] + 0.3
    assert result["train_pairs"] == 200 and result["dev_pairs"] == 60
    assert f"spearman on dev: {result['metrics']['spearman']:.4f} (before: " in printed
    stored = json.loads((out / "config.json").read_text())
    assert stored["architectures"] == ["BertModel"]
    settings = json.loads((out / "run.json").read_text())["settings"]
    weights = folder / "model.safetensors"
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (data, dev, weights)]
    assert list(settings["data_sha256"].items()) == [("train", digests[0]), ("dev", digests[1])]
    assert settings["model_sha256"] == digests[2:]
    command("report", out, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    before = f"before training {result['metrics_before']['spearman']:.3g}"
    for part in ("Sentence vectors from pairs", before, digests[0], "Training loss"):
        assert part in page
    assert pooling_warning(out, pooling_settings(out)) is None
    assert load_model(out, BareModel).missing == []
    lines = read_json_lines(out / "log.jsonl")
    assert [line["event"] for line in lines].count("evaluate") == 6
    assert lines[-1]["spearman"] == pytest.approx(result["metrics"]["spearman"])
    assert "out holds a finished run" in refused(*train_words(folder, data, out, *flags))
    with pytest.raises(ValueError, match="this model cannot classify, but embed, features"):
        bertsmith.load(out).classify(["one"])


def test_a_run_without_dev_and_an_interrupted_one(tmp_path, folder, data, monkeypatch):
    out = tmp_path / "out"
    write(out / "run.json", json.dumps({"format": 2, "kind": "contrastive"}))
    with RunFolder(out).locked():
        again = refused(*train_words(folder, data, out, "--batch-size", 64))
    assert "another process is training here" in again
    printed = command(*train_words(folder, data, out, "--batch-size", 64))
    trained, title, *commands = printed.splitlines()
    assert trained == f"{out}: trained on 200 pairs" and title == "try next:"
    assert json.loads((out / "result.json").read_text())["metrics"] == {}
    monkeypatch.chdir(tmp_path)
    write(Path("new.txt"), ["one", "two"])
    words = [line.split() for line in commands]
    assert [each[:2] for each in words] == [["bertsmith", "embed"], ["bertsmith", "report"]]
    for each in words:
        command(*each[1:])
    assert len(np.load("vectors.npy")) == 2 and (out / "report.html").exists()


def test_the_same_from_python(tmp_path, folder, data):
    out, settings = tmp_path / "out", {"max_length": 12, "precision": "float32", "threads": 1}
    given = {"data": str(data), "text": "a", "text_pair": "b", "model": folder}
    result = bertsmith.train_embeddings(**given, out=str(out), **settings)
    assert result == json.loads((out / "result.json").read_text())
    command(*train_words(folder, data, tmp_path / "other"))
    of_both = [(path / "model.safetensors").read_bytes() for path in (out, tmp_path / "other")]
    assert of_both[0] == of_both[1]
    with pytest.raises(ValueError, match=r"train_embeddings\(\): unknown setting 'epoch'.*epochs"):
        bertsmith.train_embeddings(**given, out=out, epoch=1)
    with pytest.raises(ValueError, match=r"`score='s'`: only with `dev`"):
        bertsmith.train_embeddings(**given, out=out, score="s")


def test_a_prompt_that_fills_the_rows_is_refused(tmp_path, folder, data):
    """No text would be read, and every row be the same."""
    start, out = shutil.copytree(folder, tmp_path / "start"), tmp_path / "out"
    prompt = " ".join(ENGLISH) + " one two "
    write_pooling(start, ContrastiveSettings(), 32, Kept({"number": prompt}, "number"))
    ran = cli(*train_words(start, data, out))
    assert ran.code == 2 and "--max-length 12: the prompt 'one two three" in ran.err
    assert "leaves no room for a text" in ran.err and not out.exists()


def test_a_start_with_vectors_keeps_its_way(tmp_path, folder, data):
    start, words = shutil.copytree(folder, tmp_path / "start"), train_words("start", data, "out")
    kept = Kept({"number": "one ", "other": "two "}, "number", normalize=True)
    write_pooling(start, ContrastiveSettings(pool="cls", max_length=10), 32, kept)
    words = [*words[: words.index("--max-length")], "--threads", 1, "--precision", "float32"]
    words[words.index("--model") + 1] = start
    ran = cli(*words, "--out", tmp_path / "out")
    assert ran.code == 0
    assert "start: the vector at [CLS], of at most 10 tokens, 'one ' before every text" in ran.err
    before, after = training_of(start), training_of(tmp_path / "out")
    assert replace(after, folder=start) == before and after.prompts == kept.prompts
    command(*words, "--out", tmp_path / "other", "--pool", "mean", "--max-length", 8)
    other = training_of(tmp_path / "other")
    assert (other.pool, other.max_length, other.prompt) == ("mean", 8, "one ")
    modules = json.loads((start / "modules.json").read_text())
    modules[2] |= {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    write(start / "modules.json", json.dumps(modules))
    line = refused(*words, "--out", tmp_path / "third")
    assert "start: its vectors have layers after the pooling (2_Dense), which are not tr" in line


def test_a_start_that_reads_all_its_positions_still_does(tmp_path, folder):
    start = shutil.copytree(folder, tmp_path / "start")
    write_pooling(start, ContrastiveSettings(max_length=16), 32)
    assert as_the_start(start, ContrastiveSettings(), ())[0].max_length == 16
    given = ContrastiveSettings(max_length=8)
    assert as_the_start(start, given, ["max_length"])[0].max_length == 8


def test_the_default_prompt_of_the_start_stands_before_every_text():
    pairs = Pairs(["one"], ["un"], None, "made").behind("two ")
    assert (pairs.firsts, pairs.seconds) == (["two one"], ["two un"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--score s", "--score s: only with --dev"),
        ("--max-length 17", "--max-length 17: the model reads 3 to 16"),
        ("--batch-size 24", "--batch-size 24, --negatives 32: a group"),
        ("--epochs 0", "--epochs 0: must be at least 1"),
        ("--text-pair c", "no column 'c' for --text-pair"),
        ("--text-pair a", "column 'a' is named twice"),
        ("--data absent.csv", "absent.csv: no such file"),
        ("--data one.csv", "one.csv: 1 pair: negatives need 2 or more"),
        ("--model causal --pool cls", "--pool cls: in a left-to-right model [CLS] sees nothing"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(
    tmp_path, folder, data, monkeypatch, flags, message
):
    monkeypatch.chdir(tmp_path)
    write(Path("one.csv"), ["a,b", "one,un"])
    save_model(BareModel(replace(CONFIG, causal=True)), TOKENIZER, Path("causal"))
    assert message in refused(*train_words(folder, data, "out", *flags.split()))
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b,score\none,un,high\n", "dev.csv:2: .*'high'"),
        ("a,b,score\none,un,nan\n", "dev.csv:2: "),
        ("a,b,score\none,,1\n", "dev.csv:2: empty text in column 'b'"),
        ("a,b,scores\none,un,1\n", "no column 'score' for `score`: did you mean 'scores'"),
        ("a,b,score\n", "dev.csv: no examples"),
    ],
)
def test_scored_pairs_that_cannot_be_read(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(write(tmp_path / "dev.csv", content), "a", "b", "score")
