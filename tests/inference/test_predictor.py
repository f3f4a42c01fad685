"""The predictor against transformers' models on the same folder, and what it refuses."""

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.inference.answers import TaggedText
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier, TokenClassifier
from bertsmith.model.initialization import initialize

from ..tiny import piece_tokenizer, random_model

TEXT = "the a cat dog sat ran on mat under chair ! . ##s ##ing play it was good bad"
WORDS = TEXT.split()
TOKENIZER = piece_tokenizer(f"[unused0] {TEXT}")
PIECES = TOKENIZER.vocabulary.pieces
# A vocabulary of more rows than pieces, as models padded for speed have it.
CONFIG = ModelConfig(len(PIECES) + 7, 32, 2, 4, 64, max_positions=40)
ANSWERS = [k for k, piece in enumerate(PIECES) if piece == "[UNK]" or piece in WORDS]
# Odd, so that pairs cut to equal halves: where one text must be a token longer transformers' fast
# tokenizer and google-research/bert choose differently, and we follow the latter.
MAX_LENGTH = 25
LABELS = ["bad", "good", "so-so"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    model = initialize(PreTrainingModel(CONFIG), 0.5, torch.Generator().manual_seed(1))
    with torch.no_grad():  # what may never be answered would win by far
        model.mlm.bias += 5.0
        model.mlm.bias[ANSWERS] = 0.0
    save_model(model, TOKENIZER, folder)
    return folder


def fine_tuned(folder, **written):
    written |= {"config": CONFIG, "seed": 2, "label_names": LABELS}
    return random_model(folder, TOKENIZER, SequenceClassifier, 3, **written)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "classifier"
    return fine_tuned(folder, extra_config={"max_length": MAX_LENGTH})


def test_fill_is_the_softmax_of_transformers_model(pretrained):
    answers = bertsmith.load(pretrained).fill("The [MASK] sat on the [MASK]s.", top=4)
    words = "[CLS] the [MASK] sat on the [MASK] ##s . [SEP]".replace("##s", "[UNK]").split()
    ids = torch.tensor([[PIECES.index(word) for word in words]])
    model = transformers.BertForPreTraining.from_pretrained(pretrained).eval()
    with torch.inference_mode():
        expected = model(ids).prediction_logits[0].softmax(dim=-1)
    assert [len(mask) for mask in answers] == [4, 4]
    for mask, position in zip(answers, (2, 6), strict=True):
        best = sorted(ANSWERS, key=lambda number: -expected[position, number])[:4]
        assert [row.id for row in mask] == best
        assert [row.token for row in mask] == [PIECES[number] for number in best]
        given = [row.probability for row in mask]
        np.testing.assert_allclose(given, expected[position, best].numpy(), rtol=1e-4)


def test_fill_offers_neither_special_pieces_nor_rows_without_a_piece(pretrained):
    (mask,) = bertsmith.load(pretrained).fill("[MASK]", top=1000)
    assert sorted(row.token for row in mask) == sorted(["[UNK]", *WORDS])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("The cat sat.", r'no \[MASK\] in "The cat sat\.".*"The \[MASK\] sat\."'),
        ("[MASK] " * 39, "41 tokens .* knows 40 positions"),
        (["[MASK]", "a cat"], r'no \[MASK\] in "a cat"'),
    ],
)
def test_fill_refuses(pretrained, text, message):
    with pytest.raises(ValueError, match=message):
        bertsmith.load(pretrained).fill(text)


def test_a_text_as_long_as_the_model_is_filled(pretrained):
    assert len(bertsmith.load(pretrained).fill("[MASK] " * 38)) == 38


def texts_of_many_lengths():
    random = np.random.default_rng(3)
    return [" ".join(random.choice(WORDS, size)) for size in random.integers(0, 35, 30)]


