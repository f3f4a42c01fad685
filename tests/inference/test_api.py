"""The Python API of every kind of model: what is accepted, answered, refused and shown."""

import dataclasses
import json
import pydoc
import re
import shutil

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.checkpoints.model_folder import BareModel, save_model
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..tiny import bertsmith as command
from ..tiny import write

TEXT = "the cat sat on a mat ann saw rome who left good bad film ."
PIECES = [*SPECIAL, *TEXT.split(), "##s"]
LABELS = ("bad", "good")
MODELS = {  # folder: head, its outputs, labels, entries of config.json
    "reviews": (SequenceClassifier, 2, LABELS, {"kind": "classify"}),
    "topics": (SequenceClassifier, 3, ("a", "b", "c"), {"kind": "multilabel"}),
    "stsb": (SequenceClassifier, 1, None, {"kind": "regress"}),
    "ner": (TokenClassifier, 3, ("O", "B-PER", "I-PER"), {"kind": "tag"}),
    "squad": (SpanPredictor, 2, None, {"kind": "answer"}),
    "squad2": (SpanPredictor, 2, None, {"kind": "answer", "thresholds": {"null_threshold": -99.0}}),
    "swag": (OptionScorer, 1, None, {"kind": "choice", "task": "swag"}),
    "books": (PreTrainingModel, None, None, {}),
    "pairs": (BareModel, None, None, {}),
}
QUESTION, CONTEXT = "who left", "ann saw the cat. it left rome"
# Method -> the model that can do it, and arguments for two answers.
CALLS = {
    "classify": ("reviews", (["a good film", "bad"],)),
    "explain": ("reviews", (["a good film", "bad"],)),
    "score": ("stsb", (["the cat sat", "ann left"], ["a mat", "rome"])),
    "tag": ("ner", (["ann saw rome.", "the cat"],)),
    "answer": ("squad", ([QUESTION, "who saw"], [CONTEXT, CONTEXT])),
    "choose": ("swag", (["the cat", "ann"], [["sat on a mat", "saw"], ["left", "good"]])),
    "fill": ("books", (["the [MASK] sat", "[MASK] left [MASK]"],)),
    "embed": ("pairs", (["the cat", "rome"],)),
    "features": ("pairs", (["the cat", "rome"],)),
    "attention": ("pairs", (["the cat", "rome"],)),
}
OF_ALL = "embed", "features", "attention"


def write_models(folder):
    """A folder of each of `MODELS`, of random weights."""
    config = ModelConfig(len(PIECES), 16, 2, 2, 32, 32)
    for name, (head, outputs, labels, extra) in MODELS.items():
        model = head(config) if outputs is None else head(config, outputs)
        initialize(model, 0.4, torch.Generator().manual_seed(1))
        tokenizer = Tokenizer(Vocabulary(PIECES))
        save_model(model, tokenizer, folder / name, label_names=labels, extra_config=extra)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("api"))


def as_json(answer):
    """Numbers, and answers with their own, in a form that can be compared with `close`."""
    if isinstance(answer, list):
        return [as_json(one) for one in answer]
    return answer.to_dict() if dataclasses.is_dataclass(answer) else np.asarray(answer).tolist()


def close(given, expected):
    """Rows are computed in other batches, so that numbers differ in the last digits."""
    if isinstance(expected, float):
        assert given == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        close(list(given.items()), list(expected.items()))
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            close(one, other)
    else:
        assert given == expected


