"""Exported files against the model: every head, the gate, the command, other programs."""

import json
import shutil
import subprocess
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import bertsmith
from bertsmith.inference.engines.exported import input_names, record_file
from bertsmith.inference.export import export as exporting
from bertsmith.inference.export import targets
from bertsmith.inference.export.comparison import ExportRefused, ExportReport, check_report
from bertsmith.inference.export.export import rank_products
from bertsmith.inference.export.graph import onnx_model
from bertsmith.inference.export.subject import find_subject
from bertsmith.inference.export.targets import TARGETS
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    FrozenTagger,
    OptionScorer,
    PreTrainingModel,
    ReplacedTokenDetector,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)

from ...tiny import bertsmith as run
from ...tiny import contents, piece_tokenizer, random_model, refused, write

TOKENIZER = piece_tokenizer("the cat dog sat ran on mat a b c d e f g h .")
SIZE = len(TOKENIZER.vocabulary)
NAMES = ["bad", "good", "none"]
HEADS = {  # name: class, outputs, what its config.json says of them
    "encoder": (BareModel, (), {}),
    "masked-lm": (PreTrainingModel, (), {}),
    "sequence": (SequenceClassifier, (3,), {"label_names": NAMES}),
    "choice": (OptionScorer, (1,), {}),
    "token": (TokenClassifier, (3,), {"label_names": ["O", "B-PER", "I-PER"]}),
    "span": (SpanPredictor, (2,), {}),
}
VARIANTS = {
    "bert": {},
    "tanh": {"activation": "gelu_tanh"},
    "modern": {"pre_norm": True, "gated": True},
    "causal": {"causal": True},
    "distilbert": {"family": "distilbert", "type_vocab_size": 0},
    "electra": {"family": "electra", "embedding_size": 8},
}
PLAIN = [("bert", head) for head in HEADS]
OTHERS = [
    pytest.param(name, head, marks=pytest.mark.slow)
    for name in VARIANTS
    if name != "bert"
    for head in ("sequence", "masked-lm")
]
LINES = ["the cat sat on the mat .", "a dog ran", "b c d e f g h a b c d e f", "the dog ."]


def made(folder, head="sequence", variant="bert", std=0.2, **written):
    kind, outputs, about = HEADS[head]
    config = ModelConfig(SIZE, 32, 2, 2, 64, max_positions=32, **VARIANTS[variant])
    about = about | written
    return random_model(folder, TOKENIZER, kind, *outputs, config=config, std=std, **about)


