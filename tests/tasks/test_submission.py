import pytest

from bertsmith.tasks.answer_files import FILES, write_submission
from bertsmith.tasks.task import GLUE, find_task

COLA, STSB, WNLI = (find_task(name) for name in ("cola", "stsb", "wnli"))


def test_every_glue_task_has_its_files(tmp_path):
    """Names and sizes as in jiant's guide to GLUE's server (`wc -l`, less the header)."""
    written = {}
    for task in GLUE:
        for split in task.files:
            if not split.startswith("test"):
                split = "diagnostic"
            if (task.name, split) not in FILES:
                continue
            name, count = FILES[task.name, split]
            answer = task.labels[-1] if task.labels else 2.5
            path = write_submission(task, split, dict.fromkeys(range(count), answer), tmp_path)
            assert path == tmp_path / name
            written[name] = path.read_text().splitlines()
            assert len(written[name]) == count + 1 and written[name][0] == "index\tprediction"
    assert {name: rows[-1] for name, rows in written.items()} == {
        "CoLA.tsv": "1062\t1",
        "SST-2.tsv": "1820\t1",
        "MRPC.tsv": "1724\t1",
        "STS-B.tsv": "1378\t2.500",
        "QQP.tsv": "390964\t1",
        "MNLI-m.tsv": "9795\tneutral",
        "MNLI-mm.tsv": "9846\tneutral",
        "AX.tsv": "1103\tneutral",
        "QNLI.tsv": "5462\tnot_entailment",
        "RTE.tsv": "2999\tnot_entailment",
        "WNLI.tsv": "145\t1",
    }


def test_scores_are_clipped_and_the_order_is_that_of_the_index(tmp_path):
    answers = dict.fromkeys(reversed(range(1_379)), 2.0) | {0: -0.3, 1: 5.01, 2: 3.14159}
    rows = write_submission(STSB, "test", answers, tmp_path).read_text().splitlines()
    assert rows[1:5] == ["0\t0.000", "1\t5.000", "2\t3.142", "3\t2.000"]


BAD = [
    (WNLI, "test", {}, "WNLI.tsv: the server wants 146 answers, 146 are missing, .* index 0"),
    (WNLI, "test", {145: None}, "WNLI.tsv: .* 1 are missing, the first for index 145"),
    (WNLI, "test", {200: "1"}, "WNLI.tsv: .* not 147: index 200 is not in the official test file"),
    (WNLI, "test", {7: "entailment"}, "WNLI.tsv: index 7: label 'entailment' is not one of 0, 1"),
    (WNLI, "dev", {}, "no submission for wnli/dev: did you mean 'wnli/test'?"),
    (find_task("swag"), "test", {}, "no submission for swag/test"),
]


@pytest.mark.parametrize(("task", "split", "changes", "message"), BAD)
def test_a_bad_submission_is_refused_before_a_file_is_written(
    tmp_path, task, split, changes, message
):
    answers = dict.fromkeys(range(146), "0") | changes if changes else {}
    answers = {index: answer for index, answer in answers.items() if answer is not None}
    with pytest.raises(ValueError, match=message) as error:
        write_submission(task, split, answers, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_score_must_be_finite(tmp_path):
    answers = dict.fromkeys(range(1_379), 1.0) | {3: float("nan")}
    with pytest.raises(ValueError, match="STS-B.tsv: index 3: nan is not a finite score"):
        write_submission(STSB, "test", answers, tmp_path)
