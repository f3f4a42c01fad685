"""Routes of text-embeddings-inference answer as its code does, with the library's numbers."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import bertsmith
from bertsmith.checkpoints.model_folder import BareModel
from bertsmith.inference.engines.processor import choose_processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.serving.batching import Busy
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of
from bertsmith.text.tokenizer.bytepair import BytePairTokenizer

from ..gpt import library
from ..tiny import random_model, write
from .serving_tools import application, ask, metrics, until
from .small_models import LONG, TEXTS, TOKENIZER, same


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_vectors_are_the_librarys(post, folders, precision):
    own = bertsmith.load(folders / "vectors", precision=precision)
    given = post("/embed", {"inputs": TEXTS, "normalize": False}, precision=precision)
    assert given.status == 200
    # an int8 answer does not depend on what is computed beside it, and JSON keeps every bit
    same(given.body, own.embed(TEXTS), 0 if precision == "int8" else 1e-6)
    one = post("/embed", {"inputs": TEXTS[0]}, precision=precision).body
    same(one, own.embed(TEXTS[:1], normalize=True), 0 if precision == "int8" else 1e-6)


def test_dimensions_are_cut_before_the_length_is_made_one(post, folders):
    whole = bertsmith.load(folders / "vectors").embed(TEXTS)[:, :5]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    same(post("/embed", {"inputs": TEXTS, "dimensions": 5}).body, expected)


def test_a_prompt_by_its_name(post, folders):
    own = bertsmith.load(folders / "vectors")
    given = post("/embed", {"inputs": TEXTS, "prompt_name": "query"}).body
    same(given, own.embed([f"who : {text}" for text in TEXTS], normalize=True))


def test_texts_that_are_too_long(post, folders):
    own = bertsmith.load(folders / "vectors")
    body = {"inputs": [LONG, "ann left"]}
    same(post("/embed", body).body, own.embed(body["inputs"], normalize=True))
    for direction in ("left", "Left"):
        tail = " ".join(LONG.split()[-30:])
        given = post("/embed", body | {"truncation_direction": direction})
        same(given.body, own.embed([tail, "ann left"], normalize=True))
        # the prompt is not what is lost
        tail = "who : " + " ".join(LONG.split()[-28:])
        given = post("/embed", body | {"truncation_direction": direction, "prompt_name": "query"})
        same(given.body, own.embed([tail, "who : ann left"], normalize=True))
    refused = post("/embed", body | {"truncate": False})
    assert refused.status == 422 and refused.body == {
        "error": "Input validation error: `inputs` must have less than 32 tokens. Given: 65",
        "error_type": "Validation",
    }
    fits = post("/embed", {"inputs": TEXTS, "truncate": False}).body
    same(fits, own.embed(TEXTS, normalize=True))


def test_ids_in_place_of_texts(post, folders):
    own = bertsmith.load(folders / "vectors").embed(TEXTS, normalize=True)
    rows = [TOKENIZER.encode(text) for text in TEXTS]
    same(post("/embed", {"inputs": rows}).body, own)
    same(post("/embed", {"inputs": rows[0]}).body, own[:1])
    same(post("/embed", {"inputs": [TEXTS[0], rows[1][1:-1], TEXTS[2]]}).body, own)
    with_prompt = {"inputs": [rows[1]], "prompt_name": "query"}
    expected = bertsmith.load(folders / "vectors").embed("who : ann left", normalize=True)
    same(post("/embed", with_prompt).body, expected[None])
    for wrong in (-1, len(TOKENIZER.vocabulary)):
        given = post("/embed", {"inputs": [[5, wrong]]})
        assert given.status == 422 and f"id {wrong} is none of the 23 pieces" in given.body["error"]


def test_states_of_all_tokens(post, folders):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    peer = transformers.AutoModel.from_pretrained(folders / "vectors").eval()
    given = post("/embed_all", {"inputs": TEXTS}, "vectors").body
    for text, states in zip(TEXTS, given, strict=True):
        ids = torch.tensor([TOKENIZER.encode(text)])
        with torch.no_grad():
            expected = peer(ids).last_hidden_state[0].numpy()
        same(states, expected, 1e-4)


def test_sparse_vectors(post, folders):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    peer = transformers.AutoModelForMaskedLM.from_pretrained(folders / "books").eval()
    given = post("/embed_sparse", {"inputs": TEXTS}).body
    for text, values in zip(TEXTS, given, strict=True):
        with torch.no_grad():
            logits = peer(torch.tensor([TOKENIZER.encode(text)])).logits[0]
        expected = torch.log1p(torch.relu(logits)).amax(0).numpy()
        dense = np.zeros(len(expected), np.float32)
        dense[[value["index"] for value in values]] = [value["value"] for value in values]
        same(dense, expected, 1e-4)
        assert all(value["value"] > 0 for value in values)


def test_a_folder_whose_way_to_vectors_is_not_known(tmp_path, served, folders):
    """As of SPLADE: all but pooled vectors is answered."""
    own = shutil.copytree(folders / "books", tmp_path / "splade")
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    modules = [{"path": path, "type": f"a.{kind}"} for path, kind in kinds.items()]
    write(own / "modules.json", json.dumps(modules))
    model = ServedModel.open("books", own, choose_processor("cpu", "float32"))
    plain = served("books")["books"]
    with (
        application({"books": model}, operations_of) as app,
        application({"books": plain}, operations_of) as other,
    ):
        for path in ("/embed_sparse", "/embed_all", "/tokenize"):
            given, expected = (ask(one, "POST", path, {"inputs": TEXTS}) for one in (app, other))
            assert given.status == 200 and given.body == expected.body
        assert ask(app, "GET", "/v1/models").body["data"][0]["dimensions"] == 64
        assert ask(app, "GET", "/info").body["model_type"] == {"embedding": {"pooling": "mean"}}
        refused = ask(app, "POST", "/embed", {"inputs": TEXTS})
        assert refused.status == 422 and "SpladePooling" in refused.body["error"]


def test_predictions(post, folders):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    peer = transformers.AutoModelForSequenceClassification.from_pretrained(folders / "film").eval()
    with torch.no_grad():
        logits = peer(torch.tensor([TOKENIZER.encode("a good film")])).logits[0].numpy()
    (raw,) = post("/predict", {"inputs": [["a good film"]], "raw_scores": True}).body
    found = {entry["label"]: entry["score"] for entry in raw}
    same([found["bad"], found["good"]], logits, 1e-4)
    single = post("/predict", {"inputs": "a good film"}).body
    expected = bertsmith.load(folders / "film").classify("a good film").probabilities
    assert [entry["label"] for entry in single] == sorted(expected, key=expected.get)[::-1]
    for entry in single:
        assert entry["score"] == pytest.approx(expected[entry["label"]], abs=1e-6)


def test_two_texts_are_a_pair_and_lists_are_a_batch(post):
    pair = post("/predict", {"inputs": ["ann left", "the cat sat"]}).body
    assert {entry["label"] for entry in pair} == {"bad", "good"}
    batch = post("/predict", {"inputs": [["ann left"], ["ann left", "the cat sat"]]}).body
    assert batch[0] == post("/predict", {"inputs": "ann left"}).body
    assert batch[0] == post("/predict", {"inputs": ["ann left"]}).body
    for one, other in zip(batch[1], pair, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    for wrong in (["a", "b", "c"], [], [[]], [["a", "b", "c"]], ["a", ["b"]], [["a"], "b"]):
        given = post("/predict", {"inputs": wrong})
        assert given.status == 422 and given.headers["content-type"].startswith("text/plain")
        assert given.body.startswith(b"Failed to deserialize the JSON body into the target type: ")


def test_labels_that_do_not_exclude_each_other(post, folders):
    expected = bertsmith.load(folders / "topics").classify("ann left").probabilities
    given = post("/predict", {"inputs": "ann left", "model": "topics"}).body
    found = {entry["label"]: entry["score"] for entry in given}
    assert found == pytest.approx(expected, abs=1e-6)


def test_windows_are_read_as_in_training(post, folders):
    expected = bertsmith.load(folders / "windows").classify(LONG).probabilities
    for truncate in (True, False):  # nothing is cut, so nothing is refused
        body = {"inputs": LONG, "model": "windows", "truncate": truncate}
        given = post("/predict", body)
        found = {entry["label"]: entry["score"] for entry in given.body}
        assert found == pytest.approx(expected, abs=1e-6)
    assert int(given.headers["x-compute-tokens"]) > 65


def test_texts_to_classify_that_are_too_long(post, folders):
    own = bertsmith.load(folders / "film")
    given = post("/predict", {"inputs": LONG, "truncation_direction": "left"}).body
    expected = own.classify(" ".join(LONG.split()[-30:])).probabilities
    assert {x["label"]: x["score"] for x in given} == pytest.approx(expected, abs=1e-6)
    pair = {"inputs": [LONG, LONG], "truncation_direction": "left"}
    tails = [" ".join(LONG.split()[-count:]) for count in (15, 14)]
    assert post("/predict", pair).body == post("/predict", {"inputs": tails}).body
    refused = post("/predict", {"inputs": [LONG, "ann"], "truncate": False})
    assert refused.body["error"].endswith("must have less than 32 tokens. Given: 67")


def test_pairs_that_are_read_in_both_orders(tmp_path):
    about = {"kind": "regress", "text_pair": "second", "both_orders": "on"}
    folder = random_model(tmp_path / "both", TOKENIZER, SequenceClassifier, 1, extra_config=about)
    model = ServedModel.open("both", folder, choose_processor("cpu", "float32"))
    pairs = [("ann left", "the cat sat on a mat"), ("who", "the cats")]
    swapped = [pair[::-1] for pair in pairs]
    expected = model.call("outputs")(pairs, 1)
    for cut in ("none", "left"):  # as where the end would be cut: none is too long
        for given in (pairs, swapped):
            found = model.call("outputs", cut=cut)(given, 1)
            same([outputs for outputs, _ in found], [outputs for outputs, _ in expected])
            assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]


def test_ranks(post, folders):
    scores = bertsmith.load(folders / "pairs").score(["who left"] * 3, TEXTS)
    order = np.argsort(scores)[::-1].tolist()
    body = {"query": "who left", "texts": TEXTS}
    raw = post("/rerank", body | {"raw_scores": True, "return_text": True}).body
    assert [entry["index"] for entry in raw] == order
    assert [entry["text"] for entry in raw] == [TEXTS[k] for k in order]
    same([entry["score"] for entry in raw], np.array(scores)[order])
    plain = post("/rerank", body).body
    assert [sorted(entry) for entry in plain] == [["index", "score"]] * 3
    same([entry["score"] for entry in plain], 1 / (1 + np.exp(-np.array(scores)[order])))
    given = post("/predict", {"inputs": ["who left", TEXTS[0]], "model": "pairs"}).body
    assert given[0]["label"] == "LABEL_0"
    single = post("/predict", {"inputs": "who left", "model": "pairs"})
    assert single.status == 422 and "reads pairs" in single.body["error"]


def test_a_pair_for_a_model_of_single_texts_is_refused(tmp_path):
    folder = tmp_path / "single"
    random_model(folder, TOKENIZER, SequenceClassifier, 1, extra_config={"kind": "regress"}, run={})
    model = ServedModel.open("single", folder, choose_processor("cpu", "float32"))
    with application({"single": model}, operations_of) as app:
        assert ask(app, "POST", "/predict", {"inputs": "ann left"}).status == 200
        ranked = {"query": "who left", "texts": TEXTS}
        for path, body in (("/predict", {"inputs": ["ann", "left"]}), ("/rerank", ranked)):
            given = ask(app, "POST", path, body)
            assert given.status == 422 and "reads single texts" in given.body["error"]


def test_similarities(post, folders):
    one, *others = bertsmith.load(folders / "vectors").embed(TEXTS)
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(one)
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    same(post("/similarity", {"inputs": inputs}).body, others @ one / lengths)
    long = {"source_sentence": LONG, "sentences": [LONG]}
    refused = post("/similarity", {"inputs": long, "parameters": {"truncate": False}})
    assert refused.status == 422 and "Given: 65" in refused.body["error"]
    empty = post("/similarity", {"inputs": inputs | {"sentences": []}})
    assert (empty.status, empty.body["error_type"]) == (400, "Empty")


def test_tokens_and_back(post, folders):
    transformers = pytest.importorskip("transformers")
    peer = transformers.BertTokenizerFast.from_pretrained(folders / "vectors")
    text = "The cats, ANN sat . mouse"
    theirs = peer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    (tokens,) = post("/tokenize", {"inputs": text}, "vectors").body
    assert [token["id"] for token in tokens] == theirs["input_ids"]
    assert [token["special"] for token in tokens] == list(map(bool, theirs["special_tokens_mask"]))
    for token, (start, stop) in zip(tokens[1:-1], theirs["offset_mapping"][1:-1], strict=True):
        assert (token["start"], token["stop"], token["text"]) == (start, stop, text[start:stop])
    ends = [(token["text"], token["start"], token["stop"]) for token in (tokens[0], tokens[-1])]
    assert ends == [("[CLS]", None, None), ("[SEP]", None, None)]
    bare = post("/tokenize", {"inputs": [text], "add_special_tokens": False}, "vectors").body
    assert bare == [tokens[1:-1]]
    prompted = post("/tokenize", {"inputs": "ann", "prompt_name": "query"}, "vectors").body
    assert [token["text"] for token in prompted[0]] == ["[CLS]", "who", ":", "ann", "[SEP]"]
    unknown = post("/tokenize", {"inputs": "ann", "prompt_name": "quiry"}, "vectors")
    assert unknown.status == 422 and "did you mean 'query'?" in unknown.body["error"]
    ids = theirs["input_ids"]
    for skip in (True, False):
        expected = peer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=True)
        for given, answer in ((ids, [expected]), ([ids, ids], [expected, expected])):
            body = {"ids": given, "skip_special_tokens": skip}
            assert post("/decode", body, "vectors").body == answer
    for wrong in ([[5, 99]], [99]):
        assert post("/decode", {"ids": wrong}, "vectors").status == 422
    assert post("/decode", {"ids": [5, [6]]}, "vectors").status == 422


def test_the_tokens_of_a_gpt_and_back(tmp_path):
    library().model.save(str(tmp_path))
    tokenizer = BytePairTokenizer.from_pretrained(tmp_path).with_borders()
    kind = {"family": "gpt", "causal": True, "type_vocab_size": 0, "activation": "gelu_tanh"}
    config = ModelConfig(len(tokenizer.vocabulary), 32, 1, 2, 128, 32, **kind)
    folder = random_model(tmp_path / "gpt", tokenizer, BareModel, config=config)
    model = ServedModel.open("gpt", folder, choose_processor("cpu", "float32"))
    with application({"gpt": model}, operations_of) as app:
        (tokens,) = ask(app, "POST", "/tokenize", {"inputs": "Old ☃ cats"}).body
        ids = [token["id"] for token in tokens]
        whole = {"ids": ids, "skip_special_tokens": False}
        given = ask(app, "POST", "/decode", {"ids": ids})
        assert (given.status, given.body) == (200, ["old cats"])
        assert ask(app, "POST", "/decode", whole).body == [tokenizer.decode(ids)]


def test_the_main_route_is_the_models(post):
    for path in ("/invocations", "/"):
        one = {"inputs": "ann left"}
        assert post(path, one, "film").body == post("/predict", one, "film").body
        assert post(path, one, "vectors").body == post("/embed", one, "vectors").body
        named = one | {"model": "vectors"}
        assert post(path, named, "film", "vectors").body == post("/embed", named, "vectors").body
        ranked = {"query": "who", "texts": TEXTS}
        assert post(path, ranked, "pairs").body == post("/rerank", ranked, "pairs").body
        similar = {"inputs": {"source_sentence": "ann", "sentences": TEXTS}}
        assert post(path, similar, "books").body == post("/similarity", similar, "books").body
        assert post(path, {"inputs": 3}, "vectors").status == 422
        assert post(path, one | {"model": "vectorz"}, "vectors").status == 404
        assert post(path, ranked, "vectors").body == {
            "error": "Backend error: model is not a re-ranker model",
            "error_type": "Backend",
        }


def test_about_the_model(post):
    told = post("/info", None, "film").body
    assert told["model_id"] == told["served_model_name"] == "film"
    assert told["model_type"] == {
        "classifier": {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    }
    assert (told["max_input_length"], told["auto_truncate"]) == (32, True)
    assert (told["max_client_batch_size"], told["model_dtype"]) == (2048, "float32")
    assert list(post("/info", None, "pairs").body["model_type"]) == ["reranker"]
    told = post("/info", None, "vectors", precision="int8").body
    assert told["model_type"] == {"embedding": {"pooling": "mean"}}
    assert told["model_dtype"] == "int8"


def test_the_length_is_the_one_at_which_texts_are_cut(tmp_path, folders, served):
    """Not the model's 32 positions, where it was trained on shorter rows."""
    shorter = shutil.copytree(folders / "vectors", tmp_path / "shorter")
    write(shorter / "sentence_bert_config.json", '{"max_seq_length": 10}')
    opened = ServedModel.open("vectors", shorter, choose_processor("cpu", "float32"))
    others = served("windows", "books")
    for model, length in (opened, 10), (others["windows"], 8), (others["books"], 32):
        with application({"own": model}, operations_of) as app:
            told, listed = (ask(app, "GET", path).body for path in ("/info", "/v1/models"))
        assert told["max_input_length"] == listed["data"][0]["max_tokens"] == length
    head = " ".join(LONG.split()[:8])  # with [CLS] and [SEP]
    with application({"own": opened}, operations_of) as app:
        same(*ask(app, "POST", "/embed", {"inputs": [LONG, head]}).body)


