"""Scores of words beside transformers' models on the same weights, and beside answers to texts with
other words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.llvm.blocks import integer_dtype

from ..tiny import piece_tokenizer

HIDDEN = "under"  # its embedding is also [MASK]'s, which no text can have
TOKENIZER = piece_tokenizer(
    f"the a cat dog sat on cafe t it isn good bad film ' \" “ ” - ! . ##s {HIDDEN}"
)
IDS = TOKENIZER.vocabulary.ids
CONFIG = ModelConfig(len(IDS), 64, 2, 2, 64, max_positions=40)  # that our own engine reads
LEFT_TO_RIGHT = replace(CONFIG, causal=True)
LABELS = ("bad", "good", "so-so")
KINDS = {  # kind of task: outputs, labels
    "classify": (3, LABELS),
    "multilabel": (3, LABELS),
    "regress": (1, None),
}
TEXT = "  A “Good” café-cats 😀 sat\u00a0on it: isn't the cafe\u0301s BAD!"
PARTED = "A “ Good ” café - cats 😀 sat on it : isn ' t the cafe\u0301s BAD !"
PAIR = "The dogs sat.", 'a "cat"'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the folder of a model of random weights, with entries of its config.json."""

    def make(kind="classify", config=CONFIG, **extra):
        folder, (outputs, labels) = tmp_path_factory.mktemp("models") / kind, KINDS[kind]
        generator = torch.Generator().manual_seed(3)
        model = initialize(SequenceClassifier(config, outputs), 0.3, generator)
        with torch.no_grad():
            table = model.encoder.embeddings.token.weight
            table[TOKENIZER.vocabulary.mask_id] = table[IDS[HIDDEN]]
        extra = {"kind": kind, "max_length": 40, **extra}
        save_model(model, TOKENIZER, folder, label_names=labels, extra_config=extra)
        return folder

    return make


def explained(answer, label):
    """The number to explain, from an answer's probabilities alone."""
    if isinstance(answer, float):
        return answer
    shares = {name: np.log(share) for name, share in answer.probabilities.items()}
    if isinstance(answer, bertsmith.LabelSet):
        return shares[label] - np.log1p(-answer.probabilities[label])
    return shares[label] - np.mean(list(shares.values()))


def by_hand(model, texts, words, label):
    """The falls when each word gives way to as many others as it has pieces, or to none where the
    model reads from left to right."""
    ask = getattr(model, model.methods[0])
    before, falls = explained(ask(*texts), label), []
    for word in words:
        changed, at = list(texts), word.segment == "text_pair"
        pieces = 0 if model.config.causal else len(model.tokenizer.tokenize(word.text))
        others = f" {HIDDEN}" * pieces
        changed[at] = f"{texts[at][: word.start]}{others} {texts[at][word.end :]}"
        falls.append(before - explained(ask(*changed), label))
    return falls


def scores(found):
    return [word.score for word in found.words]


@pytest.mark.parametrize("texts", [(TEXT,), PAIR])
@pytest.mark.parametrize(
    ("kind", "config"), [*((kind, CONFIG) for kind in KINDS), ("classify", LEFT_TO_RIGHT)]
)
def test_occlusion_is_the_fall_of_the_answer_without_each_word(made, kind, config, texts):
    model = bertsmith.load(made(kind, config))
    found = model.explain(*texts)
    assert found.answer == getattr(model, model.methods[0])(*texts) and found.method == "occlusion"
    # float32 probabilities near 1 have few digits of what they lack
    np.testing.assert_allclose(
        scores(found), by_hand(model, texts, found.words, found.label), atol=2e-3
    )
    assert np.abs(scores(found)).max() > 0.05


LONG = "the. cat. sat. on. a. good. dog. it. isn. bad. film. cats. dogs."


