"""The work of an experiment as cells: text, pre-training, fine-tuning, taggers over features.

Every cell calls the public functions. Settings that change a result are in its key, with the
precision that the machine gives; device and threads are not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from bertsmith.base.files import atomic_folder, read_json, remove_folder, write_json
from bertsmith.base.settings import from_mapping, to_mapping
from bertsmith.checkpoints.config_json import config_path, read_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.run_folder import RESULT_FILE, SETTINGS_FILE, RunFolder
from bertsmith.checkpoints.stored import WEIGHTS, weight_files
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.settings import MASK_SETTINGS, NEXT_TOKEN
from bertsmith.experiments.lineage.elmo import flops_a_word, pretrain_elmo
from bertsmith.experiments.lineage.elmo_text import ElmoText
from bertsmith.experiments.lineage.settings import ElmoSettings
from bertsmith.experiments.paper.cells import Cell
from bertsmith.experiments.paper.experiment import Column, Scale, Variant, overridden
from bertsmith.model.config import (
    ElmoConfig,
    ModelConfig,
    config_for,
    elmo_config,
    layers_hidden_heads,
    training_flops,
)
from bertsmith.tasks.examples import find_file
from bertsmith.tasks.task import Task
from bertsmith.text.readers.documents import input_files, read_documents
from bertsmith.text.readers.tables import digest
from bertsmith.text.tokenizer import bytepair
from bertsmith.text.tokenizer.files import TOKENIZER_FILES
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.engine import choose_engine
from bertsmith.training.finetuning.feature_tagger import check_depth, feature_table
from bertsmith.training.finetuning.run import SCORES_FILE, train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings, FrozenSettings, Provenance
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import read_data
from bertsmith.training.finetuning.trainer import InitialModel, Trainer
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import LogSettings, PretrainMachine, make_recipe
from bertsmith.training.settings import Machine

FOLDERS = {  # of a task below DATA, the first that is there
    "cola": ("CoLA", "glue/CoLA"),
    "sst2": ("SST-2", "glue/SST-2"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "stsb": ("STS-B", "glue/STS-B"),
    "qqp": ("QQP", "glue/QQP"),
    "mnli": ("MNLI", "glue/MNLI"),
    "qnli": ("QNLI", "glue/QNLI"),
    "rte": ("RTE", "glue/RTE"),
    "ner": ("conll2003", "ner"),
    "squad1": ("squad/v1.1", "squad1", "squad"),
    "squad2": ("squad/v2.0", "squad2", "squad"),
    "swag": ("swag",),
}
SUBSET_SEED = 0
TYPICAL_LENGTH = 48  # tokens of a sentence or pair, for a guess of the time
NO_RESULT = {  # fields of `PretrainSettings` that change neither weights nor checkpoints
    one.name for kind in (PretrainMachine, LogSettings) for one in fields(kind)
} - {"keep_steps"}


def is_finished(run: Path) -> bool:
    return (run / RESULT_FILE).exists()


def budget_tokens(settings: Mapping[str, Any]) -> int:
    """Tokens that a pre-training reads; 0 of a budget in minutes."""
    rows = settings.get("batch_size", 32) * settings.get("max_length", 128)
    return settings.get("tokens") or settings.get("steps", 0) * rows


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides a pre-training, however it was said. Errors: ValueError as `pretrain`."""
    changes = {name: value for name, value in settings.items() if name != "recipe"}
    whole = to_mapping(make_recipe(settings.get("recipe"), changes, None).settings)
    whole["size"] = layers_hidden_heads(whole["size"])
    return {name: value for name, value in whole.items() if name not in NO_RESULT}


@cache
def model_digests(folder: Path) -> list[str]:
    """Digests of the weights, configuration and vocabulary of a model that is there."""
    vocabulary = (folder / name for name in chain(TOKENIZER_FILES, *bytepair.FILES))
    files = config_path(folder), *filter(Path.exists, vocabulary)
    return [digest(path) for path in (*weight_files(folder), *files)]


def find_data(data: Path, task: Task) -> Path | None:
    """The task's folder below `data`; a dev file where no training set was published with it.

    None: there is none. Errors: ValueError for a task that no experiment knows a folder of.
    """
    if task.name not in FOLDERS:
        raise ValueError(f"no experiment measures {task.name}: {', '.join(FOLDERS)}")
    for name in FOLDERS[task.name]:
        folder = data / name
        if not folder.is_dir():
            continue
        try:
            find_file(task, folder, "train")
        except ValueError:
            if dev := find_file(task, folder, "dev"):
                return dev
        else:
            return folder
    return None