@pytest.fixture(params=TARGETS)
def target(request):
    for package in TARGETS[request.param].packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    return TARGETS[request.param]


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_is_not_installed_names_its_own_extra(tmp_path, monkeypatch, name):
    """OpenVINO's extra has the package `onnx`, too."""
    monkeypatch.setattr(targets, "find_spec", lambda package: None)
    line = refused("export", made(tmp_path / "model"), "--to", name, "--out", tmp_path / "out")
    assert line.endswith(f"onnx is not installed: pip install 'bertsmith[{name}]'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("drop", ["nan", "-0.1", "inf"])
def test_a_drop_that_no_loss_exceeds_is_refused(tmp_path, drop):
    line = refused("export", made(tmp_path / "model"), "--to", "onnx", "--max-drop", drop)
    assert line.endswith(f"--max-drop {drop}: must be at least 0, and finite")


@pytest.fixture
def reviews(tmp_path):
    """Labels that the model of `made` itself gives, but for the last."""
    folder = made(tmp_path / "model")
    texts = [f"{first} {second}" for first in LINES for second in LINES]
    labels = [answer.label for answer in bertsmith.load(folder).classify(texts)]
    labels[-1] = next(name for name in NAMES if name != labels[-1])
    rows = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
    return folder, write(tmp_path / "dev.csv", ["text,label", *rows])


@pytest.mark.parametrize(("variant", "head"), PLAIN + OTHERS)
def test_a_graph_computes_what_the_model_does(tmp_path, target, variant, head):
    subject = find_subject(bertsmith.load(made(tmp_path, head, variant)), None)
    path = target.program.path(tmp_path / "out", "float32")
    target.write(
        onnx_model(subject.tensors(), subject.predictor.config, head), path, "float32", (), ()
    )
    session = target.program.open(path, "float32", 1)
    expected = subject.original()
    # float32 sums in another order; outputs are about 1
    np.testing.assert_allclose(subject.outputs(session), expected, rtol=1e-5, atol=1e-5)
    per_token = len(subject.rows.ids) if subject.places is None else len(subject.places)
    assert len(expected) == (len(subject.rows) if head in ("sequence", "choice") else per_token)


def test_options_are_a_dimension(tmp_path, target):
    subject = find_subject(bertsmith.load(made(tmp_path, "choice")), None)
    path = target.program.path(tmp_path / "out", "float32")
    model = onnx_model(subject.tensors(), subject.predictor.config, "choice")
    target.write(model, path, "float32", (), ())
    ids = np.random.default_rng(1).integers(5, SIZE, (2, 3, 7))
    feeds = {name: ids * 0 for name in input_names(subject.predictor.config)}
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (logits,) = target.program.open(path, "float32", 1)(feeds)
    rows = torch.from_numpy(ids.reshape(6, 7))
    with torch.inference_mode():
        expected = subject.predictor.pytorch("OptionScorer").model(
            rows, torch.zeros_like(rows), None
        )
    np.testing.assert_allclose(logits, expected.reshape(2, 3), atol=1e-5)


def test_a_folder_of_a_kept_export(reviews, tmp_path, target):
    folder, dev = reviews
    out = tmp_path / "out"
    report = bertsmith.export(folder, out, to=target.name, dev=dev)
    assert report.agreement == 1 and report.metrics["accuracy"]["first"] == 15 / 16
    assert report.metrics["accuracy"]["difference"] == report.drop == 0
    stored = json.loads(record_file(out / report.file).read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert (out / report.file).is_file() and stored["examples"] == 16
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json",
                     "vocab.txt", target.name}  # fmt: skip
    assert json.loads((out / "config.json").read_text())["id2label"]["1"] == "good"
    again = refused("export", folder, "--to", target.name, "--out", out)
    assert "not empty" in again


def test_an_export_into_the_models_folder(reviews, tmp_path, target):
    folder, dev = reviews
    before = contents(folder)
    for _ in range(2):  # what is there is replaced
        said = run("export", folder, "--to", target.name, "--dev", dev)
    file = target.program.path(folder, "float32")
    assert said.startswith(f"{file}: ")
    beside = {one.name for one in file.parent.iterdir()} - {file.name, record_file(file).name}
    assert beside == ({"openvino_model.bin"} if target.name == "openvino" else set())
    stored = json.loads(record_file(file).read_text())
    assert stored["bytes"] == sum(one.stat().st_size for one in file.parent.iterdir()) - (
        record_file(file).stat().st_size
    )
    assert stored["model_sha256"] == [sha256(before["model.safetensors"]).hexdigest()]
    shutil.rmtree(file.parent)
    assert contents(folder) == before


def test_a_refused_export_leaves_the_models_folder(reviews, tmp_path, target, monkeypatch):
    folder, dev = reviews
    bertsmith.export(folder, to=target.name, dev=dev)
    before = contents(folder)

    def gate(report, scale, max_drop):
        raise ExportRefused("too far off")

    monkeypatch.setattr(exporting, "check_report", gate)
    with pytest.raises(ExportRefused):
        bertsmith.export(folder, to=target.name, dev=dev)
    assert contents(folder) == before


def test_int8_keeps_layers_in_float_until_it_passes(reviews, tmp_path, target, monkeypatch):
    folder, dev = reviews
    seen = []

    def gate(report, scale, max_drop):
        seen.append(report.kept_in_float)
        if len(seen) < 3:
            raise ExportRefused("too far off")

    monkeypatch.setattr(exporting, "check_report", gate)
    report = bertsmith.export(folder, tmp_path / "out", to=target.name, int8=True, dev=dev)
    assert seen[0] == () and len(seen[1]) == 1 and report.precision == "int8"
    assert sorted(seen[2]) == [f"bert.encoder.layer.{n}.output.dense" for n in (0, 1)]
    assert report.kept_in_float == seen[2] and seen[1][0] in seen[2]
    assert report.agreement > 0.8  # a tiny random model
    assert "kept in float: bert.encoder.layer" in "\n".join(report.lines())


def test_a_damaged_export_is_refused_and_nothing_kept(reviews, tmp_path, target, monkeypatch):
    folder, dev = reviews

    def damaged(tensors, config, head):
        name = "bert.encoder.layer.1.output.dense.weight"
        return onnx_model(dict(tensors) | {name: 1.01 * tensors[name]}, config, head)

    monkeypatch.setattr(exporting, "onnx_model", damaged)
    for given in (dev, None):
        with pytest.raises(ExportRefused, match="the file is not this model; nothing was kept"):
            bertsmith.export(folder, tmp_path / "out", to=target.name, dev=given)
    monkeypatch.setattr(
        exporting,
        "onnx_model",
        lambda tensors, *more: onnx_model(
            {n: -x if n == "classifier.weight" else x for n, x in tensors.items()}, *more
        ),
    )
    line = refused(
        *("export", folder, "--to", target.name, "--int8", "--dev", dev, "--out", tmp_path / "out")
    )
    assert "accuracy is" in line and "--max-drop 0.01: nothing was kept" in line
    assert not (tmp_path / "out").exists()


def test_bf16_is_openvinos(tmp_path):
    pytest.importorskip("openvino", reason="openvino is not installed")
    pytest.importorskip("nncf", reason="nncf is not installed")
    folder = made(tmp_path / "model", "encoder")
    texts, out = write(tmp_path / "texts.txt", LINES), tmp_path / "out"
    said = run("export", folder, "--to", "openvino", "--bf16", "--dev", texts, "--out", out)
    assert "agreement" in said and "INFERENCE_PRECISION_HINT bf16" in said
    record = json.loads((out / "openvino" / "openvino_model.json").read_text())
    assert record["agreement"] > 0.99


@pytest.mark.parametrize("head", ["masked-lm", "encoder", "sequence", "token"])
def test_texts_without_labels(tmp_path, target, head):
    folder, out = made(tmp_path / "model", head), tmp_path / "out"
    if head != "token":
        texts = write(tmp_path / "texts.txt", LINES)
    else:
        texts = write(tmp_path / "words.conll", [f"{word} O" for word in LINES[0].split()])
    report = bertsmith.export(folder, out, to=target.name, dev=texts)
    assert report.agreement == pytest.approx(1) and report.compared_on == str(texts)
    assert report.largest_difference < 1e-5 and (report.metrics is None) == (head != "token")


def test_labelled_data_of_other_tasks(tmp_path, target):
    answer = {"text": "cat", "answer_start": 4}
    asked = {"id": "1", "question": "the dog", "answers": [answer]}
    paragraph = {"context": LINES[0], "qas": [asked, asked | {"id": "2"}]}
    squad = {"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    questions = write(tmp_path / "dev.json", json.dumps(squad))
    config = ModelConfig(SIZE, 32, 2, 2, 64, max_positions=32)
    scorer = random_model(
        tmp_path / "scorer", TOKENIZER, SequenceClassifier, 1, config=config,
        problem_type="regression",
    )  # fmt: skip
    scores = write(tmp_path / "dev.csv", ["text,label", *(f"{x},{len(x)}" for x in LINES)])
    pairs = (made(tmp_path / "span", "span"), questions, "answer_f1"), (scorer, scores, "pearson")
    for folder, dev, metric in pairs:
        report = bertsmith.export(folder, tmp_path / metric, to=target.name, dev=dev)
        assert next(iter(report.metrics)) == metric and report.agreement == 1
        assert report.drop == pytest.approx(0, abs=1e-5)


def test_a_run_knows_its_dev_set(reviews, tmp_path, target):
    folder, dev = reviews
    tuned = tmp_path / "run"
    run(*("finetune", "classify", "--data", dev, "--dev", dev, "--model", folder, "--epochs", 1),
        *("--out", tuned, "--threads", 1, "--max-retries", 0))  # fmt: skip
    report = bertsmith.export(tuned, tmp_path / "out", to=target.name)
    assert report.compared_on == str(dev) and "accuracy" in report.metrics


def test_the_product_with_outliers_is_ranked_first(tmp_path):
    target = TARGETS["onnx"]
    for package in target.packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    subject = find_subject(bertsmith.load(made(tmp_path)), None)
    tensors = subject.tensors()
    # one input of the second layer's output is far above the others, and nothing reads it
    bias, weight = (f"bert.encoder.layer.1.{name}" for name in ("intermediate.dense.bias",
                                                                "output.dense.weight"))  # fmt: skip
    tensors[bias], tensors[weight] = tensors[bias].copy(), tensors[weight].copy()
    tensors[bias][5], tensors[weight][:, 5] = 1000.0, 0.0
    graph = onnx_model(tensors, subject.predictor.config, "sequence")
    ranked = rank_products(target, graph, subject.feeds(subject.rows))
    assert ranked[0] == "bert.encoder.layer.1.output.dense" and len(ranked) == 12


def report_of(**changed):
    fields = {"file": "f", "format": "onnx", "precision": "int8", "compared_on": "dev"}
    fields |= {"examples": 9, "agreement": 0.9, "largest_difference": 0.5, "metrics": None}
    fields |= {"bytes": 1, "model_sha256": [], "speed": {}, "threads": 1}
    return ExportReport(**fields | changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "agreement is 0.1000 worse in int8"),
        ({"metrics": {"accuracy": {"difference": -0.02}}}, "accuracy is 0.0200 worse"),
        ({"metrics": {"mse": {"difference": 0.02, "less_is_better": True}}}, "mse is 0.0200"),
        ({"metrics": {"accuracy": {"difference": 0.02}}}, None),
        ({"agreement": None}, None),
        ({"largest_difference": float("nan")}, "no numbers"),
        ({"precision": "float32", "agreement": None}, "not this model"),
    ],
)
def test_the_gate(changed, says):
    if says is None:
        check_report(report_of(**changed), 1.0, 0.01)
        return
    with pytest.raises(ExportRefused, match=says):
        check_report(report_of(**changed), 1.0, 0.01)


