"""What users get wrong: one line that names the culprit and the hint, and nothing left behind."""

import errno
import io
import json
import os
import random
import shutil
import signal

import pytest

from bertsmith.base.files import TEMPORARY_PREFIX
from bertsmith.cli.main import main
from bertsmith.experiments import finetuning

ANIMALS = ("cat", "dog", "crane", "owl")
TINY = ("--size", "1x64", "--max-length", 16, "--batch-size", 8, "--threads", 1, "--eval-rows", 8)
STEPS = (*TINY, "--steps", 2, "--num-evals", 1)
LOSSES = ("losses are in nats", "knowing only their counts")  # what they are measured in
ONE_PASS = ("--epochs", 1, "--threads", 1)


def rows(*animals):
    return "".join(f"The {animal} sleeps well.,{animal}\n" for animal in animals)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What a tidy user has: text, vocabulary, store, a run, a classifier and its files."""
    folder = tmp_path_factory.mktemp("made")
    draw = random.Random(7)
    sentences = [f"The {animal} sleeps." for animal in ANIMALS]
    documents = [" ".join(draw.choices(sentences, k=8)) for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "train.csv").write_text("text,label\n" + rows(*ANIMALS * 3))
    (folder / "dev.csv").write_text("text,label\n" + rows(*ANIMALS))
    for words in (
        ("vocab", folder / "text.txt", "--out", folder / "vocab", "--size", 40, "--workers", 1),
        ("corpus", folder / "text.txt", "--vocab", folder / "vocab", "--out", folder / "store",
         "--held-out", 0.2, "--workers", 1),
        ("pretrain", "--corpus", folder / "store", "--out", folder / "run", *STEPS),
        ("finetune", "classify", "--model", folder / "run", "--data", folder / "train.csv",
         "--dev", folder / "dev.csv", "--out", folder / "tuned", *ONE_PASS),
    ):  # fmt: skip
        assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture
def refused(capsys):
    """Run a command that must fail; its message is one line and holds the parts asked for."""

    def run(*words, says, code=2):
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        *before, line = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bertsmith {words[0]}: "), line
        # before it only progress ("label: figures"), the summary of the data and what was decided
        jobs = ("compiling, ", "counting words: ", "merging pieces: ", "pretrain: ", "finetune")
        summary = ("train: ", "dev: ", "exact duplicates: ", "no held-out figures", "warning: ")
        known = (*jobs, "predict: ", *summary, *LOSSES)
        assert all(other.startswith(known) for other in before), before
        for part in says:
            assert str(part) in line, line
        return line

    return run


def from_text(command, made, text, out):
    """The words of `vocab` or `corpus` on a text."""
    own = ("--size", 40) if command == "vocab" else ("--vocab", made / "vocab")
    return (command, text, *own, "--out", out, "--workers", 1)


UNREADABLE = {
    "empty": (b"", ("bad.txt: no text in it", "give files")),
    "blank": (b"\n \n\n", ("bad.txt: no text in it", "give files")),
    "latin": ("A café.\n\nOne more.\n".encode("latin-1"), ("bad.txt:1: not UTF-8", "iconv")),
    "utf16": ("The cat sleeps.\n".encode("utf-16"), ("bad.txt:1: NUL byte", "iconv")),
    "binary": (b"\x7fELF\x02\x01\x00\x00\x00\n\x00", ("bad.txt:1: NUL byte", "leave it out")),
    "10 MB": (b"Short.\n\n" + b"word " * 2_000_000, ("bad.txt:3: line of more", "line breaks")),
}


@pytest.mark.parametrize("command", ["vocab", "corpus"])
@pytest.mark.parametrize("text", UNREADABLE)
def test_text_that_cannot_be_used(command, text, made, refused, tmp_path):
    content, says = UNREADABLE[text]
    (tmp_path / "bad.txt").write_bytes(content)
    refused(*from_text(command, made, tmp_path / "bad.txt", tmp_path / "out"), says=says)
    assert not (tmp_path / "out").exists()


def test_a_corpus_of_one_sentence(made, refused, tmp_path):
    (tmp_path / "one.txt").write_text("The cat sleeps.\n")
    words = from_text("corpus", made, tmp_path / "one.txt", tmp_path / "out")
    refused(*words, says=("one.txt: 1 document(s)", "pairs", "put a blank line between documents"))
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_smaller_than_the_alphabet(refused, tmp_path):
    (tmp_path / "signs.txt").write_text(" ".join(map(chr, range(0x4E00, 0x4E00 + 200))))
    words = ("vocab", tmp_path / "signs.txt", "--out", tmp_path / "out", "--size", 50)
    refused(*words, "--workers", 1, says=("50 is too small", "--size 205 or more"))
    assert not (tmp_path / "out").exists()


def test_a_store_built_with_another_vocabulary(made, refused, tmp_path):
    other, store = tmp_path / "vocab", tmp_path / "store"
    assert main(["vocab", str(made / "dev.csv"), "--out", str(other), "--size", "30"]) == 0
    assert main([str(w) for w in from_text("corpus", tmp_path, made / "text.txt", store)]) == 0
    out = tmp_path / "out"
    says = (made / "run", "vocabulary", "`bertsmith corpus")
    given = ("--model", made / "run", "--out", out, "--steps", 2, "--max-length", 16)
    refused("pretrain", "--corpus", store, *given, says=says)
    shape = ("--size", "2x64", *given)
    refused("pretrain", "--corpus", store, *shape, says=("size: fixed by the model", "leave it"))
    refused("evaluate", made / "run", "--data", store, says=(store, "--vocab"))
    shutil.copytree(made / "store", tmp_path / "mixed")
    shutil.copytree(other, tmp_path / "mixed", dirs_exist_ok=True)
    says = (tmp_path / "mixed" / "vocab.txt", "the manifest says", "`bertsmith corpus")
    refused("pretrain", "--corpus", tmp_path / "mixed", "--out", out, *STEPS, says=says)
    assert not out.exists()


@pytest.mark.parametrize("file", ["train-00000.tokens", "unigram_counts.bin", "manifest.json"])
def test_a_truncated_store(file, made, refused, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(made / "store", store)
    os.truncate(store / file, (store / file).stat().st_size - 10)
    words = ("pretrain", "--corpus", store, "--out", tmp_path / "out", *STEPS)
    refused(*words, says=(store / file, "build it again with `bertsmith corpus`"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["text.txt", "vocab", "absent"])
def test_what_is_no_store_is_not_to_be_removed(wrong, made, refused, tmp_path):
    words = ("pretrain", "--corpus", made / wrong, "--out", tmp_path / "out", *STEPS)
    line = refused(*words, says=(made / wrong, "make one with `bertsmith corpus`"))
    assert "remove" not in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags", [["--tune-thresholds"], ["--sweep", "tune_thresholds=true|false"]]
)
def test_a_threshold_for_four_classes(flags, made, refused, tmp_path):
    words = ("finetune", "classify", "--model", made / "run", "--data", made / "train.csv")
    words += ("--dev", made / "dev.csv")
    says = ("--tune-thresholds", "there are 4 classes", "leave it out")
    refused(*words, "--out", tmp_path / "out", *flags, says=says)
    assert not (tmp_path / "out").exists()


def test_a_metric_that_does_not_exist_before_the_teacher_works(
    made, refused, tmp_path, monkeypatch
):
    def never(*arguments):
        raise AssertionError("the teacher works")

    monkeypatch.setattr(finetuning.Teacher, "open", never)
    words = ("finetune", "classify", "--model", made / "run", "--data", made / "train.csv")
    words += ("--dev", made / "dev.csv")
    words += ("--teacher", made / "tuned", "--metric", "acuracy", "--out", tmp_path / "out")
    refused(*words, says=("unknown metric 'acuracy'", "did you mean 'accuracy'"))


def test_a_run_of_another_size_on_resume(made, refused, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    before = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    words = ("pretrain", "--corpus", made / "store", "--out", run, "--resume", *STEPS)
    says = (run, "size = 1x64, not 2x64", "leave it out on --resume")
    refused(*words, "--size", "2x64", says=says)
    assert before == sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("flags", "recipe", "says"),
    [
        (["--warmup", "0.1"], "", ["unknown flag '--warmup': did you mean '--warmup-"]),
        (["--learn-rate", "1e-3"], "", ["'--learn-rate': did you mean '--learning-rate'?"]),
        ([], "stepz = 3", ["recipe.toml: unknown setting 'stepz': did you mean 'steps'?"]),
        ([], "learn_rate = 0.1", ["unknown setting 'learn_rate': did you mean 'learning_rate'?"]),
        ([], 'steps = "3"', ["recipe.toml: steps = '3': expected int"]),
        ([], "steps 3", ["recipe.toml: not valid TOML", "line 1"]),
        (["--size", "tinny"], "steps = 2", ["unknown size 'tinny'", "known are tiny"]),
        (["--minutes", "1", "--steps", "2"], "", ["exactly one of --steps"]),
        (["--minutes", "nan"], "", ["--minutes nan: must be above 0"]),
        (["--steps", "2", "--max-length", "4"], "", ["pretrain: max_length = 4: a pair"]),
    ],
)
def test_a_misspelt_or_impossible_setting(flags, recipe, says, made, refused, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe)
    words = ("pretrain", "--corpus", made / "store", "--out", tmp_path / "out")
    refused(*words, "--config", tmp_path / "recipe.toml", *flags, says=says)
    assert not (tmp_path / "out").exists()


def test_a_table_without_the_label_column(made, refused, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text((made / "train.csv").read_text().replace("text,label", "text,animal"))
    says = (table, "no column 'label' for --label", "name one of its own (columns: text, animal)")
    words = ("finetune", "classify", "--model", made / "run", "--data", table)
    refused(*words, "--out", tmp_path / "out", *ONE_PASS, says=says)
    refused("evaluate", made / "tuned", "--data", table, says=says)
    assert not (tmp_path / "out").exists()


def test_an_unknown_label_in_the_test_file(made, refused, tmp_path):
    table = tmp_path / "test.csv"
    table.write_text("text,label\n" + rows("cat", "cow"))
    says = (f"{table}:3: unknown label 'cow'", "(known: cat, crane, dog, owl)", "correct it")
    refused("evaluate", made / "tuned", "--data", table, says=says)
    words = ("finetune", "classify", "--model", made / "run", "--data", made / "train.csv")
    refused(*words, "--dev", table, "--out", tmp_path / "out", *ONE_PASS, says=says)
    assert not (tmp_path / "out").exists()


def test_rows_without_a_label(made, refused, tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_text("text,label\na cat,cat\na dog,\na dog,dog\n")
    words = ("finetune", "classify", "--model", made / "run", "--data", table, "--dev", table)
    finetune = (*words, "--out", tmp_path / "out", *ONE_PASS)
    says = (f"{table}:3: empty label in column 'label'", "with --skip-unlabelled")
    refused(*finetune, says=says)
    evaluate = ("evaluate", made / "tuned", "--data", table)
    refused(*evaluate, says=says)
    for words in (finetune, evaluate):
        assert main([str(word) for word in (*words, "--skip-unlabelled")]) == 0
        out, err = capsys.readouterr()
        assert f"{table}: 1 of 3 rows have no label and are left out" in err
    assert "examples             2" in out


def test_no_word_is_without_a_tag(made, refused, tmp_path):
    words = (
        "finetune",
        "ner",
        "--model",
        made / "run",
        "--data",
        tmp_path,
        "--out",
        tmp_path / "o",
    )
    refused(*words, "--skip-unlabelled", says=["--skip-unlabelled: for your own files; task ner"])
    words = (
        "finetune",
        "tag",
        "--model",
        made / "run",
        "--data",
        tmp_path,
        "--out",
        tmp_path / "o",
    )
    refused(
        *words, "--skip-unlabelled", says=["--skip-unlabelled: without effect on a task of kind"]
    )


@pytest.mark.parametrize("command", ["vocab", "corpus", "pretrain", "finetune"])
def test_a_file_in_the_place_of_the_folder_to_write(command, made, refused, tmp_path):
    out = tmp_path / "out"
    out.write_text("my thesis")
    refused(*writing(command, made, out), says=(out, "not there yet"))
    assert out.read_text() == "my thesis"


def test_a_vocabulary_is_not_replaced(made, refused):
    says = (made / "vocab", "name another --out")
    refused(*from_text("vocab", made, made / "text.txt", made / "vocab"), says=says)


def writing(command, made, out):
    """A command that would write `out`."""
    return {
        "vocab": from_text("vocab", made, made / "text.txt", out),
        "corpus": from_text("corpus", made, made / "text.txt", out),
        "pretrain": ("pretrain", "--corpus", made / "store", "--out", out, *STEPS),
        "finetune": ("finetune", "classify", "--model", made / "run", "--data", made / "train.csv",
                     "--dev", made / "dev.csv", "--out", out, *ONE_PASS),
        "predict": ("predict", made / "tuned", made / "dev.csv", "--out", out / "answers.csv"),
        "report": ("report", made / "run", "--out", out / "report.html"),
        "convert": ("convert", made / "run", out),
    }[command]  # fmt: skip


# what the disk has no room for, and what would then be mistaken for a result
FULL = {
    "vocab": ("tokenizer.json", "vocab.txt"),
    "corpus": ("train-00000.sentences", "manifest.json"),
    "pretrain": ("model.safetensors", "checkpoints/step-*"),
    "finetune": ("model.safetensors", "result.json"),
    "predict": ("answers.csv", "answers.csv"),
    "report": ("report.html", "report.html"),
    "convert": ("model.safetensors", "config.json"),
}


@pytest.mark.parametrize("command", FULL)
def test_a_full_disk(command, made, refused, tmp_path, monkeypatch):
    """The file system refuses to sync one file, as one without space may do."""
    full, result = FULL[command]
    out, sync = tmp_path / "out", os.fsync

    def fsync(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name.endswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    refused(*writing(command, made, out), says=(full, "No space left", "free some space"), code=1)
    assert not list(out.glob(result))
    assert not list(tmp_path.rglob(f"{TEMPORARY_PREFIX}*"))
    monkeypatch.undo()
    again = writing(command, made, out)
    again = (*again, "--resume") if command == "pretrain" else again
    assert main([str(word) for word in again]) == 0
    assert list(out.glob(result))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize("grows", ["log.jsonl", "tensorboard"])
def test_a_full_disk_below_the_log(grows, made, refused, tmp_path, monkeypatch):
    """Files that grow line by line, one of them by a thread of TensorBoard's."""
    out, opened = tmp_path / "out", io.open

    def open_full(file, mode="r", *rest, **named):
        if grows in str(file) and "a" in mode:
            file = "/dev/full"
        return opened(file, mode, *rest, **named)

    monkeypatch.setattr(io, "open", open_full)
    words = ("pretrain", "--corpus", made / "store", "--out", out, *STEPS, "--log-every", 1)
    refused(*words, says=(out, "No space left", "free some space"), code=1)
    assert not (out / "result.json").exists()


