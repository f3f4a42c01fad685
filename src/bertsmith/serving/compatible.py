"""All routes of others: OpenAI's embeddings, Cohere's rerank, text-embeddings-inference (`tei.py`).

OpenAI: POST /v1/embeddings. Cohere: POST /v1/rerank and /v2/rerank, and /rerank with `documents`.
/invocations and / are the model's main route, for SageMaker and for clients that know a base URL.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from bertsmith.serving import tei
from bertsmith.serving.application import (
    Application,
    Operation,
    Refused,
    Reply,
    Request,
    decoded,
    openai_error,
)
from bertsmith.serving.routes import encoded

OTHERS_MODELS = "text-embedding-", "rerank-"  # what clients of OpenAI and Cohere ask for


def own_name(app: Application, name: str | None) -> str | None:
    """The name of a model; None, which is any that can, for one of OpenAI's or Cohere's.

    A name that is nobody's stays, to be refused: it may be misspelled.
    """
    is_others = name is not None and name not in app.models and name.startswith(OTHERS_MODELS)
    return None if is_others else name


class EmbeddingsInput(Struct, kw_only=True):
    """A text, its ids, or a list of texts and of ids."""

    input: tei.Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


async def embeddings(app: Application, request: Request, body: EmbeddingsInput) -> Any:
    """Vectors of length 1, as OpenAI's are."""
    model = app.model(own_name(app, body.model), "embed")
    if not app.settings.allow_token_ids and not all(isinstance(x, str) for x in body.input):
        raise Refused(
            400,
            "token ids, which another vocabulary may have made: send texts (in langchain by"
            " OpenAIEmbeddings(check_embedding_ctx_length=False)). If they are of the vocabulary"
            f" of model '{model.name}', start the server with --allow-token-ids",
            "input",
        )
    texts = tei.texts_or_ids(model, body.input, "input")
    if not texts or not all(texts):
        raise Refused(400, "no text, or an empty one: leave it out", "input")
    options = {"normalize": True, "dimensions": body.dimensions}
    found = await app.ask(request, model, "embed", [(text,) for text in texts], **options)
    tokens = sum(count for _, count in found)
    data = [
        {"object": "embedding", "index": k, "embedding": encoded(vector, body.encoding_format)}
        for k, (vector, _) in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}


def openai_refusal(refused: Refused) -> Reply:
    """An error in OpenAI's form, which knows no 422."""
    if refused.status == 422:
        refused = Refused(400, refused.message, refused.field)
    return Reply(openai_error(refused), status=refused.status)


class RerankDocuments(tei.RerankTexts, kw_only=True):
    """A query, and documents to put in order by it: texts, or objects with a `text`."""

    documents: list[str | dict[str, Any]] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False


async def rerank_documents(
    app: Application, request: Request, body: RerankDocuments
) -> tuple[dict[str, Any], int]:
    """(Cohere's answer, tokens)."""
    documents = [{"text": x} if isinstance(x, str) else x for x in body.documents or []]
    texts = [text for x in documents if isinstance(text := x.get("text"), str)]
    if len(texts) < len(documents):
        raise tei.mismatch("a document is a text, or an object whose `text` is one", "documents")
    body.model = own_name(app, body.model)
    scores, order, tokens = await tei.relevance(app, request, body, texts, "documents")
    results: list[dict[str, Any]] = [
        {"index": k, "relevance_score": scores[k]} for k in order[: body.top_n]
    ]
    if body.return_documents:
        results = [result | {"document": documents[result["index"]]} for result in results]
    meta = {"tokens": {"input_tokens": tokens}}
    return {"id": request.id, "results": results, "meta": meta}, tokens


async def rerank(app: Application, request: Request, body: RerankDocuments) -> tuple[Any, int]:
    of = tei.rerank if body.documents is None else rerank_documents
    return await of(app, request, body)


async def cohere_rerank(app: Application, request: Request, body: RerankDocuments) -> Any:
    return (await rerank_documents(app, request, body))[0]


