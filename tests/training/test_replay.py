"""A batch that is not finite: named, and told row by row and tensor by tensor."""

import dataclasses

import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import main
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.encoder import Embeddings
from bertsmith.training.engine import Engine
from bertsmith.training.pretraining.diagnostics import replay
from bertsmith.training.pretraining.run import pretrain


@pytest.fixture
def short(settings):
    return dataclasses.replace(settings, batch_size=4, steps=6, num_evals=1)


def poisoned(token):
    """Embeddings that overflow wherever a token stands."""
    real = Embeddings.forward

    def forward(self, input_ids_BS, token_types_BS):
        states = real(self, input_ids_BS, token_types_BS)
        bad = (input_ids_BS == token).any(1)[:, None, None]
        return states.masked_fill(bad, float("inf"))

    return forward


def test_the_failed_batch_is_named_and_replayed(store_folder, tmp_path, short, monkeypatch):
    out = tmp_path / "run"
    pretrain(store_folder, out, dataclasses.replace(short, steps=3))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    found = replay(store_folder, out, short)
    assert (found.step, found.rows, found.faults) == (3, 4, [])
    assert "all 4 rows have finite" in found.text()

    # poison what stands in the third row of the next batch, and see who has it
    from bertsmith.corpus.examples.stream import PretrainingStream
    from bertsmith.corpus.store.store import TokenStore
    from bertsmith.text.tokenizer.tokenizer import Tokenizer

    stream = PretrainingStream(
        TokenStore.open(store_folder).train,
        Tokenizer.from_pretrained(store_folder).vocabulary,
        short.examples(short.max_length),
        short.seed,
    )
    ids = stream.batch(Position(0, 12), 4)[0].input_ids
    rows_with = {int(token): [r for r in range(4) if token in ids[r]] for token in ids[2]}
    token, expected = min(rows_with.items(), key=lambda item: len(item[1]))
    monkeypatch.setattr(Embeddings, "forward", poisoned(token))
    found = replay(store_folder, out, short)
    assert [fault.row for fault in found.faults] == expected
    fault = found.faults[0]
    assert fault.module == "encoder.embeddings"
    assert fault.position == Position(0, 12 + expected[0])
    assert "encoder.layers.0.qkv.weight" in fault.gradients
    assert f"row {fault.row} (epoch 0, index {fault.position.index})" in found.text()
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    with pytest.raises(FloatingPointError, match=r"phase 1, step 3: .*--out .*run --replay$"):
        pretrain(store_folder, out, resume=True, steps=short.steps)
    assert RunFolder(out).latest().name == "step-00000003"
    words = ["pretrain", "--corpus", str(store_folder), "--out", str(out), "--replay", "--json"]
    assert main(words) == 1


def test_a_gradient_alone_can_be_at_fault(store_folder, tmp_path, short, monkeypatch):
    out = tmp_path / "run"
    pretrain(store_folder, out, dataclasses.replace(short, steps=1))
    real = Embeddings.forward

    def forward(self, *given):
        states = real(self, *given)
        states.register_hook(lambda gradient: gradient * float("nan"))
        return states

    monkeypatch.setattr(Embeddings, "forward", forward)
    found = replay(store_folder, out, short)
    assert [fault.row for fault in found.faults] == [0, 1, 2, 3]
    assert {fault.module for fault in found.faults} == {None}
    assert all("encoder.embeddings" in name for name in found.faults[0].gradients)
    assert "activations finite" in found.text()


def test_a_module_inside_a_layer_is_named(store_folder, tmp_path, short, monkeypatch):
    """Where the step itself computes several modules by one kernel."""
    out = tmp_path / "run"
    pretrain(store_folder, out, dataclasses.replace(short, steps=1))
    real = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        narrows = weight.shape[1] == 4 * weight.shape[0]  # a layer's output
        return real(x, weight, bias) * (float("inf") if narrows else 1)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    found = replay(store_folder, out, short)
    assert {fault.module for fault in found.faults} == {"encoder.layers.0.output"}
    with pytest.raises(FloatingPointError, match="phase 1, step 1"):
        pretrain(store_folder, out, resume=True, steps=short.steps)


def test_it_computes_as_the_run_does(store_folder, tmp_path, short, monkeypatch):
    prepared = []
    monkeypatch.setattr(Engine, "prepare", lambda self, model: prepared.append(model))
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(short, steps=1))
    replay(store_folder, tmp_path / "run", short)
    assert len(prepared) == 2


def test_there_must_be_something_to_replay(store_folder, tmp_path, short):
    with pytest.raises(ValueError, match="nowhere: no checkpoint of a pre-training run"):
        replay(store_folder, tmp_path / "nowhere", short)


def test_a_weight_that_is_not_finite_is_refused_at_the_start(store_folder, tmp_path, short):
    from bertsmith.checkpoints.tensors import read_tensor_file, write_tensors

    pretrain(store_folder, tmp_path / "run", dataclasses.replace(short, steps=1))
    file = tmp_path / "run" / "model.safetensors"
    weights = read_tensor_file(file)
    name = "bert.encoder.layer.1.output.dense.weight"
    weights[name] = weights[name].clone()
    weights[name][3, 4] = float("nan")
    write_tensors(file, weights)
    with pytest.raises(ValueError, match=name) as error:
        pretrain(store_folder, tmp_path / "new", short, model=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("copy or download the model again")
    assert not (tmp_path / "new").exists()
    assert torch.isnan(weights[name]).sum() == 1
