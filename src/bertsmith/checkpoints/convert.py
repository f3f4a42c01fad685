"""New model folders from old ones: converted and proved equal, with more pieces, more positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.files import atomic_folder, check_new, write_json
from bertsmith.base.settings import checked
from bertsmith.checkpoints.config_json import (
    CLASS_PREFIX,
    CONFIG_FILE,
    SCORED_BY,
    architectures,
    config_entries,
    label_names,
    read_config,
    read_extra_config,
    read_stored_config,
)
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.model_folder import (
    beyond_transformers,
    config_file,
    copy_similarity_training,
    load_model,
    model_class,
    whole_tokenizer,
    write_google_model,
    write_model,
)
from bertsmith.checkpoints.names import REDUNDANT, TOKEN_EMBEDDING
from bertsmith.checkpoints.stored import WEIGHTS, folder_tensors
from bertsmith.checkpoints.tensors import as_spelled, read_tensors, write_tensors
from bertsmith.model.config import RELATIVES
from bertsmith.model.heads import FrozenTagger, TaskModel
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.extend import Addition, extended_vocabulary, old_pieces

POSITION_EMBEDDING = "position_embeddings.weight"  # of one direction or the other
OUTPUT_BIAS = "cls.predictions.bias"
MULTIPLE = 64  # rows of a matrix product that suits all processors
RIDGE = 0.1  # of the mean variance of the embedding's columns


@dataclass(frozen=True)
class Converted:
    """The model that was written, and the tensors that the source lacked or did not need."""

    architecture: str
    num_tensors: int
    num_parameters: int
    missing: list[str]
    unused: list[str]


@checked()
def convert(
    source: str | Path,
    destination: str | Path,
    to: Literal["hugging-face", "tensorflow"] = "hugging-face",
) -> Converted:
    """Write the model `source` to the new folder `destination`, as `bertsmith convert` does.

        bertsmith.convert("google/bert_uncased_L-4_H-256_A-4", "models/mini").num_parameters
        bertsmith.convert("runs/books", "models/books-tf", to="tensorflow")

    `source` is a run, a Hugging Face folder, a folder of google-research/bert or of OpenAI's GPT,
    or a hub name. `to` "tensorflow": as a checkpoint of google-research/bert, which cannot read
    left to right, has none of BERT's relatives, and computes an exact GELU by tanh.

    `destination` appears only when all tensors of `source` were found equal, bit by bit as float32.
    Errors: ValueError as `load_model`, for what the other program's BERT cannot compute, and for a
    folder that is not new or empty.
    """
    source, destination = open_model_folder(source), Path(destination)
    check_new(destination)
    kind, config = model_class(source), read_config(source)
    relative = RELATIVES.get(config.family)
    if to == "tensorflow" and (relative or config.causal or kind is FrozenTagger):
        plain = "a left-to-right model" if config.causal else "a BiLSTM over a frozen encoder"
        raise ValueError(f"{source}: {relative or plain}, which google-research/bert does not have")
    if beyond := beyond_transformers(config, kind):
        raise ValueError(
            f"{source}: a model with {' and '.join(beyond)}, which transformers' BERT does not "
            "have: it stays a folder of bertsmith's own"
        )
    tokenizer = whole_tokenizer(source)
    loaded, stored = load_model(source, kind), read_stored_config(source)
    names = label_names(source)
    # an option's score is one output, whatever labels were left in its config.json
    fits = issubclass(kind, TaskModel) and len(names) == loaded.model.num_outputs
    with _new_folder(source, destination, loaded.missing) as temporary:
        entries = config_file(
            loaded.model,
            label_names=names if fits else None,
            extra_config=read_extra_config(source),
            problem_type=stored.get("problem_type"),
            exclude=loaded.missing,
        )
        entries |= {name: stored[name] for name in SCORED_BY if name in stored}
        weights = {n: x for n, x in loaded.model.state_dict().items() if n not in loaded.missing}
        write = write_google_model if to == "tensorflow" else write_model
        write(temporary, tokenizer, entries, weights)
        before, after, num_parameters = folder_tensors(source), folder_tensors(temporary), 0
        for name in after:
            old, new = read_tensors([before[name], after[name]])
            if not torch.equal(old.float().view(torch.int32), new.float().view(torch.int32)):
                raise RuntimeError(f"'{name}' was written, but another value was read back")
            num_parameters += new.numel()
    return Converted(
        entries["architectures"][0], len(after), num_parameters, loaded.missing, loaded.unused
    )


def extend_model(
    source: Path, destination: Path, additions: Sequence[Addition], counts: np.ndarray
) -> Tokenizer:
    """Write the model of folder `source` with more pieces to `destination`; its tokenizer.

    additions  the new pieces, in the order of their ids, and how often a text has them
    counts     [V] how often the text has each old piece, cut with the old vocabulary

    A new row of the token embedding is the mean of the rows of its old pieces; its output bias is
    that of `new_biases`. A number of rows that is a multiple of 64 stays one: the rows that fill it
    up are copies of [PAD], which is never predicted, and their pieces [unused] ones, as are those
    of old rows without a piece. All else stays. Errors: as `extensible_tokenizer`.
    """
    tokenizer = extensible_tokenizer(source)
    old, num_rows = tokenizer.vocabulary, read_config(source).vocab_size
    size = num_rows + len(additions)
    fill = 0 if num_rows % MULTIPLE else -size % MULTIPLE
    size += fill
    new_pieces = [addition.piece for addition in additions]
    vocabulary = extended_vocabulary(old, new_pieces, num_rows, size)
    extended = Tokenizer(vocabulary, tokenizer.normalization)

    def extend(tensors: dict[str, Tensor]) -> None:
        table = tensors[TOKEN_EMBEDDING]
        means = torch.stack([table[old_pieces(piece, old)].float().mean(0) for piece in new_pieces])
        padding = table[old.pad_id].expand(fill, -1)
        tensors[TOKEN_EMBEDDING] = torch.cat([table, means.to(table.dtype), padding])
        if OUTPUT_BIAS in tensors:
            bias = tensors[OUTPUT_BIAS]
            frequencies = np.array([addition.frequency for addition in additions])
            new = new_biases(table.float(), bias.float(), counts, means, frequencies)
            parts = bias, new.to(bias.dtype), bias[old.pad_id].expand(fill)
            tensors[OUTPUT_BIAS] = torch.cat(parts)

    rewrite_folder(source, destination, extended, extend, vocab_size=size)
    return extended


def extensible_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model that `extend_model` can give more pieces.

    Errors: ValueError for a GPT or an ELMo; as `whole_tokenizer`.
    """
    family = read_config(folder).family
    if family == "gpt":
        raise ValueError(
            f"{folder}: the vocabulary of a GPT is not extended: its last pieces are "
            "those that stand around texts"
        )
    if family == "elmo":
        raise ValueError(f"{folder}: an ELMo reads words by their letters: there is no vocabulary")
    return whole_tokenizer(folder)


