"""`bertsmith fill`, `predict` and `evaluate`: what they print and write, and how they refuse."""

import csv
import functools
import io
import json
import math

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli import predict as fill_command
from bertsmith.cli.main import main
from bertsmith.cli.predict import Predict, outputs_of
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.inference.answers import FillCandidate
from bertsmith.inference.predictor import Predictor, load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.features import Features
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.engine import Engine

TEXT = "the a cat dog sat ran on mat under chair . ##s play it was good bad"
PIECES = [*SPECIAL, *TEXT.split()]
REVIEWS = ["the cat was good .", "it was bad", "the dog sat on the mat " * 9, "cats", "a good dog"]
STARS = ["good", "bad", "bad", "good", "good"]


def config():
    return ModelConfig(
        vocab_size=len(PIECES),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=32,
        max_positions=128,
    )


def tokenizer():
    return Tokenizer(Vocabulary(PIECES))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "books"
    model = initialize(PreTrainingModel(config()), 0.5, torch.Generator().manual_seed(1))
    save_model(model, tokenizer(), folder)
    RunFolder(folder).write_settings({"kind": "pretrain", "settings": {"max_length": 32}})
    return folder


def fine_tuned(folder, **settings):
    model = initialize(SequenceClassifier(config(), 2), 0.7, torch.Generator().manual_seed(5))
    labels = ["bad", "good"] if settings["task"] == "classify" else ["0", "1"]
    extra = {"max_length": 24}
    save_model(model, tokenizer(), folder, label_names=labels, extra_config=extra)
    RunFolder(folder).write_settings({"kind": "finetune", "settings": settings})
    return folder


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    columns = {"text": "review", "text_pair": None, "label": "stars"}
    return fine_tuned(tmp_path_factory.mktemp("runs") / "reviews", task="classify", **columns)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        rows = zip("abcde", REVIEWS, STARS, strict=True)
        csv.writer(file).writerows([("id", "review", "stars"), *rows])
    return path


