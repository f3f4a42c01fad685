"""transformers' Trainer on one task, for benchmarks/finetune.py, in a process of its own.

    python benchmarks/finetune_peer.py '{"task": "sst2", "model": ..., "data": ..., "out": ...,
        "system": "trainer, best", "epochs": 3, "batch": 32, "rate": 5e-5, "seed": 1,
        "max_length": 128, "threads": 2}'

Texts, pairs and scores are tokenized by transformers' fast tokenizer and cut longest first;
questions become windows that overlap by 128 tokens, as in the library's example of question
answering, whose search for the answer is followed too. The dev set is measured after every epoch
by a loop of our own, over rows sorted by length; that time is not counted. The figures go to "out":
{"epochs": [{metric: share}], "seconds" of training, "train_examples", "steps"}.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bertsmith.base.files import write_json
from bertsmith.base.processes import keep_freed_memory
from bertsmith.tasks.examples import find_file, read_examples
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.squad.answers import squad1_scores
from bertsmith.tasks.squad.files import read_questions
from bertsmith.tasks.squad.questions import Questions
from bertsmith.tasks.task import find_task
from bertsmith.training.engine import has_bf16

BEST = {"bf16": has_bf16(torch.device("cpu")), "train_sampling_strategy": "group_by_length"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "trainer": {},  # its defaults: float32; padding to the longest of a batch
    "trainer, best": BEST,
    "trainer, best, kept memory": BEST,
    "trainer, best, kept memory, compiled": {**BEST, "torch_compile": True},
}
OVERLAP, N_BEST, MAX_ANSWER = 128, 20, 30
ANSWERS = ("start_positions", "end_positions")
Row = dict[str, Any]


class Texts:
    """A class or a score for a text or a pair of texts."""

    def __init__(self, job: dict[str, Any], tokenizer: Any) -> None:
        self.task, data = find_task(job["task"]), Path(job["data"])
        train_file, dev_file = (find_file(self.task, data, split) for split in ("train", "dev"))
        assert train_file is not None and dev_file is not None
        train = read_examples(train_file, self.task)
        self.dev_examples = read_examples(dev_file, self.task, train.label_names)
        self.num_outputs = max(1, len(train.label_names))
        self.train, self.dev = (
            self._rows(examples, tokenizer, job["max_length"])
            for examples in (train, self.dev_examples)
        )
        self.train_examples = len(train)

    @staticmethod
    def _rows(examples: Any, tokenizer: Any, max_length: int) -> list[Row]:
        found = tokenizer(
            examples.texts, examples.pairs, truncation="longest_first", max_length=max_length
        )
        labels = examples.labels.tolist()
        return [
            {**{name: found[name][k] for name in found}, "labels": labels[k]}
            for k in range(len(labels))
        ]

    def model(self, folder: str) -> Any:
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=self.num_outputs,
            problem_type="regression" if self.num_outputs == 1 else "single_label_classification",
        )

    def measure(self, outputs: list[Any]) -> dict[str, float]:
        scores = np.stack([output.logits for output in outputs])
        labels = self.dev_examples.labels
        assert labels is not None
        predicted = scores[:, 0] if self.num_outputs == 1 else scores.argmax(axis=1)
        return compute_metrics(self.task.metrics, predicted, labels, self.num_outputs)


class Answers:
    """The stretch of a context that answers a question (SQuAD 1.1)."""

    def __init__(self, job: dict[str, Any], tokenizer: Any) -> None:
        data = Path(job["data"])
        train, self.questions = (read_questions(data / f"{name}.json") for name in ("train", "dev"))
        train = train.select(np.flatnonzero(~train.is_lost))
        self.train = windows(train, tokenizer, job["max_length"])[0]
        self.dev, self.owners, self.offsets = windows(self.questions, tokenizer, job["max_length"])
        self.train_examples = len(train)

    def model(self, folder: str) -> Any:
        return transformers.AutoModelForQuestionAnswering.from_pretrained(folder)

    def measure(self, outputs: list[Any]) -> dict[str, float]:
        best: dict[int, tuple[float, str]] = {}
        for output, question, offsets in zip(outputs, self.owners, self.offsets, strict=True):
            context = self.questions.contexts[self.questions.context_numbers[question]]
            found = best_span(output.start_logits, output.end_logits, offsets)
            if found and (question not in best or found[0] > best[question][0]):
                best[question] = found[0], context[found[1] : found[2]]
        texts = {self.questions.ids[question]: text for question, (_, text) in best.items()}
        scores = squad1_scores(self.questions, texts)
        return {"answer_f1": scores["f1"] / 100, "exact_match": scores["exact"] / 100}


def windows(
    questions: Questions, tokenizer: Any, max_length: int
) -> tuple[list[Row], list[int], list[np.ndarray]]:
    """Rows with the answer's first and last token, 0 and 0 ([CLS]) where a window lacks it.

    Returns them, the question of each, and the characters [S, 2] of its tokens (-1: not context).
    """
    contexts = [questions.contexts[number] for number in questions.context_numbers]
    found = tokenizer(
        questions.texts,
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=OVERLAP,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = found.pop("overflow_to_sample_mapping")
    mapping = found.pop("offset_mapping")
    rows, offsets = [], []
    for w, owner in enumerate(owners):
        in_context = np.array([part == 1 for part in found.sequence_ids(w)])
        places = np.where(in_context[:, None], mapping[w], -1).astype(np.int32)
        (begin, end), row = questions.spans[owner], {name: found[name][w] for name in found}
        inside = np.flatnonzero(in_context)
        row |= dict.fromkeys(ANSWERS, 0)
        if begin >= 0 and places[inside[0], 0] <= begin and end <= places[inside[-1], 1]:
            row["start_positions"] = int(inside[places[inside, 0] <= begin][-1])
            row["end_positions"] = int(inside[places[inside, 1] >= end][0])
        rows.append(row)
        offsets.append(places)
    return rows, owners, offsets


def best_span(
    starts: np.ndarray, ends: np.ndarray, offsets: np.ndarray
) -> tuple[float, int, int] | None:
    """(Score, characters begin, end) of the best answer among the best starts and ends."""
    first, last = (
        [int(k) for k in np.argsort(-scores)[:N_BEST] if k < len(offsets) and offsets[k, 0] >= 0]
        for scores in (starts, ends)
    )
    spans = [
        (float(starts[i] + ends[j]), int(offsets[i, 0]), int(offsets[j, 1]))
        for i in first
        for j in last
        if i <= j < i + MAX_ANSWER
    ]
    return max(spans, default=None)


def outputs_of(model: Any, rows: list[Row], collate: Any, batch: int, bf16: bool) -> list[Any]:
    """The model's outputs for each row, as arrays, in the rows' order."""
    order = np.argsort([-len(row["input_ids"]) for row in rows], kind="stable")
    found: list[Any] = [None] * len(rows)
    unlabelled = [{k: v for k, v in row.items() if k not in ("labels", *ANSWERS)} for row in rows]
    model.eval()
    for start in range(0, len(rows), batch):
        chosen = order[start : start + batch]
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**collate([unlabelled[k] for k in chosen]))
        arrays = {name: value.float().numpy() for name, value in output.items()}
        for place, k in enumerate(chosen):
            found[k] = type(output)(**{name: array[place] for name, array in arrays.items()})
    model.train()
    return found


class Dev(transformers.TrainerCallback):
    """The dev figures after every epoch, and the seconds they took."""

    def __init__(self, data: Texts | Answers, collate: Any, batch: int, bf16: bool) -> None:
        self.data, self.collate, self.batch, self.bf16 = data, collate, batch, bf16
        self.epochs: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        started = time.perf_counter()
        outputs = outputs_of(parts["model"], self.data.dev, self.collate, self.batch, self.bf16)
        self.epochs.append(self.data.measure(outputs))
        self.seconds += time.perf_counter() - started


def main() -> None:
    job = json.loads(sys.argv[1])
    options = SYSTEMS[job["system"]]
    if "kept memory" in job["system"]:
        keep_freed_memory()
    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    transformers.set_seed(job["seed"])  # the new head's weights
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    data = (Answers if job["task"] == "squad1" else Texts)(job, tokenizer)
    collate = transformers.DataCollatorWithPadding(tokenizer)
    dev = Dev(data, collate, job["batch"], bool(options.get("bf16")))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=data.model(job["model"]),
            args=transformers.TrainingArguments(
                output_dir=folder,
                num_train_epochs=job["epochs"],
                per_device_train_batch_size=job["batch"],
                learning_rate=job["rate"],
                warmup_steps=0.1,  # below 1: a share
                weight_decay=0.01,
                seed=job["seed"],
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
                **options,
            ),
            train_dataset=data.train,
            data_collator=collate,
            processing_class=tokenizer,
            callbacks=[dev],
        )
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started - dev.seconds
    figures = {
        "epochs": dev.epochs,
        "seconds": round(seconds, 3),
        "train_examples": data.train_examples,
        "steps": trainer.state.global_step,
    }
    write_json(Path(job["out"]), figures)


if __name__ == "__main__":
    main()
