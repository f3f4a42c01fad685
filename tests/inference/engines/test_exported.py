"""Exported files answer as the model does, where they are of its weights and whole."""

import json

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.inference.engines import choice, exported, runner
from bertsmith.inference.engines.choice import Trial
from bertsmith.inference.engines.exported import PROGRAMS, Program, record_file
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from bertsmith.tasks.vectors import cosines

from ...tiny import bertsmith as run
from ...tiny import piece_tokenizer, random_model, refused, write

TOKENIZER = piece_tokenizer("the cat dog sat ran on mat a b c d e f g h .")
CONFIG = ModelConfig(len(TOKENIZER.vocabulary), 32, 2, 1, 64, max_positions=32)
LINES = ["the cat sat on the mat .", "a dog ran", "b c d e f g h a b c d e f", "the dog ."]
NAMES = {"label_names": ["bad", "good"]}
ONNX = "onnx", "float32"


def made(folder, kind, *outputs, **about):
    return random_model(folder, TOKENIZER, kind, *outputs, config=CONFIG, std=0.3, **about)


def classifier(folder, seed=1):
    return made(folder, SequenceClassifier, 2, seed=seed, **NAMES)


def close(found, expected):
    # float32 sums in another order; numbers are about 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def refusal(folder, engine, precision="auto", **asked):
    with pytest.raises(ValueError) as caught:
        bertsmith.load(folder, engine=engine, precision=precision, **asked)
    return str(caught.value)


class StandIn:
    """PyTorch in place of ONNX Runtime, for machines without it, and "files" that say nothing."""

    def __init__(self):
        self.opened = []

    def session(self, path, precision, threads):
        self.opened.append((path, precision))
        model = bertsmith.load(path.parents[1])
        kind = model.task_kind if model.methods[0] not in ("fill", "embed") else None
        kind = kind or {"fill": "PreTrainingModel", "embed": "BareModel"}[model.methods[0]]
        network = model.pytorch(kind).model

        def run(feeds):
            assert {array.dtype.name for array in feeds.values()} == {"int64"}
            ids, mask, types = (
                torch.from_numpy(feeds[name]).flatten(0, -2)
                for name in ("input_ids", "attention_mask", "token_type_ids")
            )
            rows = ids, types, mask.sum(dim=1)
            with torch.inference_mode():
                if kind in ("BareModel", "PreTrainingModel"):
                    made = network.encoder(*rows)
                    if kind == "PreTrainingModel":
                        made = network.mlm(made, network.shared_table())
                else:
                    made = network(*rows)
            if kind == "SpanPredictor":
                return [made[:, :, k].numpy() for k in (0, 1)]
            return [made.numpy()]

        return run

    def write(self, folder, precision="float32", **changed):
        path = folder / PROGRAMS["onnx"].files[precision]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"graph")
        record = {"precision": precision, "bytes": 5} | changed
        record = {"model_sha256": exported.weight_digests(folder)} | record
        write(record_file(path), json.dumps(record))
        return path


@pytest.fixture
def stand_in(monkeypatch):
    own = StandIn()
    program = Program("numpy", PROGRAMS["onnx"].files, own.session)
    monkeypatch.setitem(PROGRAMS, "onnx", program)
    return own


@pytest.fixture(params=PROGRAMS)
def engine(request):
    for package in ("onnx", PROGRAMS[request.param].package):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return request.param


@pytest.fixture(params=[*PROGRAMS, "stand-in"])
def both(request):
    """A function: a folder's model by our own engine, and exported into the same folder."""
    if request.param == "stand-in":
        engine, write_it = "onnx", request.getfixturevalue("stand_in").write
    else:
        engine = request.param
        for package in ("onnx", PROGRAMS[engine].package):
            pytest.importorskip(package, reason=f"{package} is not installed")
        write_it = lambda folder: bertsmith.export(folder, to=engine)  # noqa: E731

    def models(folder):
        write_it(folder)
        theirs = bertsmith.load(folder, engine=engine)
        assert repr(theirs).endswith(f"cpu, {engine} in float32>")
        return bertsmith.load(folder), theirs

    return models


# What they answer


def test_a_classifier(tmp_path, both):
    ours, theirs = both(classifier(tmp_path / "model"))
    pairs = zip(theirs.classify(LINES), ours.classify(LINES), strict=True)
    for found, expected in pairs:
        assert found.label == expected.label
        assert found.confidence == pytest.approx(expected.confidence, abs=1e-5)
    with pytest.raises(ValueError, match=r"the outputs of its head \(sequence\) alone, not hidden"):
        theirs.embed(LINES)


def test_words(tmp_path, both):
    names = ["O", "B-PER", "I-PER"]
    folder = made(tmp_path / "model", TokenClassifier, 3, label_names=names)
    ours, theirs = both(folder)
    for found, expected in zip(theirs.tag(LINES), ours.tag(LINES), strict=True):
        assert found.tags == expected.tags
        close(found.confidences, expected.confidences)


