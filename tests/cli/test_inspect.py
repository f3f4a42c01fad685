"""`bertsmith compare` and `explain`: what they print, the JSON object, refusals in one line."""

import json
import re

import pytest

import bertsmith as library
from bertsmith.cli.inspect import BLUE, GREEN, RED, draw_words, show
from bertsmith.model.heads import SequenceClassifier

from ..tiny import bertsmith, cli, piece_tokenizer, random_model, refused, write


@pytest.fixture
def run(tmp_path):
    def make(name, right, seeds, task="classify"):
        predicted = ["a" if k < right else "b" for k in range(100)]
        items = [{"text": f"t{k}", "label": "a", "predicted": p} for k, p in enumerate(predicted)]
        metrics = [{"accuracy": value} for value in seeds]
        result = {
            "metrics": metrics[0],
            "main_metric": "accuracy",
            "seeds": dict(enumerate(metrics)),
        }
        files = {
            "run.json": {"kind": "finetune", "settings": {}},
            "log.jsonl": {"event": "train"},
            "result.json": result,
            "dev_scores.json": {"task": task, "kind": "classify", "examples": items},
        }
        for file, value in files.items():
            write(tmp_path / name / file, json.dumps(value))
        return tmp_path / name

    return make


def test_table(run):
    first, second = run("x", 60, [0.5, 0.6]), run("y", 65, [0.75, 0.75])
    out = bertsmith("compare", first, second, "--resamples", 1000)
    assert out.startswith("classify, 100 dev examples, 1,000 resamples\n")
    assert "accuracy            0.6000    0.6500     +0.0500  +0.0" in out
    assert "the second run answers 5 examples better, 95 alike, 0 worse" in out
    assert "accuracy            0.5500    0.7500     +0.2000  2 seeds: no interval\n" in out


def test_from_three_seeds_on_there_is_an_interval(run):
    first, second = run("x", 60, [0.5, 0.6, 0.7]), run("y", 65, [0.75, 0.75, 0.75])
    out = bertsmith("compare", first, second, "--resamples", 100)
    # t(2) = 4.303 times 0.1 / sqrt(3)
    assert "0.6000    0.7500     +0.1500  -0.0984 to +0.3984\n" in out


def test_json_is_the_same_every_time(run):
    command = ("compare", run("x", 60, [0.6]), run("y", 65, [0.65]), "--json", "--resamples", 500)
    result, again = (json.loads(bertsmith(*command)) for _ in range(2))
    assert result == again and result["seed"] == 0 and result["seeds"] == {}
    assert result["metrics"]["accuracy"]["difference"] == pytest.approx(0.05)


def test_refusals(run):
    first, second = run("first", 60, [0.6]), run("y", 65, [0.65], task="sst2")
    assert "different tasks, classify and sst2" in refused("compare", first, second)
    said = refused("compare", first, f"{first}s")
    assert f"no such run directory (did you mean '{first.name}'?): give a folder" in said


def shown(capsys, **metrics):
    """The lines of the table of some figures."""
    for figure in metrics.values():
        figure["difference"] = figure["second"] - figure["first"]
    counts = {"better": 3, "equal": 0, "worse": 1}
    show({"task": "t", "examples": 4, "resamples": 100, "metrics": metrics, "seeds": {}} | counts)
    return capsys.readouterr().out.splitlines()[2:]


def test_small_errors_are_not_shown_as_0(capsys):
    mse = {"first": 4e-12, "second": 1.5e-12, "interval": [-2.75e-12, -2.25e-12], "p": 0.01}
    rho = {"first": 0.5, "second": 0.5 + 1e-16, "interval": [-0.25, 0.25], "p": 1.0}
    head, first, second = shown(capsys, pearson=rho, mse=mse)[:3]
    assert " ".join(first.split()) == "pearson 0.5000 0.5000 +0.0000 -0.2500 to +0.2500 1.0000"
    assert " ".join(second.split()) == "mse 4e-12 1.5e-12 -2.5e-12 -2.75e-12 to -2.25e-12 0.0100"
    assert head.index(" p") == first.index(" 1.0000") == second.index(" 0.0100")


def test_less_error_is_said_to_be_better(capsys):
    mse = {
        "first": 0.5,
        "second": 0.25,
        "interval": [-0.4, -0.1],
        "p": 0.01,
        "less_is_better": True,
    }
    line = shown(capsys, mse=mse)[1]
    assert "-0.4000 to -0.1000   0.0100  (less is better)" in line