def cohere_refusal(refused: Refused) -> dict[str, str]:
    return {"message": refused.message}


MAIN_METHODS = "embed", "classify", "score"  # a frozen model's classifier gives no vectors


class MainInputs(Struct, kw_only=True):
    """Input of /predict, /rerank, /similarity or /embed; which, the fields and the model say."""

    inputs: Any = None
    query: Any = None
    model: str | None = None


async def main(app: Application, request: Request, body: MainInputs) -> Any:
    # a name that is not here is for the route to refuse, or to know as another's
    model = app.models.get(body.model or "") or next(iter(app.models.values()))
    path = "/predict" if model.methods[0] in ("classify", "score") else "/embed"
    if isinstance(body.inputs, dict):
        path = "/similarity"
    elif body.query is not None:
        path = "/rerank"
    operation, decoder = MAIN[path]
    return await operation.respond(app, request, decoded(decoder, request.body))


TEXTS = {"inputs": ["A man sings.", "Two hours of rain."]}
RERANK = {"query": "Who sings?", "texts": ["A man sings.", "Two hours of rain."]}
DOCUMENTS = {"query": RERANK["query"], "documents": RERANK["texts"]}
SENTENCES = {"source_sentence": "A man sings.", "sentences": ["Someone is singing."]}
Table = list[list[float]]
Objects = list[dict[str, Any]]
inference = functools.partial(Operation, error=tei.inference_error)
COMPATIBLE: Sequence[Operation] = (
    *(
        Operation(
            path, embeddings, EmbeddingsInput, dict[str, Any], "As of OpenAI",
            {"input": TEXTS["inputs"], "model": "text-embedding-3-small"}, openai_refusal,
            needs=("embed",),
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
    *(
        Operation(
            path, cohere_rerank, RerankDocuments, dict[str, Any], "As of Cohere", DOCUMENTS,
            cohere_refusal, needs=("score",),
        )
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    inference(
        "/embed", tei.counted(tei.embed), tei.EmbedInputs, Table, "Vectors of texts", TEXTS,
        needs=("embed",),
    ),
    inference(
        "/embed_all", tei.counted(tei.embed_all), tei.TokensInputs, list[Table],
        "States of all tokens", TEXTS, needs=("embed",),
    ),
    inference(
        "/embed_sparse", tei.counted(tei.embed_sparse), tei.TokensInputs, list[Objects],
        "Weights of pieces, by SPLADE's rule", TEXTS, needs=("fill",),
    ),
    inference(
        "/predict", tei.counted(tei.predict), tei.PredictInputs, list[Any],
        "Classes of a text, of a pair, or of a list of lists", {"inputs": "A fine film."},
        needs=("classify", "score"),
    ),
    inference(
        "/rerank", tei.counted(rerank), RerankDocuments, Objects | dict[str, Any],
        "Texts in their order for a query", RERANK, needs=("score",),
    ),
    inference(
        "/similarity", tei.counted(tei.similarity), tei.SimilarityInputs, list[float],
        "Cosines", {"inputs": SENTENCES}, needs=("embed",),
    ),
    inference(
        "/tokenize", tei.tokenize, tei.TokenizeInputs, list[Objects], "Tokens of texts", TEXTS,
        needs=("embed",),
    ),
    inference(
        "/decode", tei.decode, tei.DecodeIds, list[str], "Texts of ids", {"ids": [[2, 5, 3]]},
        needs=("embed",),
    ),
    inference(
        "/info", tei.info, None, dict[str, Any], "About the first model", needs=MAIN_METHODS
    ),
    *(
        inference(path, main, MainInputs, Any, "The model's main route", TEXTS, needs=MAIN_METHODS)
        for path in ("/invocations", "/")
    ),
)  # fmt: skip
MAIN = {
    operation.path: (operation, msgspec.json.Decoder(operation.body))
    for operation in COMPATIBLE
    if operation.path in ("/predict", "/rerank", "/similarity", "/embed")
}
