"""Models of the encoder and a head: pre-training's two, and those of the tasks.

Letters as in encoder.py; besides: P masked positions in a row, N in the batch, V vocabulary size, K
classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig, training_flops
from bertsmith.model.directions import around, encoder_for, ends
from bertsmith.model.encoder import Encoder
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.masked_lm_loss import UNUSED, masked_lm_loss
from bertsmith.model.recurrent import HIDDEN_SIZE, LAYERS_READ, NUM_LAYERS, BiLSTM
from bertsmith.model.variants import at_columns, row_lengths

Rows = tuple[Tensor, Tensor, Tensor | None]  # ids_BS, types_BS, lengths_B


POOLING = {"bert": torch.tanh, "distilbert": F.relu, "electra": F.gelu}


class Pooler(nn.Module):
    """dense + tanh (DistilBERT: ReLU, ELECTRA: GELU) on the [CLS] vector: [B, H] -> [B, H]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = POOLING[config.family]
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, cls_BH: Tensor) -> Tensor:
        return self.activation(self.dense(cls_BH))


def pooler(config: ModelConfig) -> nn.Module:
    """The pooler; a GPT's heads read the last layer itself (Radford et al. 2018)."""
    return nn.Identity() if config.family == "gpt" else Pooler(config)


class BareModel(nn.Module):
    """Encoder and pooler without a head: BertModel of transformers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder_for(config)
        self.pooler = pooler(config)


class MaskedLMHead(nn.Module):
    """dense + GELU + LayerNorm, then the tied token-embedding matrix plus a bias of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dense = nn.Linear(config.hidden_size, config.table_size)
        self.norm = nn.LayerNorm(config.table_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def transform(self, hidden_NH: Tensor) -> Tensor:
        """[N, H] -> [N, row of the table], still to be multiplied with the output table."""
        return self.norm(F.gelu(self.dense(hidden_NH), approximate=self.approximate))

    def forward(self, hidden_NH: Tensor, token_embedding_VH: Tensor) -> Tensor:
        return F.linear(self.transform(hidden_NH), token_embedding_VH, self.bias)  # [N, V]


class TiedHead(nn.Module):
    """GPT's: the last layer times the token table, without transform; its bias stays 0."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(config.vocab_size), persistent=False)

    def transform(self, hidden_NH: Tensor) -> Tensor:
        return hidden_NH

    def forward(self, hidden_NH: Tensor, token_embedding_VH: Tensor) -> Tensor:
        return F.linear(hidden_NH, token_embedding_VH)  # [N, V]


class ReplacedTokenHead(nn.Module):
    """dense + GELU, then one number: [N, H] -> [N]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        return self.output(F.gelu(self.dense(hidden_NH))).squeeze(-1)


class ReplacedTokenDetector(nn.Module):
    """ELECTRA's discriminator (Clark et al. 2020, arXiv 2003.10555)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.rtd = ReplacedTokenHead(config)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits [B, S], positive where a token was replaced; those at padding mean nothing."""
        return self.rtd(self.encoder(ids_BS, types_BS, lengths_B))


class PreTrainingOutput(NamedTuple):
    mlm_logits: Tensor  # [N, V], a row a masked position
    nsp_logits: Tensor  # [B, 2], column 0 = IsNext


class Targets(NamedTuple):
    """The predictions of a forward pass of pre-training."""

    positions_BP: Tensor | None  # masked positions; None: all S of a row
    masked_N: Tensor | None  # which of [B * P], or [B * S], hold a prediction; None: all
    labels_N: Tensor
    words_BS: Tensor | None = None  # tokens that [CLS] predicts, UNUSED where there is none
    next_sentence: bool = True


class PreTrainingLosses(NamedTuple):
    mlm_loss: Tensor  # [], summed over the N masked positions, nats
    mlm_right: Tensor  # [], how many of them have the largest logit at their label
    nsp_logits: Tensor | None  # [B, 2]; None when not asked for
    bow_loss: Tensor | None  # [], summed over the tokens that [CLS] predicts, nats
    rtl_loss: Tensor | None = None  # [], as mlm_loss, of the second direction where there is one
    rtl_right: Tensor | None = None  # [], as mlm_right


class PreTrainingModel(BareModel):
    """Encoder with both pre-training heads (paper section 3.1)."""

    # [V, H], in place of the token table in the masked-LM head: training/replicas.py puts a copy in
    # bf16 here, with a gradient of its own
    output_table: Tensor | None = None
    int8_loss = False  # see `use_int8`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        is_gpt = config.family == "gpt"
        self.mlm = TiedHead(config) if is_gpt else MaskedLMHead(config.one_direction)
        self.nsp = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        ids_BS: Tensor,
        types_BS: Tensor,
        lengths_B: Tensor | None,
        positions_BP: Tensor,
        masked_N: Tensor | None = None,
    ) -> PreTrainingOutput:
        """Logits at the masked positions, of [B * P] those that `masked_N` (int64) picks."""
        masked_NH, cls_BH = self._read((ids_BS, types_BS, lengths_B), positions_BP, masked_N, True)
        return PreTrainingOutput(self.mlm(masked_NH, self._table()), self.nsp(self.pooler(cls_BH)))

    def losses(
        self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None, targets: Targets
    ) -> PreTrainingLosses:
        """Losses of the same heads, without a matrix of all masked-LM logits in float32."""
        rows = ids_BS, types_BS, lengths_B
        words_BS, next_sentence = targets.words_BS, targets.next_sentence
        with_cls = next_sentence or words_BS is not None
        masked_NH, cls_BH = self._read(rows, targets.positions_BP, targets.masked_N, with_cls)
        one_NH, *other = masked_NH.chunk(self.config.directions, dim=1)
        loss, correct = self._token_loss(one_NH, targets.labels_N)
        rtl = self._token_loss(other[0], targets.labels_N) if other else (None, None)
        nsp_logits = self.nsp(self.pooler(cls_BH)) if next_sentence else None
        bow_loss = None
        if words_BS is not None:  # bag of words: Ma et al. 2024, arXiv 2401.11248
            log_probs_BV = self.mlm(cls_BH, self._table()).float().log_softmax(dim=1)
            counted_BS = words_BS != UNUSED
            bow_loss = -(log_probs_BV.gather(1, words_BS * counted_BS) * counted_BS).sum()
        return PreTrainingLosses(loss, correct, nsp_logits, bow_loss, *rtl)

    def _token_loss(self, states_NH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        hidden_NH = self.mlm.transform(states_NH)
        return masked_lm_loss(
            hidden_NH, self._table(), self.mlm.bias, labels_N, int8=self.int8_loss
        )

    def shared_table(self) -> Tensor:
        """The token table, also the output matrix of the masked-LM head."""
        return self.encoder.embeddings.token.weight

    def split_table(self, output_VH: Tensor) -> None:
        """Let the head multiply with `output_VH`; the gradient of lookups is then sparse."""
        self.encoder.embeddings.token.sparse = True
        self.output_table = output_VH

    def _table(self) -> Tensor:
        return self.shared_table() if self.output_table is None else self.output_table

    def _read(
        self, rows: Rows, positions_BP: Tensor | None, masked_N: Tensor | None, with_cls: bool
    ) -> tuple[Tensor, Tensor]:
        """Hidden states at the masked positions [N, H] and, `with_cls`, at [CLS] [B, H]."""
        positions_BQ, first = positions_BP, 0
        if positions_BP is not None and with_cls:
            positions_BQ, first = F.pad(positions_BP, (1, 0)), 1  # [CLS] is at 0
        hidden_BQH = self.encoder(*rows, positions_BQ)
        if self.config.directions == 2:
            hidden_BQH = around(hidden_BQH)
        masked_NH = hidden_BQH[:, first:].flatten(0, 1)
        return (masked_NH if masked_N is None else masked_NH[masked_N]), hidden_BQH[:, 0]


class TaskModel(nn.Module):
    """An encoder with a linear layer of K outputs for rows, [B, K], or their tokens, [B, S, K].

    Where the configuration says so, the head reads a BiLSTM over the encoder's states.
    """

    reads_tokens = True  # False: only where the row's answer is read
    int8_loss = False  # of a language model, see `use_int8`

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.config = config
        self.num_outputs = num_outputs
        self.encoder = encoder_for(config)
        size = config.hidden_size
        self.reader = BiLSTM(size, size // 2, 1, config.dropout) if config.bilstm else None

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """The head's outputs; those at padding mean nothing."""
        positions_BQ = None if self.reader else self.positions(ids_BS, lengths_B)
        hidden = self.encoder(ids_BS, types_BS, lengths_B, positions_BQ)
        return self.head(self.picked(hidden, ids_BS, lengths_B) if self.reader else hidden)

    def picked(self, hidden_BSH: Tensor, ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """The states that the head reads, [B, Q, H], of those of all positions.

        A class reads a BiLSTM's states where each direction has read the whole row.
        """
        if self.reader is not None:
            lengths_B = row_lengths(ids_BS, lengths_B)
            states_BSH = self.reader(hidden_BSH, lengths_B)
            return states_BSH if self.reads_tokens else ends(states_BSH, lengths_B)[:, None]
        positions_BQ = self.positions(ids_BS, lengths_B)
        return hidden_BSH if positions_BQ is None else at_columns(hidden_BSH, positions_BQ)

    def positions(self, ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        """The positions [B, Q] whose states the head reads; None: all of them."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        """States at these positions [B, Q, H] -> outputs."""
        raise NotImplementedError

    def with_next_tokens(
        self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs as of `forward`, and the language-model loss of a GPT (Radford et al. 2018, 3.2).

        That is the mean over a row's tokens after its first, in nats, summed over the rows.
        """
        hidden_BSH = self.encoder(ids_BS, types_BS, lengths_B)
        outputs = self.head(self.picked(hidden_BSH, ids_BS, lengths_B))
        lengths_B = row_lengths(ids_BS, lengths_B)
        columns = torch.arange(ids_BS.shape[1] - 1, device=ids_BS.device)
        is_read = columns < lengths_B[:, None] - 1
        weights = (is_read / (lengths_B[:, None] - 1))[is_read]
        table_VH = self.encoder.embeddings.token.weight
        read_NH, next_N = hidden_BSH[:, :-1][is_read], ids_BS[:, 1:][is_read].long()
        bias_V = table_VH.new_zeros(len(table_VH))
        given = read_NH, table_VH, bias_V, next_N, weights
        return outputs, masked_lm_loss(*given, int8=self.int8_loss)[0]

    def flops(self, rows: int, length: int) -> float:
        """FLOPs of a training step; see `training_flops`."""
        outputs = length if self.reads_tokens or self.reader else 1
        encoder = training_flops(self.config, rows, length, outputs, predictions=0)
        return encoder + self.reader_flops(rows, length)

    def reader_flops(self, rows: int, length: int) -> float:
        """FLOPs of a training step of the BiLSTM; 0 without one."""
        weights = self.reader.parameters() if self.reader else ()
        return 6.0 * sum(weight.numel() for weight in weights) * rows * length


class SequenceClassifier(TaskModel):
    """Encoder, pooler, dropout and a linear layer over [CLS] (paper section 4.1): [B, K]."""

    reads_tokens = False

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.pooler = pooler(config)
        self.dropout = Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)

    def positions(self, ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """[CLS], [B, 1]; of a causal model the last token, which alone sees all others.

        Two directions read the last token of the left one, and of the right one the first.
        """
        return last_or_first(self.config.causal, ids_BS, lengths_B)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, K]."""
        return self.classify(self.dropout(self.pooler(hidden[:, 0])))

    def classify(self, pooled_BH: Tensor) -> Tensor:
        """Logits [B, K], or scores [B, 1], of the vectors of rows."""
        if self.num_outputs > 1:
            return self.classifier(pooled_BH)
        # in float32: the 8 bits of bf16 would make 2008 of a score such as 2005
        weight_1H, bias_1 = self.classifier.weight, self.classifier.bias
        exact = torch.promote_types(weight_1H.dtype, torch.float32)
        with torch.autocast(pooled_BH.device.type, enabled=False):
            return F.linear(pooled_BH.to(exact), weight_1H.to(exact), bias_1.to(exact))


class OptionScorer(SequenceClassifier):
    """One number for a context with one of its options (paper section 4.4): [B, 1]."""


class TokenClassifier(TaskModel):
    """Encoder, dropout and a linear layer over every token (paper section 5.3): [B, S, K]."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.dropout = Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [B, S, K]; those at padding mean nothing."""
        return self.classifier(self.dropout(hidden))


class SpanPredictor(TaskModel):
    """Encoder, a vector each for start and end (paper section 4.2), no dropout (run_squad.py)."""

    def __init__(self, config: ModelConfig, num_outputs: int = 2) -> None:
        assert num_outputs == 2
        super().__init__(config, num_outputs)
        self.span = nn.Linear(config.hidden_size, num_outputs)

    def positions(self, ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        """All; a GPT's last in place of the first, where "no answer" stands: it alone sees all.

        At padding it is the last again: kernels without padding have nothing there to read.
        """
        if self.config.family != "gpt":
            return None
        last_B1 = last_or_first(True, ids_BS, lengths_B)
        places_S = torch.arange(1, ids_BS.shape[1], device=ids_BS.device)
        return torch.cat([last_B1, torch.minimum(places_S, last_B1)], dim=1)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of start and end [B, S, 2]; those at padding mean nothing."""
        return self.span(hidden)


class FrozenTagger(TaskModel):
    """A BiLSTM over the last layers of an encoder without dropout and gradients: [B, S, K]."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.num_read = min(LAYERS_READ, config.num_layers)
        size = config.hidden_size * self.num_read
        self.reader = BiLSTM(size, HIDDEN_SIZE, NUM_LAYERS, config.dropout)
        self.dropout = Dropout(config.dropout)
        self.classifier = nn.Linear(2 * HIDDEN_SIZE, num_outputs)
        self.encoder.eval()

    def train(self, mode: bool = True) -> FrozenTagger:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits [B, S, K]; those at padding mean nothing."""
        with torch.no_grad():
            layers = self.encoder(ids_BS, types_BS, lengths_B, all_layers=True)
        assert self.reader is not None
        x_BSI = torch.cat(layers[-self.num_read :], dim=2)
        states_BSH = self.reader(x_BSI, row_lengths(ids_BS, lengths_B))
        return self.classifier(self.dropout(states_BSH))

    def flops(self, rows: int, length: int) -> float:
        """FLOPs of a training step; the encoder's forward pass is a third of its training."""
        encoder = training_flops(self.config, rows, length, outputs=length, predictions=0) / 3
        return encoder + self.reader_flops(rows, length)


def last_or_first(is_last: bool, ids_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
    """The position of each row's last token, or of its first, int64 [B, 1]."""
    if is_last:
        return row_lengths(ids_BS, lengths_B)[:, None] - 1
    return ids_BS.new_zeros((ids_BS.shape[0], 1), dtype=torch.int64)