def test_what_is_refused_before_any_work(tmp_path, target):
    folder, out = made(tmp_path / "model"), tmp_path / "out"
    base = ["export", folder, "--to", target.name, "--out", out]
    assert "int8 must be tried on texts" in refused(*base, "--int8")
    assert "--int8" in refused(*base, "--int8", "--bf16")
    if target.name == "onnx":
        assert "no bf16 products on a CPU" in refused(*base, "--bf16")
    assert not out.exists()


def test_the_dev_set_of_training_is_read_as_it_was_then(tmp_path):
    """Rows without a label are left out again, and parts of a parquet are found again."""
    rows = [f"{LINES[k % 4]} {'abcdefgh'[k // 4]},{NAMES[k % 3]}" for k in range(30)]
    train = write(tmp_path / "train.csv", ["text,label", *rows, "the cat,"])
    made_of = {"task": "classify", "text": "text", "label": "label", "data": str(train)}
    split = made_of | {"dev": "10% of train", "skip_unlabelled": True}
    subject = find_subject(bertsmith.load(made(tmp_path / "split", run=split)), None)
    assert subject.source == f"10% of train, {train}" and len(subject.rows) == 3
    table = pa.table({"text": LINES, "label": [NAMES[k % 3] for k in range(4)]})
    pq.write_table(table, tmp_path / "validation-00000-of-00001.parquet")
    found = made_of | {"dev": str(tmp_path / "validation-*.parquet")}
    subject = find_subject(bertsmith.load(made(tmp_path / "found", run=found)), None)
    assert subject.source == found["dev"] and len(subject.rows) == 4


