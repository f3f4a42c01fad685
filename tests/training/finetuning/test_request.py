"""Settings and flags that cannot be, or do not go together."""

from dataclasses import replace

import pytest

from bertsmith.training.finetuning.request import Request, check_flags, parse_seeds
from bertsmith.training.finetuning.settings import (
    ContrastiveSettings,
    FinetuneSettings,
    FrozenSettings,
)

from ...tiny import refused

FINETUNE, CONTRASTIVE = FinetuneSettings(), ContrastiveSettings()
FROZEN = FrozenSettings()
PATIENT = FinetuneSettings(early_stopping_patience=2)
COMPARES = "`early_stopping_patience` compares evaluations"


@pytest.mark.parametrize(
    ("settings", "name", "value", "message"),
    [
        (FINETUNE, "epochs", -1, "`epochs=-1`"),
        (FINETUNE, "warmup_ratio", 1, "`warmup_ratio=1`"),
        (FINETUNE, "layer_decay", 1.5, "`layer_decay=1.5`: must be above 0 and at most 1"),
        (FINETUNE, "evals_per_epoch", -1, "`evals_per_epoch=-1`: must be at least 0"),
        (FINETUNE, "checkpoint_every", 0, "`checkpoint_every=0`: must be at least 1"),
        (FinetuneSettings(freeze_encoder=True), "bilstm", True, "has an LSTM of its own"),
        (FinetuneSettings(freeze_encoder=True), "precision", "int8", "for layers that learn"),
        (PATIENT, "keep", "last", "`early_stopping_patience` keeps the weights best"),
        (PATIENT, "evals_per_epoch", 0, f"{COMPARES}: leave `evals_per_epoch=0`"),
        (CONTRASTIVE, "learning_rate", 0.0, "`learning_rate="),
        (CONTRASTIVE, "scale", -1.0, "`scale="),
        (CONTRASTIVE, "weight_decay", -0.1, "`weight_decay="),
        (CONTRASTIVE, "warmup_ratio", 1.0, "`warmup_ratio="),
        (FROZEN, "epochs", 0, "`epochs="),
        (FROZEN, "sentences", -1, "`sentences="),
        (FROZEN, "learning_rate", 0.0, "`learning_rate="),
        (FROZEN, "dropout", 1.0, "`dropout="),
        (FROZEN, "precision", "float8", "`precision='float8'` is for layers that learn"),
        (FROZEN, "tokens_per_window", -1, "`tokens_per_window=-1`: must be at least 0"),
        (FINETUNE, "tokens_per_window", -1, "must be at least 0"),
    ],
)
def test_settings_that_cannot_be(settings, name, value, message):
    with pytest.raises(ValueError) as refusal:
        replace(settings, **{name: value})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3..1", "`seeds='3..1'`: a range goes upwards, such as 1..3"),
        ("1,2,1", "`seeds='1,2,1'`: 1 is named twice: leave one out"),
        (f"1,{2**63}", "`seeds='1,9223372036854775808'`: seeds are at most 2**63 - 1"),
        ("1..", "`seeds='1..'`: write 1,2,3 or 1..3"),
    ],
)
def test_seeds_that_are_refused(text, message):
    with pytest.raises(ValueError) as error:
        parse_seeds(text)
    assert str(error.value) == message


TAUGHT = "--teacher t --teacher-data x"
NO_LABELS = "has no labels: leave --distillation-w"
SCRATCH = "without effect with --from-scratch"
FOCAL = "--focal-gamma: of the labels, unused at --distillation-weight 1"
BOTH, PATIENCE = "--early-stopping-patience keeps the", "--sweep: early_stopping_patience 2"
FLAGS = [
    ("--sweep paper --learning-rate 1e-5", "--learning-rate: searched by --sweep; leave it out"),
    ("--sweep learning_rate=1e-5..1e-4", "a range needs --trials"),
    ("--sweep paper --trials 0", "--trials 0: must be"),
    ("--sweep ratte=1|2", "unknown setting 'ratte'"),
    ("--trials 3 --storage x.db", "--trials, --storage: only with --sweep"),
    ("--teacher-data x.txt --temperature 2", "--teacher-data, --temperature: only with --te"),
    ("--sweep distillation_weight=0|1", "--distillation-weight: only with --teacher"),
    (f"{TAUGHT} --distillation-weight 0.5", NO_LABELS),
    (f"{TAUGHT} --sweep distillation_weight=0|1", NO_LABELS),
    ("--teacher t --focal-gamma 2", FOCAL),
    ("--keep last --sweep early_stopping_patience=0|2", f"{PATIENCE}: {BOTH}"),
    ("--sweep early_stopping_patience=0|2\tkeep=best|last", f"{PATIENCE}, keep last: {BOTH}"),
    ("--from-scratch --max-retries 3", f"--max-retries: {SCRATCH}: leave it"),
    ("--from-scratch --reinit-layers 1", f"--reinit-layers: {SCRATCH}"),
    ("--from-scratch --sweep reinit_layers=0|1", f"--reinit-layers: {SCRATCH}"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS)
def test_flags_that_do_not_go_together_are_refused_before_anything_is_read(
    tmp_path, flags, message
):
    folder = tmp_path / "no"
    words = ("--model", folder, "--data", folder, "--out", tmp_path / "run", *flags.split(" "))
    assert message in refused("finetune", "classify", *words)


NO_ANSWERS = "--max-answer-length: without effect on a task of kind 'classify'"
NO_WINDOWS = "--doc-stride, --pool: only with --long-texts windows"
ONE_TEXT = "--both-orders: without effect on single texts: leave it out"
NO_LOGITS = "--temperature: without effect on a task of kind 'regress'"


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        ("classify", "--max-answer-length 9 --doc-stride 9", NO_ANSWERS),
        ("classify", "--doc-stride 9 --pool max", NO_WINDOWS),
        ("regress", "--teacher t --temperature 2", NO_LOGITS),
        ("classify", "--both-orders on", ONE_TEXT),
        ("cola", "--both-orders on", ONE_TEXT),
    ],
)
def test_flags_without_effect_on_the_task(toy_files, model_folder, tmp_path, task, flags, message):
    words = ("--model", model_folder, "--data", toy_files, "--out", tmp_path / "run")
    assert message in refused("finetune", task, *words, *flags.split())


def test_what_says_nothing_may_stand_beside_from_scratch(tmp_path):
    words = {"task": "rte", "model": "m", "data": tmp_path, "out": tmp_path, "from_scratch": True}
    check_flags(Request(**words))  # restarts are 2 by default
    given = ("restarts", "reinit_layers")
    check_flags(Request(**words, max_retries=0, reinit_layers=0, given=given))