@pytest.mark.parametrize("pool", ["mean", "max", "vote"])
def test_occlusion_reads_all_windows_as_the_answer_does(made, pool):
    settings = {"max_length": 12, "long_texts": "windows", "doc_stride": 6, "pool": pool}
    model = bertsmith.load(made(**settings))
    found = model.explain(LONG, label="so-so")
    assert [word.text for word in found.words] == LONG.replace(".", " .").split()
    np.testing.assert_allclose(
        scores(found), by_hand(model, [LONG], found.words, "so-so"), atol=2e-3
    )
    for method in ("gradient", "rollout"):
        with pytest.raises(ValueError, match=rf"read in \d windows, which `method='{method}'` can"):
            model.explain(LONG, method=method)
    assert model.explain("the cat", method="gradient").words  # one window


@pytest.mark.parametrize(
    ("long_texts", "read"),
    [("cut", "the . cat . sat . on . a ."), ("head-tail", "the . cat . cats . dogs .")],
)
def test_words_that_are_not_read_have_no_score(made, capsys, long_texts, read):
    model = bertsmith.load(made(max_length=12, long_texts=long_texts))
    found = model.explain(LONG)
    assert " ".join(word.text for word in found.words) == read  # in ten pieces
    assert "1 of 1 examples have more than 12 tokens" in capsys.readouterr().err
    falls = by_hand(model, [LONG], found.words, found.label)
    np.testing.assert_allclose(scores(found), falls, atol=2e-3)


class Reference:
    """transformers' model of a folder in float64, and where a text's words are in its row."""

    def __init__(self, folder, *texts):
        attention = {"attn_implementation": "eager"}
        self.model = transformers.BertForSequenceClassification.from_pretrained(folder, **attention)
        self.model.double().eval()
        tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
        self.inputs = tokenizer(*texts, return_tensors="pt")
        keys = list(zip(self.inputs.sequence_ids(), self.inputs.word_ids(), strict=True))
        words = dict.fromkeys(key for key in keys if key[1] is not None)
        self.words = [[k for k, key in enumerate(keys) if key == word] for word in words]

    def logits(self, scaled=(), factor=1.0):
        """The logits, with some of the vectors that the first layer reads times a factor."""

        def scale(module, inputs, output):
            factors = torch.ones(output.shape[1], 1, dtype=torch.float64)
            factors[list(scaled)] = factor
            return output * factors

        with self.model.bert.embeddings.register_forward_hook(scale), torch.inference_mode():
            return self.model(**self.inputs).logits[0].numpy()


@pytest.mark.parametrize("texts", [(TEXT,), PAIR])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_x_input_is_the_slope_as_a_word_fades(made, kind, texts):
    folder, step = made(kind), 1e-4
    found, reference = (
        bertsmith.load(folder).explain(*texts, method="gradient"),
        Reference(folder, *texts),
    )
    column = 0 if found.label is None else LABELS.index(found.label)
    slopes = []
    for pieces in reference.words:
        more, less = (reference.logits(pieces, 1 + sign * step) for sign in (1, -1))
        slope = (more - less) / (2 * step)
        slopes.append(slope[column] - (slope.mean() if kind == "classify" else 0.0))
    np.testing.assert_allclose(scores(found), slopes, atol=1e-4)  # float32 beside float64
    assert np.abs(slopes).max() > 0.05


@pytest.mark.parametrize("texts", [(TEXT,), PAIR])
def test_rollout_is_the_product_of_transformers_attentions(made, texts):
    folder = made()
    found, reference = (
        bertsmith.load(folder).explain(*texts, method="rollout"),
        Reference(folder, *texts),
    )
    with torch.inference_mode():
        attentions = reference.model(**reference.inputs, output_attentions=True).attentions
    shares = np.eye(attentions[0].shape[-1])
    for layer in attentions:
        shares = (0.5 * layer[0].mean(dim=0).numpy() + 0.5 * np.eye(len(shares))) @ shares
    np.testing.assert_allclose(
        scores(found), [shares[0, k].sum() for k in reference.words], atol=1e-6
    )
    assert found.label is None and "not whether it speaks for or against" in found.measures


