"""A model that is served: the library's predictor, and its methods as calls that requests share."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertsmith.inference.embeddings.pooling import (
    PoolingSettings,
    SimilarityTraining,
    pooling_settings,
    training_of,
)
from bertsmith.inference.embeddings.texts import TextRows, embed, finished, prompted
from bertsmith.inference.engines.exported import model_files
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.explanation import attention, rolled_out
from bertsmith.inference.fill import MASK, MaskFiller, fill_candidates, fill_words
from bertsmith.inference.predictor import Predictor
from bertsmith.serving.batching import Call, Job, about_tokens, work
from bertsmith.tasks.features import Features, cumulate, gather_spans, text_rows
from bertsmith.tasks.vectors import text_features
from bertsmith.text.tokenizer.rows import Encoded, make_rows, text_room, truncate_pairs
from bertsmith.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertsmith.inference.engines.runner import EngineModel

Cut = Literal["right", "left", "none"]
"""A text that is too long loses its end, its start, or nothing: then it is refused."""
ATTENTION_TOKENS = 64  # of a text whose attention is shown; longer ones are cut
ANSWERS = "classify", "score", "tag", "answer", "choose"  # methods of a fine-tuned model, one each
UNPOOLED = (("pool", "mean"),)  # for what does not pool: the folder's own way may not be known here


class ServedPredictor(Predictor):
    """A predictor that does not print: nobody at the server's terminal knows the texts. It reads no
    other weights than those that its folder had at first."""

    def __init__(self, folder: Path, processor: Processor) -> None:
        self.weights = stamps(folder)
        super().__init__(folder, processor)

    def note(self, message: str) -> None:
        pass

    def check_unchanged(self) -> None:
        """Errors: ValueError if weights that PyTorch reads only now are others than those that are
        served."""
        if stamps(self.folder) != self.weights:
            raise ValueError(
                "the folder has changed since it was opened: reload the server (SIGHUP)"
            )

    def _opened(self, kind: str, own: Processor) -> EngineModel:
        self.check_unchanged()
        return super()._opened(kind, own)


@dataclass(frozen=True)
class ModelEntry:
    """A model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    methods: list[str]
    labels: list[str]
    reads_pairs: bool
    max_tokens: int
    dimensions: int
    precision: str
    reports: list[str]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model under its name; it does not change while it is served."""

    name: str
    folder: Path
    predictor: ServedPredictor
    opened: float
    """The time when it was opened, in seconds since 1970."""
    trained: SimilarityTraining
    """What its folder said of vectors then."""
    _twins: dict[int, ServedPredictor] = field(default_factory=dict)
    """The predictor by threads; each keeps what it has made once."""
    _alone: threading.Lock = field(default_factory=threading.Lock)
    """Held by a call of an engine that takes all cores for one."""

    @classmethod
    def open(cls, name: str, folder: Path, processor: Processor) -> ServedModel:
        """Open a model's folder. Errors: ValueError as `bertsmith.load`."""
        folder = folder.absolute()  # which `public` mistakes for no other word of a message
        predictor, trained = ServedPredictor(folder, processor), training_of(folder)
        with contextlib.suppress(ValueError):  # as a request for vectors will say
            dense = tuple(layer.in_memory() for layer in trained.dense)
            trained = replace(trained, dense=dense)
        return cls(name, folder, predictor, time.time(), trained)

    @property
    def is_native(self) -> bool:
        """True if our own engine computes, whose weights processes can share."""
        return self.predictor.processor.engine == "bertsmith"

    @property
    def threads(self) -> int:
        """Calls that may run at once; other engines use all cores for one."""
        return self.predictor.processor.threads if self.is_native else 1

    def entry(self) -> ModelEntry:
        """Its entry in /v1/models."""
        config, own = self.predictor.config, self.predictor.processor
        is_tuned = self.methods[0] in ANSWERS
        names = self.predictor.model_task.label_names if is_tuned else ()
        return ModelEntry(
            id=self.name,
            object="model",
            created=int(self.opened),
            owned_by="bertsmith",
            methods=list(self.methods),
            labels=list(names),
            reads_pairs=self.reads_pairs,
            max_tokens=self.max_tokens,
            dimensions=self.pooling(UNPOOLED).size(config.hidden_size),
            precision=f"{own.engine}, {own.precision}",
            reports=list(self.reports),
        )

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

    @property
    def vector_tokens(self) -> int:
        """Tokens of a row that becomes a vector."""
        return self.trained.max_length or self.predictor.config.max_positions

    @property
    def max_tokens(self) -> int:
        """Tokens of a row of its own method."""
        if self.methods[0] in ANSWERS:
            return self.predictor.model_task.encoding.max_length
        is_embedder = self.methods[0] == "embed"
        return self.vector_tokens if is_embedder else self.predictor.config.max_positions

    def warm_up(self) -> None:
        """Read the weights into memory, compile what is missing, answer once.

        All in one thread: a process that has begun none can be forked.
        """
        self.call(self.methods[0])(self.example(), 1)
        self.predictor.keep_in_memory()

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
            # other engines answer one call at a time, with all their threads
            own = threads if self.is_native else self.predictor.processor.threads
            if own not in self._twins:
                self._twins[own] = self.predictor.with_threads(own)
            predictor = self._twins[own]
            if method == "attention" or options.get("method", "occlusion") != "occlusion":
                predictor.check_unchanged()
            with contextlib.nullcontext() if self.is_native else self._alone:
                if method in OWN_CALLS:
                    return OWN_CALLS[method](self, predictor, items, **options)
                columns = [list(column) for column in zip(*items, strict=True)]
                return getattr(predictor, method)(*columns, **options)

        return compute

    def job(self, method: str, items: Sequence[tuple[Any, ...]], /, **options: Any) -> Job:
        """A request to this model as a job.

        `options` are keyword arguments of the method, alike for all items.
        """
        key = self, method, tuple(options.items())
        if method == "choose" and items:  # the library wants as many options everywhere
            key = *key, len(items[0][1])
        if method in ("classify", "score", "explain") and items:  # with a second text or without
            key = *key, len(items[0])
        most, prompt = self._most_tokens(method, options), ""
        if method.startswith("embed"):
            given, own = options.get("prompt"), self.trained
            prompt = own.prompt if given is None else own.prompts.get(given, given)
        before = about_tokens(prompt) - 2
        room = max(1, self.vector_tokens - 2 - before)
        # the prompt stands before each window
        tokens = [min(k + before * -(-k // room), most) for k in map(about_tokens, items)]
        costs = work(method, items, tokens, options)
        numbers = self._numbers(method, items, tokens, options)
        kind = f"{self.name}/{method}"
        return Job(kind, key, self.call(method, **options), items, tokens, costs, numbers)

    def _most_tokens(self, method: str, options: dict[str, Any]) -> int:
        """Tokens that are read of a text: of one that is cut no more than the model reads."""
        if method == "attention":
            return ATTENTION_TOKENS
        if method.startswith("embed") and options.get("long_texts") != "windows":
            return self.vector_tokens
        if method in ("classify", "score", "outputs", "explain"):
            encoding = self.predictor.model_task.encoding
            if encoding.long_texts != "windows":
                return encoding.max_length
        return 1 << 40

    def _numbers(
        self, method: str, items: Sequence[Any], tokens: Sequence[int], options: dict[str, Any]
    ) -> int:
        """Numbers in the answers, at most, of methods that give many for a token or text."""
        config, pieces = self.predictor.config, len(self.predictor.tokenizer.vocabulary)
        if method == "fill_candidates":
            return 5 * len(options["candidates"]) * len(items)
        if method.startswith("fill"):  # a piece and its probability
            return 2 * min(options["top"], pieces) * sum(item[0].count(MASK) for item in items)
        if method == "embed_sparse":  # a piece and its weight
            return 2 * pieces * len(items)
        attention = config.num_layers * config.num_heads * ATTENTION_TOKENS
        each = {"attention": attention, "embed_tokens": config.hidden_size}.get(method, 0)
        return each * sum(tokens)

    @functools.cached_property
    def pooling(self) -> Callable[[tuple[tuple[str, Any], ...]], PoolingSettings]:
        """The way to vectors for some options. Errors: ValueError as `pooling_settings`."""
        return functools.lru_cache(16)(
            lambda options: pooling_settings(self.trained, **dict(options))
        )

    def public(self, message: str) -> str:
        """A message of the library without the folder, which is nobody's business."""
        return message.replace(str(self.folder), f"model '{self.name}'")


def stamps(folder: Path) -> list[tuple[int, ...]]:
    """Device, inode, time and size of a folder's weights: other files in their place differ."""
    found = [path.stat() for path in model_files(folder)[0]]
    return [(own.st_dev, own.st_ino, own.st_mtime_ns, own.st_size) for own in found]


def _embed(
    model: ServedModel, predictor: Predictor, items: list[Any], cut: Cut = "right", **options: Any
) -> list[tuple[np.ndarray, int]]:
    """(Vector, tokens) of each text."""
    pooling = model.pooling(tuple(options.items()))
    texts = [text for (text,) in items]
    if cut == "right" and all(isinstance(text, str) for text in texts):
        found = embed(predictor, texts, pooling)
        return list(zip(found.vectors, found.tokens.tolist(), strict=True))
    pooling.size(predictor.config.hidden_size)  # it refuses too many dimensions
    rows, skip = _prompted_rows(predictor, items, cut, pooling)
    vectors = predictor.vectors(rows, pooling.pool, skip)
    vectors = finished(vectors, TextRows(rows, skip), pooling)
    return list(zip(vectors, rows.lengths.tolist(), strict=True))


def _embed_tokens(
    model: ServedModel, predictor: Predictor, items: list[Any], cut: Cut = "right", **options: Any
) -> list[np.ndarray]:
    """The last states [T, H] of each text's tokens."""
    pooling = model.pooling((*UNPOOLED, *options.items()))
    rows, _ = _prompted_rows(predictor, items, cut, pooling)
    states = np.empty((len(rows.ids), predictor.config.hidden_size), np.float32)
    every = np.arange(len(rows.ids))
    for places, (last,) in predictor.states_at(rows, every, [predictor.config.num_layers]):
        states[places] = last
    return np.split(states, rows.boundaries[1:-1])


def _embed_sparse(
    model: ServedModel, predictor: Predictor, items: list[Any], cut: Cut = "right", **options: Any
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(Pieces' ids, weights, tokens) of each text: of each piece the largest log(1 + relu(logit))
    over the text's tokens (SPLADE, Formal et al. 2021), those that are not 0."""
    pooling = model.pooling((*UNPOOLED, *options.items()))
    rows, _ = _prompted_rows(predictor, items, cut, pooling)
    found: list[Any] = [None] * len(rows)
    pieces, tokens = len(predictor.tokenizer.vocabulary), rows.lengths.tolist()
    for row, logits_TV in predictor.piece_logits(rows, np.arange(len(rows.ids))):
        weights_V = np.log1p(np.maximum(logits_TV[:, :pieces].max(axis=0), 0))
        ids = np.flatnonzero(weights_V)
        found[row] = ids, weights_V[ids], tokens[row]
    return found


def _outputs(
    model: ServedModel, predictor: Predictor, items: list[Any], cut: Cut = "right"
) -> list[tuple[np.ndarray, int]]:
    """(The head's outputs float32 [K], tokens) of each text or pair; too long ones lose their end
    as in training."""
    task = predictor.model_task
    found: list[Any] = [None] * len(items)
    encoding, are_classes = task.encoding, task.task.task_type == "classify"
    for size in {len(item) for item in items}:
        places = [k for k, item in enumerate(items) if len(item) == size]
        own = [items[k] for k in places]
        if cut == "right" or encoding.long_texts == "windows":
            texts, *pairs = (list(column) for column in zip(*own, strict=True))
            whole = text_rows(predictor.tokenizer, texts, pairs[0] if pairs else None, encoding)
            rows = Features(**whole.fields(None, encoding))
        elif encoding.both_orders == "on" and size == 2:
            both = [pair for one, other in own for pair in ((one, other), (other, one))]
            rows = replace(_rows(predictor.tokenizer, both, encoding.max_length, cut), orders=2)
        else:
            rows = _rows(predictor.tokenizer, own, encoding.max_length, cut)
        outputs = rows.pooled(predictor.outputs(rows), encoding.pool, are_classes)
        tokens = rows.lengths.reshape(-1, rows.orders).sum(axis=1)
        if rows.unit_examples is not None:
            tokens = np.bincount(rows.unit_examples, tokens).astype(np.int64)
        for place, *answer in zip(places, outputs, tokens.tolist(), strict=True):
            found[place] = tuple(answer)
    return found


def _prompted_rows(
    predictor: Predictor, items: list[Any], cut: Cut, pooling: PoolingSettings
) -> tuple[Features, int]:
    """(Rows of texts with their prompt, tokens at the start of each that are not pooled).

    Errors: ValueError as `prompted` and `_rows`.
    """
    positions = predictor.config.max_positions
    tokenizer, length, _, skip = prompted(predictor.tokenizer, pooling, positions)
    return _rows(tokenizer, items, length, cut, pooling.prompt), skip


def _rows(
    tokenizer: Tokenizer, items: list[Any], length: int, cut: Cut, prompt: str = ""
) -> Features:
    """The rows of texts or pairs; in place of a text may stand the ids of its pieces.

    Errors: ValueError for one that is too long and must not be cut.
    """
    first, *second = (_encoded(tokenizer, column, prompt) for column in zip(*items, strict=True))
    a = np.diff(first.boundaries)
    b = np.diff(second[0].boundaries) if second else np.zeros_like(a)
    room = text_room(length, bool(second))
    if cut == "none" and (longest := int((a + b).max())) > room:
        given = longest + length - room
        raise ValueError(f"`inputs` must have less than {length} tokens. Given: {given}")
    if cut == "left":
        a_kept, b_kept = truncate_pairs(a, b, room)
        first = _tails(first, a_kept, len(_encoded(tokenizer, [prompt]).ids))
        second = [_tails(encoded, b_kept) for encoded in second]
    pair = second[0] if second else None
    rows = make_rows(first, pair, tokenizer.vocabulary, max_length=length)
    return Features(rows.ids, rows.token_types, rows.boundaries, None, length, rows.num_cut)


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str | Sequence[int]], prompt: str = ""
) -> Encoded:
    words = [prompt + text for text in texts if isinstance(text, str)]
    encoded = tokenizer.encode_batch(words, offsets=False)
    if len(words) == len(texts):
        return encoded
    before, numbers = tokenizer.encode_batch([prompt], offsets=False).ids, iter(range(len(words)))
    parts = [
        encoded[next(numbers)].ids
        if isinstance(text, str)
        else np.concatenate([before, np.array(text, np.int32)])
        for text in texts
    ]
    boundaries = cumulate(np.array([len(part) for part in parts]))
    return Encoded(np.concatenate(parts), encoded.offsets[:0], encoded.word_ids[:0], boundaries)


def _tails(encoded: Encoded, kept: np.ndarray, head: int = 0) -> Encoded:
    """The last tokens of each text, as many as are kept [N], among them the first `head`."""
    heads = np.minimum(head, kept)
    starts = np.stack([encoded.boundaries[:-1], encoded.boundaries[1:] - (kept - heads)], axis=1)
    return gather_spans(encoded, starts, np.stack([heads, kept - heads], axis=1))


def _filled(fill: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function of a filler and a text as a call with many texts."""
    return lambda model, predictor, items, **options: [
        fill(predictor.filler, text, **options) for (text,) in items
    ]


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
    """The predictor's attention, and the tokens' shares in [CLS] by rollout.

    `masked` are the numbers of tokens that [MASK] stands for. Errors: ValueError for others.
    """
    found = []
    length = min(ATTENTION_TOKENS, predictor.config.max_positions)
    for (text,) in items:
        row: Features = text_features(predictor.tokenizer, [text], length)
        last = len(row.ids) - 1
        for number in masked:
            if not 0 < number < last:
                raise ValueError(
                    f"masked: token {number}: expected 1 to {last - 1}, of {text!r:.60}"
                )
            row.ids[number] = predictor.tokenizer.vocabulary.mask_id
        own = attention(predictor, row)
        weights, rollout = np.round(own.weights, 4), rolled_out(list(own.weights)).tolist()
        found.append({"tokens": own.tokens, "weights": weights, "rollout": rollout})
    return found


OWN_CALLS: dict[str, Callable[..., Sequence[Any]]] = {
    "embed": _embed,
    "embed_tokens": _embed_tokens,
    "embed_sparse": _embed_sparse,
    "outputs": _outputs,
    "fill_together": _filled(MaskFiller.joint),
    "fill_words": _filled(fill_words),
    "fill_candidates": _filled(fill_candidates),
    "tokenize": _tokenize,
    "attention": _attention,
}
"""Methods that the predictor does not have in this form: (model, predictor, items, options)."""