def test_ctrl_c_interrupts_once(monkeypatch, made, capsys, tmp_path):
    """A second one must not interrupt the cleaning up."""
    cleaned = []

    def interrupted(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    monkeypatch.setattr("bertsmith.corpus.build.build.build_store", interrupted)
    words = from_text("corpus", made, made / "text.txt", tmp_path / "out")
    assert main([str(word) for word in words]) == 130
    assert cleaned and capsys.readouterr().err == "bertsmith corpus: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_predict_does_not_write_over_its_input(made, refused):
    before = (made / "dev.csv").read_bytes()
    words = ("predict", made / "tuned", made / "dev.csv", "--out", made / "dev.csv")
    refused(*words, says=("dev.csv is an input itself", "name another file"))
    assert (made / "dev.csv").read_bytes() == before


def test_a_fine_tuned_run_is_no_run_to_resume(made, refused):
    words = ("pretrain", "--corpus", made / "store", "--out", made / "tuned", *STEPS, "--resume")
    line = refused(*words, says=(made / "tuned", "holds a model already: name another --out"))
    assert "--resume" not in line


def test_going_on_without_a_model_to_go_on_from(made, refused, tmp_path):
    words = ["pretrain", "--corpus", made / "store", "--out", tmp_path / "run", "--steps", "5"]
    for more in ((), ("--resume",)):  # a first start, by a script that always says --resume
        refused(*words, "--config", "continue", *more, says="name it with --model MODEL")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "cuda:99"), "--device cuda:99"),
        (("--precision", "half"), "--precision half: known are"),
        (("--max-length", 600), "--max-length 600: the model knows"),
    ],
)
def test_what_no_training_can_be_is_refused_before_the_data_is_read(
    flags, says, made, refused, tmp_path
):
    words = ("finetune", "classify", "--model", made / "run", "--data", tmp_path / "nowhere.csv")
    refused(*words, "--out", tmp_path / "out", *flags, says=[says])


