"""A model that is served: the library's predictor, and its methods as calls that requests share."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.settings import nearest
from bertsmith.inference.embeddings.pooling import PoolingSettings, pooling_settings
from bertsmith.inference.embeddings.texts import embed
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.engines.runner import ENCODER
from bertsmith.inference.explanation import rolled_out
from bertsmith.inference.fill import fill_candidates, fill_words
from bertsmith.inference.predictor import Predictor
from bertsmith.serving.batching import Call, Job
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import text_features

ATTENTION_TOKENS = 64  # of a text whose attention is shown; longer ones are cut
ANSWERS = "classify", "score", "tag", "answer", "choose"  # methods of a fine-tuned model, one each


class ServedPredictor(Predictor):
    """A predictor that does not print: nobody at the server's terminal knows the texts."""

    def note(self, message: str) -> None:
        pass


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model under its name; it does not change while it is served."""

    name: str
    folder: Path
    predictor: ServedPredictor
    opened: int
    """When it was opened, in seconds since 1970."""

    @classmethod
    def open(cls, name: str, folder: Path, processor: Processor) -> ServedModel:
        """Open a model's folder. Errors: ValueError as `bertsmith.load`."""
        return cls(name, folder, ServedPredictor(folder, processor), int(time.time()))

    @property
    def is_native(self) -> bool:
        """True if our own engine computes, whose weights processes can share."""
        return self.predictor.processor.engine == "bertsmith"

    @property
    def threads(self) -> int:
        """Calls that may run at once; other engines use all cores for one."""
        return self.predictor.processor.threads if self.is_native else 1

    def described(self) -> dict[str, Any]:
        """What /v1/models says of it."""
        config, own = self.predictor.config, self.predictor.processor
        is_tuned = self.methods[0] in ANSWERS
        names = self.predictor.model_task.label_names if is_tuned else ()
        return {
            "methods": list(self.methods),
            "labels": list(names),
            "reads_pairs": self.reads_pairs,
            "max_tokens": config.max_positions,
            "dimensions": self.pooling(()).size(config.hidden_size),
            "precision": f"{own.engine}, {own.precision}",
            "reports": list(self.reports),
        }

    @functools.cached_property
    def reports(self) -> tuple[str, ...]:
        """Names of the reports that lay in the folder when it was opened."""
        found = (path for path in self.folder.glob("*.html") if path.is_file())
        return tuple(sorted(path.name for path in found))

    @functools.cached_property
    def methods(self) -> tuple[str, ...]:
        """Methods of the predictor that this model can do, its own first."""
        try:
            return self.predictor.methods
        except ValueError:  # nothing says what its head is for
            return "embed", "features"

    @property
    def reads_pairs(self) -> bool:
        """True for a classifier or regression that was trained on pairs of texts."""
        return self.methods[0] in ("classify", "score") and (
            self.predictor.model_task.task.text_pair is not None
        )

    def warm_up(self) -> float:
        """Read the weights, compile what is missing, answer once: the seconds of a second answer.

        All in one thread: a process that has begun none can be forked.
        """
        call, items = self.call(self.methods[0]), self.example()
        call(items, 1)
        started = time.perf_counter()
        call(items, 1)
        return time.perf_counter() - started

    def example(self) -> list[Any]:
        """Items of the model's own method, to try it."""
        method = self.methods[0]
        if method in ("classify", "score") and not self.reads_pairs:
            return [("A fine film.",)]
        known: dict[str, Any] = {
            "fill": ("The [MASK] sat.",),
            "tag": ("Ann sees Rome.",),
            "choose": ("He opens the door", ("and enters.", "of milk.")),
            "embed": ("A man sings.",),
        }
        return [known.get(method, ("Who left?", "Ann left Rome."))]

    def call(self, method: str, /, **options: Any) -> Call:
        """A method as a function of items (tuples of its arguments) and of threads."""

        def compute(items: list[Any], threads: int) -> Sequence[Any]:
            predictor = self.predictor.with_threads(threads)
            if method in OWN_CALLS:
                return OWN_CALLS[method](self, predictor, items, **options)
            columns = [list(column) for column in zip(*items, strict=True)]
            return getattr(predictor, method)(*columns, **options)

        return compute

    def job(self, method: str, items: Sequence[tuple[Any, ...]], /, **options: Any) -> Job:
        """What a request asks of this model.

        `options` are keyword arguments of the method, alike for all items.
        """
        key = self, method, tuple(options.items())
        if method == "choose" and items:  # the library wants as many options everywhere
            key = *key, len(items[0][1])
        if method in ("classify", "score", "explain") and items:  # with a second text or without
            key = *key, len(items[0])
        most = self._most_tokens(method, options)
        tokens = [min(about_tokens(item), most) for item in items]
        if method == "explain":  # a pass for each word
            tokens = [count * count for count in tokens]
        return Job(f"{self.name}/{method}", key, self.call(method, **options), items, tokens)

    def _most_tokens(self, method: str, options: dict[str, Any]) -> int:
        """Tokens that are read of a text: of one that is cut no more than the model reads."""
        if method == "embed" and options.get("long_texts") != "windows":
            return self.predictor.config.max_positions
        if method in ("classify", "score"):
            encoding = self.predictor.model_task.encoding
            if encoding.long_texts != "windows":
                return encoding.max_length
        return 1 << 40

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a served model lives as long as its process)
    def pooling(self, options: tuple[tuple[str, Any], ...]) -> PoolingSettings:
        """The way to vectors. Errors: ValueError as `pooling_settings`."""
        return pooling_settings(self.folder, **dict(options))

    def public(self, message: str) -> str:
        """A message of the library without the folder, which is nobody's business."""
        return message.replace(str(self.folder), f"model '{self.name}'")