def with_transformers(folder, texts, pairs=None):
    """Probabilities [N, K], one text at a time, cut to MAX_LENGTH."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for k, text in enumerate(texts):
        pair = {} if pairs is None else {"text_pair": pairs[k]}
        pair |= {"truncation": True, "max_length": MAX_LENGTH}
        inputs = tokenizer(text, **pair, return_tensors="pt")
        with torch.inference_mode():
            rows.append(model(**inputs).logits[0].softmax(dim=-1))
    return torch.stack(rows).numpy()


def probabilities(answers):
    return np.array([[answer.probabilities[name] for name in LABELS] for answer in answers])


def test_classify_agrees_with_transformers_in_the_order_given(classifier):
    texts = texts_of_many_lengths()
    predictor = bertsmith.load(classifier)
    answers = predictor.classify(texts)
    given = probabilities(answers)
    np.testing.assert_allclose(given, with_transformers(classifier, texts), atol=1e-5)
    assert predictor.model_task.label_names == tuple(LABELS)
    for answer, row in zip(answers, given, strict=True):
        assert answer.label == LABELS[row.argmax()]
        assert answer.confidence == row.max()


def test_classify_pairs_agrees_with_transformers(classifier):
    texts = [text for text in texts_of_many_lengths() if len(text.split()) < 10]
    pairs = texts[::-1]
    given = probabilities(bertsmith.load(classifier).classify(texts, pairs))
    np.testing.assert_allclose(given, with_transformers(classifier, texts, pairs), atol=1e-5)


def test_tag_finds_words_and_entities(tmp_path, classifier):
    model = initialize(TokenClassifier(CONFIG, 3), 0.5, torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.classifier.bias[1:] += 0.5
    save_model(model, TOKENIZER, tmp_path / "tagger", label_names=["O", "B-LOC", "I-LOC"])
    predictor = bertsmith.load(tmp_path / "tagger")
    texts = ["the cat, (under the mat) sat!", "", " good dog."]
    answers = predictor.tag(texts)
    assert " ".join(answers[0].tokens) == "the cat , ( under the mat ) sat !"
    assert answers[1] == TaggedText((), (), (), ())
    pairs = zip(texts, answers, strict=True)
    entities = [(text, entity) for text, answer in pairs for entity in answer.entities]
    assert entities
    for text, entity in entities:
        assert text[entity.start : entity.end] == entity.text
        assert entity.type == "LOC" and 0.3 < entity.confidence <= 1
    assert predictor.tag(texts[0]).tags == answers[0].tags
    assert predictor.tag("") == answers[1] and predictor.tag([]) == []
    words = predictor.tag([answers[0].tokens])[0]
    assert words.tags == answers[0].tags
    assert predictor.tag([["cat,", "sat"]])[0].tokens == ("cat,", "sat")  # as they were given
    with pytest.raises(
        ValueError, match="classifier: this model cannot tag, but classify, explain"
    ):
        bertsmith.load(classifier).tag("a cat")


def test_texts_that_are_cut_are_counted_once(classifier, capsys):
    model, texts = bertsmith.load(classifier), ["cat " * 500, "a cat", "mat " * 500]
    model.classify(texts)
    assert capsys.readouterr().err.count("2 of 3 examples have more than") == 1
    model.embed(texts)
    assert "2 of 3 texts were cut: windows read all of them\n" in capsys.readouterr().err
    model.classify(texts[1]), model.embed(texts[1]), model.embed(texts, long_texts="windows")
    assert "cut" not in capsys.readouterr().err


def test_bf16_is_close(classifier):
    texts = texts_of_many_lengths()[:10]
    exact = probabilities(bertsmith.load(classifier).classify(texts))
    rounded = probabilities(bertsmith.load(classifier, precision="bf16").classify(texts))
    assert 0 < np.abs(exact - rounded).max() < 0.1


def test_heads_that_were_never_trained_are_refused(pretrained, classifier):
    with pytest.raises(ValueError, match="pretrained: this model cannot classify, but fill, embed"):
        bertsmith.load(pretrained).classify(["The cat sat."])
    message = "classifier: this model has no masked-LM head.* can classify"
    with pytest.raises(ValueError, match=message):
        bertsmith.load(classifier).fill("The [MASK] sat.")


@pytest.mark.parametrize("lost", ["pooler.dense.weight", "classifier.bias"])
def test_a_head_that_is_there_in_part_is_refused(classifier, tmp_path, lost):
    """Random numbers in its place would give answers that look like others."""
    model = load_model(classifier, SequenceClassifier).model
    save_model(model, TOKENIZER, tmp_path / "cut", label_names=LABELS, exclude=[lost])
    with pytest.raises(ValueError, match=f"cut: the weights lack {lost}, without which the head"):
        bertsmith.load(tmp_path / "cut").classify(["The cat sat."])


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    random_model(tmp_path / "model", TOKENIZER, config=CONFIG)
    more = " ".join(f"word{k}" for k in range(10))
    piece_tokenizer(f"[unused0] {TEXT} {more}").save(tmp_path / "model")
    with pytest.raises(ValueError, match="35 pieces, but its model 32"):
        bertsmith.load(tmp_path / "model")


def test_load_gives_a_predictor(classifier):
    assert isinstance(bertsmith.load(str(classifier)), Predictor)


@pytest.mark.parametrize("run", [{"task": "mnli"}, {"task": "classify", "text_pair": "b"}])
def test_pairs_where_the_model_was_trained_on_them(run, tmp_path):
    model = bertsmith.load(fine_tuned(tmp_path / "run", run=run))
    with pytest.raises(ValueError, match="trained on pairs of texts: give `text_pair`"):
        model.classify(["a cat"])
    assert len(model.classify(["a cat"], ["a dog"])) == 1


@pytest.mark.parametrize("run", [{"task": "sst2"}, {"task": "classify"}])
def test_single_texts_where_the_model_was_trained_on_them(run, tmp_path):
    model = bertsmith.load(fine_tuned(tmp_path / "run", run=run))
    with pytest.raises(ValueError, match="trained on single texts: leave `text_pair` out"):
        model.classify(["a cat"], ["a dog"])
    assert len(model.classify(["a cat"])) == 1
