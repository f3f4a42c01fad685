"""The settings of the quickstart and of the paper's experiments, light enough for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from bertsmith.base.settings import Advanced, Count, Metavar, Positional, Seed, check_bounds
from bertsmith.training.settings import Machine

ScaleName = Literal["nano", "small", "paper"]
SCALES = get_args(ScaleName)


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings:
    minutes: float = 4.0
    """Minutes of pre-training."""
    size: str = "tiny"
    """tiny, mini, small, ... or LAYERSxHIDDEN."""
    vocab_size: int = 8000
    """Pieces of the vocabulary."""
    learning_rate: float | None = None
    """Peak learning rate of pre-training. Default: that of `bertsmith pretrain`."""
    epochs: int = 5
    """Epochs of each fine-tuning."""
    seed: Annotated[int, Seed] = 12345
    workers: Annotated[int, Count] = 2
    """Processes that read and tokenize."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class ReproduceSettings(Machine):
    """Experiments, their scale, and the files that they read (paper/reproduce.py)."""

    common = ("text", "models", "out", "scale", "dry_run")

    experiments: Annotated[tuple[str, ...], Positional, Metavar("NAME...")]
    """table1 to table8, figure5, all of these, lineage, or the TOML file of one of your own."""
    data: Path
    """Folder with the tasks' folders, such as SST-2 or glue/SST-2, conll2003, squad/v1.1, swag."""
    text: Annotated[tuple[Path, ...], Metavar("FILE...")] = ()
    """Files or folders of text to pre-train on; capitals are kept."""
    models: Annotated[tuple[str, ...], Metavar("MODEL...")] = ()
    """Tables 1 to 4 and 7: models that are there, as further rows; without --text as the only."""
    out: Path = Path("reproduced")
    """Folder to write; the same command goes on in it, and so may several at once."""
    scale: ScaleName = "nano"
    """nano: for two cores; small: for one GPU; paper: the paper's own sizes."""
    tasks: Annotated[tuple[str, ...], Advanced] = ()
    """Columns of the table; by default all whose data are there."""
    variants: Annotated[tuple[str, ...], Advanced] = ()
    """Rows of the table, by their names in its file; by default all."""
    seeds: Annotated[int | None, Count, Advanced] = None
    """Fine-tunings of each model, in place of the scale's."""
    dry_run: bool = False
    """Say what is left to compute and about how long it takes; compute nothing."""
    workers: Annotated[int, Count, Advanced] = 2
    """Processes that read and tokenize."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if "all" in self.experiments and len(self.experiments) > 1:
            raise ValueError("`all` has every table and the figure: leave the others out")
