"""The routes of text-embeddings-inference, so that its clients work unchanged.

Source: huggingface/text-embeddings-inference, router/src/http and core/src. Defaults, messages and
status codes are those of its code, which are not always those of its OpenAPI page. A batch may be
as large as `max_texts`; fields that nobody knows are passed over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from bertsmith.base import VERSION
from bertsmith.serving.application import Application, Refused, Reply, Request
from bertsmith.serving.batching import Busy
from bertsmith.serving.models import UNPOOLED, Cut, ServedModel
from bertsmith.serving.routes import Prompt
from bertsmith.tasks.metrics import sigmoid, softmax
from bertsmith.tasks.vectors import cosines
from bertsmith.text.tokenizer.wordpiece import SPECIAL

Inputs = str | list[str | int | list[int]]
BEFORE_SIGN = re.compile(r" (?=[.?!,])")


class Inference(Struct, kw_only=True):
    """Fields of its requests that read texts."""

    model: str | None = None
    """The model's name, which its own clients do not send; null: the first that was
    made for it, or else can do it."""
    truncate: bool | None = None
    """False: a text that is too long is refused."""
    truncation_direction: Literal["right", "left", "Right", "Left"] = "right"

    @property
    def cut(self) -> Cut:
        if self.truncate is False:
            return "none"
        return "left" if self.truncation_direction.lower() == "left" else "right"

    @property
    def is_batch(self) -> bool:
        return True


class TokensInputs(Inference):
    """A text, its ids, or a list of texts and of ids."""

    inputs: Inputs
    prompt_name: Prompt | None = None

    @property
    def is_batch(self) -> bool:
        return not isinstance(self.inputs, str) and not is_ids(self.inputs)


class EmbedInputs(TokensInputs):
    """Texts or ids, and how their vectors are made: cut to dimensions first, then normalized."""

    normalize: bool = True
    dimensions: int | None = None


class PipelineParameters(Struct):
    """Fields that huggingface_hub's client sends besides."""

    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None


class PredictInputs(Inference):
    """A text, a pair of texts, or a list of lists of one text or two."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    parameters: PipelineParameters | None = None
    """Sent by huggingface_hub's client, which takes the answer to a text as a list in a list."""

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and any(isinstance(x, list) for x in self.inputs[:1])


class RerankTexts(Inference):
    """A query, and texts to put in order by it."""

    query: str
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False


class Sentences(Struct):
    """A sentence, and others to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Inference):
    """The way sentences are read."""

    prompt_name: Prompt | None = None


class SimilarityInputs(Struct, kw_only=True):
    """Sentences, and how they are read."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: str | None = None

    @property
    def is_batch(self) -> bool:
        return True


class TokenizeInputs(Struct, kw_only=True):
    """A text, or a list of texts."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: Prompt | None = None
    model: str | None = None


class DecodeIds(Struct, kw_only=True):
    """Ids of pieces, or a list of such lists."""

    ids: list[int | list[int]]
    skip_special_tokens: bool = True
    model: str | None = None


ERROR_TYPES = {400: "Empty", 404: "Validation", 422: "Validation", 429: "Overloaded"}
MALFORMED = {
    400: "Failed to parse the request body as JSON: ",
    422: "Failed to deserialize the JSON body into the target type: ",
}


def inference_error(refused: Refused) -> Any:
    """A refusal; of a body that cannot be read in plain text, of a wrong key without a word."""
    status, message, cause = refused.status, refused.message, refused.__cause__
    if status == 401:
        return Reply(b"", b"text/plain", status)
    if status in (413, 415) or isinstance(cause, msgspec.MsgspecError | UnicodeError):
        text = MALFORMED.get(status, "") + message
        return Reply(text.encode(), b"text/plain; charset=utf-8", status)
    if status == 429:
        message = "Model is overloaded"
    elif status == 422 and isinstance(cause, ValueError):
        message = f"Input validation error: {message}"
    return {"error": message, "error_type": ERROR_TYPES.get(status, "Backend")}


def mismatch(message: str, name: str) -> Refused:
    """The refusal of a body of another form than the route's."""
    refused = Refused(422, message, name)
    refused.__cause__ = msgspec.ValidationError(message)
    return refused