def about_tokens(item: Any) -> int:
    """Tokens of a text, or of texts together, with [CLS] and [SEP]: a token is about four letters.

    >>> about_tokens(("A fine film.", "Really?"))
    8
    """
    if isinstance(item, str):
        return 2 + (len(item) if item.isascii() else len(item.encode(errors="replace"))) // 4
    return sum(map(about_tokens, item)) if isinstance(item, tuple | list) else 0


def choose_model(
    models: dict[str, ServedModel], name: str | None, methods: Sequence[str]
) -> ServedModel:
    """The model of that name, or without one the first that can do one of the methods.

    Errors: ValueError for an unknown name, and a model that can do none of them.
    """
    if name is not None:
        if name not in models:
            raise ValueError(f"model {name!r}: {nearest(name, models)}")
        found = models[name]
        if not set(methods) & set(found.methods):
            raise ValueError(
                f"model {name!r} cannot {' or '.join(methods)}, but {', '.join(found.methods)}"
            )
        return found
    for found in models.values():
        if set(methods) & set(found.methods):
            return found
    raise ValueError(f"no model here can {' or '.join(methods)}")


def _embed(
    model: ServedModel, predictor: Predictor, items: list[Any], **options: Any
) -> list[tuple[np.ndarray, int]]:
    """(Vector, tokens) of each text."""
    pooling = model.pooling(tuple(options.items()))
    found = embed(predictor, [text for (text,) in items], pooling)
    return list(zip(found.vectors, found.tokens.tolist(), strict=True))


def _embed_tokens(
    model: ServedModel, predictor: Predictor, items: list[Any], **options: Any
) -> list[np.ndarray]:
    """The last states [T, H] of each text's tokens."""
    pooling = model.pooling(tuple(options.items()))
    length = pooling.max_length or predictor.config.max_positions
    texts = [pooling.prompt + text for (text,) in items]
    rows = text_features(predictor.tokenizer, texts, length)
    states = np.empty((len(rows.ids), predictor.config.hidden_size), np.float32)
    every = np.arange(len(rows.ids))
    for places, (last,) in predictor.states_at(rows, every, [predictor.config.num_layers]):
        states[places] = last
    return np.split(states, rows.boundaries[1:-1])


