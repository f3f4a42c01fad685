"""A model that answers: text in, typed answers out."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.checkpoints.folder import load_model
from bertsmith.checkpoints.model_config import label_names, read_config, read_extra_config
from bertsmith.checkpoints.open import open_model_folder
from bertsmith.model.encoder import Module
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.tasks.features import Features, featurise
from bertsmith.tasks.reading import Examples
from bertsmith.text.vocabulary import Vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.scoring import logits

MASK = "[MASK]"
NEVER_ANSWERS = re.compile(r"\[(PAD|CLS|SEP|MASK|unused\d+)\]")


def load(model: str | Path, *, device: str = "auto", precision: str = "float32") -> Predictor:
    """Open a run directory, a Hugging Face folder or a model of the Hugging Face hub.

    `device` "auto" is the GPU where there is one. `precision` "bf16" makes the matrix products
    quicker on machines that have them, and the answers a little less exact.

    Errors: ValueError for a folder that holds no model, files that do not fit one another, a
    device or precision that this machine does not have.
    """
    return Predictor(open_model_folder(str(model)), choose_engine(device, precision))


class Predictor:
    """Answers of one model folder. The weights are read when the first answer is asked for."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.config = read_config(folder)
        self.tokenizer = Tokenizer.from_pretrained(folder)
        pieces = len(self.tokenizer.vocabulary)
        if pieces > self.config.vocab_size:
            raise ValueError(
                f"{folder}: its vocabulary has {pieces:,} pieces, but its model "
                f"{self.config.vocab_size:,}: the tokenizer belongs to another model"
            )

    def fill(self, text: str, top: int = 5) -> list[list[dict[str, Any]]]:
        """The `top` likeliest pieces at each [MASK] of the text, best first.

        Returns one list a [MASK] of {"token": "cat", "id": 4937, "probability": 0.31}. The
        probability is that of the softmax over the whole vocabulary, each mask by itself;
        [PAD], [CLS], [SEP], [MASK] and [unused] pieces are left out of the answers.

        Errors: ValueError for a text without [MASK], one longer than the model's positions, a
        model without a masked-LM head.
        """
        if top < 1:
            raise ValueError(f"top = {top}: ask for at least 1 answer")
        if MASK not in text:
            raise ValueError(f'no [MASK] in "{text:.60}": write it such as "The [MASK] sat."')
        ids = self._with_masks(text)
        if len(ids) > self.config.max_positions:
            raise ValueError(
                f"the text has {len(ids)} tokens with [CLS] and [SEP], but the model knows "
                f"{self.config.max_positions} positions: shorten the text"
            )
        positions = np.flatnonzero(ids == self.tokenizer.vocabulary.mask_id)
        input_ids = self.engine.tensor(ids[None])
        with torch.inference_mode(), self.engine.autocast():
            output = self.language_model(
                input_ids, torch.zeros_like(input_ids), None, self.engine.tensor(positions[None])
            )
        probabilities = output.mlm_logits.float().softmax(dim=-1)
        probabilities[:, self._never_answers] = -1.0
        pieces = self.tokenizer.vocabulary.pieces
        best = probabilities.topk(min(top, self._num_answers))
        return [
            [
                {"token": pieces[number], "id": number, "probability": probability}
                for number, probability in zip(numbers, values, strict=True)
            ]
            for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def classify(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The class of each text, or of each text with its second text, in the order given.

        Returns {"label": "good", "probability": 0.9, "probabilities": {"bad": 0.1, ...}} for
        each. A text longer than the length the model was trained at is cut to it.

        Errors: ValueError for a model that is no classifier, texts and pairs of unequal number.
        """
        return self.answers(self.scores(self.features(texts, pairs)))

    def features(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Features:
        """Texts as the classifier reads them; see `Features.num_truncated` for those cut."""
        if pairs is not None and len(pairs) != len(texts):
            raise ValueError(f"{len(texts)} texts, but {len(pairs)} second texts")
        lines = list(range(1, len(texts) + 1))
        second = None if pairs is None else list(pairs)
        examples = Examples(list(texts), second, None, self.label_names, "texts", lines)
        return featurise(self.tokenizer, examples, self.max_length)

    def scores(
        self, features: Features, on_batch: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """The classifier's logits, float32 [N, K]; `on_batch` is told how many were done."""
        return logits(
            self.classifier,
            features,
            self.tokenizer.vocabulary.pad_id,
            device=self.engine.device,
            autocast=torch.bfloat16 if self.engine.precision == "bf16" else None,
            on_batch=on_batch,
        )

    def answers(self, scores: np.ndarray) -> list[dict[str, Any]]:
        """Logits [N, K] as the answers that `classify` gives."""
        rows = torch.from_numpy(scores).softmax(dim=-1).tolist()
        answers = []
        for row in rows:
            probabilities = dict(zip(self.label_names, row, strict=True))
            label = max(probabilities, key=probabilities.__getitem__)
            answers.append(
                {
                    "label": label,
                    "probability": probabilities[label],
                    "probabilities": probabilities,
                }
            )
        return answers

    @functools.cached_property
    def label_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers. Errors: as `classifier`."""
        num_labels = self.classifier.classifier.out_features
        names = label_names(self.folder) or [f"LABEL_{k}" for k in range(num_labels)]
        if len(names) != num_labels:
            raise ValueError(
                f"{self.folder}: config.json names {len(names)} labels, but the classifier has "
                f"{num_labels}: correct id2label"
            )
        return tuple(names)

    @functools.cached_property
    def max_length(self) -> int:
        """Tokens of an example, [CLS] and [SEP] among them: what it was trained at, or can read."""
        return read_extra_config(self.folder).get("max_length", self.config.max_positions)

    @functools.cached_property
    def classifier(self) -> SequenceClassifier:
        """The model with its classifier. Errors: ValueError when that was never trained."""
        return self._ready(load_model(self.folder, SequenceClassifier).model)

    @property
    def language_model(self) -> PreTrainingModel:
        """The model with its pre-training heads. Errors: ValueError when it has no MLM head."""
        return self._language_model[0]

    @property
    def has_next_sentence_head(self) -> bool:
        """Whether that head of the language model was trained, or is there for show."""
        return not any(name.startswith(("nsp.", "pooler.")) for name in self._language_model[1])

    @functools.cached_property
    def _language_model(self) -> tuple[PreTrainingModel, list[str]]:
        loaded = load_model(self.folder, PreTrainingModel)
        if any(name.startswith("mlm.") for name in loaded.missing):
            raise ValueError(
                f"{self.folder}: this model has no masked-LM head: use a pre-trained one"
            )
        return self._ready(loaded.model), loaded.missing

    def _ready(self, model: Module) -> Module:
        return model.to(self.engine.device).eval()

    def _with_masks(self, text: str) -> np.ndarray:
        """[CLS] text [SEP] as ids, int64 [S]; the tokenizer itself would split "[MASK]"."""
        vocabulary = self.tokenizer.vocabulary
        encoded = self.tokenizer.encode_batch(text.split(MASK))
        ids = np.insert(encoded.ids.astype(np.int64), encoded.boundaries[1:-1], vocabulary.mask_id)
        return np.concatenate([[vocabulary.cls_id], ids, [vocabulary.sep_id]])

    @functools.cached_property
    def _never_answers(self) -> torch.Tensor:
        """bool [V]: what `fill` does not offer, rows without a piece among them."""
        vocabulary: Vocabulary = self.tokenizer.vocabulary
        never = torch.ones(self.config.vocab_size, dtype=torch.bool)
        for number, piece in enumerate(vocabulary.pieces):
            never[number] = bool(NEVER_ANSWERS.fullmatch(piece))
        return never.to(self.engine.device)

    @functools.cached_property
    def _num_answers(self) -> int:
        return int((~self._never_answers).sum())
