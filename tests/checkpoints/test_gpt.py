"""GPT as released in both formats, beside transformers' classes, there and back, in float32."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.checkpoints.config_json import model_kind, read_config, read_stored_config
from bertsmith.checkpoints.convert import convert, extend_model
from bertsmith.checkpoints.model_folder import load_model, model_class, save_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    TokenClassifier,
)
from bertsmith.text.vocabulary.extend import Addition

from ..gpt import POSITIONS, SIZE, write_openai

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOLERANCE = 1e-5  # of the largest value, in float32; the figures measured are below 2e-6
B, S = 3, 24
HEADS = {"": BareModel, "LMHead": PreTrainingModel, "DoubleHeads": OptionScorer}
NEXT = ["nsp.weight", "nsp.bias"]


@pytest.fixture(scope="module")
def openai(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt") / "openai"
    return folder, write_openai(folder)


def their_class(head):
    return getattr(transformers, f"OpenAIGPT{head}Model")


def their_model(head, tensors):
    """Their class with OpenAI's tensors, and random ones in the head that these lack."""
    settings = {"n_positions": POSITIONS, "n_embd": SIZE, "n_layer": 2, "n_head": 2}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    pieces = len(tensors["tokens_embed.weight"])
    torch.manual_seed(3)
    theirs = their_class(head)(
        transformers.OpenAIGPTConfig(vocab_size=pieces, summary_first_dropout=0.0, **settings)
    )
    known = {name: torch.from_numpy(array) for name, array in tensors.items()}
    encoder = theirs.transformer if head else theirs
    missing, unexpected = encoder.load_state_dict(known, strict=False)
    assert not unexpected and not missing
    return theirs.eval()


def ids_of(theirs):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, theirs.config.vocab_size, (B, S), generator=generator)


def outputs(ours, theirs, ids):
    """(Ours, theirs) where both have them."""
    types = torch.zeros_like(ids)
    with torch.no_grad():
        found = theirs(ids)
        if isinstance(ours, PreTrainingModel):
            positions = torch.arange(S).expand(B, -1)
            return ours(ids, types, None, positions).mlm_logits.view(B, S, -1), found.logits
        if isinstance(ours, OptionScorer):
            return ours(ids, types, None)[:, 0], found.mc_logits
        return ours.encoder(ids), found.last_hidden_state


def assert_near(ours, theirs):
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"{error:.1e}"


@pytest.mark.parametrize("head", HEADS)
def test_what_transformers_writes_we_compute_and_back(head, openai, tmp_path):
    theirs = their_model(head, openai[1])
    theirs.save_pretrained(tmp_path / "theirs")
    kind = HEADS[head]
    loaded = load_model(tmp_path / "theirs", kind)
    assert model_class(tmp_path / "theirs") is kind and loaded.unused == []
    assert loaded.missing == (NEXT if kind is PreTrainingModel else [])
    ours, ids = loaded.model.eval(), ids_of(theirs)
    assert_near(*outputs(ours, theirs, ids))

    save_model(ours, load_tokenizer(openai[0]), tmp_path / "ours", exclude=NEXT)
    assert read_config(tmp_path / "ours") == ours.config
    assert read_stored_config(tmp_path / "ours")["model_type"] == "openai-gpt"
    back, information = their_class(head).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(information.values()), information
    assert_near(*outputs(ours, back.eval(), ids))
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")("The old cats!")
    mine = load_tokenizer(tmp_path / "ours").encode_batch(["The old cats!"])
    assert names["input_ids"] == mine.ids.tolist()


def test_the_files_of_2018(openai, tmp_path):
    folder, tensors = openai
    theirs = their_model("LMHead", tensors)
    assert model_kind(folder) == "PreTrainingModel"
    loaded = load_model(folder, PreTrainingModel)
    assert loaded.missing == NEXT and loaded.unused == []
    ids = ids_of(theirs)
    assert_near(*outputs(loaded.model.eval(), theirs, ids))
    converted = convert(folder, tmp_path / "converted")
    assert converted.architecture == "OpenAIGPTLMHeadModel" and converted.unused == []
    theirs = their_class("LMHead").from_pretrained(tmp_path / "converted").eval()
    assert_near(*outputs(loaded.model, theirs, ids))


def stored(folder, openai, change, suffix="model.safetensors"):
    """Their LM's folder with its tensors changed, in a file of that name."""
    their_model("LMHead", openai[1]).save_pretrained(folder)
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    if suffix.endswith(".bin"):
        torch.save(tensors, folder / suffix)
    else:
        save_file(tensors, folder / suffix)
    return tensors


def without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def as_published(tensors):
    """With the mask of each layer, and the table of the head beside its twin."""
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, POSITIONS, POSITIONS) for n in range(2)}
    twin = {"lm_head.weight": tensors["transformer.tokens_embed.weight"].clone()}
    return without_prefix(tensors) | masks | twin


