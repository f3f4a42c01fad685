"""The recipes in configs/ load, and say what they claim."""

from pathlib import Path

from bertsmith.config import read_toml
from bertsmith.training.pretrain_settings import PretrainSettings

CONFIGS = Path(__file__).parents[1] / "configs"


def test_fast_is_the_default():
    assert read_toml(PretrainSettings, CONFIGS / "fast.toml") == PretrainSettings()


def test_paper_has_the_values_of_the_papers_appendix():
    recipe = read_toml(PretrainSettings, CONFIGS / "paper.toml")
    assert (recipe.batch, recipe.length, recipe.steps, recipe.rate) == (256, 128, 1_000_000, 1e-4)
    assert (recipe.dropout, recipe.attention_dropout, recipe.weight_decay) == (0.1, 0.1, 0.01)
    assert recipe.warmup * recipe.steps == 10_000
    assert (recipe.optimizer, recipe.schedule, recipe.start) == ("paper-adam", "paper", "paper")
