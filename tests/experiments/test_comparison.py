"""The comparison at toy size: killed between cells it goes on, and repeats none."""

import random

import numpy as np
import pytest
from scipy import stats

from bertsmith.base.files import read_json, read_json_lines
from bertsmith.experiments import comparison
from bertsmith.experiments.comparison import (
    matched_sizes,
    paired_p,
    parameters,
)
from bertsmith.experiments.comparison_page import REGIMES, SYSTEMS, TOLERANCE, held
from bertsmith.model.config import config_for, elmo_config

from ..tiny import ANIMALS, PLACES, cli, refused, write


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("files"), random.Random(3)

    def sentence(mood):
        return f"The {draw.choice(ANIMALS)} in the {draw.choice(PLACES)} is {mood}."

    documents = [[sentence(draw.choice(("glad", "sad"))) for _ in range(4)] for _ in range(60)]
    text = write(folder / "text.txt", "\n\n".join("\n".join(one) for one in documents))
    for split, count in (("train", 60), ("dev", 30)):
        rows = [f"{sentence(('sad', 'glad')[k % 2])}\t{k % 2}" for k in range(count)]
        write(folder / "data/glue/SST-2" / f"{split}.tsv", ["sentence\tlabel", *rows])
    return text, folder / "data"


def flags(files, out, *more):
    text, data = files
    small = "--size 1x64 --vocab-size 65 --tokens 3000 --batch-size 8 --max-length 32 --workers 1"
    small += " --tasks sst2 --seeds 1 --epochs 2 --train-examples 40 --threads 1"
    given = ["lineage", "compare", "--text", text, "--data", data, "--out", out]
    return [*given, *small.split(), "--precision", "float32", *more]


def test_a_killed_comparison_goes_on_and_repeats_no_cell(files, tmp_path, monkeypatch):
    out, cells = tmp_path / "out", []
    command = flags(files, out, "--systems", "ltr", "ltr+bilstm")
    train = comparison.train_seeds

    def killed(trainer, folder, *how):
        if len(cells) == 2:
            raise KeyboardInterrupt
        cells.append(folder)
        return train(trainer, folder, *how)

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "train_seeds", killed)
        assert cli(*command).code == 130
    assert not (out / "table.md").exists()
    ran = cli(*command)
    assert ran.code == 0, ran.err
    done = [line["cell"] for line in read_json_lines(out / "log.jsonl")]
    assert done == [
        "pretrain ltr-tokens",
        "pretrain ltr-predictions",
        *(
            f"finetune {name}-{regime} sst2 1"
            for regime in ("tokens", "predictions")
            for name in ("ltr", "ltr+bilstm")
        ),
    ]
    assert ran.out == (out / "table.md").read_text()
    assert "LTR − LTR + BiLSTM" in ran.out and "Table 5, and hurts GLUE" in ran.out
    result = read_json(out / "result.json")
    read = [result["pretraining"][regime]["ltr"]["tokens"] for regime in REGIMES]
    assert read[0] >= 3000 and 450 <= read[1] < 450 + 8 * 32  # a step more at most
    found = result["orderings"]["tokens"][0]["tasks"]["sst2"]
    values = [result["cells"]["tokens"][name]["sst2"]["mean"] for name in ("ltr", "ltr+bilstm")]
    assert found["difference"] == pytest.approx(values[0] - values[1])
    assert found["p_seeds"] is None and not found["is_sure"]  # of one seed

    # the same command is the same table; a seed more is added, and nothing else may change
    again = cli(*command)
    assert again.out == ran.out and len(read_json_lines(out / "log.jsonl")) == len(done)
    assert "batch_size = 8, not 4" in refused(*command, "--batch-size", "4")
    assert cli(*command, "--seeds", "1,2").code == 0
    added = [line["cell"] for line in read_json_lines(out / "log.jsonl")][len(done) :]
    assert added == [cell[:-1] + "2" for cell in done[2:]]


@pytest.mark.slow
def test_all_systems_in_one_table(files, tmp_path):
    ran = cli(*flags(files, tmp_path / "out"), "--seeds", "1,2,3")
    assert ran.code == 0, ran.err
    assert all(f"| {system.title} |" in ran.out for system in SYSTEMS.values())
    result = read_json(tmp_path / "out/result.json")
    # BERT is the same model in both regimes, trained once
    assert len({str(cells["bert"]) for cells in result["cells"].values()}) == 1
    assert len(result["orderings"]["tokens"]) == 15


def test_what_cannot_be_compared_is_refused(files, tmp_path):
    command = flags(files, tmp_path / "out")
    assert "'bret': did you mean 'bert'" in refused(*command, "--systems", "bret")
    assert "no folder of mrpc: MRPC or glue/MRPC" in refused(*command, "--tasks", "mrpc")
    assert "unknown 'sts'" in refused(*command, "--tasks", "sts")
    assert "nano" in refused(*command, "--scale", "nan")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "pieces"), [("2x128", 6000), ("4x256", 8000)])
def test_sizes_have_as_many_parameters(size, pieces):
    sizes, wanted = matched_sizes(size, pieces), parameters(config_for(size, pieces))
    configs = [
        config_for(sizes["ltr+rtl"], pieces, causal=True, directions=2),
        config_for(sizes["ltr"], pieces, causal=True, bilstm=True),
        config_for(sizes["gpt"], pieces, causal=True, family="gpt", type_vocab_size=0),
        elmo_config(sizes["elmo"]),
    ]
    for config in configs:
        assert abs(parameters(config) / wanted - 1) < TOLERANCE, config


def test_a_paired_t_is_scipys():
    first, second = np.random.default_rng(1).normal(size=(2, 5))
    assert paired_p(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert paired_p([1.0, 2.0], [2.0, 1.0]) is None
    assert paired_p([1.0] * 3, [0.0] * 3) == 0 and paired_p([1.0] * 3, [1.0] * 3) == 1


def test_words_for_what_is_not_sure():
    assert held({"difference": 0.3, "is_sure": False}, -1) == "not sure (-30.0 points)"
    assert held({"difference": 0.3, "is_sure": True}, 1) == "holds"