def counted(
    compute: Callable[[Application, Request, Any], Awaitable[tuple[Any, int]]],
) -> Callable[[Application, Request, Any], Awaitable[Reply]]:
    """Make a route of `compute` (answer, tokens): counted, and with headers of its costs."""

    async def respond(app: Application, request: Request, body: Any) -> Reply:
        fault: str | None = "inference"
        try:
            answer, tokens = await compute(app, request, body)
            fault = None
        except Busy:
            fault = "overloaded"
            raise
        except Refused as refused:
            fault = fault_of(refused)
            raise
        finally:
            app.metrics.on_te_request(body.is_batch, fault)
        return Reply(answer, headers=costs(app, request, tokens))

    return respond


def fault_of(refused: Refused) -> str:
    """The label by which a refusal is counted."""
    if refused.status == 424:
        return "model_type"
    if refused.message.startswith("batch size"):
        return "batch_size"
    return "tokenization" if isinstance(refused.__cause__, ValueError) else "validation"


def costs(app: Application, request: Request, tokens: int) -> list[tuple[bytes, bytes]]:
    """Headers of a request's characters, tokens and milliseconds."""
    total = round(1000 * (time.perf_counter() - request.started))
    is_cpu = next(iter(app.models.values())).predictor.processor.is_cpu
    waits = [job.began - job.queued_at for job in request.jobs if job.began is not None]
    found = {
        "compute-type": "cpu" if is_cpu else "gpu",
        "compute-time": total,
        "compute-characters": sum(
            len(part) for job in request.jobs for item in job.items for part in item
        ),
        "compute-tokens": tokens,
        "total-time": total,
        "tokenization-time": 0,  # it is a part of inference
        "queue-time": round(1000 * max(waits, default=0)),
        "inference-time": round(1000 * sum(job.computed for job in request.jobs)),
    }
    return [(f"x-{name}".encode(), str(value).encode()) for name, value in found.items()]


def check_texts(app: Application, texts: Sequence[Any], name: str) -> None:
    """Refuse an empty list, one that is too long, and texts or pairs without a character."""
    if not texts:
        raise Refused(400, f"`{name}` cannot be empty", name)
    if len(texts) > (most := app.settings.max_texts):
        raise Refused(422, f"batch size {len(texts)} > maximum allowed batch size {most}", name)
    if not all(any(text) if isinstance(text, tuple) else text for text in texts):
        raise Refused(400, "Input validation error: `inputs` cannot be empty", name)


def able(app: Application, name: str | None, otherwise: str, *methods: str) -> ServedModel:
    """The model that can do one of the methods; a message if it cannot."""
    try:
        return app.model(name, *methods)
    except Refused as refused:
        if name is not None and name not in app.models:
            raise
        raise Refused(424, f"Backend error: {otherwise}", "model") from refused


def is_ids(given: str | list[Any]) -> bool:
    """True for the ids of one text."""
    return bool(given) and all(isinstance(part, int) for part in given)


def texts_or_ids(model: ServedModel, given: Inputs, name: str) -> list[Any]:
    """Texts, and tuples of ids without [CLS] and [SEP] at their ends.

    Errors: `Refused` for an id that the model does not have, and ids beside texts.
    """
    listed: list[Any] = [given] if isinstance(given, str) or is_ids(given) else [*given]
    vocabulary = model.predictor.tokenizer.vocabulary
    for number, ids in enumerate(listed):
        if isinstance(ids, int):
            raise mismatch("ids beside texts or lists: give the ids of a text as a list", name)
        if isinstance(ids, str) or not ids:
            continue
        for wrong in (min(ids), max(ids)):
            if not 0 <= wrong < len(vocabulary):
                pieces = f"{len(vocabulary):,} pieces of model '{model.name}'"
                raise Refused(422, f"id {wrong} is none of the {pieces}", name)
        end = len(ids) - (ids[-1] == vocabulary.sep_id)
        listed[number] = tuple(ids[ids[0] == vocabulary.cls_id : end])
    return listed


