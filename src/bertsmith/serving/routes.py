"""Our own routes: requests to a model, answers, and the way between them."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from bertsmith.inference.answers import (
    AnswerSpan,
    Choice,
    FillCandidate,
    TaggedText,
    WordScore,
)
from bertsmith.inference.embeddings.pooling import LongTexts
from bertsmith.inference.explanation import Method
from bertsmith.serving.application import Application, Operation, Refused, Reply, Request
from bertsmith.serving.models import ModelEntry
from bertsmith.tasks.vectors import Pool

Texts = str | Annotated[list[str], Meta(min_length=1)]
Top = Annotated[int, Meta(ge=1, le=1000)]
Prompt = Annotated[str, Meta(max_length=4096)]  # it is put before every text


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests."""

    model: str | None = None
    """The model's name; null: the first that was made for it, or else can do it."""


class Classify(Body):
    """A text, or a list of texts; of a model of pairs their second texts, too."""

    text: Texts
    text_pair: Texts | None = None


class Explain(Classify):
    """A text or pair, as to classify: which words does the answer hang on?"""

    method: Method = "occlusion"
    label: str | None = None


class Fill(Body):
    """A text with [MASK]; one of together, max_pieces and candidates at most."""

    text: Texts
    top: Top = 5
    together: bool = False
    max_pieces: Annotated[int, Meta(ge=1, le=8)] | None = None
    candidates: Annotated[list[str], Meta(min_length=1, max_length=1000)] | None = None


class Text(Body):
    """A text, or a list of texts."""

    text: Texts


class Attend(Text):
    """A text, or a list of texts; `masked`: numbers of tokens that [MASK] takes the place of."""

    masked: tuple[Annotated[int, Meta(ge=1)], ...] = ()


class Ask(Body):
    """A question and the context that may answer it, or lists of both."""

    question: Texts
    context: Texts


class Choose(Body):
    """A prompt and the options to go on with."""

    prompt: str
    options: Annotated[list[str], Meta(min_length=2, max_length=100)]


class Embed(Body):
    """Texts, and how their vectors are made; null: as the model's folder says."""

    text: Texts
    pool: Pool | None = None
    prompt: Prompt | None = None
    normalize: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    long_texts: LongTexts = "cut"
    encoding: Literal["float", "base64"] = "float"


class Tokenize(Body):
    """Texts; `special`: with [CLS] and [SEP]."""

    text: Texts
    special: bool = True


class Filling(Struct, omit_defaults=True):
    """Pieces or words for all masks of a text together, or a candidate."""

    log_probability: float
    tokens: list[str] | UnsetType = UNSET
    words: list[str] | UnsetType = UNSET
    pieces: list[list[str] | str] | UnsetType = UNSET
    candidate: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    probability: float | UnsetType = UNSET


class Filled(Struct, omit_defaults=True):
    """The likeliest pieces at each mask by itself, or the likeliest fillings of all."""

    masks: list[list[FillCandidate]] | UnsetType = UNSET
    fillings: list[Filling] | UnsetType = UNSET


class Token(Struct):
    """A piece, and the characters start:end of the text; null of [CLS] and [SEP]."""

    token: str
    id: int
    start: int | None
    end: int | None


class LabelOrScore(Struct, omit_defaults=True):
    """A class and how sure it is; of a multi-label model its labels; of a regression a score."""

    label: str | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    labels: list[str] | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET
    score: float | UnsetType = UNSET


class Explained(Struct):
    """The part of each word in an answer; `measures` says what the scores are."""

    answer: LabelOrScore | float
    label: str | None
    method: Method
    measures: str
    words: list[WordScore]


class Vector(Struct):
    """A text's vector, as numbers or as base64 of little-endian float32, and its tokens."""

    vector: list[float] | str
    tokens: int


class Attention(Struct):
    """The weights of each token (row) for each (column), by layer and head; each token's share
    in the first by rollout."""

    tokens: list[str]
    weights: list[list[list[list[float]]]]
    rollout: list[float]


class Answered(Struct):
    """An answer a text, in their order."""

    model: str


def answered(name: str, kind: Any) -> type[Struct]:
    """The class of answers of a kind."""
    return defstruct(name, [("answers", list[kind])], bases=(Answered,))


Labels = answered("Labels", LabelOrScore)
Explanations = answered("Explanations", Explained)
Fillings = answered("Fillings", Filled)
Tags = answered("Tags", TaggedText)
Spans = answered("Spans", AnswerSpan)
Choices = answered("Choices", Choice)
Vectors = answered("Vectors", Vector)
Tokens = answered("Tokens", list[Token])
Attentions = answered("Attentions", Attention)


def listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def columns(**given: str | list[str] | None) -> list[tuple[str, ...]]:
    """The texts of several fields, item by item; a field that is None is left out.

    >>> columns(question=["Who?", "When?"], context=["Ann.", "Now."])
    [('Who?', 'Ann.'), ('When?', 'Now.')]
    """
    found = {name: listed(texts) for name, texts in given.items() if texts is not None}
    sizes = {name: len(texts) for name, texts in found.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise Refused(422, f"lists of different lengths: {told}", list(sizes)[-1])
    return list(zip(*found.values(), strict=True))


async def classify(app: Application, request: Request, body: Classify) -> Any:
    model = app.model(body.model, "classify", "score")
    items = columns(text=body.text, text_pair=body.text_pair)
    answers = await app.ask(request, model, model.methods[0], items)
    if model.methods[0] == "score":
        answers = [{"score": score} for score in answers]
    return {"model": model.name, "answers": answers}


async def fill(app: Application, request: Request, body: Fill) -> Any:
    model = app.model(body.model, "fill")
    given = {
        "together": body.together or None,
        "max_pieces": body.max_pieces,
        "candidates": body.candidates and tuple(body.candidates),
    }
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        raise Refused(422, f"{' and '.join(asked)}: give one of them", list(asked)[-1])
    method, options = "fill", {"top": body.top}
    if "together" in asked:
        method = "fill_together"
    elif "max_pieces" in asked:
        method, options = "fill_words", {"top": body.top, "max_pieces": body.max_pieces}
    elif "candidates" in asked:
        method, options = "fill_candidates", asked
    found = await app.ask(request, model, method, columns(text=body.text), **options)
    name = "fillings" if asked else "masks"
    return {"model": model.name, "answers": [{name: answer} for answer in found]}


def ask_for(
    method: str, *texts: str, options: Sequence[str] = (), need: str | None = None
) -> Callable[[Application, Request, Any], Awaitable[Any]]:
    """To answer what the method of a model that can do `need`, else the method, says of `texts`.

    These and the `options` of the method are fields of the body.
    """

    async def respond(app: Application, request: Request, body: Body) -> Any:
        model = app.model(body.model, need or method)
        items = columns(**{name: getattr(body, name) for name in texts})
        given = {name: getattr(body, name) for name in options}
        answers = await app.ask(request, model, method, items, **given)
        return {"model": model.name, "answers": answers}

    return respond


async def choose(app: Application, request: Request, body: Choose) -> Any:
    model = app.model(body.model, "choose")
    items = [(body.prompt, body.options)]
    return {"model": model.name, "answers": await app.ask(request, model, "choose", items)}


async def embed(app: Application, request: Request, body: Embed) -> Any:
    model = app.model(body.model, "embed")
    names = ("pool", "prompt", "normalize", "dimensions", "long_texts")
    options = {name: getattr(body, name) for name in names}
    found = await app.ask(request, model, "embed", columns(text=body.text), **options)
    answers = [
        {"vector": encoded(vector, body.encoding), "tokens": tokens} for vector, tokens in found
    ]
    return {"model": model.name, "answers": answers}


def encoded(vector: np.ndarray, encoding: str) -> np.ndarray | str:
    """A vector for JSON: itself, or base64 of little-endian float32.

    >>> encoded(np.float32([1, 0]), "base64")
    'AACAPwAAAAA='
    """
    if encoding == "float":
        return vector
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


FILM = {"text": ["A fine film.", "Two hours of rain."]}
OPERATIONS: Sequence[Operation] = (
    Operation(
        "/v1/classify", classify, Classify, Labels, "Classes, labels or scores", FILM,
        needs=("classify", "score"),
    ),
    Operation(
        "/v1/explain", ask_for("explain", "text", "text_pair", options=("method", "label")),
        Explain, Explanations, "Words that matter", FILM, needs=("explain",),
    ),
    Operation(
        "/v1/fill", fill, Fill, Fillings, "Words for [MASK]", {"text": "The [MASK] sat."},
        needs=("fill",),
    ),
    Operation(
        "/v1/tag", ask_for("tag", "text"), Text, Tags, "Entities", {"text": "Ann sees Rome."},
        needs=("tag",),
    ),
    Operation(
        "/v1/answer", ask_for("answer", "question", "context"), Ask, Spans, "Answers from a text",
        {"question": "Who left?", "context": "Ann left Rome."}, needs=("answer",),
    ),
    Operation(
        "/v1/choose", choose, Choose, Choices, "The option that goes on best",
        {"prompt": "He opens the door", "options": ["and enters.", "of milk."]}, needs=("choose",),
    ),
    Operation("/v1/embed", embed, Embed, Vectors, "Vectors of texts", FILM, needs=("embed",)),
    Operation(
        "/v1/tokenize", ask_for("tokenize", "text", options=("special",), need="embed"), Tokenize,
        Tokens, "Tokens of texts", FILM, needs=("embed",),
    ),
    Operation(
        "/v1/attention", ask_for("attention", "text", options=("masked",), need="embed"), Attend,
        Attentions, "Attention weights", FILM, needs=("embed",),
    ),
)  # fmt: skip


async def live(app: Application, request: Request, body: None) -> Reply:
    return Reply(content_type=b"text/plain")


async def ready(app: Application, request: Request, body: None) -> Reply:
    if app.is_draining:
        raise Refused(503, "stopping")
    return Reply(content_type=b"text/plain")


async def metrics(app: Application, request: Request, body: None) -> Reply:
    kind, text = app.metrics.text()
    return Reply(text, kind.encode())


async def models(app: Application, request: Request, body: None) -> Any:
    """The models as OpenAI lists them, and what each can do."""
    return {"object": "list", "data": [model.entry() for model in app.models.values()]}


class ModelList(Struct):
    object: str
    data: list[ModelEntry]


OPEN: Sequence[Operation] = (
    Operation("/health", live, summary="The process answers", is_open=True),
    Operation("/health/live", live, summary="The process answers", is_open=True),
    Operation("/health/ready", ready, summary="It takes requests", is_open=True),
    Operation("/ping", live, summary="The process answers", is_open=True),
    Operation("/metrics", metrics, summary="Numbers for Prometheus", is_open=True),
    Operation("/v1/models", models, answer=ModelList, summary="Models and what they can do"),
)
