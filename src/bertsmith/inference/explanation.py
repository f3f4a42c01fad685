"""Scores of words that tell what an answer hangs on, by three methods of the literature.

gradient   gradient x input: Shrikumar et al. 2016, arXiv 1605.01713; for words of a text Denil et
           al. 2014, arXiv 1412.6815
occlusion  Zeiler and Fergus 2014, arXiv 1311.2901; for words Li et al. 2016, arXiv 1612.08220
rollout    attention rollout: Abnar and Zuidema 2020, arXiv 2005.00928

The first two explain a number: the output of a score or of a label by itself, as Simonyan et al.
2014 (arXiv 1312.6034) the logit rather than the probability, which no longer moves where a model is
sure. Of classes it is the logit minus the mean of all, for a softmax sees nothing but differences
(Shrikumar et al. 2017, arXiv 1704.02685, section 3.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertsmith.inference.answers import Attention, Explanation, Label, LabelSet, WordScore
from bertsmith.inference.engines.runner import ENCODER, Runner
from bertsmith.tasks.features import Features, cumulate, text_rows
from bertsmith.tasks.labels import listed

Method = Literal["occlusion", "gradient", "rollout"]
MEASURES: dict[Method, str] = {
    "gradient": "gradient x input: how fast the logit or score begins to fall as a word's "
    "embedding fades; not what the model would answer without the word",
    "occlusion": "occlusion: how far the logit or score falls when [MASK] stands for a word, in a "
    "left-to-right model without the word; not what several words do together",
    "rollout": "attention rollout: how much attention may have carried from a word to [CLS] "
    "through all layers; not whether it speaks for or against a label",
}


VARIANT_TOKENS = 1 << 20  # of the variants of a text that are made at once


@dataclass(frozen=True)
class Reading:
    """A text or pair as a model reads it: its rows, and the W words in them."""

    texts: tuple[str, ...]
    features: Features
    word_numbers: np.ndarray
    """The word of each token, int64 [T]; -1 of [CLS] and [SEP]."""
    spans: np.ndarray
    """The number of the text (0 or 1), first and last character + 1 of each word: int64 [W, 3].
    Words that were cut off are not among them."""

    @classmethod
    def of(cls, model: Runner, *texts: str) -> Reading:
        """Errors: ValueError for texts without a word."""
        first, second = ([text] for text in texts) if len(texts) == 2 else ([texts[0]], None)
        encoding = model.model_task.encoding
        found = text_rows(model.tokenizer, first, second, encoding, offsets=True)
        rows, features = found.rows, Features(**found.fields(None, encoding))
        tokens = np.flatnonzero(rows.word_ids >= 0)
        if not len(tokens):
            raise ValueError(f"text {' '.join(texts)!r:.60}: no word in it to explain")
        places = rows.token_types[tokens].astype(np.int64)
        if features.orders == 2:  # in the second row the texts change places
            places ^= tokens >= rows.boundaries[1]
        keys = places << 32 | rows.word_ids[tokens]
        words, numbers = np.unique(keys, return_inverse=True)
        word_numbers = np.full(len(rows.ids), -1, np.int64)
        word_numbers[tokens] = numbers
        spans = np.stack([words >> 32, np.full_like(words, 1 << 32), np.zeros_like(words)], axis=1)
        np.minimum.at(spans[:, 1], numbers, rows.offsets[tokens, 0])
        np.maximum.at(spans[:, 2], numbers, rows.offsets[tokens, 1])
        return cls(texts, features, word_numbers, spans)

    def of_words(self, scores: np.ndarray) -> np.ndarray:
        """The sums of the scores of tokens [T] over the pieces of each word, float64 [W]."""
        is_piece = self.word_numbers >= 0
        return np.bincount(self.word_numbers[is_piece], scores[is_piece], len(self.spans))


def explain(
    model: Runner,
    reading: Reading,
    answer: Label | LabelSet | float,
    method: Method,
    label: str | None,
) -> Explanation:
    """The scores of a text's words; `answer` is the model's to it.

    Errors: ValueError for an unknown label, for one where the method or model knows none, and for a
    method that cannot read the text or model.
    """
    features = reading.features
    if model.config.is_frozen and method != "occlusion":
        raise ValueError(
            f"{model.folder}: `method={method!r}`: of a model of the family "
            f"{model.config.family} only 'occlusion' knows"
        )
    if method == "rollout":
        if label is not None:
            raise ValueError(f"`label={label!r}`: rollout is the same for all labels: leave it out")
        scores = reading.of_words(attention_rollout(model, features))
    else:
        label, weights = _explained(answer, label)
        if method == "occlusion":
            scores = occlusion(model, reading, weights, exclusive=isinstance(answer, Label))
        else:
            row, torch_model = _one_row(features, method), model.pytorch(model.task_kind)
            products = torch_model.gradient_times_input(row, weights)
            scores = reading.of_words(products)
    words = [
        WordScore(reading.texts[text][begin:end], begin, end, ("text", "text_pair")[text], score)
        for (text, begin, end), score in zip(reading.spans.tolist(), scores.tolist(), strict=True)
    ]
    return Explanation(answer, label, method, MEASURES[method], tuple(words))


def occlusion(model: Runner, reading: Reading, weights: np.ndarray, exclusive: bool) -> np.ndarray:
    """The fall of outputs @ weights when each word's pieces are [MASK], [W]; `exclusive` as `pool`.

    A deleted word would move all that follow it, and leave a sentence of another form; [MASK] says
    that there is a word, and not which, as in pre-training. A left-to-right model has never read
    [MASK], and a GPT has none: for these the word is deleted.
    """
    rows, count = reading.features, len(reading.spans)

    def explained(words: np.ndarray) -> np.ndarray:
        """The number to explain without each of the words."""
        is_hidden = reading.word_numbers == words[:, None]
        ids = np.where(is_hidden, np.int32(model.tokenizer.vocabulary.mask_id), rows.ids)
        is_kept = ~(is_hidden & model.config.causal)
        lengths = np.add.reduceat(is_kept, rows.boundaries[:-1], axis=1, dtype=np.int64)
        variants = Features(
            ids[is_kept],
            np.broadcast_to(rows.token_types, ids.shape)[is_kept],
            cumulate(lengths.reshape(-1)),
            None,
            rows.max_length,
            0,
            None if rows.unit_examples is None else np.arange(len(words)).repeat(len(rows)),
            rows.orders,
        )
        pool = model.model_task.encoding.pool
        return variants.pooled(model.outputs(variants), pool, exclusive) @ weights

    every = np.arange(count + 1)  # the last hides nothing
    parts = np.array_split(every, len(every) * len(rows.ids) // VARIANT_TOKENS + 1)
    found = np.concatenate([explained(words) for words in parts if len(words)])
    return found[-1] - found[:-1]


def attention(model: Runner, row: Features) -> Attention:
    """Attention of the tokens of one row in each layer."""
    layers = model.pytorch(ENCODER).attention_probabilities(row)
    pieces = model.tokenizer.vocabulary.pieces
    return Attention(tuple(pieces[k] for k in row.ids.tolist()), np.stack(layers))


def attention_rollout(model: Runner, features: Features) -> np.ndarray:
    """The share that each token of a row has in [CLS], [T]; all shares add up to 1."""
    if model.config.causal:
        raise ValueError(
            f"{model.folder}: a left-to-right model, which reads its answer from the last token: "
            "`method='rollout'` is for those that read it from [CLS]"
        )
    if model.config.bilstm:
        raise ValueError(
            f"{model.folder}: an LSTM reads its answer from all tokens: `method='rollout'` is for "
            "models that read it from [CLS]"
        )
    row = _one_row(features, "rollout")
    probabilities = model.pytorch(model.task_kind).attention_probabilities(row)
    return rolled_out(probabilities)


def rolled_out(layers: Sequence[np.ndarray]) -> np.ndarray:
    """The share [S] of each input in the first output of layers with attentions [A, S, S].

    A layer gives half of an output to what the mean of its heads has read, half to its input there.

    >>> to_the_second = np.array([[[0.0, 1.0], [0.0, 1.0]]])
    >>> rolled_out([to_the_second, to_the_second])
    array([0.25, 0.75])
    """
    shares_S = np.eye(layers[0].shape[1])[0]
    for attention_ASS in reversed(layers):
        shares_S = 0.5 * shares_S + 0.5 * shares_S @ attention_ASS.mean(axis=0)
    return shares_S


def _one_row(features: Features, method: Method) -> Features:
    if len(features) > 1:
        rows = "windows" if features.orders == 1 else "orders"
        raise ValueError(
            f"the text is read in {len(features)} {rows}, which `method={method!r}` cannot join: "
            "explain a part of it, or use `method='occlusion'`"
        )
    return features


def _explained(
    answer: Label | LabelSet | float, label: str | None
) -> tuple[str | None, np.ndarray]:
    """The label, given, predicted or the most probable of several (None of a score), and the
    weights [K] that the outputs have in the number to explain, float32."""
    if not isinstance(answer, Label | LabelSet):
        if label is not None:
            raise ValueError(f"`label={label!r}`: this model gives scores: leave it out")
        return None, np.ones(1, np.float32)
    names = list(answer.probabilities)
    if label is None and isinstance(answer, Label):
        label = answer.label
    elif label is None:
        label = max(names, key=lambda name: answer.probabilities[name])
    if label not in names:
        raise ValueError(f"`label={label!r}`: the model's labels are {listed(names)}")
    weights = np.array([name == label for name in names], np.float32)
    return label, weights - weights.mean() if isinstance(answer, Label) else weights