class Series:
    """Quacks like pandas': one dimension, an iterator."""

    ndim = 1

    def __init__(self, items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("of", [list, tuple, Series, iter, np.array])
def test_one_text_has_one_answer_and_several_a_list(runs, method, of):
    folder, arguments = CALLS[method]
    call = getattr(bertsmith.load(runs / folder), method)
    answers = as_json(list(call(*arguments)))
    given = [
        of(a) if isinstance(a[0], str) else (iter if of is iter else list)(a) for a in arguments
    ]
    close(as_json(list(call(*given))), answers)
    for k in (0, 1):
        close(as_json(call(*(argument[k] for argument in arguments))), answers[k])
    assert len(call(*([] for _ in arguments))) == 0
    json.dumps(answers)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("wrong", [None, 3, {"text": "a"}, {"a"}, b"a", ["a", None]])
def test_what_is_no_text_is_refused(runs, method, wrong):
    folder, arguments = CALLS[method]
    others = ["a"] if method == "score" else arguments[1:]
    with pytest.raises(ValueError, match="expected a text"):
        getattr(bertsmith.load(runs / folder), method)(wrong, *others)


@pytest.mark.parametrize("method", [name for name in CALLS if name not in OF_ALL])
@pytest.mark.parametrize("folder", MODELS)
def test_what_a_model_cannot_do_it_refuses_and_says_what_it_can(runs, method, folder):
    model = bertsmith.load(runs / folder)
    assert model.methods[-2:] == ("embed", "features")
    if method not in model.methods:
        can = ", ".join(model.methods)
        message = f"{folder}: this model .*{method if method != 'fill' else 'head'}.*{can}"
        with pytest.raises(ValueError, match=message):
            getattr(model, method)(*CALLS[method][1])


def test_answers_say_what_they_are(runs):
    label = bertsmith.load(runs / "reviews").classify("good")
    assert label.label == max(label.probabilities, key=label.probabilities.get)
    assert label.confidence == label.probabilities[label.label]
    assert repr(label) == f"Label(label='{label.label}', confidence={label.confidence:.3g})"
    labels = bertsmith.load(runs / "topics").classify("good")
    assert list(labels.labels) == [n for n, p in labels.probabilities.items() if p > 0.5]
    span = bertsmith.load(runs / "squad").answer(QUESTION, CONTEXT)
    assert span.has_answer and CONTEXT[span.start : span.end] == span.text
    assert span.null_odds is None
    nothing = bertsmith.load(runs / "squad2").answer(QUESTION, CONTEXT)
    assert not nothing.has_answer and isinstance(nothing.null_odds, float)
    options = ["sat on a mat", "saw", "rome"]
    choice = bertsmith.load(runs / "swag").choose("the cat", options)
    assert choice.option == options[choice.index] and len(choice.probabilities) == 3
    assert choice.confidence == max(choice.probabilities)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.index = 0


@pytest.mark.parametrize("method", CALLS)
def test_an_answer_is_shown_in_a_line(runs, method):
    folder, (first, *rest) = CALLS[method]
    model = bertsmith.load(runs / folder)
    answer = getattr(model, method)(first[0] * 9, *(r[0] for r in rest))
    if method not in ("fill", "embed", "features"):
        assert len(repr(answer)) <= 100 and "\n" not in repr(answer)
    shown = repr(model)
    assert str(runs / folder) in shown and "2 layers of 16" in shown and "cpu" in shown
    assert method in shown or model.methods[0] in shown


NO_POOL = r"features\(\): pool = 'mean': expected none, sum or"


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("score", ("a", ["b"]), "text is one text, but text_pair 1 texts: give one of both"),
        ("score", (["a", "b"], "c"), "text is 2 texts, but text_pair one text"),
        ("score", (["a", "b"], ["c"]), "text is 2 texts, but text_pair 1 texts"),
        ("score", (["a"], [None]), r"text_pair\[0\] is None: expected a text"),
        ("answer", (["a", "b"], ["c"]), "question is 2 texts, but context 1 texts"),
        ("choose", ("the cat", "sat"), r"options: expected two texts or more .*, not \[1\]"),
        ("choose", (["a", "b"], [["c", "d"]]), r"as many for all 2, not \[2\]"),
        ("choose", (["a", "b"], [["c", "d"], ["e", "f", "g"]]), r"all 2, not \[2, 3\]"),
        ("embed", ("a", {"max_length": 99}), "^`max_length=99`: the model reads 3 to 32"),
        ("features", ("a", {"layers": "7"}), "^`layers='7'`: the model has the layers 0"),
        ("features", ("a", {"pool": "mean"}), NO_POOL),
        ("classify", ("a", {"max_length": "x"}), r"classify\(\): unknown setting 'max_length'"),
        ("classify", ("a", {"text_pairs": "x"}), "did you mean 'text_pair'"),
        ("fill", ("a", {"top": "x"}), r"fill\(\): top = 'x': expected a whole number"),
        ("embed", ("a", {"normalize": 1}), "normalize = 1: expected True or False"),
    ],
)
def test_settings_and_arguments_that_do_not_fit_are_named_as_python_does(
    runs, method, arguments, message
):
    *texts, last = arguments
    given, settings = (texts, last) if isinstance(last, dict) else (arguments, {})
    with pytest.raises(ValueError, match=message):
        getattr(bertsmith.load(runs / CALLS[method][0]), method)(*given, **settings)


