"""Each route answers what the library's method answers on the same texts; errors name the field."""

import base64
import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import bertsmith
from bertsmith.base import VERSION
from bertsmith.checkpoints.model_folder import BareModel
from bertsmith.inference.engines.processor import Processor, choose_processor
from bertsmith.inference.engines.runner import Runner
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.serving.models import ServedModel, ServedPredictor
from bertsmith.serving.operations import operations_of

from ..inference.test_api import CONTEXT, QUESTION, write_models
from ..tiny import piece_tokenizer, random_model, write
from .serving_tools import application, ask

TEXTS = ["a good film", "bad"]
NAMES = "reviews", "topics", "stsb", "ner", "squad", "swag", "books", "pairs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def app(folder):
    processor = choose_processor("cpu", "float32")
    models = {name: ServedModel.open(name, folder / name, processor) for name in NAMES}
    with application(models, operations_of) as made:
        yield made


def posted(app, path, **body):
    answer = ask(app, "POST", path, body)
    assert answer.status == 200, answer.body
    return answer.body["answers"]


def plain(answer):
    """An answer of the library as JSON has it."""
    if dataclasses.is_dataclass(answer):
        return plain(answer.to_dict())
    if isinstance(answer, dict):
        return {name: plain(value) for name, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [plain(one) for one in answer]
    return pytest.approx(answer, abs=1e-5) if isinstance(answer, float) else answer


CASES = {  # route: [model, method of the library, its arguments by the fields of the body]
    "/v1/classify": [
        ("reviews", "classify", {"text": TEXTS}),
        ("topics", "classify", {"text": TEXTS}),
    ],
    "/v1/tag": [("ner", "tag", {"text": ["ann saw rome.", "the cat"]})],
    "/v1/answer": [
        ("squad", "answer", {"question": [QUESTION, "who saw"], "context": [CONTEXT] * 2})
    ],
    "/v1/explain": [
        ("reviews", "explain", {"text": TEXTS}),
        ("reviews", "explain", {"text": TEXTS, "method": "gradient", "label": "bad"}),
        ("topics", "explain", {"text": TEXTS, "method": "rollout"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_answers_are_those_of_the_library(app, folder, path):
    for model, method, fields in CASES[path]:
        expected = getattr(bertsmith.load(folder / model), method)(**fields)
        assert posted(app, path, model=model, **fields) == plain(expected)


def test_one_text_is_a_list_of_one(app):
    assert posted(app, "/v1/classify", text=TEXTS[0]) == posted(app, "/v1/classify", text=TEXTS[:1])
    context = {"context": CONTEXT}
    assert posted(app, "/v1/answer", question=QUESTION, **context)[0]["text"]


def test_scores(app, folder):
    expected = bertsmith.load(folder / "stsb").score(TEXTS, TEXTS[::-1])
    found = posted(app, "/v1/classify", model="stsb", text=TEXTS, text_pair=TEXTS[::-1])
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)


def test_choose(app, folder):
    options = ["sat on a mat", "saw"]
    expected = bertsmith.load(folder / "swag").choose("the cat", options)
    assert posted(app, "/v1/choose", prompt="the cat", options=options) == [plain(expected)]


def test_fill_in_its_four_ways(app, folder):
    library, text = bertsmith.load(folder / "books"), "the [MASK] sat [MASK]"
    (found,) = posted(app, "/v1/fill", text=text, top=3)
    assert found == {"masks": plain(library.fill(text, top=3))}
    (found,) = posted(app, "/v1/fill", text=text, top=2, together=True)
    assert found["fillings"] == plain(library.filler.joint(text, 2))
    (found,) = posted(app, "/v1/fill", text="the [MASK] sat", top=2, max_pieces=2)
    assert len(found["fillings"]) == 2 and found["fillings"][0]["words"]
    (found,) = posted(app, "/v1/fill", text="the [MASK] sat", candidates=["cat", "film"])
    assert {one["candidate"] for one in found["fillings"]} == {"cat", "film"}


def test_vectors(app, folder):
    texts = ["the cat sat", "rome"]
    expected = bertsmith.load(folder / "pairs").embed(texts)
    found = posted(app, "/v1/embed", model="pairs", text=texts)
    assert np.allclose([one["vector"] for one in found], expected, atol=1e-5)
    assert [one["tokens"] for one in found] == [5, 3]
    options = {"dimensions": 3, "normalize": True, "pool": "cls"}
    expected = bertsmith.load(folder / "pairs").embed(texts, **options)
    found = posted(app, "/v1/embed", model="pairs", text=texts, encoding="base64", **options)
    vectors = [np.frombuffer(base64.b64decode(one["vector"]), "<f4") for one in found]
    assert np.allclose(vectors, expected, atol=1e-5)


def test_tokens_have_the_places_of_the_text(app):
    text = "ann saw rome"
    (found,) = posted(app, "/v1/tokenize", text=text)
    assert (found[0]["token"], found[-1]["token"]) == ("[CLS]", "[SEP]")
    assert found[0]["start"] is found[-1]["end"] is None
    (inner,) = posted(app, "/v1/tokenize", text=text, special=False)
    assert inner == found[1:-1]
    assert [text[one["start"] : one["end"]] for one in inner] == text.split()


def test_attention(app):
    (found,) = posted(app, "/v1/attention", text="the cat sat")
    size = len(found["tokens"])
    weights = np.array(found["weights"])
    assert size == 5 and weights.shape == (2, 2, size, size)  # layers, heads
    assert np.allclose(weights.sum(axis=-1), 1, atol=1e-3)
    assert sum(found["rollout"]) == pytest.approx(1, abs=1e-4)
    (cut,) = posted(app, "/v1/attention", text="cat " * 500)
    assert len(cut["tokens"]) == 32


@pytest.mark.parametrize("directions", [1, 2])
def test_attention_sees_what_the_model_sees(tmp_path, directions):
    """A left-to-right model nothing right of a token, one that also reads from the right nothing
    left of it with the other half of its heads."""
    tokenizer = piece_tokenizer("the cat sat on a mat")
    sizes = len(tokenizer.vocabulary), 32, 2, 4, 64, 32
    config = ModelConfig(*sizes, causal=True, directions=directions)
    folder = random_model(tmp_path / "ltr", tokenizer, BareModel, config=config)
    model = ServedModel.open("ltr", folder, choose_processor("cpu", "float32"))
    found = model.call("attention", masked=())([("the cat sat",), ("the cat mat",)], 1)
    weights, changed = (one["weights"] for one in found)
    assert weights.shape == (2, 4, 5, 5)
    assert np.allclose(weights.sum(axis=-1), 1, atol=1e-3)
    left, right = np.split(weights, [4 // directions], axis=1)
    assert not np.triu(left, 1).any() and not np.tril(right, -1).any()
    # the fourth token is another: only what has read it is
    own, theirs = np.split(changed, [4 // directions], axis=1)
    assert np.array_equal(own[:, :, :3], left[:, :, :3])
    assert not np.array_equal(own[:, :, 3:], left[:, :, 3:])
    assert np.array_equal(theirs[:, :, 4:], right[:, :, 4:])


REFUSED = {
    "an empty list": ("/v1/classify", {"text": []}, "text", "length >= 1"),
    "no text": ("/v1/classify", {"text": [None]}, "text[0]", "Expected `str`"),
    "lists of two lengths": (
        "/v1/answer",
        {"question": ["a"], "context": ["b", "c"]},
        "context",
        "question 1, context 2",
    ),
    "two ways": (
        "/v1/fill",
        {"text": "[MASK]", "together": True, "max_pieces": 2},
        "max_pieces",
        "give one",
    ),
    "no mask": ("/v1/fill", {"text": "the cat"}, None, "no [MASK]"),
    "a large top": ("/v1/fill", {"text": "[MASK]", "top": 1001}, "top", "<= 1000"),
    "one option": ("/v1/choose", {"prompt": "a", "options": ["b"]}, "options", "length >= 2"),
    "dimensions": ("/v1/embed", {"text": "a", "dimensions": 17}, "dimensions", "17"),
    "no way to pool": (
        "/v1/embed",
        {"text": "a", "pool": "sum"},
        "pool",
        "'sum': known are mean, cls, max, mean_sqrt_len",
    ),
    "a long prompt": ("/v1/embed", {"text": "a", "prompt": "x" * 10**6}, "prompt", "<= 4096"),
    "no such label": ("/v1/explain", {"text": "a film", "label": "fine"}, "label", "'fine'"),
    "an empty text": ("/v1/explain", {"text": ""}, None, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_its_field(app, folder, case):
    path, body, field, message = REFUSED[case]
    answer = ask(app, "POST", path, body)
    assert (answer.status, answer.body["error"]["param"]) == (422, field), answer
    assert message in answer.body["error"]["message"] and str(folder) not in str(answer)


def test_a_folder_of_a_short_name_leaves_the_words_of_a_message(tmp_path, monkeypatch):
    similar(tmp_path / "vec", 1, "mean")
    monkeypatch.chdir(tmp_path)
    model = ServedModel.open("own", Path("vec"), choose_processor("cpu", "float32"))
    with application({"own": model}, operations_of) as app:
        many, unknown = (
            ask(app, "POST", "/v1/embed", {"text": "the cat", **given}).body["error"]["message"]
            for given in ({"dimensions": 99}, {"prompt": "query"})
        )
    assert many == "`dimensions=99`: the model's vectors have 1 to 4"
    assert "no prompt of model 'own' has this name" in unknown


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model that fills masks with any of 4,802 pieces, each of four letters."""
    words = ["".join(letters) for letters in itertools.product("abcdefg", repeat=4)]
    tokenizer = piece_tokenizer(" ".join([*words, *(f"##{word}" for word in words)]))
    folder = random_model(tmp_path_factory.mktemp("wide") / "wide", tokenizer)
    return ServedModel.open("wide", folder, choose_processor("cpu", "float32"))


@pytest.mark.parametrize(
    "method, text, options",
    [
        ("fill", "aaaa [MASK] bbbb", {"top": 5}),
        ("fill_together", "aaaa [MASK] bbbb [MASK] cccc [MASK]", {"top": 30}),
        ("fill_words", "aaaa [MASK] bbbb", {"top": 5, "max_pieces": 3}),
        ("fill_words", "[MASK] aaaa [MASK]", {"top": 5, "max_pieces": 2}),
        ("fill_candidates", "aaaa [MASK]", {"candidates": ("bbbb", "cccc", "dddd", "eeeeffff")}),
        ("fill_candidates", "[MASK]", {"candidates": ("aaaa" * 20, "bbbb" * 20)}),
    ],
)
def test_the_work_of_a_fill_is_what_the_model_reads(wide, monkeypatch, method, text, options):
    read = []

    def counting(own):
        return lambda self, rows, *others: read.append(len(rows.ids)) or own(self, rows, *others)

    for name in ("piece_logits", "piece_log_probabilities"):
        monkeypatch.setattr(Runner, name, counting(getattr(Runner, name)))
    job = wide.job(method, [(text,)], **options)
    job.call(job.items, 1)
    assert sum(read) / 2 <= sum(job.costs) <= 2 * sum(read)


def test_what_is_read_again_is_work_again(app):
    model = app.models["swag"]
    job = model.job("choose", [("abcd" * 10, ["abcd", "abcd", "abcd"])])
    assert job.costs == [3 * 12 + 3 * 3]  # a token of four letters, two at the ends of each text
    model, part = app.models["pairs"], "the cat sat on a mat . "
    options = {"prompt": part * 3, "long_texts": "windows"}
    job = model.job("embed", [(part * 9,)], **options)
    ((_, read),) = job.call(job.items, 1)
    assert read == 63 + 7 * 23 and read / 2 <= sum(job.costs) <= 2 * read  # 9 tokens a window


@pytest.mark.parametrize(
    "body",
    [
        {"text": "[MASK] " * 400, "together": True},
        {"text": "[MASK]", "candidates": ["film " * 400, "good " * 400]},
        {"text": "[MASK] [MASK]", "top": 1000, "max_pieces": 8},
    ],
)
def test_a_small_request_of_much_work_is_refused(app, body):
    with application(app.models, operations_of, timeout=0.5) as own:
        answer = ask(own, "POST", "/v1/fill", body)
    assert answer.status == 413 and "seconds of work" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/fill", {"text": ["[MASK] " * 500] * 21, "top": 1000}),
        ("/v1/fill", {"text": ["[MASK]"] * 2048, "candidates": [f"c{k}" for k in range(1000)]}),
        ("/embed_sparse", {"inputs": ["a"] * 2048}),
    ],
)
def test_an_answer_that_is_too_large_is_refused(wide, path, body):
    with application({"wide": wide}, operations_of) as own:
        answer = ask(own, "POST", path, body)
    assert answer.status == 413 and "numbers, of 10,000,000 at most" in str(answer.body)


def similar(folder, seed, pool):
    """A folder of sentence-transformers with a Dense module."""
    random_model(folder, piece_tokenizer("the cat sat"), BareModel, seed=seed)
    kinds = {"": "a.Transformer", "1_Pooling": "a.Pooling", "2_Dense": "a.Dense"}
    modules = [{"path": path, "type": kind} for path, kind in kinds.items()]
    write(folder / "modules.json", json.dumps(modules))
    write(folder / "1_Pooling" / "config.json", json.dumps({"pooling_mode": pool}))
    sizes = {"in_features": 16, "out_features": 4, "bias": False}
    write(folder / "2_Dense" / "config.json", json.dumps(sizes))
    weight = np.random.default_rng(seed).normal(size=(4, 16)).astype(np.float32)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    return folder


def test_a_folder_in_the_place_of_another_changes_no_answer(tmp_path):
    other, own = similar(tmp_path / "other", 2, "cls"), similar(tmp_path / "own", 1, "mean")
    expected = bertsmith.load(own).embed("the cat sat", dimensions=3)
    model = ServedModel.open("own", own, choose_processor("cpu", "float32"))
    model.warm_up()
    os.rename(own, tmp_path / "before")
    os.rename(other, own)
    with application({"own": model}, operations_of) as app:
        (found,) = posted(app, "/v1/embed", text="the cat sat", dimensions=3)
        assert np.allclose(found["vector"], expected, atol=1e-5)
        refused = ask(app, "POST", "/v1/attention", {"text": "the cat"})
        assert refused.status == 422 and "SIGHUP" in refused.body["error"]["message"]
        shutil.rmtree(own)
        assert ask(app, "POST", "/v1/attention", {"text": "the cat"}).status == 422


def test_another_engine_has_all_threads_for_a_call(folder, monkeypatch):
    processor, seen = Processor("cpu", "float32", 3, "pytorch"), []
    model = ServedModel.open("reviews", folder / "reviews", processor)
    monkeypatch.setattr(
        ServedPredictor, "classify", lambda self, texts: seen.append(self.processor.threads)
    )
    model.call("classify")([("a film",)], 1)
    assert model.threads == 1 and seen == [3]


def test_pytorch_reads_no_weights_of_a_folder_in_the_place_of_another(tmp_path):
    tokenizer, own = piece_tokenizer("the cat sat"), tmp_path / "own"
    for seed, folder in enumerate((own, tmp_path / "other")):
        random_model(folder, tokenizer, SequenceClassifier, 2, seed=seed)
    model = ServedModel.open("own", own, choose_processor("cpu", "float32", "pytorch"))
    model.warm_up()
    expected = plain(bertsmith.load(own).classify("the cat sat"))
    os.rename(own, tmp_path / "before")
    os.rename(tmp_path / "other", own)
    with application({"own": model}, operations_of) as app:
        assert posted(app, "/v1/classify", text="the cat sat") == [expected]
        refused = ask(app, "POST", "/v1/embed", {"text": "the cat"})
        assert refused.status == 422 and "SIGHUP" in refused.body["error"]["message"]


def test_a_model_that_cannot_and_one_that_is_not(app):
    answer = ask(app, "POST", "/v1/tag", {"text": "a", "model": "reviews"})
    assert answer.status == 404 and "cannot tag, but classify" in answer.body["error"]["message"]
    answer = ask(app, "POST", "/v1/tag", {"text": "a", "model": "nex"})
    assert (answer.status, answer.body["error"]["param"]) == (404, "model")


def test_models_are_listed_as_openai_does(app):
    found = ask(app, "GET", "/v1/models").body
    assert found["object"] == "list" and [one["id"] for one in found["data"]] == [*NAMES]
    first = found["data"][0]
    assert first.items() >= {"object": "model", "labels": ["bad", "good"], "dimensions": 16}.items()
    assert "path" not in str(found) and "folder" not in first


def test_a_model_that_keeps_more_numbers_than_there_are_is_listed(tmp_path):
    folder = similar(tmp_path / "own", 1, "mean")
    write(folder / "config_sentence_transformers.json", '{"truncate_dim": 99}')
    model = ServedModel.open("own", folder, choose_processor("cpu", "float32"))
    with application({"own": model}, operations_of) as app:
        answer = ask(app, "GET", "/v1/models")
    assert (answer.status, answer.body["data"][0]["dimensions"]) == (200, 4)


def test_health(app, monkeypatch):
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        assert ask(app, "GET", path)[::2] == (200, b"")
    monkeypatch.setattr(app, "is_draining", True)
    assert ask(app, "GET", "/health").status == 200
    assert ask(app, "GET", "/health/ready").status == 503


def test_the_document_names_what_is_there_and_its_examples_are_answered(app):
    document = ask(app, "GET", "/openapi.json").body
    assert document["info"]["version"] == VERSION
    told = {path for path in app.paths if not path.startswith(("/page/", "/reports/"))}
    assert set(document["paths"]) == told - {"/openapi.json"}
    for path, methods in document["paths"].items():
        assert {(name.upper(), path) for name in methods} <= set(app.routes)
        if told := methods.get("post"):
            content = told["requestBody"]["content"]["application/json"]
            assert ask(app, "POST", path, content["example"]).status == 200, path


def test_the_document_is_one_of_openapi(app):
    """Every reference leads somewhere; a validator looks at it where there is one."""
    document = ask(app, "GET", "/openapi.json").body

    def references(node):
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
        for child in node.values() if isinstance(node, dict) else node:
            if isinstance(child, dict | list):
                yield from references(child)

    found = set(references(document))
    assert len(found) > 10
    for reference in found:
        place = document
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]
    ids = [told["operationId"] for own in document["paths"].values() for told in own.values()]
    assert len(ids) == len(set(ids))
    pytest.importorskip("openapi_spec_validator").validate(document)


def test_a_server_has_the_routes_of_its_models(folder):
    processor = choose_processor("cpu", "float32")
    models = {"m": ServedModel.open("m", folder / "ner", processor)}
    with application(models, operations_of) as own:
        assert "/v1/tag" in own.paths and "/v1/classify" not in own.paths
        assert ask(own, "POST", "/v1/classify", {"text": "a"}).status == 404
