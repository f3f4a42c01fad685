"""DistilBERT and ELECTRA: every head of transformers' and ours, there and back, in float32."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bertsmith.checkpoints.config_json import label_names, read_config, read_stored_config
from bertsmith.checkpoints.convert import convert, extend_positions
from bertsmith.checkpoints.model_folder import config_file, load_model, model_class, save_model
from bertsmith.checkpoints.tensors import spelled, to_hugging_face
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    ReplacedTokenDetector,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)

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
        return torch.cat([output.prediction_logits[REAL].flatten(), output.seq_relationship_logits.flatten()])
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
            return torch.cat([words.flatten(), logits.nsp_logits.flatten()]) if with_pairs else words
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
        yours = {spelled(f"bert.{n}", name) if "project" not in n else f"electra.{n}": g for n, g in yours.items()}
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