def test_doctor_warms_what_answers_need():
    ran = cli("doctor", "--warm")
    assert ran.code == 0 and re.match(r"compiled and kept: float32 \d+\.\d s", ran.out)
    assert json.loads(bertsmith("doctor", "--warm", "--json"))["seconds"]["float32"] > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes a model of random weights of a kind of task."""

    def make(kind, *label_names, **extra):
        folder = tmp_path_factory.mktemp("models") / kind
        tokenizer = piece_tokenizer("the a cat dog good bad film ##s [ ] . 😀")
        outputs, extra = len(label_names) or 1, {"kind": kind, **extra}
        written = {"label_names": label_names or None, "extra_config": extra}
        return random_model(folder, tokenizer, SequenceClassifier, outputs, std=0.7, **written)

    return make


TEXT = "a [b]good[/b] film 😀"


def test_explain_prints_a_word_a_line(model):
    folder = model("classify", "bad", "good")
    found = library.load(folder).explain(TEXT, method="gradient")
    answer, meaning, empty, *lines = bertsmith(
        "explain", folder, TEXT, "--method", "gradient"
    ).splitlines()
    assert answer == f"answer: {found.label} ({found.answer.confidence:.1%})" and not empty
    assert meaning == found.measures
    assert lines == [f"{word.score:8.4f}  {word.text}" for word in found.words]
    other = "bad" if found.label == "good" else "good"
    lines = bertsmith("explain", folder, TEXT, "--label", other).splitlines()
    assert lines[1] == f"explained: {other} ({found.answer.probabilities[other]:.1%})"


def test_explain_says_what_other_tasks_answer(model):
    score, meaning, *_ = bertsmith(
        "explain", model("regress"), "a film", "--text-pair", "a cat"
    ).splitlines()
    assert re.fullmatch(r"answer: -?\d+\.\d+", score) and meaning.startswith("occlusion: ")
    none = model("multilabel", "bad", "good", thresholds={"thresholds": [1.0, 1.0]})
    answer, label, *_ = bertsmith("explain", none, "a film").splitlines()
    assert answer == "answer: no label" and label.startswith("explained: ")


def test_explain_as_json(model):
    folder = model("classify", "bad", "good", text_pair="other")
    words = ("explain", folder, TEXT, "--text-pair", "a cat", "--method", "rollout", "--json")
    answer = json.loads(bertsmith(*words))
    found = library.load(folder).explain(TEXT, "a cat", method="rollout")
    assert answer["text"] == TEXT and answer["text_pair"] == "a cat" and answer["label"] is None
    assert answer["words"][-1] == found.words[-1].to_dict()
    assert [word["segment"] for word in answer["words"]].count("text_pair") == 2


def test_explain_on_a_terminal_colours_the_words(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")

    def painted(colour, text):
        return f"\x1b[30;48;2;{';'.join(map(str, colour))}m{text}\x1b[0m"

    words = [(0, 1, 0.01), (2, 3, -1.0), (3, 4, 0.0), (5, 9, 1.0)]
    scores = [library.WordScore(TEXT[a:b], a, b, "text", score) for a, b, score in words]
    scores += [library.WordScore("cat", 2, 5, "text_pair", 0.05)] * 8
    label = library.Label("good", 0.9, {"bad": 0.1, "good": 0.9})
    texts = {"text": TEXT, "text_pair": "a cat"}
    draw_words(texts, library.Explanation(label, "good", "occlusion", "[it] says", tuple(scores)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["answer: good (90.0%)", "[it] says"]
    assert lines[3] == f"a {painted(RED, '[')}b]{painted(GREEN, 'good')}[/b] film 😀"
    assert lines[5] == "a cat" and lines[7] == f" -1.0000  {painted(RED, '[')}"
    assert len(lines) == 18 and "2 more with smaller scores" in lines[-1]
    one = library.WordScore("good", 5, 9, "text", 0.02)
    draw_words({"text": TEXT}, library.Explanation(label, None, "rollout", "so", (one,)))
    assert f"a [b]{painted(BLUE, 'good')}[/b] film 😀\n" in capsys.readouterr().out


def test_explain_refuses(model):
    folder = model("classify", "bad", "good")
    assert "--label fine: the model's labels are bad, good" in refused(
        "explain", folder, TEXT, "--label", "fine"
    )
    assert "no word in it" in refused("explain", folder, " ")
    assert "--method lime: must be" in refused("explain", folder, TEXT, "--method", "lime")
