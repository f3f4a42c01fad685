"""`bertsmith finetune`: what it proposes and says, how it reads, and what it refuses."""

import json
import random
import re
import shlex
import shutil

import pytest

from bertsmith.cli.outputs import after_pretraining
from bertsmith.experiments import finetuning

from ..tiny import bertsmith, cli, piece_tokenizer, random_model, write

ANIMALS = ("cat", "dog", "crane", "owl")
SEEDS = "--init-seed 1 --order-seed 1 --dropout-seed 1"
ONE_PASS = ("--epochs", 1, "--threads", 1)


@pytest.fixture
def finetune(made, tmp_path):
    """The words of `bertsmith finetune classify` on a table, which writes to `out`."""

    def words(data, *flags):
        model, out = made / "run", tmp_path / "out"
        return "finetune", "classify", "--model", model, "--data", data, "--out", out, *flags

    return words


def test_what_is_proposed_can_be_done(made, tmp_path, monkeypatch):
    """The commands that runs end with, as they stand, in a folder with the files they name."""
    monkeypatch.chdir(tmp_path)
    run = str(shutil.copytree(made / "run", tmp_path / "my run"))
    rows = [(f"The {animal} sleeps {n}.", animal) for animal in ANIMALS for n in range(60)]
    write(tmp_path / "labelled.csv", ["text,label", *map(",".join, rows)])
    write(tmp_path / "new.csv", ["text", *(text for text, _ in rows)])
    fill, finetune = (shlex.split(line)[1:] for line in after_pretraining(run).splitlines()[1:])
    assert len(bertsmith(*fill).splitlines()) > 1
    ran = cli(*finetune, "--epochs", 2, "--threads", 1)
    out, told = ran.out.splitlines(), ran.err.splitlines()
    steps = "finetune: 2 epochs of 7 steps, 14 in all; batch 32, rate 0.0006; dev measured once"
    assert ran.code == 0 and steps in ran.err
    lines = [line for line in told if line.startswith("finetune seed 1, step")]
    assert [line.split(":")[0].rpartition(" ")[2] for line in lines] == ["7", "14"]
    number = json.loads((tmp_path / "tuned" / "result.json").read_text())["dev_examples"]
    assert all(re.search(rf": dev accuracy \d\.\d{{4}} of {number} examples$", x) for x in lines)
    kept = r"^finetune seed 1: kept step (7|14) of 14 \(dev accuracy"
    assert any(re.search(kept, line) for line in told)
    best = r"tuned: the model of seed \d after step (7|14) of 14, the best on dev"
    assert re.search(best, out[-4]) and out[-3] == "try next:"
    for command in out[-2:]:
        bertsmith(*shlex.split(command)[1:])
    assert (tmp_path / "answers.csv").exists() and (tmp_path / "tuned" / "report.html").exists()

    figures = bertsmith("evaluate", "tuned", "--data", "labelled.csv").splitlines()
    assert re.fullmatch(r"accuracy +\d\.\d{4} of 240 examples", figures[0])
    assert not any(line.startswith("examples ") for line in figures)  # they are counted above
    words = ("finetune", "classify", "--model", run, "--data", "labelled.csv", *ONE_PASS)
    out = bertsmith(*words, "--out", "two", "--seeds", "1,2", "--max-retries", 0).splitlines()
    mean = next(line for line in out if line.startswith("mean of 2 seeds: "))
    assert "interval" not in mean and "+-" not in mean
    assert mean.endswith(f" ({number} dev examples)")


@pytest.mark.parametrize("flags", ["--tune-thresholds", "--sweep tune_thresholds=true|false"])
def test_a_threshold_for_four_classes(flags, made, refuse, tmp_path):
    says = ("--tune-thresholds", "there are 4 classes", "leave it out")
    refuse(*made.words("finetune", tmp_path / "out"), *flags.split(), says=says)
    assert not (tmp_path / "out").exists()


def test_a_metric_that_does_not_exist_before_the_teacher_works(made, refuse, tmp_path, monkeypatch):
    monkeypatch.setattr(finetuning.Teacher, "open", lambda *_: pytest.fail("the teacher works"))
    words = (*made.words("finetune", tmp_path / "out"), "--teacher", made / "tuned")
    says = ("unknown metric 'acuracy'", "did you mean 'accuracy'")
    refuse(*words, "--metric", "acuracy", says=says)


def test_a_table_without_the_label_column(made, finetune, refuse, tmp_path):
    text = (made / "train.csv").read_text().replace("text,label", "text,animal")
    table = write(tmp_path / "table.csv", text)
    says = (table, "no column 'label' for --label", "name one of its own (columns: text, animal)")
    refuse(*finetune(table, *ONE_PASS), says=says)
    refuse("evaluate", made / "tuned", "--data", table, says=says)
    assert not (tmp_path / "out").exists()


def test_an_unknown_label_in_the_test_file(made, finetune, refuse, tmp_path):
    table = write(tmp_path / "test.csv", ["text,label", "The cat.,cat", "The cow.,cow"])
    says = (f"{table}:3: unknown label 'cow'", "(known: cat, crane, dog, owl)", "correct it")
    refuse("evaluate", made / "tuned", "--data", table, says=says)
    refuse(*finetune(made / "train.csv", "--dev", table, *ONE_PASS), says=says)
    assert not (tmp_path / "out").exists()


def test_rows_without_a_label(made, finetune, refuse, tmp_path):
    table = write(tmp_path / "table.csv", ["text,label", "a cat,cat", "a dog,", "a dog,dog"])
    evaluate = ("evaluate", made / "tuned", "--data", table)
    says = (f"{table}:3: empty label in column 'label'", "with --skip-unlabelled")
    for words in (finetune(table, "--dev", table, *ONE_PASS), evaluate):
        refuse(*words, says=says)
        ran = cli(*words, "--skip-unlabelled")
        assert ran.code == 0 and f"{table}: 1 of 3 rows have no label and are left out" in ran.err
    assert " of 2 examples\n" in ran.out


