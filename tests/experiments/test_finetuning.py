"""Fine-tuning and evaluation as Python users call them."""

import json
import random
from pathlib import Path

import pytest

from bertsmith.experiments.finetuning import finetune
from bertsmith.inference.evaluation.labelled import evaluate
from bertsmith.inference.predictor import load

from ..tiny import write, write_model

WORDS = {"weather": ("rain", "snow", "wind"), "food": ("bread", "soup", "fish")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with train.csv and dev.csv, in which one word tells the label; and a model."""
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(1)
    labels = [draw.choice([*WORDS]) for _ in range(136)]
    texts = [f"today there was {draw.choice(WORDS[label])} again" for label in labels]
    rows = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
    write(folder / "data" / "train.csv", ["body,label", *rows[:96]])
    write(folder / "data" / "dev.csv", ["body,label", *rows[96:]])
    model = write_model(folder / "model", texts, max_positions=32)
    return {"data": str(folder / "data"), "model": model, "text": "body"}


@pytest.fixture
def data(files):
    return Path(files["data"])


@pytest.fixture(scope="module")
def result(files, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs") / "run")
    quick = {"max_length": 16, "precision": "float32", "threads": 1, "batch_size": 16}
    return finetune(
        "classify", **files, out=out, seeds=range(1, 3), epochs=6, learning_rate=3e-3, **quick
    )


def test_the_result_says_what_the_folder_holds(result):
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
    assert list(plain) == ["metrics", "examples", "notes", "labels", "confusion"]


def test_a_loaded_model_keeps_its_columns(result, data, tmp_path):
    (tmp_path / "other.csv").write_text((data / "dev.csv").read_text().replace("body", "mail"))
    model = load(result.folder)
    assert evaluate(model, tmp_path / "other.csv", text="mail").examples == 40
    assert evaluate(model, data).metrics == pytest.approx(result.metrics)
    message = "^`text_pair='mail'`: the model was trained without a second"
    with pytest.raises(ValueError, match=message):
        evaluate(model, data, text_pair="mail")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, r"^finetune\(\): unknown setting 'epoch': did you mean 'epochs'"),
        ({"epochs": "3"}, r"^finetune\(\): epochs = '3': expected a whole number"),
        ({"max_length": 64}, "^`max_length=64`: the model knows 32 positions"),
        ({"teacher_data": "x"}, "^`teacher_data`: only with `teacher`$"),
        (
            {"freeze_encoder": True},
            "^`freeze_encoder`: without effect on a task of kind 'classify'",
        ),
        ({"seeds": "1.."}, "^`seeds='1..'`: write 1,2,3 or 1..3"),
        ({"seeds": [1, 1]}, "^`seeds='1,1'`: 1 is named twice"),
    ],
)
def test_errors_name_the_argument(files, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        finetune("classify", **files, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
