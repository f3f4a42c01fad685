"""The experiments at toy size: cells that are made once, whatever stops them, and their page."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bertsmith.base.files import read_json
from bertsmith.experiments.paper import cells as cells_file
from bertsmith.experiments.paper.experiment import (
    SCALES,
    experiment_names,
    overridden,
    read_experiment,
)
from bertsmith.experiments.paper.page import parts
from bertsmith.experiments.paper.reproduce import plans_of
from bertsmith.experiments.paper.verdicts import held, paired_p, row_of
from bertsmith.experiments.paper.work import Work, find_data, resolved
from bertsmith.experiments.settings import ReproduceSettings
from bertsmith.tasks.task import find_task
from bertsmith.training.finetuning.settings import DEEPEST
from bertsmith.training.settings import Machine

from ..tiny import ANIMALS, PLACES, cli, python, refused, write

TOY = """
title = "Toy"
about = "A toy."
columns = ["perplexity", "sst2", "ner", "ner features"]
models = true
{more}
[nano]
vocab_size = 65
seeds = {seeds}
train_examples = 40
dev_examples = 30
finetune = {{ epochs = 2, max_length = 32 }}
finetune_own = {{ learning_rate = 2e-3 }}
[nano.pretrain]
size = "4x64"
steps = 6
batch_size = 8
max_length = 32
checkpoint_every = 3
mlm_probability = 0.2
[nano.features]
epochs = 1
hidden_size = 8
sentences = 20
max_length = 32
tokens_per_window = 16

[[variants]]
name = "mlm"
title = "Masked"
pretrain = {{ objective = "mlm" }}
paper = {{ sst2 = 92.6 }}

[[variants]]
name = "ltr"
title = "Left to right"
pretrain = {{ objective = "ltr" }}
columns = ["perplexity", "sst2"]

[[variants]]
name = "again"
title = "Masked, again"
pretrain = {{ objective = "mlm", mlm_probability = 0.2 }}
columns = ["sst2"]

[[variants]]
name = "elmo"
title = "ELMo"
system = "elmo"
sizes = {{ nano = "16x32" }}
columns = ["sst2"]

[[claims]]
better = "mlm"
worse = "ltr"
source = "the paper"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(3)

    def sentence(mood):
        return f"The {draw.choice(ANIMALS)} in the {draw.choice(PLACES)} is {mood}."

    documents = [[sentence(draw.choice(("glad", "sad"))) for _ in range(2)] for _ in range(600)]
    text = write(folder / "text.txt", "\n\n".join("\n".join(one) for one in documents))
    for split, count in (("train", 60), ("dev", 30)):
        rows = [f"{sentence(('sad', 'glad')[k % 2])}\t{k % 2}" for k in range(count)]
        write(folder / "data/glue/SST-2" / f"{split}.tsv", ["sentence\tlabel", *rows])
        tagged = []
        for _ in range(count):
            words = sentence("glad").rstrip(".").split()
            tagged += [f"{w} {'B-PER' if w in ANIMALS else 'O'}" for w in words] + [""]
        write(folder / "data/conll2003" / f"{split}.txt", tagged)
    return text, folder / "data", folder


def toy(files, name="toy", seeds=1, more=""):
    return write(files[2] / f"{name}.toml", TOY.format(seeds=seeds, more=more))


def command(files, out, *more, toml=None):
    text, data = map(os.path.relpath, files[:2])
    given = ["reproduce", toml or toy(files), "--text", text, "--data", data, "--out", out]
    return [*given, "--workers", 1, "--threads", 1, "--precision", "float32", *more]


def made(out):
    """The cells' kinds and labels, without their keys."""
    return sorted(path.parent.name.rpartition("-")[0] for path in out.glob("cells/*/cell.json"))


def rate_of(out, row):
    """The learning rate of a row's fine-tuning."""
    run = next(out.glob(f"cells/finetune-{row}-sst2-1-*/run.json"))
    return read_json(run)["settings"]["learning_rate"]


