"""Models without a run.json, as transformers writes them: what their config.json may say."""

import csv
import json

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import main
from bertsmith.inference.model_task import read_model_task
from bertsmith.model.config import config_for
from bertsmith.model.heads import OptionScorer, SpanPredictor
from bertsmith.model.initialization import initialize
from bertsmith.tasks.task import find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, "ann", "met", "bob", "in", "rome", "who", "where"]))
SWAG = "sent1,sent2,ending0,ending1,ending2,ending3,label\n" + (
    "ann met bob,who,met ann,in rome,bob,who ann,1\nin rome,bob,ann,met,where in,rome met,2\n"
)


def of_transformers(folder, head):
    config = config_for("1x64", len(TOKENIZER.vocabulary), max_positions=32)
    model = head(config, 1 if head is OptionScorer else 2)
    save_model(initialize(model, 0.5, torch.Generator().manual_seed(3)), TOKENIZER, folder)
    tell(folder, None)
    return folder


def tell(folder, ours):
    """Write what is under "bertsmith" in config.json; None: nothing, as transformers does."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "bertsmith": ours}
    if ours is None:
        del config["bertsmith"]
    path.write_text(json.dumps(config))


@pytest.fixture
def chooser(tmp_path):
    return of_transformers(tmp_path / "chooser", OptionScorer)


def evaluate(capsys, folder, data):
    assert main(["evaluate", str(folder), "--data", str(data), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_choice_says_what_is_missing(chooser, tmp_path, capsys):
    (tmp_path / "val.csv").write_text(SWAG)
    out = tmp_path / "out.csv"
    for ours in (None, {"kind": "choice", "task": "choice"}):
        tell(chooser, ours)
        for command in (
            ["evaluate", str(chooser), "--data", str(tmp_path / "val.csv")],
            ["predict", str(chooser), str(tmp_path / "val.csv"), "--out", str(out)],
        ):
            assert main(command) == 2
            message = capsys.readouterr().err.splitlines()[-1]
            assert "nothing says which columns its options are: write into config.json" in message
            assert '"bertsmith": {"task": "swag"}' in message and str(chooser) in message


def test_a_choice_answers_once_its_config_names_the_options(chooser, tmp_path, capsys):
    (tmp_path / "val.csv").write_text(SWAG)
    tell(chooser, {"task": "swag"})
    assert read_model_task(chooser).task == find_task("swag")
    result = evaluate(capsys, chooser, tmp_path / "val.csv")
    assert result["examples"] == 2

    own = {"text": "sent1", "text_pair": "sent2", "options": [f"ending{k}" for k in range(4)]}
    tell(chooser, own)
    assert read_model_task(chooser).task == own_task(
        "choice", "sent1", "sent2", "label", options=tuple(own["options"])
    )
    out = tmp_path / "out.csv"
    assert main(["predict", str(chooser), str(tmp_path / "val.csv"), "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = [row["predicted_label"] == row["label"] for row in rows]
    assert sum(right) / 2 == result["metrics"]["accuracy"]


def test_the_run_goes_before_its_config(chooser):
    """A run of ours writes its task into both; who edits one of them is not to be guessed."""
    tell(chooser, {"task": "codah"})
    RunFolder(chooser).write_settings({"kind": "finetune", "settings": {"task": "swag"}})
    assert read_model_task(chooser).task == find_task("swag")


def test_a_model_of_questions_may_be_told_that_some_have_no_answer(tmp_path, capsys):
    answerer = of_transformers(tmp_path / "answerer", SpanPredictor)
    contexts = [("q0", "ann met bob in rome", ["bob"]), ("q1", "bob met ann", [])]
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": name,
                    "question": "who",
                    "answers": [{"text": a, "answer_start": context.index(a)} for a in answers],
                }
            ],
        }
        for name, context, answers in contexts
    ]
    data = tmp_path / "dev.json"
    data.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    result = evaluate(capsys, answerer, data)
    (reason,) = result["undefined"].values()
    assert 'write "bertsmith": {"task": "squad2"} into its config.json' in reason
    assert result["metrics"]["no_answer_exact_match"] == 0
    assert main(["evaluate", str(answerer), "--data", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "no_answer_exact_match 0.0000  (no value: the model was not made for" in shown

    tell(answerer, {"task": "squad2", "thresholds": {"null_threshold": -1e6}})
    result = evaluate(capsys, answerer, data)
    assert result["undefined"] == {} and result["metrics"]["no_answer_exact_match"] == 1
    out = tmp_path / "out.json"
    assert main(["predict", str(answerer), str(data), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"q0": "", "q1": ""}

    tell(answerer, {"task": "squad2"})
    assert main(["predict", str(answerer), str(data), "--out", str(out)]) == 0
    odds = json.loads((tmp_path / "out.null_odds.json").read_text())
    answers = json.loads(out.read_text())
    assert all((answers[name] == "") == (odds[name] > 0) for name in ("q0", "q1"))