def test_an_lstm_is_refused_by_name(tmp_path):
    config = ModelConfig(SIZE, 32, 2, 2, 64, max_positions=32)
    folder = random_model(
        tmp_path, TOKENIZER, FrozenTagger, 3, config=config, label_names=["O", "B-X", "I-X"]
    )
    with pytest.raises(ValueError, match="an LSTM reads its layers"):
        find_subject(bertsmith.load(folder), None)


def test_an_electra_detector_is_a_bare_encoder(tmp_path):
    config = ModelConfig(SIZE, 32, 2, 2, 64, max_positions=32, **VARIANTS["electra"])
    folder = random_model(tmp_path, TOKENIZER, ReplacedTokenDetector, config=config)
    assert find_subject(bertsmith.load(folder), None).head == "encoder"


def test_an_absent_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.export.targets.find_spec", lambda name: None)
    base = ["export", tmp_path, "--out", tmp_path / "out", "--to"]
    assert "onnx is not installed: pip install 'bertsmith[onnx]'" in refused(*base, "onnx")
    with pytest.raises(ModuleNotFoundError, match=r"bertsmith\[openvino\]"):
        bertsmith.export(tmp_path, tmp_path / "out", to="openvino")


def test_more_than_a_file_of_onnx_holds(tmp_path, monkeypatch):
    pytest.importorskip("onnx", reason="onnx is not installed")
    monkeypatch.setattr("bertsmith.inference.export.graph.LARGEST", 1000)
    subject = find_subject(bertsmith.load(made(tmp_path)), None)
    with pytest.raises(ValueError, match="2 GB at most"):
        onnx_model(subject.tensors(), subject.predictor.config, "sequence")


