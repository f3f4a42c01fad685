"""Models of the tasks over a frozen ELMo: its layers mixed, and small networks over words.

They read the same rows as BERT's, whose tokens are bytes here. The words are gathered from them,
each text is read by itself between borders of a sentence, and what is computed of a word stands at
its first byte. Heads: of a text a BiLSTM and its largest values, of a pair u, v besides |u - v| and
u v (Conneau et al. 2017, arXiv 1705.02364); of tags two layers of BiLSTM; of an answer two layers
with attention between question and passage in between (Seo et al. 2017, arXiv 1611.01603).

Letters: B rows of S bytes, N words, W of a text, H size of a word's mixed vector, G of a
direction of a BiLSTM, K outputs; J words of a question.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.config import ElmoConfig, ModelConfig
from bertsmith.model.elmo import (
    MOST_BYTES,
    SENTENCE_BEGIN,
    SENTENCE_END,
    WORD_BEGIN,
    WORD_END,
    WORD_NUMBERS,
    WORD_PAD,
    Elmo,
)
from bertsmith.model.heads import (
    OptionScorer,
    SequenceClassifier,
    SpanPredictor,
    TaskModel,
    TokenClassifier,
)
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.recurrent import BiLSTM, ScalarMix

HEAD_SIZE = 128  # of a direction of a BiLSTM
BYTES_A_WORD = 6  # about, with its end, to count operations
INSIDE = 10.0  # an answer begins inside a word with this much less than at its border, in nats
NEVER = -1e4  # a logit that no softmax sees


class Texts(NamedTuple):
    """The first, or the second, text of each row."""

    words_BW: Tensor  # the numbers of its words, with the borders of a sentence
    lengths_B: Tensor  # its words, without the borders


class Words(NamedTuple):
    """The N words of B rows, in the order in which they stand there."""

    words_UK: Tensor  # the U different ones and the borders of a sentence, as ELMo reads them
    texts: list[Texts]  # one, or two where a row has a pair
    text_N: Tensor  # where each word stands: in which of them, in which row, at which place
    row_N: Tensor
    place_N: Tensor
    first_N: Tensor  # its first byte's place in [B * S]
    size_N: Tensor  # its bytes
    word_M: Tensor  # the word of each of M bytes and ends of words
    byte_M: Tensor  # their places in [B * S]


def gather_words(ids_BS: Tensor) -> Words:
    """Find the words of rows [CLS] a [SEP] or [CLS] a [SEP] b [SEP].

    A word begins at the first byte and behind each end of a word; one that lacks its end, as where
    a row was cut, ends before what is no byte.
    """
    rows, width = ids_BS.shape
    ids_X = ids_BS.flatten().long()
    is_end_X = ids_X == WORD_END
    is_byte_X = (ids_X > 0) & (ids_X < SENTENCE_BEGIN)
    is_read_X = is_byte_X | is_end_X
    first_N = (is_read_X & ~F.pad(is_byte_X, (1, 0))[:-1]).nonzero()[:, 0]
    number_X = torch.bucketize(
        torch.arange(rows * width, device=ids_BS.device), first_N, right=True
    )
    number_X = number_X - 1  # at no word's place that of the word before
    byte_Y = is_byte_X.nonzero()[:, 0]
    place_Y = byte_Y - first_N[number_X[byte_Y]]
    byte_Y, place_Y = byte_Y[place_Y < MOST_BYTES], place_Y[place_Y < MOST_BYTES]
    size_N = number_X[byte_Y].bincount(minlength=len(first_N))
    words_NK = ids_X.new_full((len(first_N) + 2, WORD_NUMBERS), WORD_PAD)
    words_NK[:, 0] = WORD_BEGIN
    words_NK[number_X[byte_Y], 1 + place_Y] = ids_X[byte_Y]
    words_NK[-2, 1], words_NK[-1, 1] = SENTENCE_BEGIN, SENTENCE_END
    ends_N = F.pad(size_N, (0, 2), value=1) + 1
    words_NK[torch.arange(len(words_NK), device=ids_BS.device), ends_N] = WORD_END
    words_UK, which_N = words_NK.unique(dim=0, return_inverse=True)

    second_BS = (ids_BS == SENTENCE_END).cumsum(dim=1).clamp(max=1)
    text_N, row_N = second_BS.flatten()[first_N], first_N // width
    lengths_T = (2 * row_N + text_N).bincount(minlength=2 * rows)
    place_N = torch.arange(len(first_N), device=ids_BS.device)
    place_N = place_N - (lengths_T.cumsum(dim=0) - lengths_T)[2 * row_N + text_N]
    texts = []
    for number, lengths_B in enumerate(lengths_T.view(rows, 2).unbind(dim=1)):
        longest, is_here_N = int(lengths_B.max()), text_N == number
        words_BW = which_N[-2].repeat(rows, longest + 2)
        words_BW[row_N[is_here_N], place_N[is_here_N] + 1] = which_N[:-2][is_here_N]
        words_BW[torch.arange(rows, device=ids_BS.device), lengths_B + 1] = which_N[-1]
        if longest or not number:
            texts.append(Texts(words_BW, lengths_B))
    byte_M = is_read_X.nonzero()[:, 0]
    where = text_N, row_N, place_N, first_N, size_N
    return Words(words_UK, texts, *where, number_X[byte_M], byte_M)


class ElmoTask(TaskModel):
    """A frozen ELMo, the mix of its layers, and dropout; heads are added to it."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        assert isinstance(config, ElmoConfig)
        nn.Module.__init__(self)  # not the other parents', which would build a BERT
        self.config = config
        self.num_outputs = num_outputs
        self.encoder = Elmo(config)
        self.encoder.eval()
        self.mix = ScalarMix(config.num_layers + 1)
        self.dropout = Dropout(config.dropout)

    def train(self, mode: bool = True) -> ElmoTask:
        super().train(mode)
        self.encoder.eval()
        return self

    def read(self, words: Words) -> list[Tensor]:
        """The mixed vectors [B, W, H] of the words of the first texts, and of the second."""
        mixed = []
        for words_BW, lengths_B in words.texts:
            with torch.no_grad():
                layers = self.encoder(words.words_UK, words_BW, lengths_B + 2)
                layers_BWNH = torch.stack(layers, dim=2)[:, 1:]  # without the left border
            mixed.append(self.mix(layers_BWNH))
        return mixed

    def flops(self, rows: int, length: int) -> float:
        """FLOPs of a training step; ELMo's forward pass alone."""
        frozen = sum(weight.numel() for weight in self.encoder.layers.parameters())
        weights = sum(weight.numel() for weight in self.parameters())
        weights -= sum(weight.numel() for weight in self.encoder.parameters())
        return (2.0 * frozen + 6.0 * weights) * rows * length / BYTES_A_WORD


