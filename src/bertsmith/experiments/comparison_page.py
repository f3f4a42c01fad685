"""The page of a comparison: its systems, what the paper says of them, tables of what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from bertsmith.base.terminal import short

REGIMES = {"tokens": "equal tokens read", "predictions": "equal predicted positions"}
TOLERANCE = 0.1  # of parameters
SURE = 0.05


class System(NamedTuple):
    """A row of the table."""

    title: str
    pretraining: str
    """Systems of one pre-training share it."""
    finetuning: dict[str, Any]


SYSTEMS = {
    "bert": System("BERT (MLM)", "bert", {}),
    "gpt": System("GPT", "gpt", {}),
    "elmo": System("ELMo", "elmo", {}),
    "ltr": System("LTR", "ltr", {}),
    "ltr+rtl": System("LTR + RTL", "ltr+rtl", {}),
    "ltr+bilstm": System("LTR + BiLSTM", "ltr", {"bilstm": True}),
}


class Expectation(NamedTuple):
    """The paper's word on two systems, on these tasks."""

    higher: str
    lower: str
    tasks: tuple[str, ...]
    source: str


ALL = "sst2", "mrpc", "qnli", "ner", "squad1"
TABLE_5 = ("sst2", "mrpc", "qnli", "squad1")
EXPECTATIONS = (
    Expectation("bert", "ltr", TABLE_5, "Table 5, No NSP above LTR & No NSP"),
    Expectation("bert", "ltr+bilstm", TABLE_5, "Table 5, No NSP above + BiLSTM"),
    Expectation("ltr+bilstm", "ltr", ("squad1",), "Table 5, a BiLSTM helps SQuAD"),
    Expectation("ltr", "ltr+bilstm", ("sst2", "mrpc", "qnli"), "Table 5, and hurts GLUE"),
    Expectation("bert", "ltr+rtl", ALL, "section 5.1, argued and not measured"),
    Expectation("bert", "gpt", ("sst2", "mrpc", "qnli"), "Table 1"),
    Expectation("bert", "elmo", ("sst2", "mrpc", "qnli", "ner"), "Tables 1 and 7"),
    Expectation("ltr", "bert", ALL, "Figure 5, in the first steps alone"),
)


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The lines of table.md."""
    settings = result["settings"]
    tasks, names = settings["tasks"], settings["systems"]
    yield "# BERT and the systems before it"
    yield ""
    yield (
        f"BERT of size {settings['size']} reads {settings['tokens']:,} tokens. One pre-training of "
        "each system and regime: the spread is that of fine-tuning seeds "
        f"{settings['seeds']} alone. Every fine-tuning: {settings['epochs']} epochs of at most "
        f"{settings['train_examples']:,} examples, rate by the system's own rule, measured once at "
        f"the end on at most {settings['dev_examples']:,} dev examples."
    )
    for regime, title in REGIMES.items():
        cells, costs = result["cells"][regime], result["pretraining"][regime]
        yield from ("", f"## At {title}", "", EXPLAINED[regime], "")
        metrics = [f"{task} ({cells[names[0]][task]['metric']})" for task in tasks]
        yield from table(
            ["system", *metrics, "mean"],
            (
                [
                    SYSTEMS[name].title,
                    *(_spread(cells[name][task]) for task in tasks),
                    f"{100 * mean(cells[name][task]['mean'] for task in tasks):.1f}",
                ]
                for name in names
            ),
        )
        yield from ("", "Parameters used downstream, with the difference from BERT's, and FLOPs:")
        yield ""
        heads = [f"parameters, {task}" for task in tasks]
        header = ["system", "size", "tokens or words read", "pre-training", *heads, "fine-tuning"]
        yield from table(
            header,
            (
                [
                    SYSTEMS[name].title,
                    result["sizes"][SYSTEMS[name].pretraining],
                    f"{costs[name]['tokens']:,}",
                    _flops(costs[name]["flops"]),
                    *(_parameters(cells, names[0], name, task) for task in tasks),
                    _flops(sum(cells[name][task]["flops"] for task in tasks)),
                ]
                for name in names
            ),
        )
        yield from ("", *_orderings(result["orderings"][regime], tasks))
        yield from ("", *_expectations(result["orderings"][regime], tasks))


EXPLAINED = {
    "tokens": "Every system reads as much text. BERT predicts 15% of it, the others all.",
    "predictions": (
        "BERT is as above; the others read 15% of its text, so that each has predicted as many "
        "positions. What two directions both predict counts once; ELMo's words are those of the "
        "text that LTR reads."
    ),
}


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _spread(cell: Mapping[str, Any]) -> str:
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.1f}"
    return f"{100 * cell['mean']:.1f}{spread}"


def _flops(value: float) -> str:
    return f"{value:.2e}"


def _parameters(cells: Mapping[str, Any], first: str, name: str, task: str) -> str:
    count, other = (cells[one][task]["parameters"] for one in (name, first))
    off = count / other - 1
    return f"{short(count)} ({off:+.0%}{'' if abs(off) <= TOLERANCE else ', more than 10%'})"


def _orderings(orderings: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Iterator[str]:
    count = len(orderings) * len(tasks)
    yield (
        "First minus second in points, with the 95% interval of a paired bootstrap over dev "
        "examples, its p, and p of a paired t over seeds (–: of fewer than three). **Sure** are "
        f"those with both below {SURE}; of {count} tests some {SURE * count:.0f} would be below it "
        "in each by luck alone."
    )
    yield ""

    def row(ordering: Mapping[str, Any]) -> Iterator[str]:
        yield " − ".join(SYSTEMS[name].title for name in ordering["systems"])
        for task in tasks:
            found = ordering["tasks"][task]
            low, high = (100 * end for end in found["interval"])
            line = f"{100 * found['difference']:+.1f} ({low:+.1f} to {high:+.1f}), "
            line += f"{found['p_examples']:.3f}, {_p(found['p_seeds'])}"
            yield f"**{line}**" if found["is_sure"] else line
        yield _p(ordering["p_tasks"])

    header = ["systems", *tasks, "p over the tasks' means"]
    yield from table(header, ([*row(ordering)] for ordering in orderings))


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _expectations(orderings: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Iterator[str]:
    """Each ordering of the paper beside what was found."""
    yield "What the paper says, and what the tests say here:"
    yield ""
    known = {tuple(ordering["systems"]): ordering["tasks"] for ordering in orderings}
    rows = []
    for expected in EXPECTATIONS:
        pair = expected.higher, expected.lower
        sign = 1 if pair in known else -1
        found = known.get(pair) or known.get(pair[::-1])
        for task in [task for task in expected.tasks if task in tasks and found]:
            assert found
            titles = " > ".join(SYSTEMS[name].title for name in pair)
            rows.append([titles, task, expected.source, held(found[task], sign)])
    yield from table(["expected", "task", "source", "here"], iter(rows))


def held(found: Mapping[str, Any], sign: int) -> str:
    """
    >>> held({"difference": 0.021, "is_sure": True}, -1)
    'does not hold: the contrary, by 2.1 points'
    """
    points = 100 * sign * found["difference"]
    if not found["is_sure"]:
        return f"not sure ({points:+.1f} points)"
    return "holds" if points > 0 else f"does not hold: the contrary, by {-points:.1f} points"