# Other programs


@pytest.mark.slow
def test_sentence_transformers_opens_it(tmp_path, target):
    needed = {"onnx": "optimum.onnxruntime", "openvino": "optimum.intel"}[target.name]
    pytest.importorskip(needed, reason=f"{needed} is not installed")
    from sentence_transformers import SentenceTransformer

    folder = made(tmp_path / "model", "encoder")
    bertsmith.export(folder, tmp_path / "out", to=target.name)
    theirs = SentenceTransformer(str(tmp_path / "out"), backend=target.name)
    # OpenVINO may multiply in bf16 there
    vectors, expected = theirs.encode(LINES), bertsmith.load(folder).embed(LINES)
    np.testing.assert_allclose(vectors, expected, atol=1e-5 if target.name == "onnx" else 0.03)


@pytest.mark.slow
def test_transformers_js_opens_it(reviews, tmp_path):
    for package in TARGETS["onnx"].packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    load = 'const { pipeline, env } = require("@huggingface/transformers");'
    try:
        found = subprocess.run(["node", "-e", load], capture_output=True).returncode == 0
    except FileNotFoundError:
        found = False
    if not found:
        pytest.skip("node does not find @huggingface/transformers: set NODE_PATH")
    folder, _ = reviews
    bertsmith.export(folder, tmp_path / "out", to="onnx")
    program = f"""{load}
    env.allowRemoteModels = false; env.localModelPath = {json.dumps(str(tmp_path))};
    pipeline("text-classification", "out", {{dtype: "fp32"}})
      .then(p => p({json.dumps(LINES)})).then(x => console.log(JSON.stringify(x)));"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout), bertsmith.load(folder).classify(LINES)
    for one, other in zip(theirs, ours, strict=True):
        assert one["label"] == other.label
        assert one["score"] == pytest.approx(other.confidence, abs=1e-5)