class ElmoClassifier(ElmoTask, SequenceClassifier):
    """A BiLSTM and its largest values: [B, K]. Without a second text its vector v is 0."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.reader = BiLSTM(config.hidden_size, HEAD_SIZE, 1, config.dropout)
        self.dense = nn.Linear(4 * 2 * HEAD_SIZE, 2 * HEAD_SIZE)
        self.classifier = nn.Linear(2 * HEAD_SIZE, num_outputs)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        words = gather_words(ids_BS)
        u_BG, *second = (
            largest_words(self.reader(x_BWH, text.lengths_B), text.lengths_B)
            for x_BWH, text in zip(self.read(words), words.texts, strict=True)
        )
        v_BG = second[0] if second else torch.zeros_like(u_BG)
        pair_BG = torch.cat([u_BG, v_BG, (u_BG - v_BG).abs(), u_BG * v_BG], dim=1)
        return self.classify(self.dropout(self.dense(self.dropout(pair_BG)).tanh()))


class ElmoOptionScorer(ElmoClassifier, OptionScorer):
    """One number for a context with one of its options: [B, 1]."""


def head_size(width: int) -> int:
    """The units of a direction for a part of a model's width: a small model has no larger head.

    >>> head_size(8), head_size(96), head_size(512)
    (64, 96, 128)
    """
    return max(HEAD_SIZE // 2, min(HEAD_SIZE, width))


class ElmoTagger(ElmoTask, TokenClassifier):
    """Two layers of BiLSTM: [B, S, K], at the first byte of each word."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        size = head_size(3 * config.hidden_size // 4)
        self.reader = BiLSTM(config.hidden_size, size, 2, config.dropout)
        self.classifier = nn.Linear(2 * size, num_outputs)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits; elsewhere they are 0 and mean nothing."""
        words = gather_words(ids_BS)
        read_BWG = self.reader(self.read(words)[0], words.texts[0].lengths_B)
        logits_NK = self.classifier(self.dropout(read_BWG)[words.row_N, words.place_N])
        logits_XK = logits_NK.new_zeros(ids_BS.numel(), self.num_outputs)
        return logits_XK.index_copy(0, words.first_N, logits_NK).unflatten(0, ids_BS.shape)


class ElmoSpanPredictor(ElmoTask, SpanPredictor):
    """BiLSTM, attention between question and passage, BiLSTM: logits [B, S, 2].

    Those of a start stand at a word's first byte, those of an end at its last. Within a word they
    are lower by 10 nats: an answer that begins there in the data teaches the word.
    """

    def __init__(self, config: ModelConfig, num_outputs: int = 2) -> None:
        super().__init__(config, num_outputs)
        units = head_size(config.hidden_size // 2)
        size = 2 * units
        self.reader = BiLSTM(config.hidden_size, units, 1, config.dropout)
        self.attention = nn.Linear(3 * size, 1, bias=False)
        self.modeler = BiLSTM(4 * size, units, 1, config.dropout)
        self.span = nn.Linear(size, num_outputs)
        self.nothing = nn.Linear(size, num_outputs)  # at [CLS]: there is no answer

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits; those outside of the passage are out of the question, but for [CLS]."""
        words = gather_words(ids_BS)
        asked_B, read_B = words.texts[0].lengths_B, words.texts[-1].lengths_B
        vectors = self.read(words)
        question_BJG = self.reader(vectors[0], asked_B)
        passage_BWG = self.reader(vectors[-1], read_B)
        fused_BWG = self._attended(question_BJG, passage_BWG, asked_B, read_B)
        modeled_BWG = self.dropout(self.modeler(fused_BWG, read_B))
        logits_BW2 = self.span(modeled_BWG).float()

        passage = (words.text_N == len(words.texts) - 1).nonzero()[:, 0]
        logits_N2 = logits_BW2.new_full((len(words.text_N), 2), NEVER)
        found = logits_BW2[words.row_N[passage], words.place_N[passage]]
        logits_N2 = logits_N2.index_copy(0, passage, found)
        borders = torch.stack([words.first_N, words.first_N + (words.size_N - 1).clamp(min=0)], 1)
        is_border_M2 = borders[words.word_M] == words.byte_M[:, None]
        logits_M2 = logits_N2[words.word_M] - INSIDE * ~is_border_M2
        logits_X2 = logits_M2.new_full((ids_BS.numel(), 2), NEVER)
        logits_X2 = logits_X2.index_copy(0, words.byte_M, logits_M2)
        firsts = torch.arange(0, ids_BS.numel(), ids_BS.shape[1], device=ids_BS.device)
        nothing_B2 = self.nothing(largest_words(modeled_BWG, read_B)).float()
        return logits_X2.index_copy(0, firsts, nothing_B2).unflatten(0, ids_BS.shape)

    def _attended(
        self, question_BJG: Tensor, passage_BWG: Tensor, asked_B: Tensor, read_B: Tensor
    ) -> Tensor:
        """[B, W, 4 * 2G]: a word c of the passage, what it attends to in the question, their
        product, and that of c with what the question attends to in the passage."""
        by_c, by_q, by_both = self.attention.weight[0].chunk(3)
        scores_BWJ = (passage_BWG * by_both) @ question_BJG.transpose(1, 2)
        scores_BWJ = scores_BWJ + (passage_BWG @ by_c)[:, :, None] + (question_BJG @ by_q)[:, None]
        scores_BWJ = scores_BWJ.masked_fill(~is_word(asked_B, scores_BWJ.shape[2])[:, None], NEVER)
        asked_BWG = scores_BWJ.softmax(dim=2) @ question_BJG
        best_BW = scores_BWJ.amax(dim=2)
        best_BW = best_BW.masked_fill(~is_word(read_B, best_BW.shape[1]), 2 * NEVER)
        told_B1G = best_BW.softmax(dim=1)[:, None] @ passage_BWG
        parts = passage_BWG, asked_BWG, passage_BWG * asked_BWG, passage_BWG * told_B1G
        return torch.cat(parts, dim=2)


def is_word(lengths_B: Tensor, size: int) -> Tensor:
    """bool [B, W], False at padding."""
    return torch.arange(size, device=lengths_B.device) < lengths_B[:, None]


def largest_words(x_BWG: Tensor, lengths_B: Tensor) -> Tensor:
    """The largest of each number over the words of a text, [B, G]; 0 of a text without a word.

    >>> x_BWG = torch.tensor([[[1.0], [-2.0]], [[5.0], [6.0]]])
    >>> largest_words(x_BWG, torch.tensor([2, 0])).tolist()
    [[1.0], [0.0]]
    """
    padded_BWG = x_BWG.masked_fill(~is_word(lengths_B, x_BWG.shape[1])[:, :, None], NEVER)
    return torch.where(lengths_B[:, None] > 0, padded_BWG.amax(dim=1), 0.0)