def test_a_run_among_the_users_own_files(made, refused):
    before = sorted(made.iterdir())
    words = ("finetune", "classify", "--model", made / "run", "--data")
    for data in (made, made / "train.csv"):
        refused(*words, data, "--out", made, says=["is the folder of the data: name another"])
    assert sorted(made.iterdir()) == before


def test_the_class_that_f1_is_of(made, refused, capsys, tmp_path):
    table = tmp_path / "fraud.csv"
    named = (
        f"Number {k}: the {animal} sleeps.,{animal}\n" for k in range(9) for animal in ANIMALS[:2]
    )
    table.write_text("text,label\n" + "".join(named))
    words = ("finetune", "classify", "--model", made / "run", "--data", table, *ONE_PASS)
    words = (*words, "--metric", "f1")
    assert main([str(word) for word in (*words, "--out", tmp_path / "last")]) == 0
    assert "f1 is that of 'dog': --positive names the other" in capsys.readouterr().err
    first = ("--positive", "cat", "--out", tmp_path / "first")
    assert main([str(word) for word in (*words, *first)]) == 0
    assert "f1 is that of" not in capsys.readouterr().err
    for name, labels in (("last", ["cat", "dog"]), ("first", ["dog", "cat"])):
        stored = json.loads((tmp_path / name / "result.json").read_text())
        (right_0, wrong_0), (wrong_1, right_1) = stored["confusion"]
        assert stored["labels"] == labels
        found = 2 * right_1 + wrong_0 + wrong_1  # of F1: 2 TP / (2 TP + FP + FN)
        assert stored["metrics"]["f1"] == pytest.approx(2 * right_1 / found if found else 0.0)
    says = ["--positive cow: the labels of column 'label'", "cat, dog: name one of two"]
    refused(*words, "--positive", "cow", "--out", tmp_path / "none", says=says)


def test_seeds_that_would_be_one_run_are_refused_before_the_data_is_read(made, refused, tmp_path):
    words = ("finetune", "classify", "--model", made / "run", "--data", tmp_path / "nowhere.csv")
    seeds = ("--init-seed", 1, "--order-seed", 1, "--dropout-seed", 1, "--seeds", "1..3")
    refused(*words, "--out", tmp_path / "out", *seeds, says=["are all set: --seeds has no effect"])
