"""Small things that many tests need: a command's run, a file, a tokenizer, a model, a store."""

import contextlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import command_name, main
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.model.config import config_for
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
    """The last line on standard error of a command that must be refused, with nothing printed."""
    ran = cli(*words)
    assert ran.code == 2 and not ran.out, ran
    line = ran.err.splitlines()[-1]
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


def contents(folder: Path) -> dict[str, bytes]:
    """What every file of a folder holds, by its path in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def word_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """An uncased tokenizer whose vocabulary is the words of some texts."""
    words = {word.characters for text in texts for word in split_words(text, GOOGLE_UNCASED)}
    return Tokenizer(Vocabulary([*SPECIAL, *sorted(words)]))


def write_model(
    folder: Path, texts: Iterable[str], size: str = "1x64", max_positions: int = 64
) -> Path:
    """A model folder of random weights that knows the words of some texts."""
    tokenizer = word_tokenizer(texts)
    config = config_for(size, len(tokenizer.vocabulary), max_positions=max_positions)
    model = initialize(PreTrainingModel(config), 0.05, torch.Generator().manual_seed(1))
    save_model(model, tokenizer, folder)
    return folder


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
