"""Tag words over a frozen model with a BiLSTM: the six rows of the paper's Table 7.

Examples:
    bertsmith feature-ner --data conll2003 --model bert-base-cased --out runs/table7
    bertsmith feature-ner --data conll2003 --model run --out t7 --rows last concat-last-four
    bertsmith feature-ner --data conll2003 --model run --out t7-all --sentences 0 --seeds 1..5

The model's states of every word are computed once; each row then trains a two-layer BiLSTM over
other layers of them (paper section 5.3). The table of entity F1 is also in OUT/table.md. The same
command again goes on where it was stopped; more rows or seeds are added to what is there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from bertsmith.cli.finetune import check_tagged_pieces, parse_seeds, read_data
from bertsmith.finetuning.frozen_settings import ROWS, FrozenSettings


@dataclass(frozen=True, kw_only=True)
class FeatureNer(FrozenSettings):
    data: Path
    """Folder with train, dev and test files in CoNLL columns, .jsonl or .parquet."""
    model: str
    """A run, a Hugging Face folder or hub name."""
    out: Path
    """Run directory to write, or to go on with."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which rows of the table."""
    seeds: str = "1"
    """Seeds, such as 1,2,3 or 1..5."""
    given: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run_feature_ner(settings: FeatureNer) -> None:
    seeds = parse_seeds(settings.seeds)
    from bertsmith.checkpoints.folder import load_tokenizer
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.checkpoints.tensors import weight_files
    from bertsmith.cli.outputs import check_folder
    from bertsmith.finetuning.feature_table import feature_table, table
    from bertsmith.finetuning.tag_kind import Tag
    from bertsmith.tasks.rows import digest
    from bertsmith.tasks.table import find_task
    from bertsmith.tasks.tagging_sets import case_warning

    check_folder(settings.out)
    folder, task, kind = open_model_folder(settings.model), find_task("ner"), Tag()
    train, dev, record = read_data(kind, task, settings.data, None)
    data = {"train": train, **dev}
    if "tagged_pieces" in settings.given:
        check_tagged_pieces(settings.tagged_pieces, settings.document_context, *data.values())
    if test := kind.find_file(task, settings.data, "test"):
        data["test"] = kind.read(test, task, kind.label_names(train))
        record["data_sha256"]["test"] = digest(test)
    record["model_sha256"] = [digest(path) for path in weight_files(folder)]
    print(kind.summarise(train, data["dev"]), file=sys.stderr)
    if warning := case_warning(train, load_tokenizer(folder).normalization):
        print(warning, file=sys.stderr)
    recipe = {field.name: getattr(settings, field.name) for field in fields(FrozenSettings)}
    result = feature_table(
        folder,
        data,
        settings.rows,
        seeds,
        FrozenSettings(**recipe),
        settings.out,
        record,
        ["bertsmith", *sys.argv[1:]],
    )
    for line in table(result):
        print(line)