ALL = sorted(
    ["text-65", "pretrain-mlm-4x64", "pretrain-ltr-4x64", "pretrain-elmo-16x32"]
    + ["features-mlm-4x64-ner-1"]
    + [f"finetune-{row}-1" for row in ("mlm-4x64-sst2", "mlm-4x64-ner", "ltr-4x64-sst2")]
    + ["finetune-elmo-16x32-sst2-1"]
)


def test_killed_experiments_go_on_and_make_no_cell_twice(files, tmp_path, monkeypatch):
    """Stopped once in every cell, between the end of its run and the mark that it is done."""
    out, stops, done = tmp_path / "out", [], []
    write_mark = cells_file.write_json

    def stopped_once(path, value):
        cell = path.parent.name.rpartition("-")[0]
        if cell not in stops:
            stops.append(cell)
            raise KeyboardInterrupt
        done.append(cell)
        write_mark(path, value)

    monkeypatch.setattr(cells_file, "write_json", stopped_once)
    assert {cli(*command(files, out)).code for _ in ALL} == {130}
    assert not (out / "toy.md").exists()
    ran = cli(*command(files, out))
    assert ran.code == 0, ran.err
    assert made(out) == sorted(done) == sorted(stops) == ALL
    for result in out.glob("cells/finetune-*/seeds/1/log.jsonl"):
        assert result.read_text().count('"event": "evaluate"') == 1  # trained once
        given = read_json(result.parents[2] / "run.json")["settings"]
        assert given["data"].startswith(str(files[1])), given  # it goes on however it is spelled
    elmo = read_json(next(out.glob("cells/pretrain-elmo-*/run.json")))["settings"]
    assert elmo["text"] == [str(files[0])]
    assert (out / "toy.md").read_text() in ran.out
    assert rate_of(out, "mlm-4x64") == 2e-3 != rate_of(out, "elmo-16x32")

    page, result = (out / "toy.html").read_text(), read_json(out / "toy.json")
    for words in ("Masked", "Left to right", "(92.6)", "the paper", "What the paper says"):
        assert words in ran.out and words in page
    assert result["claims"][0]["words"]["sst2"].startswith("not sure")  # of one seed
    assert "of one pre-training each" in result["claims"][0]["words"]["perplexity"]
    mlm, again = (result["rows"][name]["figures"] for name in ("mlm", "again"))
    assert again["sst2"]["seeds"] == mlm["sst2"]["seeds"]  # equal settings are one cell
    assert mlm["ner features"]["seeds"].keys() == {"1"} and "parameters" in mlm["sst2"]

    # the same is the same; other seeds are other cells, and what they share stays
    assert cli(*command(files, out)).out == ran.out and len(done) == len(ALL)
    (out / "toy.md").unlink()
    two = ["reproduce", toy(files, "two", seeds=2), *command(files, out)[1:]]
    assert cli(*two).code == 130  # in a cell of `two`, when `toy` has its page again
    assert (out / "toy.md").read_text() in ran.out and not (out / "two.md").exists()
    monkeypatch.setattr(cells_file, "write_json", write_mark)
    assert cli(*command(files, out, "--seeds", 2, "--tasks", "sst2")).code == 0
    rows = ("mlm-4x64", "ltr-4x64", "elmo-16x32")
    assert sorted({*made(out)} - {*ALL}) == sorted(f"finetune-{row}-sst2-2" for row in rows)
    dry = cli(*command(files, out, "--seeds", 3, "--tasks", "sst2", "--dry-run"))
    assert "3 of 9 finetune cells left" in dry.out and "0 of 3 pretrain cells" in dry.out


