"""A damaged checkpoint is found and named, and nothing is trained on it."""

import random
import shutil
from dataclasses import replace

import pytest

from bertsmith.base.files import read_json, write_json
from bertsmith.checkpoints.run_folder import MANIFEST_FILE, RunFolder, write_manifest
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

from ..training.runs import assert_same_run, messages

FILES = (
    "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.txt",
)  # fmt: skip
FLIPS, CUTS = 104, 32  # over the files in turn


@pytest.fixture(scope="module")
def trained(small_store, tmp_path_factory):
    """A run of 24 steps with checkpoints at 8, 16 and 24."""
    settings = PretrainSettings(
        size="1x64", max_length=32, batch_size=4, steps=24, learning_rate=3e-3, threads=1,
        precision="float32", checkpoint_every=8, keep_checkpoints=3, log_every=4, num_evals=2,
        eval_rows=8, loggers=(),
    )  # fmt: skip
    out = tmp_path_factory.mktemp("runs") / "run"
    pretrain(small_store, out, settings)
    return out, settings


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    return RunFolder(tmp_path / "run")


def flipped(content, draw):
    place = draw.randrange(len(content))
    damaged = bytearray(content)
    damaged[place] ^= draw.randrange(1, 256)
    return bytes(damaged)


def cut(content, draw):
    return content[: draw.randrange(len(content))]


def skipped_for(run, name, damage, draw):
    """What a resume says of the newest checkpoint once a file of it is damaged; then mended."""
    file = run.checkpoints / "step-00000024" / name
    content = file.read_bytes()
    file.write_bytes(damage(content, draw))
    try:
        checkpoint, skipped = run.latest_valid()
    finally:
        file.write_bytes(content)
    assert checkpoint.name == "step-00000016"
    assert [path.name for path, _ in skipped] == ["step-00000024"]
    return skipped[0].reason


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_and_a_cut_are_named_in_every_file(copied, name):
    draw = random.Random(name)
    assert skipped_for(copied, name, flipped, draw).startswith(f"{name} is")
    assert skipped_for(copied, name, cut, draw).startswith(f"{name} is truncated")
    assert copied.latest_valid() == (copied.checkpoints / "step-00000024", [])


@pytest.mark.faults
@pytest.mark.parametrize(("damage", "number"), [(flipped, FLIPS), (cut, CUTS)])
def test_every_damage_is_found_and_named(copied, tally, damage, number):
    what = "byte flipped" if damage is flipped else "end cut off"
    for case in range(number):
        name = FILES[case % len(FILES)]
        reason = skipped_for(copied, name, damage, random.Random(case))
        assert reason.startswith(f"{name} is"), (case, reason)
        tally(f"{what} in a file of a checkpoint: found and named, not trained on")


def test_a_run_goes_on_from_the_newest_whole_checkpoint(trained, copied, small_store, capsys):
    whole, settings = trained
    newest, before = (copied.checkpoints / f"step-000000{step}" for step in (24, 16))
    for checkpoint in (newest, before):
        file = checkpoint / "optimizer.safetensors"
        file.write_bytes(flipped(file.read_bytes(), random.Random(1)))
    pretrain(small_store, copied.path, settings, resume=True)
    said = capsys.readouterr().err
    reason = "optimizer.safetensors is damaged: its bytes are not those that were written"
    notes = [f"skipped {checkpoint}: {reason}" for checkpoint in (newest, before)]
    assert all(f"{note}\n" in said for note in notes)
    assert set(notes) < set(messages(copied.path))
    assert_same_run(whole, copied.path)
    # the damaged ones are beside the new ones, and take no place among those to keep
    names = sorted(path.name for path in copied.checkpoints.iterdir())
    steps = ("step-00000008", "step-00000016", "step-00000024")
    assert names == [*(f"skipped-{step}" for step in steps[1:]), steps[0], *steps[1:]]


def test_nothing_is_begun_anew_over_a_run_whose_checkpoints_are_all_damaged(
    trained, copied, small_store
):
    for number, checkpoint in enumerate(copied.saved()):
        (checkpoint / FILES[number]).unlink()
    before = (copied.path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError) as error:
        pretrain(small_store, copied.path, trained[1], resume=True)
    said = str(error.value)
    assert "there is no whole checkpoint to go on from" in said and "\n" not in said
    why = "step-00000016: half-written: no manifest.json; step-00000008: config.json is mis"
    assert why in said
    assert (copied.path / "model.safetensors").read_bytes() == before
    shutil.rmtree(copied.checkpoints)
    with pytest.raises(ValueError, match=r"\(none at all\): put one back from a copy"):
        pretrain(small_store, copied.path, trained[1], resume=True)


def test_a_checkpoint_of_another_run_or_step_is_skipped(trained, copied, small_store, tmp_path):
    other = replace(trained[1], size="2x64", steps=8)
    pretrain(small_store, tmp_path / "other", other)
    theirs = tmp_path / "other" / "checkpoints" / "step-00000008"
    strange = shutil.copytree(theirs, copied.checkpoints / "step-00000030")
    assert copied.latest_valid()[1] == [(strange, "it holds step 8")]
    manifest = read_json(strange / MANIFEST_FILE)
    (strange / MANIFEST_FILE).unlink()
    write_manifest(strange, {"step": 30, "identity": manifest["identity"]})
    reason = "it is of another run, with other settings or another corpus"
    assert copied.latest_valid() == (copied.checkpoints / "step-00000024", [(strange, reason)])
    # and where there is nothing else, it is an error
    for checkpoint in copied.saved()[:-1]:
        shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match=f"step-00000030: {reason}"):
        pretrain(small_store, copied.path, trained[1], resume=True)


def test_a_manifest_of_another_format_is_named(copied):
    newest = copied.latest()
    (newest / MANIFEST_FILE).unlink()
    write_manifest(newest, {"step": 24, "format": 3})
    assert copied.latest_valid()[1] == [(newest, "manifest.json has format 3, not 2")]
    for manifest in ([1], {"format": 2}):
        write_json(newest / MANIFEST_FILE, manifest)
        assert copied.latest_valid()[1] == [(newest, "manifest.json is truncated or damaged")]
    file = copied.saved()[1] / "vocab.txt"
    file.write_bytes(file.read_bytes() + b"x")
    reason = copied.latest_valid()[1][1].reason
    assert reason.startswith("vocab.txt is too long: ")
