"""`bertsmith pretrain`: what it says to a person who looks on, and what it refuses."""

import io
import os
import re
import shutil

import pytest

from ..tiny import bertsmith, cli, contents, write


def test_what_is_said(made, tmp_path):
    words = made.words("pretrain", tmp_path / "run")
    words += ("--steps", 20, "--num-evals", 4, "--eval-rows", 512)
    ran = cli(*words)
    out, told = ran.out.splitlines(), ran.err.splitlines()
    assert ran.code == 0 and not any("compil" in line for line in told)
    explained = next(k for k, line in enumerate(told) if "losses are in nats" in line)
    assert re.search(r"; a guess among \d+ pieces has 3\.\d\d$", told[explained])
    known = r"knowing only their counts has \d\.\d\d, the unigram entropy of the training text"
    assert re.fullmatch(known, told[explained + 1])
    assert not any("nats" in line or "entropy" in line for line in told[:explained])
    steps = [line for line in told if line.startswith("pretrain, step")]
    figures = r"held-out MLM loss \d\.\d{3}, \d+\.\d% of \d+ right, NSP \d+\.\d% of 256"
    assert len(steps) == 3 and max(map(len, steps)) <= 80
    for step, line in zip((5, 10, 15), steps, strict=True):
        assert re.fullmatch(f"pretrain, step {step}: {figures}", line), line
    assert re.fullmatch(r"held-out MLM loss .* nats \(unigram entropy .*, NSP .* of 256", out[1])
    assert out[2] == "try next:" and len(out) == 5
    assert out[3].startswith("  bertsmith fill ") and out[4].startswith("  bertsmith finetune ")
    again = cli(*words, "--resume")
    assert again.code == 0 and "losses are in nats" not in again.err
    figures = bertsmith("evaluate", tmp_path / "run", "--held-out", made / "store")
    assert re.search(r"^nsp_accuracy +\d\.\d{4} of 256$", figures, re.M)
    assert "_cases" not in figures


def test_a_store_built_with_another_vocabulary(made, refuse, tmp_path):
    other, store, out = tmp_path / "vocab", tmp_path / "store", tmp_path / "out"
    bertsmith("vocab", made / "dev.csv", "--out", other, "--size", 30)
    bertsmith("corpus", made / "text.txt", "--vocab", other, "--out", store, "--workers", 1)
    pretrain = ("pretrain", "--corpus", store, "--model", made / "run", "--out", out)
    pretrain += ("--steps", 2, "--max-length", 16)
    refuse(*pretrain, says=(made / "run", "vocabulary", "`bertsmith corpus"))
    refuse(*pretrain, "--size", "2x64", says=("size: fixed by --model", "leave it"))
    refuse("evaluate", made / "run", "--held-out", store, says=(store, "--vocab"))
    mixed = shutil.copytree(made / "store", tmp_path / "mixed")
    shutil.copytree(other, mixed, dirs_exist_ok=True)
    says = (mixed / "vocab.txt", "the manifest says", "`bertsmith corpus")
    refuse(*made.words("pretrain", out), "--corpus", mixed, says=says)
    assert not out.exists()


@pytest.mark.parametrize("file", ["train-00000.tokens", "unigram_counts.bin", "manifest.json"])
def test_a_truncated_store(file, made, refuse, tmp_path):
    store = shutil.copytree(made / "store", tmp_path / "store")
    os.truncate(store / file, (store / file).stat().st_size - 10)
    says = (store / file, "build it again with `bertsmith corpus`")
    refuse(*made.words("pretrain", tmp_path / "out"), "--corpus", store, says=says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["text.txt", "vocab", "absent"])
def test_what_is_no_store_is_not_to_be_removed(wrong, made, refuse, tmp_path):
    words = (*made.words("pretrain", tmp_path / "out"), "--corpus", made / wrong)
    line = refuse(*words, says=(made / wrong, "make one with `bertsmith corpus`"))
    assert "remove" not in line and not (tmp_path / "out").exists()


def test_a_corpus_of_one_sentence(made, refuse, tmp_path):
    one = write(tmp_path / "one.txt", "The cat sleeps.\n")
    says = ("one.txt: 1 document(s)", "pairs", "put a blank line between documents")
    refuse(*made.words("corpus", tmp_path / "out", one), says=says)
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_size_on_resume(made, refuse, tmp_path):
    run = shutil.copytree(made / "run", tmp_path / "run")
    before = contents(run)
    says = (run, "size = 1x64, not 2x64", "leave it out with --resume")
    refuse(*made.words("pretrain", run), "--resume", "--size", "2x64", says=says)
    assert before == contents(run)


