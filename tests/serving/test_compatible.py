"""Clients of OpenAI, LangChain, Hugging Face and Cohere get the library's numbers, as installed."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

import bertsmith
from bertsmith.inference.engines.processor import choose_processor
from bertsmith.model.config import ElmoConfig
from bertsmith.model.elmo_heads import ElmoClassifier
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of
from bertsmith.text.tokenizer.characters import CharacterTokenizer

from ..tiny import random_model
from .serving_tools import application, ask, server
from .small_models import TEXTS, TOKENIZER, floats, same

PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def test_openais_embeddings(post, folders):
    expected = bertsmith.load(folders / "vectors").embed(TEXTS, normalize=True)
    given = post("/v1/embeddings", {"input": TEXTS, "model": "vectors"}).body
    assert (given["object"], given["model"]) == ("list", "vectors")
    assert [entry["index"] for entry in given["data"]] == [0, 1, 2]
    same([entry["embedding"] for entry in given["data"]], expected)
    tokens = sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    assert given["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert post("/embeddings", {"input": TEXTS}).body == given
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 4, "user": "ann"}
    (entry,) = post("/v1/embeddings", body).body["data"]
    cut = expected[0, :4] / np.linalg.norm(expected[0, :4])
    same(floats(entry["embedding"]), cut)


def test_a_name_of_openais_is_whatever_can_and_a_wrong_one_is_refused(post):
    given = post("/v1/embeddings", {"input": "ann", "model": "text-embedding-3-small"}).body
    assert given["model"] == "vectors"
    given = post("/v1/embeddings", {"input": "ann", "model": "vectorz"})
    assert (given.status, given.body["error"]["param"]) == (404, "model")
    assert "did you mean 'vectors'?" in given.body["error"]["message"]


def test_ids_are_refused_unless_they_are_allowed(post, folders):
    row = TOKENIZER.encode(TEXTS[0])
    for given in ([row], row):
        refused = post("/v1/embeddings", {"input": given})
        assert (refused.status, refused.body["error"]["param"]) == (400, "input")
        told = refused.body["error"]["message"]
        assert "check_embedding_ctx_length=False" in told and "--allow-token-ids" in told
        (entry,) = post("/v1/embeddings", {"input": given}, allow_token_ids=True).body["data"]
        expected = bertsmith.load(folders / "vectors").embed(TEXTS[0], normalize=True)
        same(entry["embedding"], expected)
    wrong = post("/v1/embeddings", {"input": [[57668, 53901]]}, allow_token_ids=True)
    assert wrong.status == 400 and "id 53901" in wrong.body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        *({"input": wrong} for wrong in ([], 3, [5, "a"], "", ["ann", ""], [[]], [["a"]])),
        {"input": "a", "dimensions": 99},
    ],
)
def test_openais_refusals_are_400(post, body):
    given = post("/v1/embeddings", body, allow_token_ids=True)
    assert given.status == given.body["error"]["code"] == 400
    assert given.body["error"]["type"] == "invalid_request_error"


def test_coheres_rerank(post, folders):
    scores = bertsmith.load(folders / "pairs").score(["who left"] * 3, TEXTS)
    order = np.argsort(scores)[::-1].tolist()
    expected = 1 / (1 + np.exp(-np.array(scores)[order]))
    body = {"query": "who left", "documents": TEXTS, "model": "rerank-v3.5"}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/"):
        given = post(path, body).body
        assert given["id"] and given["meta"]["tokens"]["input_tokens"] > 0
        assert [entry["index"] for entry in given["results"]] == order
        same([entry["relevance_score"] for entry in given["results"]], expected)
        assert "document" not in given["results"][0]
        documents = [TEXTS[0], {"text": TEXTS[1], "page": 7}, TEXTS[2]]
        more = {"documents": documents, "top_n": 2, "return_documents": True}
        shown = post(path, body | more).body["results"]
        whole = [{"text": TEXTS[0]}, documents[1], {"text": TEXTS[2]}]
        assert [entry["document"] for entry in shown] == [whole[k] for k in order[:2]]
    for wrong in ({"documents": []}, {"documents": [{"title": "a"}]}, {"documents": None}):
        refused = post("/v1/rerank", body | wrong)
        assert refused.status in (400, 422) and set(refused.body) == {"message"}
    assert post("/rerank", {"query": "a"}).body.endswith(b"missing field `texts`")


def test_the_main_route_of_a_model_without_vectors(tmp_path, served):
    sizes = {"hidden_size": 12, "intermediate_size": 10, "embedding_size": 4, "filters": (3, 5, 4)}
    about = {"config": ElmoConfig(**sizes), "extra_config": {"kind": "classify"}}
    folder = random_model(tmp_path / "elmo", CharacterTokenizer(), ElmoClassifier, 2, **about)
    elmo = ServedModel.open("elmo", folder, choose_processor("cpu", "float32"))
    body = {"inputs": "ann left"}
    with application(served("vectors") | {"elmo": elmo}, operations_of) as app:
        named = body | {"model": "elmo"}
        found, expected = (ask(app, "POST", path, named) for path in ("/", "/predict"))
        assert found.status == 200 and found.body == expected.body
    with application({"elmo": elmo}, operations_of) as app:
        assert ask(app, "POST", "/", body).body == expected.body
        assert ask(app, "GET", "/info").body["model_id"] == "elmo"


# --- clients as installed


@pytest.fixture(scope="module")
def url(folders):
    names = ("film", "pairs", "books", "vectors")
    with server(*(f"{name}={folders / name}" for name in names), "--device", "cpu") as found:
        yield found.address


def test_openais_client(url, folders):
    openai = pytest.importorskip("openai", reason="the client is not installed")
    own = bertsmith.load(folders / "vectors")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()][-1] == "vectors"
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(input=TEXTS, model="vectors", **options)
            vectors = [entry.embedding for entry in found.data]
            if options.get("encoding_format") == "base64":
                vectors = [floats(vector) for vector in vectors]
            same(vectors, own.embed(TEXTS, normalize=True))
            assert found.usage.prompt_tokens == sum(len(TOKENIZER.encode(t)) for t in TEXTS)
        found = client.embeddings.create(
            input=TEXTS[0], model="text-embedding-3-large", dimensions=3
        )
        same(found.data[0].embedding, own.embed(TEXTS[0], normalize=True, dimensions=3))
        with pytest.raises(openai.NotFoundError, match="did you mean 'vectors'"):
            client.embeddings.create(input="ann", model="vektors")
        with pytest.raises(openai.BadRequestError, match="vectors have 1 to 64"):
            client.embeddings.create(input="ann", model="vectors", dimensions=99)

    async def several():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = [client.embeddings.create(input=text, model="vectors") for text in TEXTS * 5]
            return [found.data[0].embedding for found in await asyncio.gather(*asked)]

    same(asyncio.run(several()), own.embed(TEXTS * 5, normalize=True))


def test_the_page_of_clients(url, folders, capsys):
    for package in ("openai", "langchain_openai", "huggingface_hub"):
        pytest.importorskip(package, reason="the client is not installed")
    page = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
    names = {}
    for code, output in PYTHON.findall(page.read_text(encoding="utf-8")):
        capsys.readouterr()
        exec(code.replace("http://127.0.0.1:8000", url), names)
        assert capsys.readouterr().out == output


def test_langchains_client(url, folders, monkeypatch):
    module = pytest.importorskip("langchain_openai", reason="the client is not installed")
    openai, tiktoken = pytest.importorskip("openai"), pytest.importorskip("tiktoken")
    # OpenAI's vocabularies are downloaded: one of bytes stands in for them
    ranks = {bytes([k]): k for k in range(256)}
    vocabulary = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: vocabulary)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: vocabulary)
    about = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        module.OpenAIEmbeddings(**about).embed_documents(TEXTS)
    client = module.OpenAIEmbeddings(check_embedding_ctx_length=False, **about)
    expected = bertsmith.load(folders / "vectors").embed(TEXTS, normalize=True)
    same(client.embed_documents(TEXTS), expected)
    same(client.embed_query(TEXTS[1]), expected[1])


def test_hugging_faces_client(url, folders):
    hub = pytest.importorskip("huggingface_hub")
    own = bertsmith.load(folders / "vectors")
    client = hub.InferenceClient(f"{url}/embed")
    same(client.feature_extraction(TEXTS), own.embed(TEXTS, normalize=True))
    found = client.feature_extraction(
        "ann left", normalize=False, truncate=True, truncation_direction="Left", prompt_name="query"
    )
    same(found, own.embed(["who : ann left"]))
    same(
        client.feature_extraction("ann", dimensions=3)[0],
        own.embed("ann", dimensions=3, normalize=True),
    )
    with pytest.raises(hub.errors.HfHubHTTPError, match="vectors have 1 to 64"):
        client.feature_extraction("ann", dimensions=99)
    client = hub.InferenceClient(url)
    expected = bertsmith.load(folders / "film").classify(TEXTS[0]).probabilities
    found = client.text_classification(TEXTS[0])
    assert {entry.label: entry.score for entry in found} == pytest.approx(expected, abs=1e-6)
    (best,) = client.text_classification(TEXTS[0], top_k=1)
    assert best.label == max(expected, key=expected.get)
    sigmoids = client.text_classification(TEXTS[0], function_to_apply="sigmoid")
    assert sum(entry.score for entry in sigmoids) != pytest.approx(1, abs=1e-3)
    one, *others = own.embed(TEXTS, normalize=True)
    same(client.sentence_similarity(TEXTS[0], TEXTS[1:]), others @ one)
