"""The recipes that come with the package: TOML files of pre-training settings."""

from __future__ import annotations

from pathlib import Path

from bertsmith.config import nearest, read_toml
from bertsmith.training.pretrain_settings import PretrainSettings

RECIPES = Path(__file__).parents[1] / "configs"


def recipe_file(recipe: str | Path) -> Path:
    """The file of a recipe: a path, or the bare name of one that comes with the package.

    Errors: ValueError for a bare name that none has; it tells the nearest.

    >>> recipe_file("paper").name, recipe_file("mine.toml").name
    ('paper.toml', 'mine.toml')
    """
    path = Path(recipe)
    if path.suffix or len(path.parts) != 1:
        return path
    known = sorted(file.stem for file in RECIPES.glob("*.toml"))
    if path.name not in known:
        raise ValueError(
            f"--config {path}: no such recipe: {nearest(path.name, known)} "
            "(the name of a file ends in .toml)"
        )
    return RECIPES / f"{path.name}.toml"


def read_recipe(recipe: str | Path) -> PretrainSettings:
    """The settings of a recipe. Errors: ValueError that names the file and what is wrong in it."""
    return read_toml(PretrainSettings, recipe_file(recipe))