def test_points_of_a_pretraining_and_models_of_the_user(files, tmp_path):
    out = tmp_path / "out"
    curve = (
        toy(files, "curve", more="points = [0.5, 1.0]").read_text().replace('"perplexity", ', "")
    )
    curve = curve[: curve.index('[[variants]]\nname = "elmo"')] + curve[curve.index("[[claims]]") :]
    curve = curve.replace('better = "mlm"', 'better = "mlm@1"')
    curve = curve.replace('worse = "ltr"', 'worse = "mlm@0.5"')
    toml = write(files[2] / "curve.toml", curve)
    assert "paper: unknown column 'sst2': did you" in refused(*command(files, out, toml=toml))
    toml = write(files[2] / "curve.toml", curve.replace("sst2 = 92.6", '"sst2@0.5" = 92.6'))
    ran = cli(*command(files, out, "--tasks", "sst2", toml=toml))
    assert ran.code == 0, ran.err
    assert "pretrain-mlm-4x64" in made(out) and "finetune-mlm-4x64-step3-sst2-1" in made(out)
    assert "Over the pre-training" in (out / "curve.html").read_text()
    curves = read_json(out / "curve.json")["curves"]
    assert [at for at, _ in curves["Masked"]] == [0.5, 1.0]
    assert curves["Masked"][0][1]["sst2"]["paper"] == 92.6
    half, whole = (read_json(out / "curve.json")["rows"][f"mlm@{at}"] for at in ("0.5", "1"))
    for name in ("tokens", "flops"):  # of three steps, and of six
        assert 2 * half["pretraining"][name] == whole["pretraining"][name]

    model = next(out.glob("cells/pretrain-mlm-*"))
    given = ["--models", model, "--variants", "ltr", "--tasks", "sst2"]
    ran = cli(*command(files, out, *given))
    assert ran.code == 0, ran.err
    assert f"| {model.name} |" in ran.out and "Masked" not in ran.out
    assert rate_of(out, "model") == pytest.approx(5e-5 * 768 / 64)  # by its width


def test_a_model_that_is_there_has_no_perplexity(files):
    text = toy(files).read_text().replace('title = "Masked"', 'title = "Masked"\nmodel = "m"')
    experiment = read_experiment(str(write(files[2] / "there.toml", text)), "nano")
    there, made_here = map(experiment.columns_of, experiment.variants[:2])
    assert [column.name for column in there] == ["sst2", "ner", "ner features"]
    assert [column.name for column in made_here] == ["perplexity", "sst2"]


def test_without_a_text_models_alone_are_measured(files, capsys):
    text = toy(files).read_text()
    for name in ("Masked", "Left to right"):
        text = text.replace(f'title = "{name}"', f'title = "{name}"\nmodel = "m"')
    own = write(files[2] / "models.toml", text)
    (experiment, _) = plans_of(ReproduceSettings(experiments=(str(own),), data=files[1]))["models"]
    assert [one.name for one in experiment.variants] == ["mlm", "ltr"]
    assert len(experiment.claims) == 1
    of_all = ReproduceSettings(experiments=("all",), data=files[1], models=("model",))
    assert plans_of(of_all).keys() == {"table1", "table7"}
    assert "table5: left out: Table 5: pre-training tasks: name `text`" in capsys.readouterr().err


def test_a_text_too_short_for_a_perplexity_leaves_the_page(files, monkeypatch, capsys):
    experiment = read_experiment(str(toy(files)), "nano")
    monkeypatch.setattr(Work, "result", lambda *_: {"steps": 6, "tokens": 9, "flops": 8.0})
    work = Work("nano", experiment.scale, [], {}, (), (), root=None)
    variant = replace(experiment.variants[0], columns=("perplexity",))
    row = row_of(experiment, work, variant)
    assert row["figures"] == {}
    assert "Masked: no perplexity: the text is too short" in capsys.readouterr().err
    result = {"rows": {"mlm": row}, "columns": ["perplexity"], "tests": (), "claims": ()}
    *_, costs = parts({**result, "curves": {}})
    assert costs.rows == [["Masked", "4x64", "9", "8.00e+00", "–", "–"]]


