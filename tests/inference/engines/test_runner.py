"""A folder's models are opened once, whoever asks, with however many threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import bertsmith
from bertsmith.inference.embeddings.pooling import PoolingSettings
from bertsmith.inference.embeddings.texts import embed
from bertsmith.inference.engines import runner
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.vectors import text_features

from ...tiny import piece_tokenizer, random_model

TEXT = "the a cat dog sat on mat . good bad"
TOKENIZER = piece_tokenizer(TEXT)
TEXTS = ["the cat sat on the mat .", "a good dog", "bad"]


@pytest.fixture
def model(tmp_path):
    config = ModelConfig(len(TOKENIZER.vocabulary), 64, 2, 2, 128, max_positions=40)
    folder = random_model(tmp_path / "model", TOKENIZER, SequenceClassifier, 2, config=config)
    return bertsmith.load(folder)


@pytest.fixture
def opened(monkeypatch):
    """The kinds of the models that our engine reads."""
    kinds, read = [], runner.open_tensors
    monkeypatch.setattr(
        runner, "open_tensors", lambda folder, kind: [kinds.append(kind), read(folder, kind)][1]
    )
    return kinds


def test_the_same_weights_answer_with_any_number_of_threads(model, opened):
    expected = model.classify(TEXTS)
    for threads in (1, 3):
        assert model.with_threads(threads).classify(TEXTS) == expected
    assert opened == ["SequenceClassifier"]


def test_a_model_with_a_head_gives_vectors_too(model, opened):
    model.classify(TEXTS)
    vectors = model.embed(TEXTS)
    assert opened == ["SequenceClassifier"]
    np.testing.assert_array_equal(vectors, bertsmith.load(model.folder).embed(TEXTS))
    assert opened[1:] == ["BareModel"]


def test_threads_that_ask_at_once_open_it_once(model, opened):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model.classify(TEXTS), range(8)))
    assert found == found[:1] * 8 and len(opened) == 1


@pytest.mark.parametrize(("long_texts", "tokens"), [("cut", [5, 5, 3]), ("windows", [13, 5, 3])])
def test_tokens_of_texts_are_counted(model, long_texts, tokens):
    """Of a text of seven pieces in windows of three: three, each with [CLS] and [SEP]."""
    settings = PoolingSettings(max_length=5, long_texts=long_texts)
    assert embed(model, TEXTS, settings).tokens.tolist() == tokens


def test_what_is_kept_in_memory_survives_its_file(model):
    """A map of a file that is cut kills the process, and one that is written to answers anew."""
    vectors = model.embed(TEXTS)
    model.keep_in_memory()
    weights = model.folder / "model.safetensors"
    size = weights.stat().st_size
    with open(weights, "r+b") as file:
        file.truncate(0)
        file.write(b"\1" * size)
    np.testing.assert_array_equal(model.embed(TEXTS), vectors)


def test_threads_that_explain_at_once_see_their_own_text(model):
    """PyTorch's modules are one for all threads, and keep what they give for each by itself."""
    texts = [" ".join(TEXT.split()[: 2 + k]) for k in range(8)]
    expected = [[model.explain(t, method=m) for t in texts] for m in ("gradient", "rollout")]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for method, known in zip(("gradient", "rollout"), expected, strict=True):
                found = list(pool.map(lambda t, m=method: model.explain(t, method=m), texts))
                assert found == known


@pytest.mark.parametrize("method", ["gradient", "rollout"])
def test_what_another_thread_answers_meanwhile_is_not_explained(model, method):
    expected, read = model.explain(TEXT, method=method), model.pytorch(model.task_kind)
    other, caller = text_features(TOKENIZER, ["the mat"], 40), threading.get_ident()

    def meanwhile(module, inputs):
        if threading.get_ident() == caller:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(read.outputs, other).result()

    read.model.encoder.register_forward_pre_hook(meanwhile)
    assert model.explain(TEXT, method=method) == expected
