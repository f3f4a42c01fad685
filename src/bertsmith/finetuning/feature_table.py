"""Table 7 of the paper in one run directory: every row trained over the same stored states.

OUT/run.json              the settings; another run of the same settings goes on
OUT/states/SPLIT.npy      the states of every word in all layers, float16; may be removed
OUT/rows/ROW/SEED/        the log of one training
OUT/result.json table.md  what is done so far, written again after every training
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.checkpoints.folder import BareModel, load_model, load_tokenizer
from bertsmith.checkpoints.model_config import read_config
from bertsmith.checkpoints.run import RESULT_FILE, RunFolder
from bertsmith.files import write_text
from bertsmith.finetuning.frozen import TaggedStates, train_row
from bertsmith.finetuning.frozen_settings import DEEPEST, ROWS, FrozenSettings
from bertsmith.finetuning.word_states import word_states
from bertsmith.progress import Progress
from bertsmith.tasks.layout import Layout
from bertsmith.tasks.tagging_features import featurise_sentences
from bertsmith.tasks.tagging_files import Sentences
from bertsmith.training import engine as engines

KIND = "feature-ner"


def feature_table(
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    out: Path,
    record: dict[str, Any],
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Train `rows` with all `seeds` on the encoder in `folder`; what result.json holds then.

    `data` has "train", "dev" and perhaps "test"; `record` what else decides the figures, such as
    the hashes of the files. A training that `out` has already is not done again.

    Errors: ValueError for an unknown row, a model with too few layers or positions, an `out` of
    other settings, or one that another process writes; those of `featurise_sentences` and
    `word_states`.
    """
    config = read_config(folder)
    for name in rows:
        if name not in ROWS:
            raise ValueError(f"unknown row '{name}': known are {', '.join(ROWS)}")
    if config.num_layers < DEEPEST:
        raise ValueError(f"{folder}: {config.num_layers} layers, but Table 7 reads the last four")
    if settings.max_length > config.max_positions:
        raise ValueError(
            f"--max-length {settings.max_length}: the model knows {config.max_positions} positions"
        )
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    run = RunFolder(out)
    wanted = {**asdict(settings), **engine.settings(), "model": str(folder), **record}
    _goes_on(run, wanted)
    with run.held():
        if not _goes_on(run, wanted):  # again: another process may have been here meanwhile
            machine = engines.machine(engine, engines.measure_peak(engine))
            run.write_settings(
                {"kind": KIND, "command": list(command), "settings": wanted, "machine": machine}
            )
        return _fill(run, folder, data, rows, seeds, settings, engine)


def _fill(
    run: RunFolder,
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    engine: engines.Engine,
) -> dict[str, Any]:
    """Train what is missing; what result.json holds then."""
    out = run.path
    names = data["train"].labels()[1]  # also of types that begin behind the first sentences
    if settings.sentences:
        first = np.arange(min(settings.sentences, len(data["train"])))
        data = {**data, "train": data["train"].select(first)}
    result: dict[str, Any] = {"rows": {}, "sentences": {s: len(d) for s, d in data.items()}}
    if (out / RESULT_FILE).exists():
        result = run.result()
    todo = [
        (row, seed)
        for row in rows
        for seed in seeds
        if str(seed) not in result["rows"].get(row, {"seeds": {}})["seeds"]
    ]
    if todo:
        states = _states(folder, data, names, settings, engine, out / "states")
    for row, seed in todo:
        started = time.monotonic()
        scores = train_row(
            ROWS[row], states, names, settings, seed, engine, out / "rows" / row / str(seed)
        )
        figures = {split: scores[split]["entity_f1"] for split in scores}
        done = result["rows"].setdefault(
            row, {"paper_dev": round(ROWS[row].paper / 100, 4), "seeds": {}}
        )
        done["seeds"][str(seed)] = {**figures, "seconds": round(time.monotonic() - started, 1)}
        run.write_result(result)
        write_text(out / "table.md", "\n".join(table(result)) + "\n")
    return result


def _goes_on(run: RunFolder, wanted: dict[str, Any]) -> bool:
    """Whether `run` is one of these settings. Errors: ValueError when it is another run."""
    if run.kind() != KIND:
        run.check_free(KIND)
        return False
    stored = run.settings()["settings"]
    for name in wanted:
        if stored.get(name) != wanted[name]:
            raise ValueError(
                f"{run.path} was made with {name} = {stored.get(name)}, not {wanted[name]}: give"
                " the same settings to go on with it, or name another --out"
            )
    return True


def _states(
    folder: Path,
    data: dict[str, Sentences],
    names: tuple[str, ...],
    settings: FrozenSettings,
    engine: engines.Engine,
    stored: Path,
) -> dict[str, TaggedStates]:
    """The splits with their states; `names` are those of the classes."""
    layout = Layout(
        max_length=settings.max_length,
        document_context=settings.document_context,
        tagged_pieces=settings.tagged_pieces,
    )
    tokenizer = load_tokenizer(folder)
    encoder = load_model(folder, BareModel).model.encoder.to(engine.device)
    found = {}
    for split, sentences in data.items():
        labels, _ = sentences.labels(names)
        features = featurise_sentences(tokenizer, sentences, None, layout)
        with Progress(f"states of {split}", total=len(features), unit="rows") as bar:
            states = word_states(
                encoder, features, stored / f"{split}.npy", engine, on_batch=bar.update
            )
        found[split] = TaggedStates(sentences, labels, states)
    return found


def table(result: dict[str, Any]) -> Iterable[str]:
    """The rows in Markdown, in the order of the paper: entity F1 in percent, mean over the seeds
    and, of several, their standard deviation."""
    splits = [split for split in result["sentences"] if split != "train"]
    yield (
        "| features | "
        + " | ".join(f"{s} F1" for s in splits)
        + " | paper, BASE, dev | seeds | s |"
    )
    yield "|---|" + "---|" * (len(splits) + 3)
    for name, row in ROWS.items():
        if name not in result["rows"]:
            continue
        seeds = list(result["rows"][name]["seeds"].values())
        cells = [_mean([100 * seed[split] for seed in seeds]) for split in splits]
        cells += [f"{row.paper:.1f}", str(len(seeds))]
        cells.append(f"{np.mean([seed['seconds'] for seed in seeds]):.0f}")
        yield f"| {row.title} | {' | '.join(cells)} |"


def _mean(values: list[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"
