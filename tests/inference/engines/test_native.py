"""The native engine beside PyTorch: the same in float32, near in bf16 and int8, alone or not."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.inference.engines import native
from bertsmith.inference.engines.native import NativeModel, row_ranges, why_not
from bertsmith.inference.engines.processor import PRECISIONS
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from bertsmith.model.kernels.llvm.blocks import cpu_features
from bertsmith.tasks.features import Features
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.hidden_states import head_outputs, states_at

from ...tiny import python

CONFIG = ModelConfig(300, 64, 3, 2, 128, max_positions=160)
CPU = Engine(torch.device("cpu"), "float32", 1)
INTEGERS = [
    pytest.param(name, marks=pytest.mark.skipif(needs not in cpu_features(), reason=f"no {needs}"))
    for name, needs in (("uint8", "avx512vnni"), ("int16", "avx2"))
]


def some_texts(count=40, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 80, count)
    lengths[:2] = 160, 33  # the longest, and one more than a block
    edges = np.concatenate([[0], np.cumsum(lengths)])
    ids, types = random.integers(0, 300, edges[-1]), random.integers(0, 2, edges[-1])
    return Features(ids.astype(np.int32), types.astype(np.int32), edges, None, 160, 0)


def made(head, config=CONFIG, outputs=3):
    model = (head(config) if issubclass(head, BareModel) else head(config, outputs)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():  # of norms and biases, too
            weight.normal_(mean=float(weight.ndim == 1), std=0.2, generator=generator)
    return model, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("head", "outputs"),
    [(SequenceClassifier, 3), (OptionScorer, 1), (TokenClassifier, 40), (SpanPredictor, 2)],
)
def test_in_float32_it_answers_as_pytorch(head, outputs, activation):
    config = ModelConfig(300, 64, 3, 2, 128, max_positions=160, activation=activation)
    model, tensors = made(head, config, outputs)
    texts = some_texts()
    ours = NativeModel.make(tensors, config, "float32", 2)
    found, expected = ours.outputs(texts), head_outputs(model, texts, CPU)
    assert found.shape == expected.shape
    # both sum in float32, in other orders
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_in_int8_it_is_near_by_every_instruction(monkeypatch, dtype):
    model, tensors = made(TokenClassifier)
    monkeypatch.setattr(native, "integer_dtype", lambda *inputs: np.dtype(dtype))
    texts, ours = some_texts(), NativeModel.make(tensors, CONFIG, "int8", 1)
    assert ours.dtype == dtype
    expected = head_outputs(model, texts, CPU)
    assert cosines(ours.outputs(texts), expected).mean() > 0.998
    monkeypatch.setattr(native, "has_bf16_blocks", lambda: False)  # attention in float32
    assert cosines(ours.outputs(texts), expected).mean() > 0.998


def cosines(found, expected):
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return (found * expected).sum(1) / lengths


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_in_bf16_it_is_nearer(activation):
    config = replace(CONFIG, activation=activation)
    if reason := why_not(config, "bf16"):
        pytest.skip(reason)
    model, tensors = made(TokenClassifier, config)
    texts, ours = some_texts(), NativeModel.make(tensors, config, "bf16", 2)
    near = cosines(ours.outputs(texts), head_outputs(model, texts, CPU))
    assert near.mean() > 0.9999 and near.min() > 0.9995


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_text_has_the_same_bits_alone_and_in_any_company(precision):
    if why_not(CONFIG, precision):
        pytest.skip(why_not(CONFIG, precision))
    _, tensors = made(SequenceClassifier)
    texts = some_texts(300)
    one = NativeModel.make(tensors, CONFIG, precision, 1)
    expected = one.outputs(texts)
    two = NativeModel.make(tensors, CONFIG, precision, 2)
    assert (two.outputs(texts) == expected).all()
    order = np.random.default_rng(1).permutation(len(texts))
    assert (two.outputs(texts.of_rows(order)) == expected[order]).all()
    for row in range(0, len(texts), 7):
        assert (one.outputs(texts.of_rows(np.array([row]))) == expected[row]).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 33, 160])
def test_threads_that_share_a_text_give_its_bits(monkeypatch, precision, tokens):
    if why_not(CONFIG, precision):
        pytest.skip(why_not(CONFIG, precision))
    monkeypatch.setattr(native, "TILED_TOKENS", 16)
    _, tensors = made(PreTrainingModel)
    random = np.random.default_rng(tokens)
    ids = random.integers(0, 300, tokens).astype(np.int32)
    text = Features(ids, np.zeros_like(ids), np.array([0, tokens]), None, 160, 0)
    some = np.flatnonzero(random.random(tokens) < 0.3)
    reads, every = np.array([0, len(some)]), np.arange(tokens)

    def answers(threads):
        ours = NativeModel.make(tensors, CONFIG, precision, threads)
        states = ours.states(text, every, text.boundaries, all_layers=True)
        return states, ours.states(text, some, reads), ours.vectors(text, "mean")

    alone = answers(1)
    assert alone[0].shape == (4, tokens, 64) and (alone[0][-1][some] == alone[1]).all()
    for threads in (2, 3, 7):
        for found, expected in zip(answers(threads), alone, strict=True):
            assert np.array_equal(found, expected)


def test_a_model_of_one_thread_computes_in_the_callers(monkeypatch):
    monkeypatch.setattr(native, "workers", pytest.fail)
    ours = NativeModel.make(made(PreTrainingModel)[1], CONFIG, "float32", 1)
    texts = some_texts()
    parts = list(ours.map(texts, lambda model, rows: np.full(len(rows), threading.get_ident())))
    assert len(parts) > 1 and sum(count for count, _ in parts) == len(texts)
    assert {ident for _, own in parts for ident in own} == {threading.get_ident()}


@pytest.mark.parametrize("failing", [0, 5])
def test_rows_that_fail_or_are_not_wanted_leave_the_workers_free(failing):
    ours = NativeModel.make(made(PreTrainingModel)[1], CONFIG, "float32", 2)
    texts, seen = some_texts(300), []

    def compute(model, part):
        seen.append(part)
        if len(seen) > failing:
            raise MemoryError
        return part

    with pytest.raises(MemoryError):
        list(ours.map_ranges(texts, compute))
    seen.clear()
    began = ours.map_ranges(texts, lambda model, part: part)
    next(began)
    began.close()
    assert len(ours.vectors(texts, "mean")) == 300


def test_a_forked_process_has_workers_and_a_lock_of_its_own(monkeypatch):
    monkeypatch.setattr(native, "SHARING", native.Lock())
    before, held = native.workers(2), native.SHARING
    with held:
        native.begin_anew()
    assert native.workers(2) is not before and not native.SHARING.locked()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_may_lie_in_any_order(precision):
    if why_not(CONFIG, precision):
        pytest.skip(why_not(CONFIG, precision))
    tensors, texts = made(SequenceClassifier)[1], some_texts()
    turned = {name: np.asfortranarray(array) for name, array in tensors.items()}
    found, expected = (
        NativeModel.make(own, CONFIG, precision, 1).outputs(texts) for own in (turned, tensors)
    )
    assert (found == expected).all()


def test_a_thread_that_fails_leaves_nobody_waiting(monkeypatch):
    def encode(*given):
        share = given[-1]
        if share.first:
            raise MemoryError
        while share.arrived[0] < 2:
            time.sleep(0.001)
        return np.zeros((share.last, 64), np.float32)

    monkeypatch.setattr(native, "encode", encode)
    ours = NativeModel.make(made(PreTrainingModel)[1], CONFIG, "float32", 2)
    text = some_texts().of_rows(np.array([0]))
    with pytest.raises(MemoryError):
        ours.token_states(text)


ANSWER = """
import hashlib, numpy as np
from tests.inference.engines.test_native import (
    PRECISIONS, NativeModel, PreTrainingModel, made, some_texts, why_not
)
from bertsmith.model.config import ModelConfig
config = ModelConfig(300, 384, 2, 6, 768, max_positions=160)
tensors, texts = made(PreTrainingModel, config)[1], some_texts()
for precision in PRECISIONS:
    if why_not(config, precision):
        continue
    model = NativeModel.make(tensors, config, precision, 2)
    found = [model.run(texts, NativeModel.token_states)]
    found += [row for _, row in model.piece_logits(texts, texts.boundaries[:-1])]
    print(hashlib.sha256(b"".join(map(np.ndarray.tobytes, found))).hexdigest())
