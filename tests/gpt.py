"""A small GPT as it is released, of random weights: Hugging Face's folder and OpenAI's files."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bertsmith.checkpoints.formats.openai import LAYER, TABLES

SIZE, LAYERS, POSITIONS = 128, 2, 48  # heads of 64, as the released model's files imply
TEXTS = [f"the {a} {b} sat near a {c} house" for a in ["old", "new"] for b in ["cats", "dogs"]
         for c in ["small", "large", "green"]]  # fmt: skip


def shapes(pieces: int) -> list[tuple[int, ...]]:
    """As params_shapes.json of 2018 has them, a layer's products as convolutions of width 1."""
    wide = 4 * SIZE
    layer = [
        *((1, SIZE, 3 * SIZE), (3 * SIZE,), (1, SIZE, SIZE), (SIZE,), (SIZE,), (SIZE,)),
        *((1, SIZE, wide), (wide,), (1, wide, SIZE), (SIZE,), (SIZE,), (SIZE,)),
    ]
    return [(POSITIONS, SIZE), (pieces, SIZE), *layer * LAYERS]


def library(texts=TEXTS, pieces: int = 60) -> Library:
    """Byte pairs of some texts, trained by the package `tokenizers`."""
    made = Library(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    settings = {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>", "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=pieces, **settings))
    return made


def write_openai(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """OpenAI's files; the tensors in them by Hugging Face's names, as transformers shapes them."""
    folder.mkdir(parents=True)
    made = library()
    library_folder = folder / "library"
    library_folder.mkdir()
    vocabulary, merges = made.model.save(str(library_folder))
    Path(vocabulary).rename(folder / "encoder_bpe_40000.json")
    Path(merges).rename(folder / "vocab_40000.bpe")
    library_folder.rmdir()
    sizes = shapes(made.get_vocab_size())
    random = np.random.default_rng(seed)
    arrays = [random.normal(0, 0.2, shape).astype(np.float32) for shape in sizes]
    (folder / "params_shapes.json").write_text(json.dumps(sizes))
    flat = np.concatenate([array.ravel() for array in arrays])
    for number, part in enumerate(np.array_split(flat, 10)):
        np.save(folder / f"params_{number}.npy", part)
    names = TABLES + [f"h.{n}.{name}" for n in range(LAYERS) for name in LAYER]
    squeezed = (array[0] if array.ndim == 3 else array for array in arrays)
    return dict(zip(names, squeezed, strict=True))