TYPES = {400: "Empty", 404: "Validation", 422: "Validation", 424: "Backend"}  # of an error
REFUSALS = [  # path, body, status, message
    ("/embed", {"inputs": []}, 400, "`inputs` cannot be empty"),
    ("/embed", {"inputs": [""]}, 400, "Input validation error: `inputs` cannot be empty"),
    ("/embed", {"inputs": [[]]}, 400, "Input validation error: `inputs` cannot be empty"),
    ("/rerank", {"query": "a", "texts": []}, 400, "`texts` cannot be empty"),
    ("/decode", {"ids": []}, 400, "`ids` cannot be empty"),
    ("/embed", {"inputs": ["a"] * 4}, 422, "batch size 4 > maximum allowed batch size 3"),
    ("/rerank", {"query": "a", "texts": ["a"], "model": "film"}, 424,
     "Backend error: model is not a re-ranker model"),
    ("/predict", {"inputs": "a", "model": "books"}, 424,
     "Backend error: Model is not a classifier model"),
    ("/embed", {"inputs": "a", "model": "vectorz"}, 404, "did you mean 'vectors'?"),
    ("/embed", {"inputs": "a", "dimensions": 65}, 422, "vectors have 1 to 64"),
    ("/embed", {"inputs": [LONG], "truncate": False, "dimensions": 0}, 422, "1 to 64"),
    ("/embed", {"inputs": "a", "prompt_name": "quiry"}, 422, "no prompt of model"),
    *(
        (path, {"prompt_name": "who : " * 20} | body, 422, "leaves no room for a text")
        for path, body in (
            ("/embed", {"inputs": "a"}),
            ("/embed", {"inputs": "a", "truncation_direction": "left"}),
            ("/embed", {"inputs": [[5, 6]]}),
            ("/embed_all", {"inputs": "a"}),
            ("/embed_sparse", {"inputs": "a"}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSALS)
def test_refusals_are_those_of_its_code(post, path, body, status, message):
    given = post(path, body, max_texts=3)
    assert (given.status, given.body["error_type"]) == (status, TYPES[status])
    assert message in given.body["error"] and set(given.body) == {"error", "error_type"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b'{"inputs": ', (), 400, b"Failed to parse the request body as JSON: "),
        (b'{"inputs": "\xff"}', (), 400, b"Failed to parse the request body as JSON: "),
        ({"input": "a"}, (), 422, b"Failed to deserialize the JSON body into the target type: "),
        ({"inputs": 3}, (), 422, b"Failed to deserialize the JSON body into the target type: "),
        ({"inputs": [5, "a"]}, (), 422, b"Failed to deserialize the JSON body"),
        ({"inputs": "a"}, {"content-type": "text/plain"}, 415, b"application/json"),
        ({"inputs": "a" * 999}, (), 413, b"more than 500 bytes"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_in_plain_text(post, body, headers, status, message):
    given = post("/embed", body, headers=headers, max_body=500)
    assert given.status == status and message in given.body
    assert given.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/predict", {"parameters": {"top_k": 0}}),
        ("/predict", {"parameters": {"top_k": -1}}),
        ("/embed", {"prompt_name": "x" * 10**6}),
        ("/tokenize", {"prompt_name": "x" * 10**6}),
    ],
)
def test_a_number_or_prompt_out_of_bounds(post, path, more):
    given = post(path, {"inputs": "ann"} | more)
    assert given.status == 422 and given.body.startswith(b"Failed to deserialize the JSON body")
    one = post("/predict", {"inputs": "ann", "parameters": {"top_k": 1}}).body
    assert len(one[0]) == 1


def test_a_wrong_key_is_refused_without_a_word(post, tmp_path):
    keys = write(tmp_path / "keys", ["secret"])
    given = post("/embed", {"inputs": "ann"}, api_key_file=keys)
    assert (given.status, given.body) == (401, b"")
    right = {"authorization": "Bearer secret"}
    assert post("/embed", {"inputs": "ann"}, headers=right, api_key_file=keys).status == 200


def test_a_score_that_is_no_number(post, monkeypatch):
    outputs = [(np.array([np.nan, 1], np.float32), 3)]
    monkeypatch.setitem(
        ServedModel.call.__globals__["OWN_CALLS"], "outputs", lambda *_, **__: outputs
    )
    given = post("/predict", {"inputs": "ann"}, "film")
    assert (given.status, given.body["error"]) == (424, "score is NaN")


def te_counts():
    lines = metrics().text()[1].decode().splitlines()
    wanted = [line for line in lines if line.startswith(("te_request_count", "te_request_success"))]
    wanted += [line for line in lines if line.startswith("te_request_failure")]
    return {line.split()[0]: float(line.split()[1]) for line in wanted}


def test_requests_are_counted_and_their_costs_told(post, monkeypatch):
    before = te_counts()
    given = post("/embed", {"inputs": ["ann left", "the cats"]})
    costs = {name[2:]: given.headers[name] for name in given.headers if name.startswith("x-")}
    assert (costs["compute-type"], costs["compute-characters"]) == ("cpu", "16")
    assert costs["compute-tokens"] == "9"  # [CLS] ann left [SEP], [CLS] the cat ##s [SEP]
    times = ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time")
    assert all(int(costs[name]) >= 0 for name in times)
    post("/embed", {"inputs": "ann"})
    post("/embed", {"inputs": [5, 6]})
    post("/embed", {"inputs": ["a"] * 4}, max_texts=3)
    post("/rerank", {"query": "a", "texts": ["a"], "model": "film"})
    post("/predict", {"inputs": [[LONG], ["a"]], "truncate": False})
    post("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}})

    async def busy(*_):
        raise Busy(1.0)

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.serving.batching.Batcher.run", busy)
        given = post("/embed", {"inputs": "ann"})
        assert given.status == 429 and "retry-after" in given.headers
        assert given.body == {"error": "Model is overloaded", "error_type": "Overloaded"}

        async def fault(*_):
            raise RuntimeError("a fault of ours")

        patch.setattr("bertsmith.serving.batching.Batcher.run", fault)
        given = post("/embed", {"inputs": "ann"})
        assert (given.status, given.body["error_type"]) == (500, "Backend")
    after = te_counts()
    risen = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: by for name, by in risen.items() if by} == {
        'te_request_count_total{method="single"}': 4,
        'te_request_count_total{method="batch"}': 5,
        'te_request_success_total{method="single"}': 2,
        'te_request_success_total{method="batch"}': 1,
        'te_request_failure_total{err="batch_size"}': 1,
        'te_request_failure_total{err="model_type"}': 1,
        'te_request_failure_total{err="tokenization"}': 1,
        'te_request_failure_total{err="validation"}': 1,
        'te_request_failure_total{err="overloaded"}': 1,
        'te_request_failure_total{err="inference"}': 1,
    }


def test_a_name_may_have_a_slash(served):
    models = {"org/vectors": served("vectors")["vectors"]}
    models = {name: replace(model, name=name) for name, model in models.items()}
    with application(models, operations_of) as app:
        given = ask(app, "POST", "/v1/embeddings", {"input": "ann", "model": "org/vectors"})
    assert given.body["model"] == "org/vectors"
    counted = 'bertsmith_texts_total{method="embed",model="org/vectors"} 1.0'
    until(lambda: counted in metrics().text()[1].decode())  # after the answer


def test_routes_are_those_of_what_the_models_can_do(served):
    def paths(*names):
        with application(served(*names), operations_of) as app:
            return app.paths

    assert {"/embed", "/embed_sparse", "/v1/embeddings", "/info"} < paths("books")
    assert not {"/predict", "/rerank", "/v1/rerank"} & paths("books")
    assert "/embed_sparse" not in paths("film") and "/rerank" not in paths("film")
    assert {"/predict", "/rerank", "/v1/rerank", "/v2/rerank"} < paths("pairs")
