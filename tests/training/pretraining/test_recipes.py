"""The recipes load, say what they claim, are found by their names, and give way to flags."""

import tomllib

import pytest

from bertsmith.cli.flags import read_command
from bertsmith.cli.train import Pretrain, _recipe
from bertsmith.training.loop.schedule import default_rate
from bertsmith.training.pretraining.settings import (
    RECIPES,
    SHAPE,
    PretrainSettings,
    read_recipe,
    recipe_file,
)

from ...tiny import cli, write

NAMES = ("continue", "fast", "paper")
GIVEN = ("--corpus", "store", "--out", "run")


def read_words(config, *words):
    """The settings that a command line comes to, and the names of those that it gives."""
    given = [*GIVEN, "--config", str(config), *words]
    recipe = _recipe(read_command(Pretrain, "pretrain", given))
    return recipe.settings, recipe.explicit


def recipe_of(config, *words):
    return read_words(config, *words)[0]


def test_a_recipe_gives_way_to_flags_that_leave_a_part_of_it_without_sense():
    recipe = recipe_of("fast", "--objective", "ltr")
    assert (recipe.objective, recipe.mlm_probability, recipe.learning_rate) == ("ltr", 0.15, None)
    recipe = recipe_of("paper", "--objective", "mlm")
    assert (recipe.objective, recipe.nsp_sampling, recipe.short_seq_prob) == ("mlm", None, 0.0)


def test_a_second_phase_of_rows_that_are_not_longer_gives_way():
    def lengths(*words):
        return [phase.length for phase in recipe_of("paper", *words).phases()]

    assert lengths("--max-length", "256") == [256, 512]
    assert lengths("--max-length", "512") == [512]
    assert lengths("--max-length", "512", "--phase2-length", "1024") == [512, 1024]


def test_a_recipe_of_ones_own_gives_way_too(tmp_path):
    lines = ["batch_size = 256", "micro_batch_size = 32", "phase2_length = 256"]
    lines += ["phase2_ratio = 0.3", "phase2_batch_size = 64", "nsp_sampling = 'clean'"]
    file = write(tmp_path / "mine.toml", [*lines, "steps = 100"])
    recipe = recipe_of(file, "--max-length", "256")
    assert recipe.phase2_length is recipe.phase2_batch_size is None
    assert recipe.phase2_ratio == 0.1
    with pytest.raises(ValueError, match="`phase2_ratio=0.2`: there is no second phase"):
        recipe_of(file, "--max-length", "256", "--phase2-ratio", "0.2")
    assert recipe_of(file, "--objective", "mlm").nsp_sampling is None
    with pytest.raises(ValueError, match="`nsp_sampling=clean`: the objective mlm has no pairs"):
        recipe_of(file, "--objective", "mlm", "--nsp-sampling", "clean")
    assert recipe_of(file, "--batch-size", "16").micro_batch_size is None
    assert recipe_of(file, "--batch-size", "64").micro_batch_size == 32


def test_a_recipe_out_of_an_editor_of_windows_is_read(tmp_path):
    """Which begins a file with a mark, and ends its lines in its own way."""
    file = write(tmp_path / "mine.toml", b'\xef\xbb\xbfsteps = 7\r\nsize = "mini"\r\n')
    recipe, given = read_words(file)
    assert (recipe.steps, recipe.size) == (7, "mini") and given == {"steps", "size"}


def test_beside_a_model_to_go_on_from_a_recipe_has_no_shape():
    recipe, given = read_words("paper", "--model", "model")
    assert not SHAPE & given and {"phase2_length", "steps"} <= given
    assert all(getattr(recipe, name) == getattr(PretrainSettings, name) for name in SHAPE)
    assert recipe.dropout == 0.1
    with pytest.raises(ValueError, match="size: fixed by `model`, from which"):
        read_words("paper", "--model", "model", "--size", "mini")


def test_each_recipe_is_found_by_its_bare_name():
    assert sorted(path.stem for path in RECIPES.glob("*.toml")) == list(NAMES)
    for name in NAMES:
        by_path = recipe_of(RECIPES / f"{name}.toml", "--steps", "1000000")
        assert recipe_of(name, "--steps", "1000000") == by_path


def test_fast_is_what_the_budget_literature_agrees_on():
    recipe = read_recipe("fast")
    assert recipe.dropout == recipe.attention_dropout == 0.0
    assert 0.15 <= recipe.mlm_probability <= 0.30
    assert recipe.learning_rate is None and default_rate(hidden_size=256) == 1e-3  # of mini
    assert recipe.phase2_length is None
    assert recipe.precision == "auto-int8"


def test_paper_has_the_values_of_the_papers_appendix():
    recipe = read_recipe("paper")
    assert (recipe.batch_size, recipe.max_length) == (256, 128)
    assert (recipe.steps, recipe.learning_rate) == (1_000_000, 1e-4)
    assert (recipe.dropout, recipe.attention_dropout, recipe.weight_decay) == (0.1, 0.1, 0.01)
    assert recipe.warmup_ratio * recipe.steps == 10_000
    assert (recipe.optimizer, recipe.schedule) == ("paper-adam", "paper")
    assert recipe.init_scheme == recipe.nsp_sampling == "paper"
    assert [(phase.length, phase.until) for phase in recipe.phases()] == [(128, 0.9), (512, 1.0)]
    # create_pretraining_data.py: max_predictions_per_seq is 20 and 77, and 15% are at most these
    examples = [recipe.examples(phase.length) for phase in recipe.phases()]
    assert [example.num_predictions for example in examples] == [19, 77]
    assert (recipe.mask_replace_prob, recipe.random_replace_prob) == (0.8, 0.1)
    assert recipe.short_seq_prob == 0.1
    assert (recipe.layer_norm, recipe.glu) == ("post", False)


def test_continue_is_gentler_than_fast():
    assert read_recipe("fast").learning_rate is None
    assert read_recipe("continue").learning_rate < default_rate(hidden_size=768)
    assert read_recipe("continue").warmup_ratio < 0.1


@pytest.mark.parametrize("name", ["fast", "continue"])
def test_a_recipe_of_no_size_goes_on_from_any_model(name):
    # what --model fixes must not be in it
    assert not SHAPE & tomllib.loads(recipe_file(name).read_text(encoding="utf-8")).keys()


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"`recipe='papr'`: no such recipe: did you mean 'paper'\?"
    ):
        recipe_file("papr")


def test_a_flag_overrules_the_recipe():
    assert recipe_of("paper", "--minutes", "5").steps is None
    assert recipe_of("paper", "--warmup-steps", "7").warmup_steps == 7
    assert recipe_of("paper", "--micro-batch-size", "64").micro_batch_size == 64
    auto = recipe_of("paper", "--micro-batch-size", "auto")
    assert (auto.batch_size, auto.micro_batch_size) == (256, "auto")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch-size", "auto"], "--batch-size auto: must be a whole number"),
        (["--resume", "--dry-run"], "--resume and --dry-run: give one of them"),
        (["--resume", "--replay"], "--resume and --replay: give one of them"),
        (
            ["--config", "mine.toml"],
            "mine.toml: unknown setting 'mlm_probabilit': did you mean 'mlm_probability'?",
        ),
    ],
)
def test_flags_and_recipes_that_make_no_sense_are_refused(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.toml", ["mlm_probabilit = 0.3"])
    ran = cli("pretrain", *GIVEN, *words)
    (line,) = ran.err.splitlines()
    assert ran.code == 2 and says in line