@pytest.mark.parametrize(
    ("task", "says"),
    [("ner", "for your own files; task ner"), ("tag", "without effect on a task of kind")],
)
def test_no_word_is_without_a_tag(task, says, finetune, refuse, tmp_path):
    words = [task if word == "classify" else word for word in finetune(tmp_path)]
    refuse(*words, "--skip-unlabelled", says=f"--skip-unlabelled: {says}")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--device cuda:99", "--device cuda:99"),
        ("--precision half", "--precision half: known are"),
        ("--max-length 600", "--max-length 600: the model knows"),
        (f"{SEEDS} --seeds 1..3", "are all set: --seeds has no effect"),
    ],
)
def test_what_no_training_can_be_is_refused_before_the_data_is_read(flags, says, finetune, refuse):
    refuse(*finetune("nowhere.csv", *flags.split()), says=says)


def test_a_run_among_the_users_own_files(made, finetune, refuse):
    before = sorted(made.folder.iterdir())
    for data in (made.folder, made / "train.csv"):
        says = "is the folder of the data: name another"
        refuse(*finetune(data, "--out", made.folder), says=says)
    assert sorted(made.folder.iterdir()) == before


def test_the_class_that_f1_is_of(finetune, refuse, tmp_path):
    rows = [
        f"Number {k}: the {animal} sleeps.,{animal}" for k in range(9) for animal in ANIMALS[:2]
    ]
    words = finetune(write(tmp_path / "fraud.csv", ["text,label", *rows]), *ONE_PASS)
    words += ("--metric", "f1")
    last, first = tmp_path / "last", tmp_path / "first"
    ran = cli(*words, "--out", last)
    assert ran.code == 0 and "f1 is that of 'dog', as no class is named as positive" in ran.err
    ran = cli(*words, "--positive", "cat", "--out", first)
    assert ran.code == 0 and "f1 is that of" not in ran.err
    for run, labels in ((last, ["cat", "dog"]), (first, ["dog", "cat"])):
        stored = json.loads((run / "result.json").read_text())
        (_, wrong_0), (wrong_1, right_1) = stored["confusion"]
        assert stored["labels"] == labels
        found = 2 * right_1 + wrong_0 + wrong_1  # of F1: 2 TP / (2 TP + FP + FN)
        assert stored["metrics"]["f1"] == pytest.approx(2 * right_1 / found if found else 0.0)
    says = ["--positive cow: the labels of column 'label'", "cat, dog: name one of two"]
    refuse(*words, "--positive", "cow", says=says)


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """An untrained model of 32 positions, and texts of 60 words whose last says the label."""
    folder, draw = tmp_path_factory.mktemp("made"), random.Random(1)
    tokenizer = piece_tokenizer("the cat dog sat ran on mat .")
    random_model(folder / "model", tokenizer, std=0.1)
    for split, size in (("train", 24), ("dev", 8)):
        rows = []
        for k in range(size):
            words = [*draw.choices(["sat", "ran", "on", "mat", "."], k=59), ("cat", "dog")[k % 2]]
            rows.append(json.dumps({"text": " ".join(words), "label": k % 2}))
        write(folder / f"{split}.jsonl", rows)
    return folder


LOSE = "24 of 24 examples have more than 32 tokens and lose their"


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--long-texts windows --doc-stride 20 --pool vote", "24 examples are read in"),
        ("--long-texts head-tail", f"{LOSE} middle: windows or"),
        ("", f"{LOSE} end: windows, head"),
    ],
)
def test_a_model_reads_as_it_was_trained(long_texts, tmp_path, flags, note):
    out, answers, dev = tmp_path / "out", tmp_path / "answers.jsonl", long_texts / "dev.jsonl"
    words = ("finetune", "classify", "--model", long_texts / "model", "--data", long_texts)
    settings = ("--batch-size", 8, "--max-length", 32, *ONE_PASS)
    ran = cli(*words, "--out", out, *settings, *flags.split())
    assert ran.code == 0 and f"train: {note}" in ran.err
    stored = json.loads((out / "config.json").read_text())["bertsmith"]
    assert stored["long_texts"] == (flags.split()[1] if flags else "cut")
    told = cli("predict", out, dev, "--out", answers).err
    assert len(answers.read_text().splitlines()) == 8  # one a text, not one a window
    what = "8 examples are read in" if "windows" in flags else "8 of 8 examples have more than 32"
    assert what in told and ", as in training\n" in told and "--long-texts" not in told
    ran = cli("evaluate", out, "--data", dev, "--json")
    measured = json.loads((out / "result.json").read_text())["metrics"]
    assert json.loads(ran.out)["metrics"] == pytest.approx(measured)
    assert ran.err.count("as in training") == ("windows" not in flags)  # where some is not read


def test_rows_longer_than_the_model_knows_are_refused_with_the_ways_out(
    long_texts, refuse, tmp_path
):
    words = ("--model", long_texts / "model", "--data", long_texts, "--out", tmp_path / "out")
    message = "--max-length 64: the model knows 32 positions: read longer texts with"
    says = (message, "--long-texts windows", "extend-positions")
    refuse("finetune", "classify", *words, "--max-length", 64, says=says)
    # such tasks refuse --long-texts, and need none
    says = (message, "(contexts of questions and tagged sentences are read whole anyway)")
    for task in ("squad1", "ner"):
        refuse("finetune", task, *words, "--max-length", 64, says=says)