"""


@pytest.mark.slow  # it compiles
def test_a_process_that_compiles_answers_with_the_bits_of_those_that_find_the_code(tmp_path):
    ran = [python(ANSWER, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert ran[0].code == 0 and "compiling" in ran[0].err and "compiling" not in ran[1].err
    assert ran[0].out == ran[1].out


def test_the_states_of_all_layers_are_pytorchs():
    model, tensors = made(BareModel)
    texts = some_texts(9)
    ours = NativeModel.make(tensors, CONFIG, "float32", 1)
    places = np.arange(len(texts.ids))
    found = ours.states(texts, places, texts.boundaries, all_layers=True)
    layers = range(CONFIG.num_layers + 1)
    for taken, states in states_at(model.encoder, texts, places, layers, CPU, 512):
        for layer, expected in enumerate(states):
            np.testing.assert_allclose(found[layer, taken], expected.numpy(), atol=2e-5)


def test_all_states_of_the_last_layer_are_those_of_single_tokens():
    _, tensors = made(BareModel)
    texts = some_texts(20)
    ours = NativeModel.make(tensors, CONFIG, "float32", 1)
    assert (ours.first_states(texts) == ours.token_states(texts)[texts.boundaries[:-1]]).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_masks_have_pytorchs_logits(activation):
    config = ModelConfig(300, 64, 2, 2, 128, max_positions=160, activation=activation)
    model, tensors = made(PreTrainingModel, config)
    texts, ours = some_texts(20), NativeModel.make(tensors, config, "float32", 2)
    places = np.sort(np.concatenate([texts.boundaries[:-1], texts.boundaries[1:] - 1]))
    found = dict(ours.piece_logits(texts, places))
    assert list(found) == list(range(20))
    for row, scores in found.items():
        batch = map(torch.from_numpy, texts.padded(np.array([row]), 0))
        wanted = torch.tensor([[0, texts.lengths[row] - 1]])
        with torch.inference_mode():
            expected = model(*batch, wanted).mlm_logits
        np.testing.assert_allclose(scores, expected.numpy(), atol=2e-5)
        alone = texts.of_rows(np.array([row]))
        ((_, same),) = ours.piece_logits(alone, np.array([0, len(alone.ids) - 1]))
        assert (same == scores).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre_norm": True}, "not the paper's"),
        ({"gated": True}, "not the paper's"),
        ({"causal": True}, "not the paper's"),
        ({"num_heads": 4}, "no multiples of 32"),
        ({"intermediate_size": 100}, "no multiples of 32"),
        ({}, None),
    ],
    ids=str,
)
def test_models_beyond_the_engine_are_named(changes, says):
    shape = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "intermediate_size": 128}
    reason = why_not(ModelConfig(300, **(shape | changes)), "float32")
    assert reason is None if says is None else says in reason


def test_a_processor_without_integer_products_says_so(monkeypatch):
    monkeypatch.setattr(native, "integer_dtype", lambda: None)
    assert "no products of integers" in why_not(CONFIG, "int8")
    monkeypatch.setattr(native, "has_bf16_blocks", lambda: False)
    assert "no products of bf16" in why_not(CONFIG, "bf16")
    assert why_not(CONFIG, "float32") is None


def test_the_rows_of_a_layer_have_two_lengths(monkeypatch):
    monkeypatch.setattr(native, "integer_dtype", lambda *inputs: inputs)
    assert native.row_dtype(ModelConfig(9, 96, 1, 3, 128), "int8") == (96, 128)
    assert native.row_dtype(CONFIG, "float32") == np.float32


def test_a_row_longer_than_the_positions_is_refused():
    _, tensors = made(SequenceClassifier)
    ours = NativeModel.make(tensors, CONFIG, "float32", 1)
    ids = np.zeros(161, np.int32)
    row = Features(ids, ids, np.array([0, 161]), None, 161, 0)
    with pytest.raises(ValueError, match="161 tokens, but the model knows 160 positions"):
        ours.outputs(row)


def test_rows_are_cut_into_parts():
    assert row_ranges(np.array([], np.int64), 8) == []
    assert row_ranges(np.array([9, 8, 1]), 8) == [slice(0, 1), slice(1, 2), slice(2, 3)]
