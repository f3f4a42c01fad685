"""DistilBERT and ELECTRA: every head of transformers' and ours, there and back, in float32."""

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.checkpoints.config_json import label_names, read_config, read_stored_config
from bertsmith.checkpoints.convert import convert, extend_model, extend_positions
from bertsmith.checkpoints.model_folder import load_model, model_class, save_model
from bertsmith.checkpoints.names import spelled
from bertsmith.checkpoints.tensors import to_hugging_face
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    ReplacedTokenDetector,
    SequenceClassifier,
    SpanPredictor,
    Targets,
    TokenClassifier,
)
from bertsmith.text.vocabulary.extend import Addition, old_pieces

from ..tiny import piece_tokenizer

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOLERANCE = 1e-5  # of the largest value, in float32; the figures measured are below 2e-6
V, B, S = 300, 3, 24
WORDS = piece_tokenizer(" ".join(f"a{k}" for k in range(V - 5)))
LENGTHS = torch.tensor([24, 9, 17])
REAL = torch.arange(S) < LENGTHS[:, None]
HEADS = {  # the end of their name: ours, our outputs
    "Model": (BareModel, None),
    "ForMaskedLM": (PreTrainingModel, None),
    "ForSequenceClassification": (SequenceClassifier, 3),
    "ForTokenClassification": (TokenClassifier, 3),
    "ForQuestionAnswering": (SpanPredictor, 2),
    "ForMultipleChoice": (OptionScorer, 1),
}
MODELS = [(family, head) for family in ("Bert", "DistilBert", "Electra") for head in HEADS]
MODELS += [("Electra", "ForPreTraining"), ("Bert", "ForPreTraining")]
OWN = {"ElectraForPreTraining": ReplacedTokenDetector, "BertForPreTraining": PreTrainingModel}
PLACELESS = ["pooler.dense.weight", "pooler.dense.bias"]
NEXT = ["nsp.weight", "nsp.bias"]