def test_the_precision_of_a_pretraining_is_in_its_key():
    experiment = read_experiment("table7", "nano")
    machine = Machine(device="cpu", precision="float32")
    for asked, wanted in (
        ({}, "float32"),
        ({"recipe": "fast"}, "float32"),  # the command's, before the recipe's
        ({"recipe": "fast", "precision": "auto-int8"}, "auto-int8"),
    ):
        work = Work("nano", experiment.scale, [], {}, (), (), root=None, machine=machine)
        variant = replace(experiment.variants[0], pretrain=asked)
        assert work.pretraining(variant).made_of["precision"] == wanted
    work = replace(work, machine=Machine(device="cpu"))
    variant = replace(experiment.variants[0], pretrain={"recipe": "fast"})
    assert work.pretraining(variant).made_of["precision"] == "auto-int8"


@pytest.mark.parametrize("name", experiment_names())
def test_the_experiments_that_come_along(name):
    for scale in SCALES:
        experiment = read_experiment(name, scale)
        work = Work(scale, experiment.scale, [], {}, (), experiment.points, root=None)
        for variant in experiment.variants:
            columns = experiment.columns_of(variant)
            least = DEEPEST if any(column.is_features for column in columns) else 1
            assert work.config(variant).num_layers >= least
            settings = work.pretrain_settings(variant)
            assert len({"steps", "tokens", "minutes"} & settings.keys()) == 1
            if variant.system == "encoder":
                resolved(settings)  # no setting that its objective refuses


@pytest.mark.parametrize("scale", SCALES)
def test_figure_5_measures_the_pre_trainings_of_table_5(scale):
    keys = {}
    for name in ("table5", "figure5"):
        experiment = read_experiment(name, scale)
        work = Work(scale, experiment.scale, [], {}, (), experiment.points, root=None)
        keys[name] = {work.pretraining(variant).key for variant in experiment.variants}
    assert len(keys["figure5"]) == 2
    assert keys["figure5"] < keys["table5"]


@pytest.mark.parametrize("scale", ["nano", "small"])
def test_the_lineage_has_equal_parameters(scale):
    """Within a tenth, of a classifier."""
    from bertsmith.experiments.paper.page import TOLERANCE

    experiment = read_experiment("lineage", scale)
    work = Work(scale, experiment.scale, [], {}, (), (), root=None)
    counts = {v.name: parameters(work.config(v), v) for v in experiment.variants}
    for name, count in counts.items():
        assert abs(count / counts["bert"] - 1) < TOLERANCE, (name, counts)


def test_an_elmo_costs_what_its_lstms_and_its_words_do():
    """The time that is left goes by it; the softmax is over words, not over bytes."""
    import torch

    from bertsmith.experiments.lineage.settings import ElmoSettings
    from bertsmith.model.elmo import ElmoLM

    experiment = read_experiment("lineage", "nano")
    work = Work("nano", experiment.scale, [], {}, (), (), root=None)
    elmo = experiment.variant("elmo")
    with torch.device("meta"):
        model = ElmoLM(work.config(elmo), ElmoSettings.vocab_size)
    weights = sum(weight.numel() for weight in model.encoder.layers.parameters())
    weights += 2 * model.output.weight.numel()  # of both directions
    assert work.pretraining(elmo).flops == 6 * 4_000_000 * weights


def parameters(config, variant):
    """Parameters of a classifier; nothing is allocated."""
    from dataclasses import replace

    import torch

    from bertsmith.checkpoints.model_folder import family_class
    from bertsmith.model.heads import SequenceClassifier
    from bertsmith.model.initialization import WithoutInitialization

    config = replace(config, bilstm=bool(variant.finetune))
    kind = family_class(SequenceClassifier, config, Path(config.family))
    with torch.device("meta"), WithoutInitialization():
        model = kind(config, 2)
    return sum(weight.numel() for weight in model.parameters())


def test_data_published_without_a_training_file(tmp_path):
    task = find_task("squad2")
    assert find_data(tmp_path, task) is None
    dev = write(tmp_path / "squad/v2.0/dev-v2.0.json", "{}")
    assert find_data(tmp_path, task) == dev
    write(tmp_path / "squad/v2.0/train-v2.0.json", "{}")
    assert find_data(tmp_path, task) == dev.parent
    with pytest.raises(ValueError, match="no experiment measures codah: cola, sst2"):
        find_data(tmp_path, find_task("codah"))


