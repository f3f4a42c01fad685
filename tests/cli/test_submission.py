"""`bertsmith predict --submission`: from GLUE's test files to what its server takes."""

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import main
from bertsmith.inference.predictor import Predictor, load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks import answer_files as submission
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

TOKENIZER = Tokenizer(Vocabulary([*SPECIAL, "good", "bad", "old", "new", "film"]))
FIRSTS = ["good film", "bad old film", "new", "film film", "old good new"]
SECONDS = ["new film", "old", "good good", "bad film", "film"]
FILE_NAMES = {"mrpc": "msr_paraphrase_test.txt"}
PAGES = {  # columns of the official files, the texts among others
    "cola": "index|sentence",
    "sst2": "index|sentence",
    "mrpc": "index|#1 ID|#2 ID|#1 String|#2 String",
    "stsb": "index|genre|sentence1|sentence2",
    "qqp": "id|question1|question2",
    "mnli": "index|pairID|sentence1|sentence2",
    "qnli": "index|question|sentence",
    "rte": "index|sentence1|sentence2",
    "wnli": "index|sentence1|sentence2",
}


@pytest.fixture
def run(tmp_path):
    """The folder of a model of random weights that says it was fine-tuned for a task of GLUE."""

    def write(task):
        outputs = len(task.labels) if task.labels else 1
        config = ModelConfig(len(TOKENIZER.vocabulary), 16, 1, 2, 32, max_positions=32)
        generator = torch.Generator().manual_seed(2)
        folder = tmp_path / "run"
        save_model(
            initialize(SequenceClassifier(config, outputs), 0.5, generator),
            TOKENIZER,
            folder,
            label_names=task.labels,
            extra_config={"task": task.name, "kind": task.task_type, "max_length": 32},
            problem_type="regression" if outputs == 1 else "single_label_classification",
        )
        settings = {"task": task.name, "metrics": list(task.metrics)}
        RunFolder(folder).write_settings({"kind": "finetune", "settings": settings})
        return folder

    return write


def write_test_file(path, task, rows):
    names = PAGES[task.name].split("|")
    given = {task.text: FIRSTS, task.text_pair: SECONDS}
    lines = [[given[name][k] if name in given else str(k) for name in names] for k in range(rows)]
    path.write_text("\n".join("\t".join(line) for line in [names, *lines]) + "\n")


@pytest.mark.parametrize(
    ("name", "split", "own_name"),
    [*((name, split, None) for name, split in submission.FILES), ("mrpc", "test", "test.tsv")],
)
def test_from_a_test_file_to_a_submission(name, split, own_name, run, tmp_path, monkeypatch):
    task, (server_name, _) = find_task(name), submission.FILES[name, split]
    monkeypatch.setitem(submission.FILES, (name, split), (server_name, len(FIRSTS)))
    folder = run(task)
    official = {"test": FILE_NAMES.get(name, "test.tsv"), "diagnostic": "diagnostic.tsv"}
    if name == "mnli":
        official |= {"test": "test_matched.tsv", "test_mismatched": "test_mismatched.tsv"}
    file, out = tmp_path / (own_name or official[split]), tmp_path / "upload"
    write_test_file(file, task, len(FIRSTS))
    assert main(["predict", str(folder), str(file), "--submission", "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == [server_name]
    header, *lines = (out / server_name).read_text().splitlines()
    model, pairs = load(folder), SECONDS if task.text_pair else None
    if task.labels is None:
        wanted = [f"{min(max(score, 0), 5):.3f}" for score in model.score(FIRSTS, pairs)]
    else:
        wanted = [answer.label for answer in model.classify(FIRSTS, pairs)]
    assert header == "index\tprediction"
    assert lines == [f"{k}\t{answer}" for k, answer in enumerate(wanted)]


def test_a_part_of_the_test_file_is_refused_before_it_is_answered(
    run, tmp_path, monkeypatch, capsys
):
    task = find_task("rte")
    folder, file, out = run(task), tmp_path / "test.tsv", tmp_path / "upload"
    write_test_file(file, task, rows=3)

    def never(*arguments):
        raise AssertionError("it answers")

    monkeypatch.setattr(Predictor, "outputs", never)
    words = ["predict", str(folder), "--submission", "--out", str(out)]
    assert main([*words, str(file)]) == 2
    message = "RTE.tsv: the server wants 3,000 answers, but the input has 3 examples: predict the"
    assert message in capsys.readouterr().err and not out.exists()
    other = file.rename(tmp_path / "new.tsv")
    assert main([*words, str(other)]) == 2
    assert "no submission for task rte: its test files are test.tsv" in capsys.readouterr().err