def their_config(family, **settings):
    if family == "DistilBert":
        shape = {"dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 80}
        shape |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        shape |= {"qa_dropout": 0.0}
    else:
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        shape |= {"intermediate_size": 80, "hidden_dropout_prob": 0.0}
        shape |= {"attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-12}
    if family == "Electra":
        shape |= {"embedding_size": 32, "summary_last_dropout": 0.0}
    shape |= {"vocab_size": V, "max_position_embeddings": 32}
    return getattr(transformers, f"{family}Config")(**shape | settings)


def our_config(family, **settings):
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 3, "intermediate_size": 80}
    if family == "DistilBert":
        sizes["type_vocab_size"] = 0
    if family == "Electra":
        sizes["embedding_size"] = 32
    sizes |= {"max_positions": 32, "dropout": 0.0, "attention_dropout": 0.0}
    return ModelConfig(V, family=family.lower(), **sizes | settings)


def randomized(model):
    """Every tensor random, biases and LayerNorms too, and large enough to bend every activation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


class Rows(NamedTuple):
    ids: Tensor
    types: Tensor

    @classmethod
    def drawn(cls):
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, V, (B, S), generator=generator) * REAL
        return cls(ids, (torch.arange(S) > torch.tensor([[12], [4], [7]])).long())


def theirs_of(theirs, rows):
    """Their outputs as ours stand, without those at padding."""
    given = {"input_ids": rows.ids, "attention_mask": REAL.long(), "token_type_ids": rows.types}
    if theirs.config.model_type == "distilbert":
        del given["token_type_ids"]
    if "MultipleChoice" in type(theirs).__name__:
        given = {name: array[None] for name, array in given.items()}
    output = theirs(**given)
    if "QuestionAnswering" in type(theirs).__name__:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)[REAL]
    if type(theirs).__name__ == "BertForPreTraining":
        return torch.cat(
            [output.prediction_logits[REAL].flatten(), output.seq_relationship_logits.flatten()]
        )
    if "logits" not in output:
        return output.last_hidden_state[REAL]
    if "MultipleChoice" in type(theirs).__name__:
        return output.logits.T
    return output.logits[REAL] if output.logits.shape[:2] == (B, S) else output.logits


def ours_of(ours, rows, with_pairs=False):
    if isinstance(ours, BareModel):
        if isinstance(ours, PreTrainingModel):
            positions = torch.arange(S).expand(B, -1)
            logits = ours(rows.ids, rows.types, LENGTHS, positions)
            words = logits.mlm_logits.view(B, S, V)[REAL]
            return (
                torch.cat([words.flatten(), logits.nsp_logits.flatten()]) if with_pairs else words
            )
        return ours.encoder(rows.ids, rows.types, LENGTHS)[REAL]
    logits = ours(rows.ids, rows.types, LENGTHS)
    return logits[REAL] if logits.shape[:2] == (B, S) else logits


def kind_of(family, head):
    return (OWN[family + head], None) if family + head in OWN else HEADS[head]


def lacking(family, head):
    """Tensors of ours for which their class has no place."""
    if head == "ForMaskedLM":
        return PLACELESS + NEXT
    return PLACELESS if family != "Bert" and head == "Model" else []


def assert_near(ours, theirs):
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"{error:.1e}"


def assert_gradients_near(ours, theirs, name):
    """The gradients of their class' parameters; those of a tensor may be rounding alone."""
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    mine = {spelled(n, name): g for n, g in to_hugging_face(gradients).items()}
    yours = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    if name.endswith("Model"):  # a bare encoder is written without prefix
        yours = {
            spelled(f"bert.{n}", name) if "project" not in n else f"electra.{n}": g
            for n, g in yours.items()
        }
    assert mine.keys() == yours.keys()
    whole = torch.stack([gradient.norm() for gradient in yours.values()]).norm()
    for key, gradient in yours.items():
        assert (mine[key] - gradient).norm() < TOLERANCE * whole, key


@pytest.mark.parametrize(("family", "head"), MODELS)
def test_what_they_write_we_compute(family, head, tmp_path):
    kind, outputs = kind_of(family, head)
    name = family + head
    labels = {"num_labels": 3 if outputs == 3 else 2}
    theirs = randomized(getattr(transformers, name)(their_config(family, **labels)))
    theirs.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, kind)
    assert model_class(tmp_path) is kind and loaded.unused == []
    assert loaded.missing == lacking(family, head)
    ours, rows = loaded.model.train(), Rows.drawn()
    mine = ours_of(ours, rows, name == "BertForPreTraining")
    yours = theirs_of(theirs.train(), rows)
    assert_near(mine, yours)
    gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2))
    mine.backward(gradient)
    yours.backward(gradient)
    assert_gradients_near(ours, theirs, name)


@pytest.mark.parametrize(("family", "head"), MODELS)
def test_what_we_write_they_compute(family, head, tmp_path):
    kind, outputs = kind_of(family, head)
    name, arguments = family + head, [outputs] if outputs else []
    ours = randomized(kind(our_config(family), *arguments)).eval()
    save_model(ours, WORDS, tmp_path, exclude=lacking(family, head))
    assert read_config(tmp_path) == ours.config
    assert read_stored_config(tmp_path)["architectures"] == [name]
    theirs, information = getattr(transformers, name).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(information.values()), information
    with torch.no_grad():
        rows = Rows.drawn()
        mine = ours_of(ours, rows, name == "BertForPreTraining")
        assert_near(mine, theirs_of(theirs.eval(), rows))
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", kind)
    assert back.unused == [] and back.missing == lacking(family, head)
    before = ours.state_dict()
    for key, tensor in back.model.state_dict().items():
        assert key in back.missing or torch.equal(tensor, before[key]), key


def test_losses_of_the_masked_lm_head_with_a_smaller_table():
    model = randomized(PreTrainingModel(our_config("Electra")))
    rows, positions = Rows.drawn(), torch.tensor([[3, 5], [1, 2], [0, 7]])
    labels = torch.arange(6)
    targets = Targets(positions, None, labels, next_sentence=False)
    losses = model.losses(rows.ids, rows.types, LENGTHS, targets)
    logits = model(rows.ids, rows.types, LENGTHS, positions).mlm_logits
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(losses.mlm_loss, expected)