async def of_texts(
    app: Application, request: Request, body: TokensInputs, method: str, **options: Any
) -> list[Any]:
    """The answers of a method to the texts of a request."""
    needed, otherwise = "embed", "Model is not an embedding model"
    if method == "embed_sparse":
        needed, otherwise = "fill", "Model is not an embedding model with SPLADE pooling"
    model = able(app, body.model, otherwise, needed)
    texts = texts_or_ids(model, body.inputs, "inputs")
    check_texts(app, texts, "inputs")
    items, own = [(text,) for text in texts], {"cut": body.cut, "prompt": body.prompt_name}
    return await app.ask(request, model, method, items, **own, **options)


async def embed(app: Application, request: Request, body: EmbedInputs) -> tuple[list[Any], int]:
    options = {"normalize": body.normalize, "dimensions": body.dimensions}
    found = await of_texts(app, request, body, "embed", **options)
    return [vector for vector, _ in found], sum(tokens for _, tokens in found)


async def embed_all(app: Application, request: Request, body: TokensInputs) -> tuple[Any, int]:
    found = await of_texts(app, request, body, "embed_tokens")
    return found, sum(map(len, found))


async def embed_sparse(app: Application, request: Request, body: TokensInputs) -> tuple[Any, int]:
    found = await of_texts(app, request, body, "embed_sparse")
    answers = [
        [{"index": k, "value": value} for k, value in zip(ids.tolist(), weights, strict=True)]
        for ids, weights, _ in found
    ]
    return answers, sum(tokens for *_, tokens in found)


async def similarity(
    app: Application, request: Request, body: SimilarityInputs
) -> tuple[np.ndarray, int]:
    given, sentences = body.parameters or SimilarityParameters(), body.inputs.sentences
    if not sentences:
        raise Refused(400, "`inputs.sentences` cannot be empty", "inputs.sentences")
    asked = EmbedInputs(
        inputs=[body.inputs.source_sentence, *sentences],
        model=body.model,
        truncate=given.truncate,
        truncation_direction=given.truncation_direction,
        prompt_name=given.prompt_name,
    )
    vectors, tokens = await embed(app, request, asked)
    others = np.stack(vectors[1:])
    return cosines(np.broadcast_to(vectors[0], others.shape), others), tokens


async def logits_of(
    app: Application, request: Request, model: ServedModel, items: list[Any], cut: Cut
) -> tuple[np.ndarray, int]:
    """(The head's outputs [N, K] for texts or pairs, tokens)."""
    if model.reads_pairs and any(len(item) == 1 for item in items):
        raise Refused(422, f"model '{model.name}' reads pairs: send [text, second text]", "inputs")
    is_single = not model.reads_pairs and model.predictor.says_columns
    if is_single and any(len(item) == 2 for item in items):
        raise Refused(422, f"model '{model.name}' reads single texts: send one, no pair", "inputs")
    found = await app.ask(request, model, "outputs", items, cut=cut)
    logits = np.stack([outputs for outputs, _ in found])
    if np.isnan(logits).any():
        raise Refused(424, "score is NaN")
    return logits, sum(tokens for _, tokens in found)


async def predict(app: Application, request: Request, body: PredictInputs) -> tuple[Any, int]:
    model = able(app, body.model, "Model is not a classifier model", "classify", "score")
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    listed = given if body.is_batch else [given]
    if not all(
        isinstance(item, list) and len(item) in (1, 2) and all(isinstance(x, str) for x in item)
        for item in listed
    ):
        raise mismatch("not a text, a pair of texts, or a list of lists of 1 or 2", "inputs")
    items = [tuple(item) for item in listed]
    check_texts(app, items, "inputs")
    logits, tokens = await logits_of(app, request, model, items, body.cut)
    task, parameters = model.predictor.model_task, body.parameters or PipelineParameters()
    # of a model with several labels at once each is for itself, which the original does not know
    usual = "softmax" if task.task.task_type == "classify" else "sigmoid"
    function = parameters.function_to_apply or ("none" if body.raw_scores else usual)
    scores = {"none": np.asarray, "sigmoid": sigmoid, "softmax": softmax}[function](logits)
    names = labels_of(model)
    answers = [
        [
            {"score": row[k], "label": names[k]}
            for k in np.argsort(-row, kind="stable")[: parameters.top_k]
        ]
        for row in scores
    ]
    return answers if body.is_batch or body.parameters else answers[0], tokens


