"""Heads of fine-tuning against transformers', through our own folders, in float32."""

import pytest
import torch

from bertsmith.checkpoints.model_folder import kind_of, load_model, save_model
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import OptionScorer, SpanPredictor, TokenClassifier
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from .test_parity import (
    LENGTHS,
    REAL,
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


def theirs_of(theirs, examples):
    """Their logits as ours stand, without those at padding: [N, K] of tokens, [B, 1] of options."""
    arrays = [examples.ids, REAL.long(), examples.types]
    if type(theirs).__name__ == "BertForMultipleChoice":
        arrays = [array[None] for array in arrays]  # B options of one example
    output = theirs(arrays[0], attention_mask=arrays[1], token_type_ids=arrays[2])
    if type(theirs).__name__ == "BertForQuestionAnswering":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)[REAL]
    return output.logits[REAL] if output.logits.ndim == 3 else output.logits.T


def ours_of(ours, examples):
    logits = ours(examples.ids, examples.types, LENGTHS)
    return logits[REAL] if logits.ndim == 3 else logits


@pytest.mark.parametrize(("kind", "name", "outputs"), HEADS)
def test_a_folder_of_theirs_gives_the_same_forward_and_backward(kind, name, outputs, tmp_path):
    theirs = bert(getattr(transformers, name), std=0.05, num_labels=max(outputs, 2)).train()
    ours = convert(theirs, kind, tmp_path).train()
    assert kind_of(tmp_path) is kind and ours.num_outputs == outputs
    mine, yours = ours_of(ours, batch()), theirs_of(theirs, batch())
    assert_near(mine, yours, "logits")
    # any gradient will do; that of a softmax over tokens or options leaves a bias without one
    gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2))
    mine.backward(gradient)
    yours.backward(gradient)
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
    with torch.no_grad():
        assert_near(ours_of(ours, batch()), theirs_of(theirs.eval(), batch()), "logits")

    theirs.save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs", kind)
    assert back.missing == back.unused == []
    for parameter, before in zip(back.model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter, before)