@pytest.mark.parametrize("family", ["DistilBert", "Electra"])
def test_automatic_classes_of_transformers_open_our_folders(family, tmp_path):
    ours = randomized(SequenceClassifier(our_config(family), 3)).eval()
    save_model(ours, WORDS, tmp_path, label_names=["no", "maybe", "yes"])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)("a1 a2", "a3", return_tensors="pt")
    assert ("token_type_ids" in given) == (family == "Electra")
    with torch.no_grad():
        expected = theirs(**given).logits
        types = given.get("token_type_ids", torch.tensor([[0, 0, 0, 0, 1, 1]]))
        assert_near(ours(given["input_ids"], types, None), expected)


def test_their_defaults_are_known(tmp_path):
    """A config.json need not say what is as usual."""
    for family in ("DistilBert", "Electra"):
        theirs = getattr(transformers, f"{family}Config")()
        stored = {"model_type": theirs.model_type, "vocab_size": V}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        ours = read_config(tmp_path)
        assert (ours.num_layers, ours.num_heads) == (
            theirs.num_hidden_layers,
            theirs.num_attention_heads,
        )
        assert ours.hidden_size == theirs.hidden_size
        assert ours.table_size == getattr(theirs, "embedding_size", theirs.hidden_size)
        wide = theirs.hidden_dim if family == "DistilBert" else theirs.intermediate_size
        assert ours.intermediate_size == wide


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("Electra", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new': bertsmith has only gelu, "),
        ("Electra", {"summary_type": "mean"}, "summary_type 'mean': bertsmith has only 'first'"),
        ("Electra", {"is_decoder": True}, "is_decoder 'True': bertsmith has only 'False'"),
        ("Electra", {"embedding_size": 10**9}, "`embedding_size=1000000000`: must be 1 to 10,0"),
        ("Electra", {"embedding_size": 16}, r"word_embeddings.weight' has shape \[300, 32\], but"),
        ("DistilBert", {"activation": "relu"}, "activation 'relu': bertsmith has only gelu"),
        ("DistilBert", {"dim": 10**9}, "`hidden_size=1000000000`: must be 1 to 10,000,000"),
        ("DistilBert", {"n_layers": 3}, "config.json says 3 layers, but the weights hold 2"),
        ("DistilBert", {"hidden_dim": 81}, r"ffn.lin1.weight' has shape \[80, 48\], but by config"),
        ("DistilBert", {"model_type": "bert"}, "missing setting|it should have|the weights"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(family, values, message, tmp_path):
    save_model(randomized(TokenClassifier(our_config(family), 2)), WORDS, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | values))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path, TokenClassifier)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("DistilBert", "distilbert.transformer.layer.1.attention.k_lin.bias"),
        ("Electra", "electra.embeddings_project.weight"),
    ],
)
def test_a_tensor_that_lacks_is_named_as_they_call_it(family, lost, tmp_path):
    save_model(randomized(TokenClassifier(our_config(family), 2)), WORDS, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"the weights lack '{lost}' of the encoder"):
        load_model(tmp_path, TokenClassifier)