def test_load_names_its_arguments(runs):
    with pytest.raises(ValueError, match="^`precision='half'`: known are"):
        bertsmith.load(runs / "books", precision="half")
    with pytest.raises(ValueError, match="^`device='abacus'`: use cpu, cuda"):
        bertsmith.load(runs / "books", device="abacus")


def test_features_are_those_of_the_hidden_states(runs):
    model = bertsmith.load(runs / "books")
    vectors = model.features("the cats sat", layers="all", pool="none")
    assert vectors.shape == (3, 3, 16) and vectors.dtype == np.float32
    rows = model.tokenizer.rows(["the cats sat"])
    with torch.inference_mode():
        encoder = model.pytorch("BareModel").model.encoder
        states = encoder(torch.from_numpy(rows.ids)[None], all_layers=True)
    expected = torch.stack([s[0] for s in states], dim=1)
    np.testing.assert_allclose(vectors, expected[[1, 2, 4]], atol=1e-5)  # cat ##s: the first piece
    pieces = model.features(["the cats sat", "", ["a", "mat"]], layers="0,1", align="pieces")
    assert [part.shape for part in pieces] == [(4, 32), (0, 32), (2, 32)]
    mean = model.features("the cats sat", align="mean")
    np.testing.assert_allclose(mean[1], expected[2:4, -1].mean(dim=0), atol=1e-5)


def test_embed_takes_settings(runs):
    model = bertsmith.load(runs / "pairs")
    vector = model.embed("the cat", pool="cls", normalize=True)
    assert vector.dtype == np.float32 and model.embed([]).shape == (0, 16)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert not np.allclose(model.embed("the cat"), model.embed("the cat", prompt="a film "))


def examples_of(text):
    """The lines of a docstring that call `bertsmith.load`."""
    return re.findall(
        r"^ {4,}((?:vectors = )?bertsmith\.load\(\"runs/.*)$", text or "", re.MULTILINE
    )


def test_the_examples_of_the_help_run(runs, tmp_path, monkeypatch):
    (tmp_path / "runs").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    for name in CALLS:
        (example,) = examples_of(getattr(Predictor, name).__doc__)
        if name != "tag":  # there may be no entity in it
            exec(example, {"bertsmith": bertsmith})
    lines = bertsmith.__doc__.split("\n")
    model = bertsmith.load("runs/reviews")
    for line in lines:
        if line.startswith("    model.classify(") and '"' in line:
            eval(line.partition("#")[0].strip(), {"model": model})