@dataclass(frozen=True)
class TaskData:
    """A task's examples, as many as the scale takes; read when they are first used."""

    task: Task
    path: Path
    scale: Scale

    @cached_property
    def sets(self) -> tuple[Any, Any, dict[str, Any]]:
        """(train, dev, the files for run.json)."""
        task_type = TASK_TYPES[self.task.task_type]
        train, dev, files = read_data(task_type, self.task, self.path)
        sizes = self.scale.train_examples, self.scale.dev_examples
        parts = []
        for part, most in zip((train, next(iter(dev.values()))), sizes, strict=True):
            if 0 < most < len(part):
                _, part = task_type.split_dev(part, most / len(part), SUBSET_SEED)  # about as many
            parts.append(part)
        return parts[0], parts[1], files

    @cached_property
    def made_of(self) -> dict[str, Any]:
        """All that decides the examples."""
        splits = ("train", *self.task.dev_splits[:1])
        found = {split: find_file(self.task, self.path, split) for split in splits}
        digests = {split: digest(path) for split, path in found.items() if path}
        sizes = {"train": self.scale.train_examples, "dev": self.scale.dev_examples}
        return {"task": self.task.name, "files": digests, "examples": sizes}


@dataclass(frozen=True)
class Work:
    """Makes the cells of an experiment at a scale."""

    scale_name: str
    scale: Scale
    text: Sequence[Path]
    data: Mapping[str, TaskData]
    """By the name of the task."""
    rows: Sequence[str]
    """Rows of Table 7, for columns of features."""
    points: Sequence[float]
    """Parts of a pre-training whose checkpoints are kept."""
    root: Path
    """The folder of all cells."""
    machine: Machine = field(default_factory=Machine)
    workers: int = 2

    @cached_property
    def precision(self) -> str:
        """Numbers of the matrix products, such as float32."""
        return choose_engine(**vars(self.machine)).precision

    # --- text and pre-training

    @cached_property
    def text_cell(self) -> Cell:
        """A cased vocabulary and a token store."""
        files = [digest(Path(str(path))) for path in input_files(self.text)]
        made_of = {"text": files, "vocab_size": self.scale.vocab_size}
        kept = RESULT_FILE, "store/manifest.json"
        return Cell("text", str(self.scale.vocab_size), made_of, self._make_text, kept=kept)

    def _make_text(self, folder: Path) -> None:
        vocabulary = folder / "vocab"
        if not vocabulary.exists():
            documents, pieces = read_documents(self.text), self.scale.vocab_size
            try:
                trained = train_vocabulary(documents, pieces, GOOGLE_CASED, workers=self.workers)
            except ValueError as error:
                where = (
                    f"`vocab_size` of the experiment's scale, [{self.scale_name}], is {pieces:,}"
                )
                raise ValueError(f"{where}, but {error}") from error
            with atomic_folder(vocabulary) as temporary:
                Tokenizer(trained, GOOGLE_CASED).save(temporary)
        tokenizer = Tokenizer.from_pretrained(vocabulary)
        build = BuildSettings(workers=self.workers)
        splits = build_store(self.text, tokenizer, folder / "store", build)["splits"]
        tokens = sum(split["tokens"] for split in splits.values())
        write_json(folder / RESULT_FILE, {"tokens": tokens})

    def pretraining(self, variant: Variant) -> Cell:
        """The pre-training of a variant; those of equal settings are one cell."""
        settings = self.pretrain_settings(variant)
        if variant.system == "elmo":
            asked = {"size": settings["size"], "tokens": budget_tokens(settings)}
            if not asked["tokens"]:
                raise ValueError(f"{variant.title}: elmo needs a budget in steps or tokens")
            made_of, make = {"system": "elmo", **asked}, self._make_elmo
            precision = self.precision
            label = f"elmo-{settings['size']}"
        else:
            made_of, asked, make = resolved(settings), settings, self._make_pretraining
            precision = self._pretraining_precision(settings)
            label = f"{made_of['objective']}-{settings.get('size', 'tiny')}"
        return Cell(
            "pretrain",
            label,
            {**made_of, "precision": precision},
            lambda folder: make(folder, asked),
            (self.text_cell,),
            self._pretraining_flops(variant, settings),
            (RESULT_FILE, WEIGHTS),
            60.0 * settings.get("minutes", 0.0),
        )

    def pretrain_settings(self, variant: Variant) -> dict[str, Any]:
        """The keywords of its pre-training: the scale's, changed by the variant's."""
        shared = dict(self.scale.pretrain)
        if overridden(shared, variant.pretrain).get("objective") in NEXT_TOKEN:
            shared = {name: shared[name] for name in shared if name not in MASK_SETTINGS}
        settings = overridden(shared, variant.pretrain)
        if self.scale_name in variant.sizes:
            settings["size"] = variant.sizes[self.scale_name]
        for budget in ("steps", "tokens", "minutes"):
            if budget in settings:
                exact = variant.share * settings[budget]
                settings[budget] = exact if budget == "minutes" else max(1, round(exact))
        if steps := [self.step(settings, point) for point in self.points if point < 1]:
            settings["keep_steps"] = steps
        return settings

    @staticmethod
    def step(settings: Mapping[str, Any], at: float) -> int:
        """The step at a part of a pre-training."""
        if "steps" not in settings:
            raise ValueError("a figure over pre-training needs a budget in steps")
        return max(1, round(at * settings["steps"]))

    def _pretraining_flops(self, variant: Variant, settings: Mapping[str, Any]) -> float:
        length, tokens = settings.get("max_length", 128), budget_tokens(settings)
        config = self.config(variant)
        if isinstance(config, ElmoConfig):
            return tokens * flops_a_word(config, ElmoSettings.vocab_size)
        share = settings.get("mlm_probability", 0.15)
        predictions = length if config.causal else round(share * length)
        return training_flops(config, tokens // length, length, length, predictions)

    def config(self, variant: Variant) -> ModelConfig:
        """The shape of a variant's encoder."""
        if variant.model:
            return read_config(open_model_folder(variant.model))
        settings = self.pretrain_settings(variant)
        size, objective = settings.get("size", "tiny"), settings.get("objective", "mlm+nsp")
        if variant.system == "elmo":
            return elmo_config(size)
        two = {"directions": 2} if objective == "ltr+rtl" else {}
        return config_for(size, self.scale.vocab_size, causal=objective.startswith("ltr"), **two)

    def _pretraining_precision(self, settings: Mapping[str, Any]) -> str:
        """The variant's, the command's or the recipe's; "auto" is what the machine has."""
        recipe = make_recipe(settings.get("recipe"), {}, None).settings
        named = settings.get("precision"), self.machine.precision, recipe.precision
        asked = next((one for one in named if one not in (None, "auto")), "auto")
        return self.precision if asked == "auto" else asked

    def _make_pretraining(self, folder: Path, settings: Mapping[str, Any]) -> None:
        store = self.text_cell.folder(self.root) / "store"
        is_begun = RunFolder(folder).kind() is not None
        given: Any = {"resume": is_begun, "loggers": (), **vars(self.machine), **settings}
        given["precision"] = self._pretraining_precision(settings)
        if is_finished(folder):  # and was stopped before it counted
            return
        if not pretrain(store, folder, **given).finished:
            raise KeyboardInterrupt

    def _make_elmo(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Train on the words that `tokens` pieces of the text are."""
        if is_finished(folder):
            return
        words = ElmoText.read(self.text)
        pieces = read_json(self.text_cell.folder(self.root) / RESULT_FILE)["tokens"]
        share = (len(words.tokens) + len(words.boundaries) - 1) / pieces
        budget: dict[str, Any] = {"words": max(1, round(settings["tokens"] * share))}
        fixed = {"size": settings["size"], **vars(self.machine)}
        pretrain_elmo(ElmoSettings(text=[*self.text], out=folder, **budget, **fixed))

    def result(self, variant: Variant) -> dict[str, Any]:
        """The content of a finished pre-training's result.json."""
        return RunFolder(self.pretraining(variant).folder(self.root)).result()

    # --- what is measured

    def start(self, variant: Variant) -> tuple[Path, dict[str, Any], tuple[Cell, ...]]:
        """(The model's folder, what tells it from others, the cells that make it).

        Errors: ValueError for a part of a pre-training of which no checkpoint is kept.
        """
        if variant.model:
            folder = open_model_folder(variant.model)
            return folder, {"model": model_digests(folder)}, ()
        cell = self.pretraining(variant)
        folder = cell.folder(self.root)
        if variant.at == 1.0:
            return folder, {}, (cell,)
        settings = self.pretrain_settings(variant)
        if (step := self.step(settings, variant.at)) not in settings["keep_steps"]:
            raise ValueError(
                f"{variant.title}: at={variant.at} is step {step:,}, which keep_steps of its "
                "pre-training lacks: name it there"
            )
        return folder / "checkpoints" / f"step-{step:08}", {"step": step}, (cell,)

    def measurement(self, variant: Variant, column: Column, seed: int) -> Cell:
        """The cell that has the variant's figure in a column, of one seed."""
        if column.is_perplexity:
            return self.pretraining(variant)
        data = self.data[column.task.name]
        if column.is_features:
            return self._tagging(variant, data, seed)
        return self._finetuning(variant, data, seed)

    def _finetuning(self, variant: Variant, data: TaskData, seed: int) -> Cell:
        folder, origin, inputs = self.start(variant)
        task = data.task
        settings = {"keep": "last", "evals_per_epoch": 0, "max_retries": 0, **self.scale.finetune}
        if task.task_type == "answer" and (length := settings.get("max_length")):
            settings.setdefault("doc_stride", length // 2)
        if not variant.model and variant.system == "encoder":
            settings |= self.scale.finetune_own
        settings |= variant.finetune
        # nothing is chosen on dev, where all is measured
        recipe = from_mapping(FinetuneSettings, {**vars(self.machine), **settings}, "finetune")

        def make(out: Path) -> None:
            forget_other(out, folder)
            if not is_finished(out):
                train, dev, files = data.sets
                start = InitialModel(folder)
                trainer = Trainer.prepare(start, task, train, {"dev": dev}, recipe)
                train_seeds(trainer, out, recipe, [seed], Provenance(data=files))
            # the answers are enough: the models would be gigabytes
            (out / WEIGHTS).unlink(missing_ok=True)

        made_of = {**data.made_of, **origin, "settings": settings, "seed": seed}
        made_of["precision"] = self.precision
        kept = RESULT_FILE, SCORES_FILE
        epochs, rows = settings.get("epochs") or 3, self.scale.train_examples or 10_000
        length = 128 if task.task_type in ("answer", "tag") else TYPICAL_LENGTH
        flops = training_flops(self.config(variant), math.ceil(epochs * rows), length, length, 0)
        label = label_of(inputs, origin, task, seed)
        return Cell("finetune", label, made_of, make, inputs, flops, kept)

    def _tagging(self, variant: Variant, data: TaskData, seed: int) -> Cell:
        """All rows of Table 7 of a seed; the encoder's states are computed once for them."""
        check_depth(variant.title, self.config(variant).num_layers)
        folder, origin, inputs = self.start(variant)
        settings = {"sentences": self.scale.train_examples, **self.scale.features}
        own = from_mapping(FrozenSettings, {**vars(self.machine), **settings}, "features")

        def make(out: Path) -> None:
            forget_other(out, folder)
            train, dev, files = data.sets
            sets, provenance = {"train": train, "dev": dev}, Provenance(data=files)
            feature_table(folder, sets, self.rows, [seed], own, out, provenance)
            remove_folder(out / "states")  # gigabytes

        rows = {"rows": self.rows, "seed": seed, "precision": self.precision}
        made_of = {**data.made_of, **origin, "settings": settings, **rows}
        words = 15 * (self.scale.train_examples or 14_000)  # of a sentence
        weights = 8 * own.hidden_size * (4 * self.config(variant).hidden_size + 3 * own.hidden_size)
        flops = 6.0 * len(self.rows) * own.epochs * words * weights
        label = label_of(inputs, origin, data.task, seed)
        return Cell("features", label, made_of, make, inputs, flops)


def forget_other(out: Path, model: Path) -> None:
    """Remove what an unfinished cell has of another model: its pre-training was made anew since."""
    run = RunFolder(out)
    if run.kind() is None:
        return
    if run.settings()["settings"]["model_sha256"] == [*map(digest, weight_files(model))]:
        return
    print(f"{out}: begins anew: the pre-training that it builds on was made anew", file=sys.stderr)
    # run.json last, which tells: a kill may come before
    for path in sorted(out.iterdir(), key=lambda path: path.name == SETTINGS_FILE):
        if path.is_dir():
            remove_folder(path)
        elif path.suffix != ".lock":  # which this process holds
            path.unlink()


def label_of(inputs: Sequence[Cell], origin: Mapping[str, Any], task: Task, seed: int) -> str:
    """The model, its step if it is not the last, the task and the seed."""
    step = f"-step{origin['step']}" if "step" in origin else ""
    return f"{inputs[0].label if inputs else 'model'}{step}-{task.name}-{seed}"
