"""The page of an experiment: what its tables and pictures say."""

from dataclasses import replace

from bertsmith.experiments.paper.experiment import read_experiment
from bertsmith.experiments.paper.page import parts
from bertsmith.experiments.paper.reproduce import curves


def rows_of(experiment, figures):
    return {
        one.name: {"title": one.title, "group": one.group, "figures": figures(one)}
        for one in experiment.variants
    }


def test_namesakes_of_two_groups_are_told_apart_wherever_they_stand():
    experiment = read_experiment("lineage", "nano")
    rows = rows_of(experiment, lambda _: {})
    word, found = "not sure (+0.1 points)", {"difference": 0.1, "is_sure": False, "p_seeds": None}
    pairs = dict.fromkeys((one.better, one.worse) for one in experiment.claims)
    claims = [
        {"better": better, "worse": worse, "source": "s", "words": {"sst2": word}}
        for better, worse in pairs
    ]
    tests = [{"rows": pair, "columns": {"sst2": found}} for pair in pairs]
    result = {"rows": rows, "columns": ["sst2"], "tests": tests, "claims": claims, "curves": {}}
    *_, of_claims, of_tests, costs = parts(result)
    for part, size in ((of_claims, len(pairs)), (of_tests, len(pairs)), (costs, len(rows))):
        assert len({row[0] for row in part.rows}) == len(part.rows) == size, part.rows
    assert of_claims.rows[0][0] == "At equal tokens read: BERT (MLM) > LTR"


def test_curves_are_of_what_was_pretrained_here_and_the_papers_of_what_it_has():
    experiment = read_experiment("figure5", "nano")
    there = replace(experiment.variants[0], name="there", title="there", model="m", paper={})
    experiment = replace(experiment, variants=(*experiment.variants, there))

    def figures(variant):
        paper = variant.paper["mnli"] if variant.name.startswith("mlm") else None
        return {"mnli": {"mean": 0.5, "std": None, "paper": paper}}

    rows = rows_of(experiment, figures)
    drawn = curves(experiment, rows)
    assert [*drawn] == ["masked LM", "left to right"]
    assert [at for at, _ in drawn["masked LM"]] == [*experiment.points]
    result = {"rows": rows, "columns": ["mnli"], "tests": (), "claims": (), "curves": drawn}
    ((_, legend, _),) = next(part.pictures for part in parts(result) if part.pictures)
    assert legend.count("the paper") == 1 and "masked LM, the paper" in legend