def test_spans(tmp_path, both):
    ours, theirs = both(made(tmp_path / "model", SpanPredictor, 2))
    asked = ["the dog"] * 4, LINES
    for found, expected in zip(theirs.answer(*asked), ours.answer(*asked), strict=True):
        assert (found.start, found.end) == (expected.start, expected.end)
        assert found.confidence == pytest.approx(expected.confidence, abs=1e-5)


def test_options(tmp_path, both):
    ours, theirs = both(made(tmp_path / "model", OptionScorer, 1))
    asked = LINES[:2], [["a dog .", "the cat ran on", "b"], ["c", "d e f", "the mat"]]
    for found, expected in zip(theirs.choose(*asked), ours.choose(*asked), strict=True):
        close(found.probabilities, expected.probabilities)


def test_masks(tmp_path, both):
    ours, theirs = both(made(tmp_path / "model", PreTrainingModel))
    texts = ["the [MASK] sat on the [MASK] .", "a [MASK]"]
    for found, expected in zip(theirs.fill(texts, 30), ours.fill(texts, 30), strict=True):
        for mine, other in zip(found, expected, strict=True):
            one, two = ({c.id: c.probability for c in mask} for mask in (mine, other))
            assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize("pool", ["mean", "cls", "max", "mean_sqrt_len"])
def test_vectors(tmp_path, both, pool):
    ours, theirs = both(made(tmp_path / "model", BareModel))
    texts = LINES * 40  # several batches
    for prompt in ("", "the cat "):
        asked = {"pool": pool, "prompt": prompt}
        close(theirs.embed(texts, **asked), ours.embed(texts, **asked))


def test_states_of_words(tmp_path, both):
    ours, theirs = both(made(tmp_path / "model", BareModel))
    for align in ("first", "mean", "pieces"):
        found, expected = (model.features(LINES * 40, align=align) for model in (theirs, ours))
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    with pytest.raises(ValueError, match="gives the last layer alone: `layers='last'`"):
        theirs.features(LINES, layers="all")


def test_int8_and_bf16_are_files_of_their_own(tmp_path, engine):
    if engine == "openvino":
        pytest.importorskip("nncf", reason="nncf is not installed")
    folder = made(tmp_path / "model", BareModel)
    texts = write(tmp_path / "texts.txt", LINES)
    exact = bertsmith.load(folder).embed(LINES)
    for precision in (own for own in PROGRAMS[engine].files if own != "float32"):
        bertsmith.export(folder, to=engine, **{precision: True}, dev=texts, max_drop=0.5)
        model = bertsmith.load(folder, engine=engine, precision="auto")
        assert model.processor.precision == precision
        found = model.embed(LINES)
        assert np.abs(found - exact).max() > 1e-4 and cosines(found, exact).min() > 0.8  # so small


def test_the_folder_of_an_export_answers_by_itself(tmp_path, engine):
    folder, out = classifier(tmp_path / "model"), tmp_path / "out"
    expected = bertsmith.load(folder).classify(LINES)
    run("export", folder, "--to", engine, "--out", out)
    texts = write(tmp_path / "texts.txt", LINES)
    run("predict", out, texts, "--out", tmp_path / "answers.jsonl")
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").open()]
    assert [row["label"] for row in found] == [answer.label for answer in expected]
    assert "no weights" in refusal(out, "bertsmith")


def test_the_command_refuses_what_is_not_there(tmp_path, engine):
    folder, texts = classifier(tmp_path / "model"), write(tmp_path / "texts.txt", LINES)
    words = "predict", folder, texts, "--engine", engine, "--out", tmp_path / "a.jsonl"
    line = refused(*words)
    assert (
        f"--engine {engine}: " in line and f"`bertsmith export {folder} --to {engine}` wr" in line
    )
    run("export", folder, "--to", engine)
    run(*words)
    run("evaluate", folder, "--engine", engine, "--data", labelled(tmp_path))
    classifier(folder, seed=2)
    assert "was exported from other weights" in refused(*words)


def labelled(folder):
    return write(folder / "dev.csv", ["text,label", *(f"{line},good" for line in LINES)])


# What is refused, and chosen


def test_an_export_must_be_there_whole_and_of_these_weights(tmp_path, stand_in, monkeypatch):
    folder = classifier(tmp_path / "model")
    again = f"`bertsmith export {folder} --to onnx` replaces it"
    path = folder / "onnx" / "model.onnx"
    absent = refusal(folder, "onnx")
    assert absent == (
        f"{folder}: `engine='onnx'`: {path} is not there, or has no record beside it: "
        f"`bertsmith export {folder} --to onnx` writes it"
    )
    assert "--to onnx --int8` writes it" in refusal(folder, "onnx", "int8")
    stand_in.write(folder, bytes=6)
    assert refusal(folder, "onnx") == f"{folder}: `engine='onnx'`: {path} is damaged: {again}"
    stand_in.write(folder, precision="float32", model_sha256=["0"])
    assert f"{path} was exported from other weights: {again}" in refusal(folder, "onnx")
    write(record_file(path), '{"precision": "int8"}')
    assert f"{path} holds int8: {again}" in refusal(folder, "onnx", "float32")
    monkeypatch.setitem(PROGRAMS, "onnx", PROGRAMS["onnx"]._replace(package="not_there"))
    assert "not_there is not installed: pip install 'bertsmith[onnx]'" in refusal(folder, "onnx")


