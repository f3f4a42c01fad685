"""The table of kinds."""

from __future__ import annotations

from bertsmith.finetuning.answer_kind import AnswerQuestions
from bertsmith.finetuning.choice_kind import Choice
from bertsmith.finetuning.kind import Kind
from bertsmith.finetuning.sequence_kinds import Classify, MultiLabel, Regress
from bertsmith.finetuning.tag_kind import Tag

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (Classify(), Regress(), MultiLabel(), Choice(), Tag(), AnswerQuestions())
}