@pytest.mark.parametrize(
    ("flags", "recipe", "says"),
    [
        ("--warmup 0.1", "", "unknown flag '--warmup': did you mean '--warmup-"),
        ("--learn-rate 1e-3", "", "'--learn-rate': did you mean '--learning-rate'?"),
        ("", "stepz = 3", "recipe.toml: unknown setting 'stepz': did you mean 'steps'?"),
        ("", "learn_rate = 0.1", "unknown setting 'learn_rate': did you mean 'learning_rate'?"),
        ("", 'steps = "3"', "recipe.toml: steps = '3': expected a whole number"),
        ("", "steps 3", ["recipe.toml: not valid TOML", "line 1"]),
        ("--size tinny", "steps = 2", ["unknown size 'tinny'", "known are tiny"]),
        ("--minutes 1 --steps 2", "", "exactly one of --steps"),
        ("--minutes nan", "", "--minutes nan: must be above 0"),
        ("--steps 2 --max-length 4", "", "pretrain: --max-length 4: a pair"),
    ],
)
def test_a_misspelt_or_impossible_setting(flags, recipe, says, made, refuse, tmp_path):
    config = write(tmp_path / "recipe.toml", recipe)
    words = ("pretrain", "--corpus", made / "store", "--out", tmp_path / "out", "--config", config)
    refuse(*words, *flags.split(), says=says)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize("grows", ["log.jsonl", "tensorboard"])
def test_a_full_disk_below_the_log(grows, made, refuse, tmp_path, monkeypatch):
    """Files that grow line by line, one of them by a thread of TensorBoard's."""
    out, opened = tmp_path / "out", io.open

    def open_full(file, mode="r", *rest, **named):
        if grows in str(file) and "a" in mode:
            file = "/dev/full"
        return opened(file, mode, *rest, **named)

    monkeypatch.setattr(io, "open", open_full)
    says = (out, "No space left", "free some space")
    refuse(*made.words("pretrain", out), "--log-every", 1, says=says, code=1)
    assert not (out / "result.json").exists()


def test_a_fine_tuned_run_is_no_run_to_resume(made, refuse):
    says = (made / "tuned", "holds a model already: name another --out")
    line = refuse(*made.words("pretrain", made / "tuned"), "--resume", says=says)
    assert "--resume" not in line


@pytest.mark.parametrize(
    "name",
    ["result.json", "log.jsonl", "model.safetensors", "vocab.txt", "tokenizer.json"]
    + ["tokenizer_config.json", "checkpoints/step-00000500/weights.bin"],
)
def test_files_of_the_user_are_left_alone(name, made, refuse, tmp_path):
    out = tmp_path / "out"
    write(out / name, "mine")
    first = name.partition("/")[0]
    for more in ((), ("--resume",)):
        words = (*made.words("pretrain", out), *more)
        refuse(*words, says=f"{out} holds '{first}', which is of no run: name another --out")
    assert contents(out) == {name: b"mine"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--replay --model bogus", "--model has no effect with --replay: leave it out"),
        ("--replay --time-limit 5", "--time-limit has no effect with --replay: leave it out"),
        ("--dry-run --time-limit 5", "--time-limit has no effect with --dry-run: leave it out"),
        ("--dry-run --time-limit bogus", "time limit 'bogus': give minutes"),
        ("--dry-run --replay", "--dry-run and --replay: give one of them"),
        ("--seed -1", "--seed -1: must be at least 0 and at most 2**63 - 1"),
        (f"--seed {2**63}", f"--seed {2**63}: must be at least 0 and at most"),
    ],
)
def test_flags_that_would_be_ignored_and_seeds_out_of_bounds(flags, says, made, refuse, tmp_path):
    refuse(*made.words("pretrain", tmp_path / "out"), *flags.split(), says=says)
    assert not (tmp_path / "out").exists()


def test_going_on_without_a_model_to_go_on_from(made, refuse, tmp_path):
    words = ("pretrain", "--corpus", made / "store", "--out", tmp_path / "run", "--steps", 5)
    for more in ((), ("--resume",)):  # a first start, by a script that always says --resume
        refuse(*words, "--config", "continue", *more, says="name it with --model MODEL")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "hint"), [("rnu", "so one begins; did you mean 'run'?"), ("x", "so one begins")]
)
def test_resume_names_the_run_that_may_be_meant(made, tmp_path, name, hint):
    write(tmp_path / "run" / "run.json", "{}")
    ran = cli(*made.words("pretrain", tmp_path / name), "--resume")
    line = f"{tmp_path / name}: no run to resume yet, {hint}"
    assert ran.code == 0 and line in ran.err.splitlines()