@pytest.mark.parametrize("family", ["DistilBert", "Electra"])
def test_a_table_of_its_own_is_refused(family, tmp_path):
    theirs = getattr(transformers, f"{family}ForMaskedLM")(their_config(family))
    theirs.save_pretrained(tmp_path)
    name = {"DistilBert": "vocab_projector.weight", "Electra": "generator_lm_head.weight"}[family]
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors[f"{family.lower()}.embeddings.word_embeddings.weight"]
    save_file(tensors | {name: table.clone()}, tmp_path / "model.safetensors")
    assert load_model(tmp_path, PreTrainingModel).unused == []
    save_file(tensors | {name: table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{name}' differs from the token embedding"):
        load_model(tmp_path, PreTrainingModel)


@pytest.mark.parametrize("family", ["DistilBert", "Electra"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForPreTraining"])
def test_a_converted_and_a_lengthened_model_keep_their_class(family, head, tmp_path):
    if family + head not in OWN and head not in HEADS:
        pytest.skip("DistilBERT has no such head")
    kind, outputs = kind_of(family, head)
    before = randomized(kind(our_config(family), *([outputs] if outputs else [])))
    save_model(before, WORDS, tmp_path / "before")
    converted = convert(tmp_path / "before", tmp_path / "converted")
    assert converted.architecture == family + head and converted.unused == []
    extend_positions(tmp_path / "converted", tmp_path / "long", 40, torch.Generator())
    theirs, information = getattr(transformers, family + head).from_pretrained(
        tmp_path / "long", output_loading_info=True
    )
    assert not any(information.values()), information
    assert theirs.config.max_position_embeddings == 40
    after = load_model(tmp_path / "long", kind).model.state_dict()
    for name, tensor in before.state_dict().items():
        if "position" not in name and name not in PLACELESS + NEXT:
            assert torch.equal(after[name], tensor), name
    if family == "DistilBert":
        names = json.loads((tmp_path / "long" / "tokenizer_config.json").read_text())
        assert names["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(("family", "name"), [("DistilBert", "DistilBERT"), ("Electra", "ELECTRA")])
def test_googles_bert_has_no_relatives(family, name, tmp_path):
    """It would read the tensors of an ELECTRA that it knows by name, and leave out the others."""
    save_model(randomized(PreTrainingModel(our_config(family))), WORDS, tmp_path / "old")
    with pytest.raises(ValueError, match=f"old: {name}, which google-research/bert does not have"):
        convert(tmp_path / "old", tmp_path / "new", to="tensorflow")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("stored", [None, "as one name"])
@pytest.mark.parametrize(
    ("family", "head"),
    [*(("DistilBert", head) for head in ("Model", "ForMaskedLM")), ("Electra", "ForPreTraining")],
)
def test_names_stay_those_of_the_family(family, head, stored, tmp_path, change_config):
    """Where config.json has no list of classes."""
    old, (kind, _) = tmp_path / "old", kind_of(family, head)
    save_model(randomized(kind(our_config(family))), WORDS, old)
    change_config(old, {"architectures": stored and family + head})
    assert model_class(old) is kind
    extend_positions(old, tmp_path / "new", 40, torch.Generator())
    before, after = (load_file(path / "model.safetensors") for path in (old, tmp_path / "new"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("family", ["DistilBert", "Electra"])
def test_its_vocabulary_is_extended(family, tmp_path):
    before = randomized(PreTrainingModel(our_config(family)))
    save_model(before, WORDS, tmp_path / "old")
    additions = [Addition("a1a2", 3)]
    extend_model(tmp_path / "old", tmp_path / "new", additions, np.ones(V, np.int64))
    theirs, information = getattr(transformers, f"{family}ForMaskedLM").from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert not any(information.values()), information
    table = theirs.get_input_embeddings().weight
    old = before.encoder.embeddings.token.weight
    assert len(table) == V + 1 and torch.equal(table[:V], old)
    pieces = old_pieces("a1a2", WORDS.vocabulary)
    torch.testing.assert_close(table[V], old[pieces].mean(0))


def test_a_head_of_another_relative_is_another_start(tmp_path):
    """A discriminator fine-tuned: the encoder is kept, both layers of the new head are new."""
    save_model(randomized(ReplacedTokenDetector(our_config("Electra"))), WORDS, tmp_path)
    loaded = load_model(tmp_path, SequenceClassifier, num_outputs=2)
    assert loaded.missing == [*PLACELESS, "classifier.weight", "classifier.bias"]
    assert all(name.startswith("discriminator_predictions.") for name in loaded.unused)
    assert label_names(tmp_path) == []
    with pytest.raises(ValueError, match="causal: BERT has that, electra has not"):
        our_config("Electra", causal=True)
    with pytest.raises(ValueError, match="type_vocab_size 0 for bert"):
        our_config("Bert", type_vocab_size=0)
    with pytest.raises(ValueError, match="family 'roberta': known are bert, distilbert, electra"):
        our_config("Roberta")