def test_engines_and_precisions_that_do_not_go_together(tmp_path, stand_in):
    folder = classifier(tmp_path / "model")
    assert refusal(folder, "tensorrt") == (
        "`engine='tensorrt'`: known are auto, bertsmith, pytorch, onnx, openvino"
    )
    said = "`precision='bf16'`: known are auto, float32, int8 of `engine='onnx'`"
    assert refusal(folder, "onnx", "bf16") == said
    narrow = made(tmp_path / "narrow", SequenceClassifier, 2, **NAMES)
    config = json.loads((narrow / "config.json").read_text())
    write(narrow / "config.json", json.dumps(config | {"num_attention_heads": 2}))
    assert refusal(narrow, "bertsmith") == (
        f"{narrow}: `engine='bertsmith'`: its sizes are no multiples of 32"
    )
    assert bertsmith.load(narrow).processor.engine == "pytorch"
    assert "multiples of 32" in refusal(narrow, "auto", "int8")
    stand_in.write(narrow, "int8")
    assert bertsmith.load(narrow, precision="int8").processor.engine == "onnx"


def test_nothing_is_opened_that_does_not_answer(tmp_path, stand_in):
    folder = classifier(tmp_path / "model")
    path = stand_in.write(folder)
    bertsmith.load(folder).classify(LINES)
    assert not stand_in.opened
    model = bertsmith.load(folder, engine="onnx")
    model.classify(LINES)
    assert stand_in.opened == [(path, "float32")]
    assert [own.engine for _, own in model._models] == ["onnx"] and not model._torch


def test_what_was_opened_answers_whatever_becomes_of_the_files(tmp_path, stand_in):
    folder = classifier(tmp_path / "model")
    stand_in.write(folder)
    model = bertsmith.load(folder, engine="onnx")
    expected = model.classify(LINES)
    folder.rename(tmp_path / "before")  # as while a server gets new weights
    assert model.classify(LINES) == expected
    classifier(folder, seed=2)
    assert model.classify(LINES) == expected
    assert "is not there" in refusal(folder, "onnx")


def test_auto_measures_what_was_exported(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(runner, "FEWEST_ROWS", 2)
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    tried = []

    def quickest(exact, count, compute, others):
        tried.append([(own.engine, own.precision) for own in others])
        for own in others:
            if own.engine == "onnx":
                rows = np.arange(2)
                assert choice.deviation(compute(exact, rows), compute(own, rows)) < 1e-4
        return Trial("onnx" if ONNX in tried[-1] else exact.engine, "float32", 2.0)

    monkeypatch.setattr(runner, "quickest", quickest)
    folder = classifier(tmp_path / "model")
    stand_in.write(folder)
    model = bertsmith.load(folder, precision="auto")
    model.classify(LINES)
    assert model.processor.engine == "onnx" and ONNX in tried[0]
    model = bertsmith.load(folder, precision="auto")
    model.classify(LINES)  # as it is kept
    assert model.processor.engine == "onnx" and len(tried) == 1
    assert [own.engine for _, own in model._models] == ["onnx"]
    exact = bertsmith.load(folder).embed(LINES)
    np.testing.assert_array_equal(model.embed(LINES), exact)  # which this file cannot give
    assert len(tried) == 1 and model.processor.engine == "onnx"
    tried.clear()
    stand_in.write(folder, model_sha256=["0"])
    bertsmith.load(folder, precision="auto", device="cpu").classify(LINES)
    assert ONNX not in sum(tried, [])


def test_a_precision_that_nobody_asked_for_is_said(tmp_path, stand_in, capsys):
    folder = classifier(tmp_path / "model")
    stand_in.write(folder)
    stand_in.write(folder, "int8")
    assert bertsmith.load(folder, engine="onnx", precision="auto").processor.precision == "float32"
    assert capsys.readouterr().err == ""
    stand_in.write(folder, bytes=6)
    assert bertsmith.load(folder, engine="onnx", precision="auto").processor.precision == "int8"
    said = capsys.readouterr().err
    assert said.startswith(
        f"{folder}: answers by onnx in int8: {folder}/onnx/model.onnx is damaged"
    )


def test_auto_of_vectors_leaves_out_a_head(tmp_path, stand_in):
    folder = classifier(tmp_path / "model")
    stand_in.write(folder)
    model = bertsmith.load(folder)
    onnx = Processor("cpu", "float32", 1, "onnx")
    assert model.why_not(onnx, model.task_kind) is None
    assert "alone, not hidden states" in model.why_not(onnx, "BareModel")
    assert "last layer alone" in model.why_not(onnx, "BareModel", [0, 2])
    on_gpu = Processor("cuda", "float32", 1, "onnx")
    assert model.why_not(on_gpu) == "cuda is no CPU, on which alone it computes"
