"""Vectors of texts beside transformers and sentence-transformers; what a folder says of them."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

import bertsmith
from bertsmith.inference.embeddings.pooling import (
    Dense,
    PoolingSettings,
    apply_dense,
    pooling_settings,
    pooling_warning,
)
from bertsmith.inference.embeddings.texts import embed
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import BareModel
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.contrastive import write_pooling
from bertsmith.training.finetuning.settings import ContrastiveSettings

from ...tiny import piece_tokenizer, published_model, random_model, write

VOCABULARY = piece_tokenizer("the a cat dog sat on mat . ##s good bad").vocabulary
TEXTS = ["the cat sat on the mat .", "", "a dog", "the cats sat . " * 9, "good"]


def saved(folder, causal=False, normalization=GOOGLE_UNCASED, **extra):
    config = ModelConfig(len(VOCABULARY), 16, 2, 2, 32, max_positions=48, causal=causal)
    written = {"config": config, "std": 0.3, "extra_config": extra}
    return random_model(folder, Tokenizer(VOCABULARY, normalization), BareModel, **written)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "model")


def with_transformers(folder, texts, pool, max_length):
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state[0]
        vectors.append((hidden.mean(dim=0) if pool == "mean" else hidden[0]).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_vectors_are_those_of_transformers_model(folder, pool):
    done = []
    vectors, cut, _ = embed(bertsmith.load(folder), TEXTS, PoolingSettings(pool, 20), done.append)
    np.testing.assert_allclose(vectors, with_transformers(folder, TEXTS, pool, 20), atol=1e-5)
    assert cut == 1 and sum(done) == len(TEXTS) and vectors.dtype == np.float32


def test_vectors_of_published_weights():
    folder = published_model()
    assert pooling_warning(folder, pooling_settings(folder)) is None
    assert pooling_settings(folder) == PoolingSettings("mean", 256, normalize=True)
    texts = ["A man is playing a flute.", "Someone plays the flute.", "Prices fell on Monday."]
    vectors = bertsmith.load(folder).embed(texts)
    expected = with_transformers(folder, texts, "mean", 256)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, unit, atol=1e-5)
    theirs = sentence_transformer(folder).encode(texts)
    np.testing.assert_allclose(vectors, theirs, atol=1e-5)
    assert unit[0] @ unit[1] > 0.7 > 0.2 > unit[0] @ unit[2]


def sentence_transformer(folder):
    package = pytest.importorskip("sentence_transformers")
    return package.SentenceTransformer(str(folder), device="cpu")


def saved_by_them(source, target, *, pool="mean", normalize=False, prompts=(), **settings):
    """A folder that sentence-transformers itself writes."""
    package = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(source), max_seq_length=settings.get("max_length"))
    pooling = modules.Pooling(16, pool, include_prompt=settings.get("include_prompt", True))
    dense = [modules.Dense(*layer, **more) for *layer, more in settings.get("dense", [])]
    parts = [transformer, pooling, *dense, *([modules.Normalize()] if normalize else [])]
    name = next(iter(prompts), None)
    model = package.SentenceTransformer(
        modules=parts, prompts=dict(prompts), default_prompt_name=name, device="cpu"
    )
    model.save(str(target), create_model_card=False)
    return target


DENSE = [
    (16, 12, {}),  # tanh
    (12, 12, {"bias": False, "activation_function": torch.nn.Identity(), "use_residual": True}),
    (12, 6, {"activation_function": torch.nn.GELU(), "use_residual": True}),
]
QUERY = {"query": "a good dog ", "passage": "the mat "}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool": "cls", "normalize": True},
        {"pool": "max"},
        {"pool": "mean_sqrt_len_tokens"},
        {"dense": DENSE},
        {"dense": DENSE, "normalize": True, "pool": "cls"},
        {"normalize": True, "max_length": 20},
        {"prompts": QUERY, "normalize": True},
        {"prompts": QUERY, "include_prompt": False},
        {"prompts": QUERY, "include_prompt": False, "pool": "max", "max_length": 9},
        {"prompts": QUERY, "include_prompt": False, "pool": "cls"},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items() if v != QUERY) or "two",
)
def test_vectors_are_those_of_sentence_transformers(folder, tmp_path, settings):
    theirs = saved_by_them(folder, tmp_path / "theirs", **settings)
    expected = sentence_transformer(theirs).encode(TEXTS)
    np.testing.assert_allclose(bertsmith.load(theirs).embed(TEXTS), expected, atol=1e-5)


def test_what_embed_train_writes_opens_in_sentence_transformers(tmp_path, folder):
    for pool in ("mean", "cls"):
        ours = shutil.copytree(folder, tmp_path / pool)
        write_pooling(ours, ContrastiveSettings(pool=pool, max_length=20), 16)
        expected = sentence_transformer(ours).encode(TEXTS)
        np.testing.assert_allclose(bertsmith.load(ours).embed(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("config.json", {"in_features": 9}, "takes vectors of 9, but gets 16 numbers"),
        ("config.json", {"out_features": 0}, "in_features and out_features are not numbers"),
        ("config.json", {"out_features": 5}, "by config.json it should have"),
        ("model.safetensors", None, "no such file; pickled weights are never opened"),
    ],
)
def test_a_damaged_dense_module(tmp_path, folder, file, damage, message):
    theirs = saved_by_them(folder, tmp_path / "theirs", dense=DENSE[:1])
    path = theirs / "2_Dense" / file
    if damage is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=message):
        bertsmith.load(theirs).embed(TEXTS)


def test_a_dense_module_gives_the_same_bits_alone_and_in_any_company(tmp_path):
    random = np.random.default_rng(0)
    shapes = {"linear.weight": (500, 700), "linear.bias": (500,), "residual.weight": (500, 700)}
    weights = {name: random.normal(size=of).astype(np.float32) for name, of in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    layer = Dense(tmp_path, {"in_features": 700, "out_features": 500, "use_residual": True})
    vectors = random.normal(size=(40, 700)).astype(np.float32)
    found = apply_dense(layer, vectors)
    linear, bias, residual = (weight.astype(np.float64) for weight in weights.values())
    expected = np.tanh(vectors @ linear.T + bias) + vectors @ residual.T
    np.testing.assert_allclose(found, expected, atol=1e-3)
    for count in (1, 2, 7):
        np.testing.assert_array_equal(
            apply_dense(layer.in_memory(), vectors[:count]), found[:count]
        )


def test_a_module_outside_the_folder_is_refused(tmp_path, folder):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    write(theirs / "modules.json", json.dumps([{"type": "a.Dense", "path": "../2_Dense"}]))
    with pytest.raises(ValueError, match="'../2_Dense' is no folder beside it"):
        pooling_settings(theirs)


def test_prompts_by_name(tmp_path, folder):
    theirs = saved_by_them(folder, tmp_path / "theirs", prompts=QUERY)
    model, library = bertsmith.load(theirs), sentence_transformer(theirs)
    expected = library.encode(TEXTS, prompt_name="passage")
    np.testing.assert_allclose(model.embed(TEXTS, prompt="passage"), expected, atol=1e-5)
    np.testing.assert_array_equal(
        model.embed(TEXTS, prompt="the mat "), model.embed(TEXTS, prompt="passage")
    )
    with pytest.raises(ValueError, match=r"`prompt='pasage'`: no prompt.*did you mean 'passage'"):
        model.embed(TEXTS, prompt="pasage")
    with pytest.raises(ValueError, match=r"has this name \(it has none\).*such as 'query: '"):
        bertsmith.load(folder).embed(TEXTS, prompt="query")


def test_dimensions_are_the_first_numbers_before_vectors_are_made_of_length_1(tmp_path, folder):
    theirs = saved_by_them(folder, tmp_path / "theirs")
    expected = sentence_transformer(theirs).encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    found = bertsmith.load(theirs).embed(TEXTS, dimensions=5, normalize=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for wrong in (0, 17):
        with pytest.raises(ValueError, match=f"`dimensions={wrong}`: the model's vectors have 1"):
            bertsmith.load(theirs).embed(TEXTS, dimensions=wrong)


def test_a_model_that_was_not_trained_for_it_is_warned_of_once(tmp_path, folder, capsys):
    model, said = bertsmith.load(folder), f"warning: nothing says that {folder} was ever trained"
    for times in (1, 0):
        model.embed("a dog")
        assert capsys.readouterr().err.count(said) == times
    trained = shutil.copytree(folder, tmp_path / "trained")
    write_pooling(trained, ContrastiveSettings(), 16)
    bertsmith.load(trained).embed("a dog")
    assert capsys.readouterr().err == ""
    bertsmith.load(trained).embed("a dog", pool="cls")
    assert "was trained with mean pooling, but is read with cls" in capsys.readouterr().err


def test_dimensions_of_a_folder_that_are_more_than_there_are_are_all(tmp_path, folder):
    theirs = saved_by_them(folder, tmp_path / "theirs", dense=DENSE[:1])
    path = theirs / "config_sentence_transformers.json"
    stored = json.loads(path.read_text())
    for given, count in ((99, 12), (12, 12), (5, 5)):
        path.write_text(json.dumps(stored | {"truncate_dim": given}))
        found, expected = bertsmith.load(theirs).embed(TEXTS), sentence_transformer(theirs)
        np.testing.assert_allclose(found, expected.encode(TEXTS), atol=1e-5)
        assert found.shape == (len(TEXTS), count)
    for wrong in (0, "5"):
        path.write_text(json.dumps(stored | {"truncate_dim": wrong}))
        with pytest.raises(ValueError, match=f"transformers.json: truncate_dim {wrong!r} is not"):
            pooling_settings(theirs)


LONG = ["the cat sat on the mat . a dog", "good " * 31, "a cat", ""]


@pytest.mark.parametrize("pool", ["mean", "max", "cls", "mean_sqrt_len"])
@pytest.mark.parametrize("prompt", ["", "a dog "])
def test_windows_are_pooled_as_their_tokens_are(folder, pool, prompt):
    """Beside windows made by hand, of 8 tokens with [CLS], prompt and [SEP]."""
    model = bertsmith.load(folder)
    settings = {"pool": pool, "max_length": 8, "prompt": prompt}
    found = model.embed(LONG, long_texts="windows", **settings)
    short = model.embed(LONG[2:], **settings)
    np.testing.assert_allclose(found[2:], short, atol=1e-6)
    room = 6 - len(prompt.split())
    for text, vector in zip(LONG[:2], found[:2], strict=True):
        words, count = text.split(), -(-len(text.split()) // room)
        cuts = [len(words) * k // count for k in range(count + 1)]
        windows = [" ".join(words[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert max(len(window.split()) for window in windows) <= room
        parts = model.embed(windows, **settings).astype(np.float64)
        weights = np.array([len(w.split()) + len(prompt.split()) + 2.0 for w in windows])[:, None]
        expected = {
            "mean": (parts * weights).sum(0) / weights.sum(),
            "cls": (parts * weights).sum(0) / weights.sum(),
            "max": parts.max(0),
            "mean_sqrt_len": (parts * np.sqrt(weights)).sum(0) / np.sqrt(weights.sum()),
        }[pool]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_windows_are_counted_by_text(folder):
    done, settings = [], PoolingSettings(max_length=8, long_texts="windows")
    _, cut, _ = embed(bertsmith.load(folder), LONG, settings, done.append)
    assert cut == 0 and sum(done) == len(LONG)
    assert str(settings) == "the mean of the tokens, of at most 8 tokens a window"
    assert bertsmith.load(folder).embed([], long_texts="windows").shape == (0, 16)
    with pytest.raises(ValueError, match="long_texts = 'head': expected cut or windows"):
        bertsmith.load(folder).embed(LONG, long_texts="head")


def test_texts_are_lower_cased_where_the_folder_says_so(tmp_path):
    cased = Normalization(lowercase=False, strip_accents="none")
    source = saved(tmp_path / "cased", normalization=cased)
    theirs = saved_by_them(source, tmp_path / "theirs")
    config = theirs / "sentence_bert_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"do_lower_case": True}))
    texts = ["The CAT sat", "the cat sat"]
    expected = sentence_transformer(theirs).encode(texts)
    vectors = bertsmith.load(theirs).embed(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    plain = bertsmith.load(source).embed(texts)
    assert not np.allclose(plain[0], plain[1], atol=1e-2)


def test_what_is_given_goes_before_what_the_folder_says(folder, tmp_path):
    theirs = saved_by_them(folder, tmp_path / "theirs", normalize=True, prompts=QUERY)
    assert pooling_settings(theirs) == PoolingSettings("mean", None, "a good dog ", normalize=True)
    given = pooling_settings(theirs, "cls", 20, "the mat ", False)
    assert given == PoolingSettings("cls", 20, "the mat ")
    model = sentence_transformer(theirs)
    vectors, *_ = embed(bertsmith.load(theirs), TEXTS, pooling_settings(theirs, prompt="the mat "))
    np.testing.assert_allclose(vectors, model.encode(TEXTS, prompt_name="passage"), atol=1e-5)
    vectors, *_ = embed(bertsmith.load(theirs), TEXTS, pooling_settings(theirs, prompt=""))
    np.testing.assert_allclose(vectors, model.encode(TEXTS, prompt=""), atol=1e-5)


def test_a_prompt_without_room_for_a_text_is_refused(folder):
    settings = PoolingSettings("mean", 6, "the cat sat on ")
    message = "`max_length=6`: the prompt 'the cat sat on ' leaves no room"
    with pytest.raises(ValueError, match=message):
        embed(bertsmith.load(folder), TEXTS, settings)


def test_a_default_prompt_that_is_not_there(folder, tmp_path):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    stored = {"prompts": {"query": "q: "}, "default_prompt_name": "passage"}
    write(theirs / "config_sentence_transformers.json", json.dumps(stored))
    with pytest.raises(ValueError, match="default_prompt_name 'passage' is none of its prompts"):
        pooling_settings(theirs)


def test_what_a_folder_says_of_its_training(tmp_path, folder):
    assert "nothing says" in pooling_warning(folder, pooling_settings(folder))
    assert pooling_settings(folder) == PoolingSettings("mean", None)
    ours = saved(tmp_path / "ours")
    write_pooling(ours, ContrastiveSettings(pool="cls", max_length=24), 16)
    assert pooling_settings(ours) == PoolingSettings("cls", 24)
    assert pooling_warning(ours, pooling_settings(ours)) is None
    assert pooling_settings(ours, "mean", 12) == PoolingSettings("mean", 12)
    warning = pooling_warning(ours, PoolingSettings("mean"))
    assert "was trained with cls pooling, but is read with mean" in warning
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    write(theirs / "modules.json", "[]")
    assert pooling_warning(theirs, pooling_settings(theirs)) is None
    pooling = theirs / "1_Pooling" / "config.json"
    write(pooling, json.dumps({"pooling_mode_cls_token": True}))
    assert pooling_settings(theirs).pool == "cls"
    for stored, pools in (
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean and max"),
        ({"pooling_mode": ["cls", "mean"]}, "cls and mean"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
    ):
        pooling.write_text(json.dumps(stored))
        with pytest.raises(ValueError, match=f"pooled by {pools}, which is not known.*pool='mean'"):
            pooling_settings(theirs)
        warning = pooling_warning(theirs, pooling_settings(theirs, "mean"))
        assert f"trained with {pools} pooling" in warning
    pooling.write_text("[]")
    with pytest.raises(ValueError, match="config.json: not a JSON object"):
        pooling_settings(theirs)


def test_layers_behind_the_pooling_are_told(tmp_path, folder):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    modules = theirs / "modules.json"
    names = ("Transformer", "Pooling", "LSTM", "Normalize")
    modules.write_text(json.dumps([{"type": f"sentence_transformers.models.{n}"} for n in names]))
    message = r"made by layers after the pooling \(LSTM\).*pool='mean'"
    with pytest.raises(ValueError, match=message):
        pooling_settings(theirs)
    assert pooling_settings(theirs, "mean") == PoolingSettings(normalize=True)
    warning = pooling_warning(theirs, PoolingSettings())
    assert "pooling that are not read here, LSTM: use" in warning
    for damaged in ({}, [1]):
        modules.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="modules.json: not a list of JSON objects"):
            pooling_settings(theirs)


@pytest.mark.parametrize("length", [2, 49])
def test_a_length_that_the_model_does_not_have(folder, length):
    with pytest.raises(ValueError, match=f"`max_length={length}`: the model reads 3 to 48"):
        embed(bertsmith.load(folder), TEXTS, PoolingSettings("mean", length))


def test_cls_of_a_left_to_right_model_is_no_vector_of_a_text(tmp_path):
    folder = saved(tmp_path / "causal", causal=True)
    predictor = bertsmith.load(folder)
    with pytest.raises(
        ValueError, match=r"`pool='cls'`: in a left-to-right model \[CLS\] sees noth"
    ):
        embed(predictor, TEXTS, PoolingSettings("cls"))
    vectors, *_ = embed(predictor, TEXTS, PoolingSettings("mean"))
    assert not np.allclose(vectors[0], vectors[2])
    with pytest.raises(ValueError, match="pool = 'avg': expected mean, cls, max or mean_sqrt_len"):
        predictor.embed(TEXTS, pool="avg")
