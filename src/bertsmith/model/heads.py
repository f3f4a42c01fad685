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
from bertsmith.model.encoder import Encoder
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.masked_lm_loss import UNUSED, masked_lm_loss

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


class BareModel(nn.Module):
    """Encoder and pooler without a head: BertModel of transformers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)


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


class PreTrainingModel(BareModel):
    """Encoder with both pre-training heads (paper section 3.1)."""

    # [V, H], in place of the token table in the masked-LM head: training/replicas.py puts a copy in
    # bf16 here, with a gradient of its own
    output_table: Tensor | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mlm = MaskedLMHead(config)
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
        """Losses of the same heads; the masked-LM logits are never stored whole."""
        rows = ids_BS, types_BS, lengths_B
        words_BS, next_sentence = targets.words_BS, targets.next_sentence
        with_cls = next_sentence or words_BS is not None
        masked_NH, cls_BH = self._read(rows, targets.positions_BP, targets.masked_N, with_cls)
        hidden_NH, table_VH = self.mlm.transform(masked_NH), self._table()
        loss, correct = masked_lm_loss(hidden_NH, table_VH, self.mlm.bias, targets.labels_N)
        nsp_logits = self.nsp(self.pooler(cls_BH)) if next_sentence else None
        bow_loss = None
        if words_BS is not None:  # bag of words: Ma et al. 2024, arXiv 2401.11248
            log_probs_BV = self.mlm(cls_BH, table_VH).float().log_softmax(dim=1)
            counted_BS = words_BS != UNUSED
            bow_loss = -(log_probs_BV.gather(1, words_BS * counted_BS) * counted_BS).sum()
        return PreTrainingLosses(loss, correct, nsp_logits, bow_loss)

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
        masked_NH = hidden_BQH[:, first:].flatten(0, 1)
        return (masked_NH if masked_N is None else masked_NH[masked_N]), hidden_BQH[:, 0]


class TaskModel(nn.Module):
    """An encoder with a linear layer of K outputs for rows, [B, K], or their tokens, [B, S, K]."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.config = config
        self.num_outputs = num_outputs
        self.encoder = Encoder(config)

    def flops(self, rows: int, length: int) -> float:
        """FLOPs of a training step; see `training_flops`."""
        return training_flops(self.config, rows, length, outputs=1, predictions=0)


class SequenceClassifier(TaskModel):
    """Encoder, pooler, dropout and a linear layer over [CLS] (paper section 4.1): [B, K]."""

    def __init__(self, config: ModelConfig, num_outputs: int) -> None:
        super().__init__(config, num_outputs)
        self.pooler = Pooler(config)
        self.dropout = Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits [B, K]; the last layer runs at the token that is read alone."""
        read_B1 = ids_BS.new_zeros((ids_BS.shape[0], 1), dtype=torch.int64)
        if self.config.causal:  # the last token, which alone sees all others, as in GPT
            lengths = ids_BS.shape[1] if lengths_B is None else lengths_B[:, None]
            read_B1 = read_B1 + lengths - 1
        hidden_B1H = self.encoder(ids_BS, types_BS, lengths_B, read_B1)
        return self.classify(self.dropout(self.pooler(hidden_B1H[:, 0])))

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

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits [B, S, K]; those at padding mean nothing."""
        return self.classifier(self.dropout(self.encoder(ids_BS, types_BS, lengths_B)))


class SpanPredictor(TaskModel):
    """Encoder, a vector each for start and end (paper section 4.2), no dropout (run_squad.py)."""

    def __init__(self, config: ModelConfig, num_outputs: int = 2) -> None:
        assert num_outputs == 2
        super().__init__(config, num_outputs)
        self.span = nn.Linear(config.hidden_size, num_outputs)

    def forward(self, ids_BS: Tensor, types_BS: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits of start and end [B, S, 2]; those at padding mean nothing."""
        return self.span(self.encoder(ids_BS, types_BS, lengths_B))