@pytest.mark.parametrize("texts", [(TEXT,), PAIR])
def test_attention_is_that_of_transformers(made, texts):
    folder = made()
    found, reference = bertsmith.load(folder).attention(*texts), Reference(folder, *texts)
    with torch.inference_mode():
        expected = reference.model(**reference.inputs, output_attentions=True).attentions
    np.testing.assert_allclose(found.weights, torch.cat(expected), atol=1e-5)  # float32
    assert [IDS[token] for token in found.tokens] == reference.inputs.input_ids[0].tolist()
    with pytest.raises(ValueError, match="text 'the cat .*: the model reads 40 tokens at most"):
        bertsmith.load(folder).attention("the cat " * 20)


@pytest.mark.parametrize("method", ["occlusion", "gradient", "rollout"])
def test_words_stand_where_the_user_wrote_them(made, method):
    model = bertsmith.load(made())
    found = model.explain(TEXT, method=method)
    assert [word.text for word in found.words] == PARTED.split(" ")
    pair = model.explain(*PAIR, method=method)
    assert [word.text for word in pair.words] == ["The", "dogs", "sat", ".", "a", '"', "cat", '"']
    assert [word.segment for word in pair.words] == ["text"] * 4 + ["text_pair"] * 4
    for texts, answer in (((TEXT,), found), (PAIR, pair)):
        for word in answer.words:
            assert texts[word.segment == "text_pair"][word.start : word.end] == word.text


def test_the_label_may_be_another_than_the_predicted_one(made):
    model = bertsmith.load(made())
    every = [model.explain(TEXT, label=label) for label in LABELS]
    assert [found.label for found in every] == list(LABELS)
    predicted = model.explain(TEXT)
    assert predicted.label == predicted.answer.label
    assert scores(predicted) == scores(every[LABELS.index(predicted.label)])
    # what speaks for one class speaks against the others
    np.testing.assert_allclose(np.sum([scores(found) for found in every], axis=0), 0.0, atol=1e-5)
    several = bertsmith.load(
        made("multilabel", thresholds={"thresholds": [1.0, 1.0, 1.0]})
    ).explain(TEXT)
    assert several.answer.labels == ()  # then it is the most probable one
    assert several.label == max(LABELS, key=several.answer.probabilities.get)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_what_pytorch_explains_is_in_float32(made, precision):
    folder = made()
    if precision == "int8" and integer_dtype() is None:
        pytest.skip("no products of integers here")
    exact, rounded = bertsmith.load(folder), bertsmith.load(folder, precision=precision)
    for method in ("gradient", "rollout"):
        label = None if method == "rollout" else "good"
        of_both = (model.explain(TEXT, None, method, label) for model in (exact, rounded))
        assert len({tuple(scores(found)) for found in of_both}) == 1
    falls, others = (scores(model.explain(TEXT, label="good")) for model in (exact, rounded))
    assert 0 < np.abs(np.subtract(falls, others)).max() < 0.2


def test_a_left_to_right_model_has_no_rollout(made):
    model = bertsmith.load(made(config=LEFT_TO_RIGHT))
    assert model.explain("the cat").words and model.explain("the cat", method="gradient").words
    with pytest.raises(ValueError, match="left-to-right model.*`method='rollout'` is for those"):
        model.explain("the cat", method="rollout")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("classify", {"text": " \n"}, "no word in it to explain"),
        ("classify", {"text": "", "text_pair": ""}, "no word in it to explain"),
        (
            "classify",
            {"label": "goood"},
            "^`label='goood'`: the model's labels are bad, good, so-so$",
        ),
        ("regress", {"label": "good"}, "^`label='good'`: this model gives scores: leave it out"),
        (
            "classify",
            {"label": "good", "method": "rollout"},
            "^`label='good'`: rollout is the same",
        ),
        ("classify", {"method": "lime"}, r"explain\(\): method = 'lime': expected occlusion, grad"),
        ("classify", {"text_pair": ["a"]}, "text is one text, but text_pair 1 texts"),
    ],
)
def test_what_cannot_be_explained_is_refused(made, kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        bertsmith.load(made(kind)).explain(**{"text": "the cat", **arguments})