def _embed_sparse(
    model: ServedModel, predictor: Predictor, items: list[Any], **options: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(Pieces' ids, weights) of each text: of each piece the largest log(1 + relu(logit)) over the
    text's tokens (SPLADE, Formal et al. 2021), those that are not 0."""
    length = predictor.config.max_positions
    rows = text_features(predictor.tokenizer, [text for (text,) in items], length)
    found: list[Any] = [None] * len(rows)
    pieces = len(predictor.tokenizer.vocabulary)
    for row, logits_TV in predictor.piece_logits(rows, np.arange(len(rows.ids))):
        weights_V = np.log1p(np.maximum(logits_TV[:, :pieces].max(axis=0), 0))
        ids = np.flatnonzero(weights_V)
        found[row] = ids, weights_V[ids]
    return found


def _fill_together(
    model: ServedModel, predictor: Predictor, items: list[Any], top: int
) -> list[Any]:
    return [predictor.filler.joint(text, top) for (text,) in items]


def _fill_words(
    model: ServedModel, predictor: Predictor, items: list[Any], top: int, max_pieces: int
) -> list[Any]:
    return [fill_words(predictor.filler, text, max_pieces, top) for (text,) in items]


def _fill_candidates(
    model: ServedModel, predictor: Predictor, items: list[Any], candidates: tuple[str, ...]
) -> list[Any]:
    return [fill_candidates(predictor.filler, text, candidates) for (text,) in items]


def _tokenize(
    model: ServedModel, predictor: Predictor, items: list[Any], special: bool
) -> list[Any]:
    """Tokens of each text: {"token", "id", "start", "end"}, without place of [CLS] and [SEP]."""
    vocabulary = predictor.tokenizer.vocabulary
    encoded = predictor.tokenizer.encode_batch([text for (text,) in items])
    found = []
    for number in range(len(items)):
        own = encoded[number]
        tokens = [
            {"token": vocabulary.pieces[piece], "id": piece, "start": start, "end": end}
            for piece, (start, end) in zip(own.ids.tolist(), own.offsets.tolist(), strict=True)
        ]
        if special:
            ends = [
                {"token": vocabulary.pieces[piece], "id": piece, "start": None, "end": None}
                for piece in (vocabulary.cls_id, vocabulary.sep_id)
            ]
            tokens = [ends[0], *tokens, ends[1]]
        found.append(tokens)
    return found


def _attention(
    model: ServedModel, predictor: Predictor, items: list[Any], masked: tuple[int, ...]
) -> list[Any]:
    """Tokens, attention [L, A, T, T] by PyTorch, and the tokens' shares in [CLS] by rollout.

    `masked` are the numbers of tokens that [MASK] stands for. Errors: ValueError for others.
    """
    found = []
    vocabulary = predictor.tokenizer.vocabulary
    for (text,) in items:
        length = min(ATTENTION_TOKENS, predictor.config.max_positions)
        row: Features = text_features(predictor.tokenizer, [text], length)
        last = len(row.ids) - 1
        for number in masked:
            if not 0 < number < last:
                raise ValueError(
                    f"masked: token {number}: expected 1 to {last - 1}, of {text!r:.60}"
                )
            row.ids[number] = vocabulary.mask_id
        layers = predictor.pytorch(ENCODER).attention_probabilities(row)
        found.append(
            {
                "tokens": [vocabulary.pieces[piece] for piece in row.ids.tolist()],
                "attention": np.round(np.stack(layers), 4),
                "rollout": rolled_out(layers).tolist(),
            }
        )
    return found


OWN_CALLS: dict[str, Callable[..., Sequence[Any]]] = {
    "embed": _embed,
    "embed_tokens": _embed_tokens,
    "embed_sparse": _embed_sparse,
    "fill_together": _fill_together,
    "fill_words": _fill_words,
    "fill_candidates": _fill_candidates,
    "tokenize": _tokenize,
    "attention": _attention,
}
"""Methods that the predictor does not have in this form: (model, predictor, items, options)."""
