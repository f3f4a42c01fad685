"""Heads of fine-tuning against transformers', through our own folders, in float32."""

import pytest
import torch
import torch.nn.functional as F

from bertsmith.checkpoints.folder import kind_of, load_model, save_model
from bertsmith.model.encoder import ModelConfig, initialize
from bertsmith.model.heads import OptionScorer, SpanPredictor, TokenClassifier
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.wordpiece import Tokenizer

from .test_parity import (
    LENGTHS,
    REAL,
    B,
    S,
    V,
    assert_gradients_near,
    assert_near,
    batch,
    bert,
    convert,
)

transformers = pytest.importorskip("transformers")

CLASSES = 5
HEADS = [  # ours, their class, our outputs
    (SpanPredictor, "BertForQuestionAnswering", 2),
    (TokenClassifier, "BertForTokenClassification", CLASSES),
    (OptionScorer, "BertForMultipleChoice", 1),
]


def theirs_of(theirs, examples, mask, **labels):
    """Their output, and their logits as ours stand: [B, S, K] of tokens, [B, 1] of options."""
    arrays = [examples.ids, mask.long(), examples.types]
    if type(theirs).__name__ == "BertForMultipleChoice":
        arrays = [array[None] for array in arrays]  # B options of one example
    output = theirs(arrays[0], attention_mask=arrays[1], token_type_ids=arrays[2], **labels)
    if type(theirs).__name__ == "BertForQuestionAnswering":
        return output, torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output, output.logits if output.logits.ndim == 3 else output.logits.T


def real(logits, mask=REAL):
    """What stands at padding means nothing."""
    return logits[mask] if logits.ndim == 3 else logits


def labels_for(kind):
    """Labels as theirs are told them, and the loss of our logits."""
    if kind is SpanPredictor:
        places = torch.tensor([[3, 17], [9, 0]])  # starts, ends
        named = {"start_positions": places[0], "end_positions": places[1]}
        return named, lambda logits: F.cross_entropy(logits, places.T)
    if kind is TokenClassifier:
        classes = torch.randint(CLASSES, (B, S), generator=torch.Generator().manual_seed(2))
        classes = torch.where(REAL, classes, -100)
        return {"labels": classes}, lambda logits: F.cross_entropy(
            logits.flatten(0, 1), classes.flatten()
        )
    right = torch.tensor([1])
    return {"labels": right}, lambda logits: F.cross_entropy(logits.T, right)


@pytest.mark.parametrize(("kind", "name", "outputs"), HEADS)
def test_a_folder_of_theirs_gives_the_same_forward_and_backward(kind, name, outputs, tmp_path):
    theirs = bert(getattr(transformers, name), std=0.05, num_labels=max(outputs, 2)).train()
    ours = convert(theirs, kind, tmp_path).train()
    assert kind_of(tmp_path) is kind and ours.num_outputs == outputs
    # their loss of a span runs over the padding too, so here it has none
    mask = torch.ones_like(REAL) if kind is SpanPredictor else REAL
    examples, (labels, loss_of) = batch(), labels_for(kind)
    expected, scores = theirs_of(theirs, examples, mask, **labels)
    logits = ours(examples.ids, examples.types, mask.sum(1))
    assert_near(real(logits, mask), real(scores, mask), "logits")
    loss = loss_of(logits)
    assert_near(loss, expected.loss, "loss")
    loss.backward()
    expected.loss.backward()
    assert_gradients_near(ours, theirs)


@pytest.mark.parametrize(("kind", "name", "outputs"), HEADS)
def test_what_we_write_they_read(kind, name, outputs, tmp_path):
    config = ModelConfig(V, 128, 2, 2, 512, 40)
    ours = initialize(kind(config, outputs), 0.05, torch.Generator().manual_seed(3)).eval()
    words = Vocabulary([*SPECIAL, *(f"a{k}" for k in range(V - 5))])
    save_model(ours, Tokenizer(words), tmp_path)
    theirs, information = getattr(transformers, name).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(information.values()), information
    examples = batch()
    with torch.no_grad():
        scores = theirs_of(theirs.eval(), examples, REAL)[1]
        assert_near(real(ours(examples.ids, examples.types, LENGTHS)), real(scores), "logits")

    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", kind)
    assert back.missing == back.unused == []
    for parameter, before in zip(back.model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter, before)
