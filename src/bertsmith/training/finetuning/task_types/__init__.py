"""The task types of fine-tuning: rows in, a head and its loss, answers out. Start: `base.py`."""

from __future__ import annotations

from bertsmith.training.finetuning.task_types.answers import AnswerQuestions
from bertsmith.training.finetuning.task_types.base import Kind
from bertsmith.training.finetuning.task_types.tagging import Tag
from bertsmith.training.finetuning.task_types.texts import Choice, Classify, MultiLabel, Regress

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (Classify(), Regress(), MultiLabel(), Choice(), Tag(), AnswerQuestions())
}