async def relevance(
    app: Application, request: Request, body: RerankTexts, texts: list[str], name: str
) -> tuple[np.ndarray, list[int], int]:
    """(Scores of texts, their numbers from the best to the worst, tokens)."""
    model = able(app, body.model, "model is not a re-ranker model", "score")
    check_texts(app, texts, name)
    items = [(body.query, text) for text in texts]
    logits, tokens = await logits_of(app, request, model, items, body.cut)
    scores = logits[:, 0] if body.raw_scores else sigmoid(logits[:, 0])
    return scores, np.argsort(-scores, kind="stable").tolist(), tokens


async def rerank(app: Application, request: Request, body: RerankTexts) -> tuple[Any, int]:
    if body.texts is None:
        raise mismatch("missing field `texts`", "texts")
    scores, order, tokens = await relevance(app, request, body, body.texts, "texts")
    shown = [{"text": text} if body.return_text else {} for text in body.texts]
    return [{"index": k, **shown[k], "score": scores[k]} for k in order], tokens


async def tokenize(app: Application, request: Request, body: TokenizeInputs) -> Any:
    model = app.model(body.model, "embed")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_texts(app, texts, "inputs")
    try:
        prompt = model.pooling((*UNPOOLED, ("prompt", body.prompt_name))).prompt
    except ValueError as error:
        raise Refused(422, model.public(str(error)), "prompt_name") from error
    texts = [prompt + text for text in texts]
    items, special = [(text,) for text in texts], body.add_special_tokens
    found = await app.ask(request, model, "tokenize", items, special=special)
    return [
        [
            {
                "id": token["id"],
                "text": token["token"]
                if token["end"] is None
                else text[token["start"] : token["end"]],
                "special": token["end"] is None,
                "start": token["start"],
                "stop": token["end"],
            }
            for token in tokens
        ]
        for text, tokens in zip(texts, found, strict=True)
    ]


async def decode(app: Application, request: Request, body: DecodeIds) -> list[str]:
    model = app.model(body.model, "embed")
    tokenizer = model.predictor.tokenizer
    vocabulary = tokenizer.vocabulary
    listed: list[Any] = [body.ids] if is_ids(body.ids) else body.ids
    check_texts(app, listed, "ids")
    if any(isinstance(ids, int) for ids in listed):
        raise mismatch("ids beside lists of ids", "ids")
    hidden = set()
    if body.skip_special_tokens:  # a GPT's are none of BERT's
        hidden = {vocabulary.ids[name] for name in SPECIAL if name in vocabulary.ids}
        hidden |= {vocabulary.unk_id, *(vocabulary.borders or ())}
    try:
        texts = [tokenizer.decode([k for k in ids if k not in hidden]) for ids in listed]
    except ValueError as error:
        raise Refused(422, str(error), "ids") from error
    return [BEFORE_SIGN.sub("", text) for text in texts]


def labels_of(model: ServedModel) -> tuple[str, ...]:
    """The names of the head's outputs; that of a score is transformers'."""
    return model.predictor.model_task.label_names or ("LABEL_0",)


async def info(app: Application, request: Request, body: None) -> dict[str, Any]:
    """About the first model."""
    model = next(iter(app.models.values()))
    own, settings, method = model.predictor.processor, app.settings, model.methods[0]
    if method in ("classify", "score"):
        kind = "classifier" if method == "classify" else "reranker"
        names = labels_of(model)
        of_kind: dict[str, Any] = {
            "id2label": {str(k): name for k, name in enumerate(names)},
            "label2id": {name: k for k, name in enumerate(names)},
        }
        length = model.max_tokens
    else:
        kind, of_kind = "embedding", {"pooling": model.trained.pool or "mean"}
        length = model.vector_tokens
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": own.precision,
        "served_model_name": model.name,
        "model_type": {kind: of_kind},
        "max_concurrent_requests": settings.max_connections,
        "max_input_length": length,
        "max_batch_tokens": settings.max_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_texts,
        "auto_truncate": True,
        "tokenization_workers": model.threads,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }
