"""Fine-tuning and evaluation as Python users call them."""

import csv
import json

import pytest

from bertsmith.experiments.finetuning import finetune
from bertsmith.inference.evaluation import evaluate
from bertsmith.inference.predictor import load

QUICK = {
    "max_length": 16,
    "precision": "float32",
    "threads": 1,
    "batch_size": 16,
    "learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def data(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 96), ("dev", 40)):
        examples = toy.examples(count, len(name))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = zip(examples.texts, examples.labels, strict=True)
            csv.writer(file).writerows(
                [("body", "label"), *((text, examples.label_names[k]) for text, k in rows)]
            )
    return folder


@pytest.fixture(scope="module")
def result(data, model_folder, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs") / "run")
    files = {"data": str(data), "model": model_folder, "out": out, "text": "body"}
    return finetune("classify", **files, seeds=range(1, 3), epochs=6, **QUICK)


def test_the_result_says_what_the_folder_holds(result, data):
    assert set(result.seeds) == {1, 2} and result.best_seed in (1, 2)
    assert result.metrics == result.seeds[result.best_seed] and result.dev_examples == 40
    accuracies = [metrics["accuracy"] for metrics in result.seeds.values()]
    assert result.mean["accuracy"] == pytest.approx(sum(accuracies) / 2)
    assert repr(result) == (
        f"FinetuneResult({str(result.folder)!r}: accuracy {result.metrics['accuracy']:.4f}, best of"
        " 2 seeds)"
    )
    stored = json.loads((result.folder / "result.json").read_text())
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["metrics"] == stored["metrics"] and plain["seeds"] == stored["seeds"]
    record = json.loads((result.folder / "run.json").read_text())
    assert record["settings"]["text"] == "body" and record["settings"]["epochs"] == 6


def test_an_evaluation_measures_what_was_measured(result, data):
    found = evaluate(result.folder, data / "dev.csv")
    assert found.metrics == pytest.approx(result.metrics) and found.examples == 40
    assert repr(found).startswith(f"Evaluation(accuracy {found.metrics['accuracy']:.4f}, ")
    assert repr(found).endswith("; 40 examples)")
    plain = json.loads(json.dumps(found.to_dict()))
    assert list(plain) == ["metrics", "examples", "undefined", "labels", "confusion"]


def test_a_loaded_model_keeps_its_columns(result, data, tmp_path):
    (tmp_path / "other.csv").write_text((data / "dev.csv").read_text().replace("body", "mail"))
    model = load(result.folder)
    assert evaluate(model, tmp_path / "other.csv", text="mail").examples == 40
    assert evaluate(model, data).metrics == pytest.approx(result.metrics)
    with pytest.raises(
        ValueError, match="^text_pair='mail': the model was trained without a second"
    ):
        evaluate(model, data, text_pair="mail")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, r"^finetune\(\): unknown setting 'epoch': did you mean 'epochs'"),
        ({"epochs": "3"}, r"^finetune\(\): epochs = '3': expected int"),
        ({"max_length": 64}, "^max_length=64: the model knows 32 positions"),
        ({"teacher_data": "x"}, "^teacher_data=: only with teacher=$"),
        ({"freeze_encoder": True}, "^freeze_encoder=: without effect on a task of kind 'classify'"),
        ({"seeds": "1.."}, "^seeds=1..: write 1,2,3 or 1..3"),
        ({"seeds": [1, 1]}, "^seeds=1,1: 1 is named twice"),
    ],
)
def test_errors_name_the_argument(data, model_folder, tmp_path, settings, message):
    files = {"data": data, "model": model_folder, "out": tmp_path / "run", "text": "body"}
    with pytest.raises(ValueError, match=message):
        finetune("classify", **files, **settings)
    assert not (tmp_path / "run").exists()
