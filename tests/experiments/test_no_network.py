"""The line without a network: its numbers by hand, its metrics on what overlap and words tell."""

import json
import math
import random

import numpy as np
import pytest

from bertsmith.experiments.no_network import measure_no_network, overlap_features
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import find_task

from ..tiny import bertsmith, refused, write

WORDS = [f"word{k}" for k in range(200)]


def pairs(*texts):
    first, second = zip(*texts, strict=True)
    return Examples([*first], [*second], None, (), "made", [*range(1, len(first) + 1)])


def test_the_numbers_of_a_pair():
    """Of "a cat sat" and "a cat ran off" two words of five are shared, and one pair of four."""
    ((row,),) = (overlap_features(pairs(("a cat sat", "A cat ran off"))),)
    assert row.shape == (1, 14)
    words, weighted, bigrams, runs = row[0, :12].reshape(4, 3)
    assert words == pytest.approx([2 / 5, 2 / 3, 2 / 4])
    # of two texts both have the shared words: idf log(3 / 3)
    assert weighted == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert bigrams == pytest.approx([1 / 4, 1 / 2, 1 / 3])
    # " a ", " cat" and "cat " beside " sat" and "sat ", or " ran", "ran ", " off" and "off "
    assert runs == pytest.approx([3 / 9, 3 / 5, 3 / 7])
    assert row[0, 12] == pytest.approx(math.log(4 / 5)) and row[0, 13] == 0


def test_a_negation_in_one_text_alone_is_seen():
    texts = [("he sings", "he doesn't sing"), ("nobody sings", "he never sings"), ("a", "b")]
    (rows,) = overlap_features(pairs(*texts))
    assert rows[:, 13].tolist() == [1, 0, 0]
    assert np.isfinite(overlap_features(pairs(("", "!"), ("a", "")))[0]).all()


def drawn(draw):
    return " ".join(draw.choice(WORDS) for _ in range(8))


def glue_pairs(path, count, seed):
    """Pairs of MRPC's columns: a paraphrase shares most of its words."""
    draw, lines = random.Random(seed), ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for number in range(count):
        first = drawn(draw)
        words = first.split()
        other = " ".join([*words[:6], "new", "end"]) if number % 2 else drawn(draw)
        lines.append(f"{number % 2}\t1\t2\t{first}\t{other}")
    return write(path, lines)


def test_pairs_are_told_by_their_overlap(tmp_path):
    folder = tmp_path / "MRPC"
    glue_pairs(folder / "msr_paraphrase_train.txt", 100, 1)
    glue_pairs(folder / "msr_paraphrase_test.txt", 40, 2)
    found = json.loads(bertsmith("baseline", "mrpc", "--data", folder, "--json"))
    assert found["metrics"] == {"f1": 1.0, "accuracy": 1.0}
    assert (found["examples"], found["train_examples"], found["task"]) == (40, 100, "mrpc")
    assert found == measure_no_network(find_task("mrpc"), folder)


def test_scores_stay_within_the_bounds_of_the_task(tmp_path):
    draw, lines = random.Random(1), ["index\tsentence1\tsentence2\tscore"]
    for number in range(60):
        words, shared = drawn(draw).split(), number % 9
        other = [*words[:shared], *drawn(draw).split()[shared:]]
        lines.append(f"{number}\t{' '.join(words)}\t{' '.join(other)}\t{min(5.0, shared * 0.7)}")
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.tsv", lines)
    metrics = measure_no_network(find_task("stsb"), tmp_path)["metrics"]
    assert metrics["spearman"] > 0.95


def test_single_texts_of_own_files_are_told_by_their_words(tmp_path):
    draw, files = random.Random(2), [tmp_path / "train.csv", tmp_path / "test.csv"]
    for file in files:
        rows = [f"{drawn(draw)} {('bad', 'fine')[k % 2]},{k % 2}" for k in range(300)]
        write(file, ["body,stars", *rows])
    words = ("baseline", "classify", "--data", files[0], "--text", "body", "--label", "stars")
    shown = bertsmith(*words, "--dev", files[1], "--json")
    assert json.loads(shown)["metrics"]["accuracy"] > 0.95  # chance is 0.5
    assert "train.csv: one file: name another one to measure on with --dev" in refused(*words)
    line = refused(*words, "--dev", tmp_path / "no.csv")
    assert "no.csv: no such file or folder" in line and "--data" not in line


def test_mnli_has_two_dev_sets(tmp_path):
    lines = ["sentence1\tsentence2\tgold_label"]
    for k in range(30):
        lines.append(f"a b c\t{('a b c', 'not a b c', 'x y z')[k % 3]}\t" + (
            "entailment", "contradiction", "neutral")[k % 3])  # fmt: skip
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / f"{name}.tsv", lines)
    found = measure_no_network(find_task("mnli"), tmp_path)
    assert {name: own["accuracy"] for name, own in found["splits"].items()} == {
        "dev": 1.0,
        "dev_mismatched": 1.0,
    }


def test_what_has_no_such_line_is_refused(tmp_path):
    assert "of kind 'choice'" in refused("baseline", "swag", "--data", tmp_path)
    line = refused("baseline", "mrpc", "--data", tmp_path, "--text", "x")
    assert (
        "--text: for your own files; task mrpc knows its columns, task classify reads those" in line
    )
    assert "no training file; looked" in refused("baseline", "mrpc", "--data", tmp_path)
    line = refused("baseline", "regress", "--data", tmp_path, "--positive", "1")
    assert "--positive: without effect on a task of kind 'regress'" in line
    assert "--separator" in refused("baseline", "classify", "--data", tmp_path, "--separator", ";")


def test_its_help_has_the_columns_that_it_reads_alone():
    shown = bertsmith("baseline", "--help-all")
    assert "--text-pair" in shown and "--skip-unlabelled" in shown
    assert "--separator" not in shown and "--options" not in shown
