"""`bertsmith vocab extend` from text and model to a folder that the other commands open."""

import json

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "sat", "."]
TEXT = "The iterator sat. Tensor operators iterate.\n\n" * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model of 64 pieces that knows only letters and three words."""
    config = ModelConfig(len(PIECES), 16, 1, 2, 32, 64)
    network = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("made") / "model"
    save_model(network, Tokenizer(Vocabulary(PIECES)), folder)
    return folder


@pytest.fixture
def run(tmp_path, capsys, model):
    def command(*flags, text=TEXT, model=model):
        (tmp_path / "text.txt").write_text(text)
        words = ["vocab", "extend", tmp_path / "text.txt", "--model", model, "--workers", "1"]
        out = [] if "--out" in flags else ["--out", tmp_path / "new"]
        code = main([str(word) for word in (*words, *out, *flags)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err.splitlines()[-1]

    return command


def test_a_model_grows_and_the_other_commands_open_it(run, tmp_path, capsys):
    code, out, _ = run("--add", 3)
    assert code == 0
    assert "new: 3 pieces added to 60\nfirst: ##erator iterate tensor\n" in out
    # two of the documents, each of 34 pieces: 1 + 8 + 1 + 1 and 6 + 9 + 7 + 1
    assert "held-out documents, every tenth: 68 pieces before, 26 after (61.8% fewer)" in out
    tokenizer = Tokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.vocabulary.pieces[:60] == tuple(PIECES)
    assert main(["fill", "The [MASK] sat.", "--model", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["convert", str(tmp_path / "new"), str(tmp_path / "copy")]) == 0


def test_by_default_as_much_is_added_as_the_text_gives(run, tmp_path):
    code, out, _ = run(text=TEXT.replace("\n\n", "\n"))
    assert code == 0 and "the text (too few to hold any out)" in out
    tokenizer = Tokenizer.from_pretrained(tmp_path / "new")
    assert len(tokenizer.encode_batch(["The iterator sat. Tensor operators iterate."]).ids) == 8


def test_a_model_with_a_multiple_of_64_rows_keeps_one(run, tmp_path):
    network = initialize(
        PreTrainingModel(ModelConfig(64, 16, 1, 2, 32, 64)), 0.1, torch.Generator().manual_seed(1)
    )
    save_model(network, Tokenizer(Vocabulary(PIECES)), tmp_path / "wider")
    code, out, _ = run("--add", 2, model=tmp_path / "wider")
    assert code == 0 and "2 pieces added to 60, and 66 [unused] ones that hold places" in out


def test_words_to_keep_are_added_besides(run, tmp_path):
    keep = tmp_path / "keep.txt"
    keep.write_text("Quux\nsat\n##ator\n")
    assert run("--add", 0, "--keep", keep)[0] == 0
    assert Tokenizer.from_pretrained(tmp_path / "new").vocabulary.pieces[60:] == ("quux", "##ator")
    keep.write_text("quux\nnumpy.array\n")
    code, _, error = run("--keep", keep, "--out", tmp_path / "other")
    assert code == 2 and "keep.txt:2: 'numpy.array' becomes 3 words when it is normal" in error


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--add", 900], TEXT, "--add 900: the text has only"),
        (["--add", 0], TEXT, "nothing to add: the text has no piece that would shorten it"),
        ([], "the sat. " * 50, "nothing to add"),
        (["--min-frequency", 10_000], TEXT, "nothing to add"),
        ([], "\n \n", "text.txt: no text in it"),
        (["--add", -1], TEXT, "--add -1: must be 0 or more"),
        (["--min-frequency", 0], TEXT, "--min-frequency 0: must be 1 or more"),
        (["--keep", "nowhere.txt"], TEXT, "nowhere.txt: no such file: --keep names a file"),
    ],
)
def test_bad_input_leaves_nothing_behind(run, tmp_path, flags, text, message):
    code, out, error = run(*flags, text=text)
    assert (code, out) == (2, "")
    assert message in error
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_and_a_model_without_tokenizer_are_refused(run, tmp_path, model):
    code, _, error = run("--out", model)
    assert code == 2 and "not empty: name a folder that is not there yet" in error
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    code, _, error = run(model=bare)
    assert code == 2 and "neither vocab.txt nor tokenizer.json is there" in error