def test_the_help_of_the_package_fits_five_screens():
    lines = pydoc.plain(pydoc.render_doc(bertsmith)).splitlines()
    assert sum(1 + max(0, len(line) - 1) // 80 for line in lines) <= 200
    assert lines.index("DESCRIPTION") < 6 and "FUNCTIONS" in lines and "CLASSES" not in lines
    for name in set(dir(bertsmith)) - {"__version__"}:
        assert re.search(rf"\b{name}\b", "\n".join(lines)), name


def test_tag_calls_its_argument_text(runs):
    model = bertsmith.load(runs / "ner")
    with pytest.raises(ValueError, match=r"^text\[1\] is a text, but text\[0\] is not"):
        model.tag([["ann"], "saw"])
    with pytest.raises(ValueError, match=r"^text\[1\] is None"):
        model.tag(["ann", None])


def test_choose_needs_no_columns_of_options(runs, tmp_path):
    """A model that transformers trained does not say where its options stood."""
    folder = tmp_path / "foreign"
    shutil.copytree(runs / "swag", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["bertsmith"]
    (folder / "config.json").write_text(json.dumps(config))
    options = ["sat on a mat", "saw"]
    expected = bertsmith.load(runs / "swag").choose("the cat", options)
    model = bertsmith.load(folder)
    assert model.choose("the cat", options) == expected
    assert "choose" in repr(model)


def tune(task="classify", **changes):
    given = {"data": "d", "model": "m", "out": "o", **changes}
    return lambda: bertsmith.finetune(task, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bertsmith.load(3), "load(): model = 3: expected a text or a path"),
        (lambda: bertsmith.load("m", devise="cpu"), "unknown setting 'devise': did you mean 'dev"),
        (lambda: bertsmith.evaluate("m", 3), "evaluate(): data = 3: expected a text or a path"),
        (lambda: bertsmith.predict("m", "a.csv", "./a.csv"), "`out='./a.csv'`: is the input its"),
        (tune("sst2", data=[1]), "finetune(): data = [1]: expected a text or a path"),
        (tune(lable="x"), "finetune(): unknown setting 'lable': did you mean 'label'?"),
        (tune(pooling=1), "unknown setting 'pooling': did you mean 'pool'?"),
        (tune("tag", pool="mean"), "`pool`: without effect on a task of kind 'tag'"),
        (lambda: bertsmith.load(""), "load(): model = '': expected a path; the current folder is"),
        (lambda: bertsmith.pretrain("", "o"), "pretrain(): corpus = '': expected a path"),
        (tune(out=""), "finetune(): out = '': expected a path; the current folder is '.'"),
        (tune(dev=""), "finetune(): dev = '': expected a path"),
        (tune("tag", seeds=np.int64(-3)), "`seeds='-3'`: write 1,2,3 or 1..3"),
        (lambda: bertsmith.pretrain("s", "o", stepz=3), "did you mean 'steps'?"),
        (lambda: bertsmith.pretrain("s", "o", steps="x"), "pretrain(): steps = 'x': expected a wh"),
        (lambda: bertsmith.pretrain("s", "o", dropout=2.0), "`dropout=2.0`: must be in [0, 1)"),
    ],
)
def test_calls_that_cannot_be_are_refused_before_anything_is_opened(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_recipe_is_made_of_a_public_name(tmp_path):
    recipe = bertsmith.PretrainSettings(size="mini", steps=3)
    with pytest.raises(ValueError, match="store: no finished token store"):
        bertsmith.pretrain(tmp_path / "store", tmp_path / "run", recipe, seed=2)
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_numbers(runs):
    predictor = bertsmith.load(runs / "books")
    assert len(predictor.fill("the [MASK] sat", top=np.int64(2))[0]) == 2


def test_a_misspelt_name_of_the_package_is_told_the_nearest():
    with pytest.raises(AttributeError, match="has no attribute 'laod': did you mean 'load'"):
        bertsmith.laod  # noqa: B018
    assert not hasattr(bertsmith, "__wrapped__")


def test_predict_answers_a_file_as_the_command_does(runs, tmp_path):
    model, texts = bertsmith.load(runs / "reviews"), ["a good film", "bad"]
    source, out = write(tmp_path / "new.csv", ["body", *texts]), tmp_path / "answers.jsonl"
    more = {"text": "body", "ensemble": [runs / "reviews"]}  # their mean is that of one
    assert bertsmith.predict(model, source, out, **more) == out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    answers = [(row["body"], row["label"], row["probability"]) for row in rows]
    expected = zip(texts, model.classify(texts), strict=True)
    close(answers, [(text, answer.label, answer.confidence) for text, answer in expected])
    command("predict", runs / "reviews", source, "--out", tmp_path / "o.jsonl", "--text", "body")
    assert (tmp_path / "o.jsonl").read_bytes() == out.read_bytes()
    assert model.model_task.task.text == "text"  # the column was that of this file alone


def test_an_empty_text_is_answered_with_a_note(runs, capsys):
    assert bertsmith.load(runs / "reviews").classify(["", "good"])[0].label in LABELS
    assert capsys.readouterr().err == "1 of 2 texts are empty\n"