def refused(capsys, *words):
    """The one line that a refused command prints."""
    assert main(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and line.startswith(f"bertsmith {words[0]}: ")
    return line


def test_fill_as_json_and_as_lines(capsys, pretrained):
    text = "the [MASK] sat on the [MASK]."
    expected = load(pretrained).fill(text, 3)
    assert main(["fill", text, "--model", str(pretrained), "--top", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == text and len(answer["predictions"]) == 2
    for mask, rows in zip(answer["predictions"], expected, strict=True):
        assert mask == [{"token": c.token, "probability": c.probability} for c in rows]

    assert main(["fill", text, "--model", str(pretrained), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [text, "[MASK] 1"] and lines[3] == "[MASK] 2" and len(lines) == 5
    assert lines[2].split() == [f"{expected[0][0].probability:.4f}", expected[0][0].token]


def test_fill_on_a_terminal_shows_the_sentence_filled(capsys):
    rows = [FillCandidate("[b]cat", 7, 0.75), FillCandidate("dog", 8, 0.001)]
    fill_command.show_predictions("the [MASK] sat, [i]so", [rows])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the [b]cat sat, [i]so"  # brackets are text, not the terminal's markup
    assert lines[1].split() == ["[b]cat", "75.0%", "█" * 18]
    assert lines[2].split() == ["dog", "0.1%", "█"]
    other = [FillCandidate("a", 9, 0.75)]
    fill_command.show_predictions("the [MASK] sat, [MASK]", [rows, other])
    bars = [line.index("█") for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert len(set(bars)) == 1 and len(bars) == 3  # both masks' bars begin at one place


def test_fill_refuses_in_one_line(capsys, tmp_path, pretrained, reviews):
    assert "no [MASK] in" in refused(capsys, "fill", "the cat", "--model", pretrained)
    assert "no masked-LM head" in refused(capsys, "fill", "a [MASK]", "--model", reviews)
    assert "--top 0:" in refused(capsys, "fill", "a [MASK]", "--model", pretrained, "--top", 0)
    assert "absent" in refused(capsys, "fill", "a [MASK]", "--model", tmp_path / "absent")


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.jsonl"])
def test_predict_adds_answers_to_the_rows(capsys, tmp_path, reviews, data, name):
    out = tmp_path / name
    assert main(["predict", str(reviews), str(data), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"5 answers written to {out}\n"
    note = "1 of 5 examples have more than 24 tokens and lose their end, as in training\n"
    assert note in printed.err
    if name == "out.jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        separator = "," if name == "out.csv" else "\t"
        rows = list(csv.DictReader(io.StringIO(out.read_text()), delimiter=separator))
    assert [(row["id"], row["review"]) for row in rows] == list(zip("abcde", REVIEWS, strict=True))
    for row, answer in zip(rows, load(reviews).classify(REVIEWS), strict=True):
        assert row["predicted_stars"] == answer.label
        assert float(row["probability"]) == round(answer.confidence, 4)
        if name == "out.jsonl":
            assert row["probabilities"] == pytest.approx(answer.probabilities, abs=6e-5)


@pytest.mark.parametrize("runs", [1, 2])
def test_predict_goes_on_where_it_was_interrupted(
    capsys, tmp_path, reviews, data, monkeypatch, runs
):
    out, whole, partial = tmp_path / "o.jsonl", tmp_path / "w.jsonl", tmp_path / "o.jsonl.partial"
    words = ["predict", str(reviews), str(data), *["--ensemble", str(reviews)][: 2 * (runs - 1)]]
    monkeypatch.setattr("bertsmith.inference.kept_blocks.BLOCK_TOKENS", 8)
    assert main([*words, "--out", str(whole)]) == 0
    outputs, blocks = Predictor.outputs, []

    def interrupted(self, features, on_batch=None):
        if len(blocks) == 2:
            raise KeyboardInterrupt
        blocks.append(len(features))
        return outputs(self, features, on_batch)

    monkeypatch.setattr(Predictor, "outputs", interrupted)
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 130
    done = f"{sum(blocks)} of {runs * len(REVIEWS)} rows are kept in {partial}"
    line = f"bertsmith predict: interrupted: {done}: the same command goes on"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert not out.exists()

    first, blocks = sum(blocks), []
    counted = functools.partialmethod(counting, outputs, blocks)
    monkeypatch.setattr(Predictor, "outputs", counted)
    assert main([*words, "--out", str(out)]) == 0
    assert f"{done}: going on behind them" in capsys.readouterr().err
    assert first + sum(blocks) == runs * len(REVIEWS) and not partial.exists()
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("of_tokens", [False, True])
def test_blocks_of_outputs_come_back_in_the_order_of_the_rows(
    tmp_path, reviews, monkeypatch, of_tokens
):
    """A block has rows of like length; a head gives something for a row, or for each token."""
    monkeypatch.setattr("bertsmith.inference.kept_blocks.BLOCK_TOKENS", 7)
    lengths = np.array([3, 5, 2, 5, 9, 2])
    ids = np.arange(lengths.sum(), dtype=np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    rows = Features(ids, np.zeros_like(ids), boundaries, None, 16, 0)
    asked = []

    class Echo:
        folder = reviews
        engine = Engine(torch.device("cpu"), "float32", 1)

        def resolve_precision_for(self, features):
            assert features is rows

        def outputs(self, features, on_batch):
            asked.append(len(features))
            first = features.ids if of_tokens else features.ids[features.boundaries[:-1]]
            return first[:, None].astype(np.float32)

    settings = Predict(run=str(reviews), input="in.csv", out=tmp_path / "out.csv")
    with outputs_of([Echo(), Echo()], rows, settings) as outputs:
        assert outputs[:, 0].tolist() == (ids if of_tokens else boundaries[:-1]).tolist()
        assert (tmp_path / "out.csv.partial").exists()
    assert asked == [2, 1, 3] * 2
    assert list(tmp_path.iterdir()) == []


def counting(self, outputs, blocks, features, on_batch=None):
    blocks.append(len(features))
    return outputs(self, features, on_batch)


def test_predict_reads_lines_from_standard_input(tmp_path, reviews, standard_input):
    standard_input("\n".join(REVIEWS).encode())
    out = tmp_path / "out.jsonl"
    assert main(["predict", str(reviews), "-", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["review"] for row in rows] == [text.rstrip("\n") for text in REVIEWS]


def test_predict_says_how_many_texts_are_empty(capsys, tmp_path, reviews):
    (tmp_path / "in.csv").write_text('id,review\n1,a cat\n2,\n3," "\n')
    (tmp_path / "in.txt").write_text("a cat\n\na dog\n")
    for name, note in (("in.csv", "2 of 3 texts are empty"), ("in.txt", "1 of 3 texts are empty")):
        words = ["predict", reviews, tmp_path / name, "--out", tmp_path / "o.csv"]
        assert main(list(map(str, words))) == 0
        assert capsys.readouterr().err.splitlines()[-1] == note


def test_predict_refuses_a_column_of_texts_a_line(capsys, tmp_path, reviews):
    path, out = tmp_path / "in.txt", tmp_path / "o.csv"
    path.write_text("body\tstars\ngood\t5\n")
    for source in (path, "-"):
        line = refused(capsys, "predict", reviews, source, "--text", "bodies", "--out", out)
        assert f"--text bodies: {source} is a text a line and has no column 'bodies'" in line
    words = ["predict", reviews, path, "--text", "body", "--out", out]
    assert main(list(map(str, words))) == 0
    assert out.read_text().splitlines()[0] == "body,stars,predicted_stars,probability"


def test_predict_a_published_task_of_pairs(capsys, tmp_path):
    folder = fine_tuned(tmp_path / "mrpc", task="mrpc", text=None, text_pair=None, label=None)
    source = tmp_path / "new.txt"
    source.write_text('#1 String\t#2 String\nthe cat\ta dog\nit "was\tgood\n')
    assert main(["predict", str(folder), str(source), "--out", str(tmp_path / "o.csv")]) == 0
    expected = load(folder).classify(["the cat", 'it "was'], ["a dog", "good"])
    capsys.readouterr()
    with (tmp_path / "o.csv").open(newline="") as file:
        assert [row["Quality"] for row in csv.DictReader(file)] == [
            answer.label for answer in expected
        ]
    line = refused(capsys, "predict", folder, "-", "--out", tmp_path / "o.csv")
    assert "pairs of texts are read from a file" in line


def test_runs_of_other_columns_do_not_answer_together(capsys, tmp_path, reviews, data):
    names = {"text": "body", "text_pair": None, "label": "stars"}
    other = fine_tuned(tmp_path / "other", task="classify", **names)
    pairs = fine_tuned(tmp_path / "pairs", task="classify", **(names | {"text_pair": "id"}))
    out = tmp_path / "o.csv"
    line = refused(capsys, "predict", reviews, data, "--out", out, "--ensemble", other)
    assert f"{other}: reads the column 'body', but {reviews} 'review'" in line
    together = ["predict", str(reviews), str(data), "--out", str(out), "--ensemble", str(other)]
    assert main([*together, "--text", "review"]) == 0
    with out.open(newline="") as file:  # their weights are the same
        answers = [row["predicted_stars"] for row in csv.DictReader(file)]
    assert answers == [row.label for row in load(reviews).classify(REVIEWS)]
    capsys.readouterr()
    for first, second in ((other, pairs), (pairs, other)):
        line = refused(capsys, "predict", first, data, "--out", out, "--ensemble", second)
        assert f"{other}: reads no second text, but {pairs} reads that of 'id'" in line
    line = refused(capsys, "predict", other, data, "--out", out, "--text-pair", "id")
    assert "--text-pair id: the model was trained without a second text: leave it out" in line


def test_predict_refuses_and_writes_nothing(capsys, tmp_path, reviews, pretrained, data):
    out = tmp_path / "out" / "labelled.csv"
    bad = tmp_path / "other.csv"
    bad.write_text("reviews,id\ngood,1\n")
    line = refused(capsys, "predict", reviews, bad, "--out", out)
    assert "other.csv: no column 'review' for --text: did you mean 'reviews'?" in line
    assert main(["predict", str(reviews), str(bad), "--text", "reviews", "--out", str(out)]) == 0
    out.unlink()
    capsys.readouterr()
    assert "absent" in refused(capsys, "predict", tmp_path / "absent", data, "--out", out)
    assert "in.csv: no such file" in refused(capsys, "predict", reviews, "in.csv", "--out", out)
    line = refused(capsys, "predict", pretrained, data, "--out", out)
    assert "not a fine-tuned classifier but a run of 'pretrain'" in line
    assert "'.xml'" in refused(capsys, "predict", reviews, data, "--out", tmp_path / "out.xml")
    assert list(out.parent.iterdir()) == []


def test_evaluate_counts_what_predict_answers(capsys, tmp_path, reviews, data):
    out = tmp_path / "out.csv"
    main(["predict", str(reviews), str(data), "--out", str(out)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    capsys.readouterr()
    assert main(["evaluate", str(reviews), "--data", str(data), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    right = sum(row["stars"] == row["predicted_stars"] for row in rows)
    labels = ["bad", "good"]
    assert result["labels"] == labels and result["examples"] == 5
    assert result["metrics"]["accuracy"] == pytest.approx(right / 5)
    assert result["confusion"] == [
        [
            sum((row["stars"], row["predicted_stars"]) == (true, answer) for row in rows)
            for answer in labels
        ]
        for true in labels
    ]
    assert main(["evaluate", str(reviews), "--data", str(data)]) == 0
    text = capsys.readouterr().out
    assert f"accuracy             {right / 5:.4f}" in text and "columns: answer" in text


def test_evaluate_refuses_in_one_line(capsys, tmp_path, reviews, pretrained, data):
    unknown = tmp_path / "unknown.csv"
    unknown.write_text("review,stars\ncat,good\ndog,gooood\n")
    line = refused(capsys, "evaluate", reviews, "--data", unknown)
    assert "unknown.csv:3: unknown label 'gooood'" in line
    no_label = tmp_path / "no.csv"
    no_label.write_text("review,id\ncat,1\n")
    line = refused(capsys, "evaluate", reviews, "--data", no_label)
    assert "no column 'stars' for --label" in line
    assert "absent" in refused(capsys, "evaluate", tmp_path / "absent", "--data", data)
    assert "absent" in refused(capsys, "evaluate", reviews, "--data", tmp_path / "absent")
    line = refused(capsys, "evaluate", pretrained, "--data", data)
    assert "not a fine-tuned classifier but a run of 'pretrain'" in line


def test_evaluate_a_model_that_knows_nothing_on_a_token_store(capsys, tmp_path, pretrained):
    documents = [f"the cat sat .\nit was {k} .\nthe dog ran .\n" for k in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(documents))
    store = tmp_path / "store"
    build_store([tmp_path / "text.txt"], tokenizer(), store, BuildSettings(held_out=0.25))
    model = PreTrainingModel(config())
    torch.nn.utils.vector_to_parameters(
        torch.zeros(sum(p.numel() for p in model.parameters())), model.parameters()
    )
    save_model(model, tokenizer(), tmp_path / "zero")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "zero"), "--data", str(store), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"]["mlm_loss"] == pytest.approx(math.log(len(PIECES)), rel=1e-5)
    assert result["metrics"]["nsp_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert result["metrics"]["unigram_entropy"] < math.log(len(PIECES))

    assert main(["evaluate", str(pretrained), "--data", str(store)]) == 0
    assert "mlm_accuracy" in capsys.readouterr().out
    Tokenizer(Vocabulary([*PIECES[:-1], "sad"])).save(tmp_path / "zero")
    line = refused(capsys, "evaluate", tmp_path / "zero", "--data", store)
    assert "built with tokenizer" in line