@pytest.mark.parametrize("suffix", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("change", [without_prefix, as_published])
def test_the_spellings_of_a_folder(change, suffix, openai, tmp_path):
    stored(tmp_path, openai, change, suffix)
    loaded = load_model(tmp_path, PreTrainingModel)
    assert loaded.missing == NEXT and loaded.unused == []
    expected = load_model(openai[0], PreTrainingModel).model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert name in NEXT or torch.equal(tensor, expected[name]), name


def test_a_table_of_its_own_is_refused(openai, tmp_path):
    stored(tmp_path, openai, lambda t: as_published(t) | {"lm_head.weight": torch.zeros(3, SIZE)})
    with pytest.raises(ValueError, match="'lm_head.weight' differs from the token embedding"):
        load_model(tmp_path, PreTrainingModel)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"afn": "relu"}, "afn 'relu': bertsmith has only gelu"),
        ({"n_layer": 3}, "config.json says 3 layers, but the weights hold 2"),
        ({"n_embd": 192, "n_head": 3}, r"has shape \[\d+, 128\], but by config.json"),
        ({"n_embd": "wide"}, "hidden_size = 'wide': expected a whole number"),
        ({"summary_type": "mean"}, "summary_type 'mean': bertsmith has only 'cls_index'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(values, message, openai, tmp_path):
    stored(tmp_path, openai, without_prefix)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, PreTrainingModel)


def test_a_tensor_that_lacks_is_named_as_they_call_it(openai, tmp_path):
    def torn(tensors):
        name = "transformer.h.1.attn.c_attn.weight"
        return tensors | {name: tensors[name][:, :-1].contiguous()}

    stored(tmp_path, openai, torn)
    with pytest.raises(ValueError, match=r"lack 'transformer.h.1.attn.c_attn.weight' of the enc"):
        load_model(tmp_path, PreTrainingModel)


@pytest.mark.parametrize("kind", [SequenceClassifier, TokenClassifier])
def test_a_head_that_transformers_lacks_stays_our_own(kind, openai, tmp_path):
    model = load_model(openai[0], kind, num_outputs=3).model
    save_model(model, load_tokenizer(openai[0]), tmp_path, label_names=["a", "b", "c"])
    assert read_stored_config(tmp_path)["model_type"] == "bertsmith"
    back = load_model(tmp_path, kind)
    assert back.missing == back.unused == [] and back.model.config == model.config
    for name, tensor in back.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    with pytest.raises(ValueError, match="its head, which transformers' BERT does not have"):
        convert(tmp_path, tmp_path / "other")


def spoil(folder, name, content):
    (folder / name).unlink()
    if isinstance(content, np.ndarray):
        np.save(folder / name, content)
    elif content is not None:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("params_3.npy", None, "params_3.npy missing: copy the whole model"),
        ("params_3.npy", np.zeros(7, np.float32), r"numbers in its params_\*.npy, but [\d,]+ by"),
        ("params_3.npy", np.zeros(7), r"params_3.npy: float64 \[7\]: expected a vector of float32"),
        ("params_3.npy", np.array([{}]), "params_3.npy: truncated or damaged"),
        ("params_3.npy", b"\x93NUM", "params_3.npy: truncated or damaged"),
        ("params_shapes.json", b"[[1, 2]", "params_shapes.json: no list of shapes"),
        ("params_shapes.json", b"[[1, 2], [3, 4], [5]]", "params_shapes.json: 3 shapes: a GPT has"),
        ("encoder_bpe_40000.json", b'{"a": 0}', "lacks <unk>"),
        ("vocab_40000.bpe", b"#version\na b c\n", r"merge 1 is \['a', 'b', 'c'\]: it has two piec"),
    ],
)
def test_damaged_files_of_2018_are_named(name, content, message, openai, tmp_path):
    folder = tmp_path / "gpt"
    shutil.copytree(openai[0], folder)
    spoil(folder, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder, PreTrainingModel)
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


def test_what_a_gpt_cannot_be(openai, tmp_path):
    with pytest.raises(ValueError, match="causal False: a gpt reads from left to right"):
        ModelConfig(60, family="gpt", type_vocab_size=0)
    with pytest.raises(ValueError, match="pre_norm: BERT has that, gpt has not"):
        ModelConfig(60, family="gpt", type_vocab_size=0, causal=True, pre_norm=True)
    with pytest.raises(ValueError, match="GPT, which google-research/bert does"):
        convert(openai[0], tmp_path / "google", "tensorflow")
    with pytest.raises(ValueError, match="the vocabulary of a GPT is not extended"):
        extend_model(openai[0], tmp_path / "new", [Addition("a1", 3)], np.ones(60, np.int64))