def new_biases(
    table: Tensor, bias: Tensor, counts: np.ndarray, new_table: Tensor, new_counts: np.ndarray
) -> Tensor:
    """Output biases [N] with which new rows are predicted about as often as they occur.

    A piece's logit is row . state + bias. The typical state is the one with which the old rows
    [V, H] and biases [V] give the log frequencies of their pieces in the text (`counts` [V]), up to
    a constant: a ridge regression over the pieces seen. The bias of a new row [N, H] is what then
    lacks to its log frequency; a piece never seen counts as seen half a time.
    """
    seen, total = np.flatnonzero(counts), counts.sum()
    rows = table[seen].double()
    lacking = torch.from_numpy(np.log(counts[seen] / total)) - bias[seen].double()
    centre, constant = rows.mean(0), lacking.mean()
    gram = (rows - centre).T @ (rows - centre)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    state = torch.linalg.pinv(gram, hermitian=True) @ (rows - centre).T @ (lacking - constant)
    wanted = torch.from_numpy(np.log(np.maximum(new_counts, 0.5) / total))
    return (wanted - constant - (new_table.double() - centre) @ state).float()


def extend_positions(
    source: Path, destination: Path, positions: int, generator: torch.Generator
) -> int:
    """Write the model of folder `source` with more positions (`longer_table`) to `destination`.

    Returns how many it had. Errors: ValueError when it has as many already.
    """
    tokenizer, known = whole_tokenizer(source), read_config(source).max_positions
    if positions <= known:
        raise ValueError(
            f"{positions} positions: the model of {source} knows {known} already: ask for more"
        )

    def lengthen(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(POSITION_EMBEDDING)]:
            tensors[name] = longer_table(tensors[name], positions, generator)

    rewrite_folder(source, destination, tokenizer, lengthen, max_positions=positions)
    return known


def longer_table(table: Tensor, positions: int, generator: torch.Generator) -> Tensor:
    """A position embedding [P, H] with new rows after the old ones: [positions, H].

    They are drawn with the mean and standard deviation of the old rows in each column. Copies of
    the old rows, as in Longformer (Beltagy et al. 2020, arXiv 2004.05150, section 5), need
    attention in a window: a BERT confuses each token with its twin P positions away, and loses what
    it knew of the first P too (docs/reference/results.md has the figures).

    >>> table = torch.tensor([[1.0], [3.0]])
    >>> longer_table(table, 4, torch.Generator().manual_seed(1)).shape
    torch.Size([4, 1])
    """
    known = table.float()
    new = torch.randn(positions - len(table), table.shape[1], generator=generator)
    new = known.mean(0) + known.std(0, correction=0) * new
    return torch.cat([table, new.to(table.dtype)])


def rewrite_folder(
    source: Path,
    destination: Path,
    tokenizer: Tokenizer,
    change: Callable[[dict[str, Tensor]], None],
    **settings: int,
) -> None:
    """Write the model of folder `source` with other tensors and `settings` to `destination`.

    `change` gets all tensors, under canonical names, and puts others in their place. All else,
    whatever heads the folder has, is written as it is. Errors: ValueError as `load_model`.
    """
    kind, config = model_class(source), replace(read_config(source), **settings)
    missing = load_model(source, kind).missing  # refuses what is damaged or of another kind
    stored = {n: tensor for n, tensor in folder_tensors(source).items() if n not in REDUNDANT}
    tensors = dict(zip(stored, read_tensors(stored.values()), strict=True))
    change(tensors)
    with _new_folder(source, destination, missing) as temporary:
        tokenizer.save(temporary, config.max_positions, config.type_vocab_size > 0)
        entries = config_entries(config, own=bool(beyond_transformers(config, kind)))
        write_json(temporary / CONFIG_FILE, read_stored_config(source) | entries)
        architecture = [*architectures(source), CLASS_PREFIX[config.family]][0]
        write_tensors(temporary / WEIGHTS, as_spelled(tensors, architecture))


@contextmanager
def _new_folder(source: Path, destination: Path, missing: list[str]) -> Iterator[Path]:
    """A folder for a model made of `source`'s; it appears if the model lacks `missing` alone."""
    with atomic_folder(destination) as temporary:
        copy_similarity_training(source, temporary)
        yield temporary
        assert load_model(temporary, model_class(source)).missing == missing
