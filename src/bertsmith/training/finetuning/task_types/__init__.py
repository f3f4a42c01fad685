"""The task types of fine-tuning: rows in, answers out, and their losses. Start: `base.py`."""

from __future__ import annotations

from bertsmith.training.finetuning.task_types.answers import AnswerQuestions
from bertsmith.training.finetuning.task_types.base import TaskType
from bertsmith.training.finetuning.task_types.tagging import Tag
from bertsmith.training.finetuning.task_types.texts import Choice, Classify, MultiLabel, Regress

TASK_TYPES: dict[str, TaskType] = {
    task_type.name: task_type
    for task_type in (Classify(), Regress(), MultiLabel(), Choice(), Tag(), AnswerQuestions())
}