def test_a_budget_takes_the_place_of_another():
    base = {"seeds": 5, "pretrain": {"steps": 9, "size": "tiny"}}
    changed = overridden(base, {"pretrain": {"tokens": 80}, "seeds": 3})
    assert changed == {"seeds": 3, "pretrain": {"size": "tiny", "tokens": 80}}


COLUMNS = 'columns = ["perplexity", "sst2"]'
SIZES = 'sizes = { nano = "16x32" }'


def with_line(variant, line):
    """A line more behind a variant's title."""
    return f'title = "{variant}"', f'title = "{variant}"\n{line}'


def kept_at_half(steps, columns=""):
    """The first row after half of its six steps, with checkpoints of some."""
    objective = 'objective = "mlm"'
    line = f'title = "Masked"\npretrain = {{ {objective}'
    return f"{line} }}", f"at = 0.5\n{columns}\n{line}, keep_steps = {steps} }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('worse = "ltr"', 'worse = "lrt"'), "unknown variant 'lrt': did you mean 'ltr'"),
        (('name = "ltr"', 'name = "mlm"'), "two variants are called mlm: rename one"),
        (('"ner"', '"nr"'), "unknown task 'nr'"),
        (('"sst2", "ner"', '"sst2:f1", "ner"'), "sst2:f1: unknown metric"),
        ((COLUMNS, 'columns = ["sst"]'), "unknown column 'sst'"),
        (('"ner features"]', '"sst2 features"]'), "sst2 features: features are for taggers"),
        (with_line("Masked", 'features = "lst"'), "unknown row 'lst'"),
        (("sst2 = 92.6", "sts2 = 92.6"), "variant mlm: paper: unknown column 'sts2': did you mean"),
        (('title = "Masked"', 'titel = "Masked"'), "unknown setting 'titel'"),
        (("[nano]", "[nano"), "not valid TOML"),
        (("[nano]", "[nano]\nseed = 3"), "wrong.toml: [nano]: unknown setting 'seed'"),
        (("seeds = 1", "seeds = 0"), "wrong.toml: [nano]: seeds=0: must be at least 1"),
        ((COLUMNS, 'columns = "sst2"'), "wrong.toml: variants: columns = 'sst2': expected a list, "
         'such as ["sst2"]'),
        (with_line("Masked", "finetune = { bilstn = true }"), "wrong.toml: variant mlm: finetune: "
         "unknown setting 'bilstn': did you mean 'bilstm'"),
        (("steps = 6", "stepps = 6"), "[nano]: pretrain: unknown setting 'stepps'"),
        (("steps = 6", 'steps = "five"'), "pretrain: steps = 'five': expected a whole number"),
        (with_line("ELMo", "pretrain = { minutes = 1 }"), "elmo needs a budget in steps or tokens"),
        (with_line("ELMo", "pretrain = { steps = 9, seed = 2 }"),
         "wrong.toml: variant elmo: elmo does not read seed of pretrain: leave it out"),
        ((f'{SIZES}\ncolumns = ["sst2"]', SIZES),
         "wrong.toml: variant elmo: perplexity of elmo is over words, not pieces: give it col"),
        (with_line("Masked", "share = 0.0"), "variant mlm: share=0.0: must be ab"),
        (with_line("Masked", "at = 1.5"), "variant mlm: at=1.5: must be above 0"),
        (with_line("Masked", "at = 0.5"),
         "wrong.toml: variant mlm: at=0.5 is none of the experiment's points"),
        (kept_at_half("[3]"), "mlm: perplexity is that of the end, and at=0.5 is before it"),
        (kept_at_half("[2, 4]", 'columns = ["sst2"]'),
         "Masked: at=0.5 is step 3, which keep_steps of its pre-training lacks: name it there"),
        (("models = true", "points = [0.0, 1.0]"), "wrong.toml: points=0.0: must be above 0"),
        (("models = true", "points = 0.5"), "wrong.toml: points = 0.5: expected a list"),
        ((TOY[TOY.index("[nano]") :].format(seeds=1), "points = [0.5]\n[variants]\nname = 'mlm'"),
         "wrong.toml: variants = {'name': 'mlm'}: expected a list"),
        (("models = true", "models = true\npoints = [1.0]\n[[variants]]\ntitle = 'A'"),
         "wrong.toml: variants: missing setting name"),
        ((TOY[TOY.index("[nano]") : TOY.index("[[")].format(seeds=1), "nano = 3\n"),
         "wrong.toml: nano = 3: expected a table, [nano]"),
        ((SIZES, 'sizes = { nan = "16x32" }'), "variant elmo: sizes: unknown scale 'nan': did you"),
        (('"perplexity", "sst2", "ner", "ner features"]', '"sst2"]\npoints = [0.5, 0.5]'),
         "wrong.toml: two variants are called mlm@0.5: rename one, or leave a point out"),
        (with_line("ELMo", "at = 0.5"), "elmo is measured at its end alone"),
        (('"4x64"', '"3x64"'), "Masked: Table 7 reads 4 layers, and it has 3: take a deeper model"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(files, tmp_path, change, message):
    toml = write(files[2] / "wrong.toml", toy(files).read_text().replace(*change))
    assert message in refused(*command(files, tmp_path / "out", toml=toml))


def test_mistakes_in_a_file_are_told_without_pytorch(files, tmp_path):
    toml = write(files[2] / "wrong.toml", toy(files).read_text().replace("[nano]", "[nano"))
    program = "import sys; from bertsmith.cli.main import main; main(sys.argv[1:])"
    ran = python(f"{program}; print('torch' in sys.modules)", *command(files, tmp_path, toml=toml))
    assert "not valid TOML" in ran.err and ran.out == "False\n"


def test_mistakes_of_the_command(files, tmp_path):
    own = command(files, tmp_path / "out")
    assert "unknown 'sts'" in refused(*own, "--tasks", "sts")
    assert "unknown 'lrt'" in refused(*own, "--variants", "lrt")
    assert "none of the rows ltr has one of the columns ner" in refused(
        *own, "--variants", "ltr", "--tasks", "ner"
    )
    assert "nano" in refused(*own, "--scale", "nan")
    within = files[2] / "out"  # its logs and pages would be read as text, and change every key
    lies = f"{within} lies in the text {files[2]}: name an --out outside of it"
    assert lies in refused("reproduce", toy(files), "--text", files[2], *own[4:6], "--out", within)
    assert not within.exists()
    own[1] = "table9"
    assert "unknown experiment 'table9': did you mean 'table" in refused(*own)
    assert "two experiments are called toy" in refused(own[0], toy(files), toy(files), *own[2:])
    own[1] = "table4"  # its task's folder is not there
    assert "no folder of swag, which table4 measures" in refused(*own)
    own[own.index("--data") + 1] = "nodata"
    assert "nodata: no such folder; it has one for each task" in refused(*own)
    own[1:2] = ["all", "table1"]
    assert "leave the others out" in refused(*own)
    assert not (tmp_path / "out").exists()


def test_a_paired_t_is_scipys():
    import numpy as np
    from scipy import stats

    first, second = np.random.default_rng(1).normal(size=(2, 5))
    assert paired_p(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert paired_p([1.0, 2.0], [2.0, 1.0]) is None
    assert paired_p([1.0] * 3, [0.0] * 3) == 0 and paired_p([1.0] * 3, [1.0] * 3) == 1


def test_words_for_what_was_found():
    assert held({"difference": 0.3, "is_sure": False}) == "not sure (+30.0 points)"
    assert held({"difference": 0.3, "is_sure": True}) == "holds, by 30.0 points"
    assert held({"difference": -0.5}) == "does not hold, by 0.50; of one pre-training each"


def test_all_is_the_papers():
    assert [name for name in experiment_names() if name.startswith("table")] == [
        f"table{number}" for number in range(1, 9)
    ]
    assert {"figure5", "lineage"} == {*experiment_names()} - {f"table{n}" for n in range(1, 9)}
