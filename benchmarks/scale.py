"""The arithmetic of docs/design/scale.md: from measured constants to texts and numbers of GPUs.

    python benchmarks/scale.py          prints the tables of the page; a test holds the page to them

MEASURED was measured by the benchmarks it names; what was measured on another machine, or could not
be, is ASSUMED, with its source, and every figure that rests on it is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

TEXTS = {"16 GB": 16e9, "1 TB": 1e12, "100 TB": 1e14}
GPUS = (8, 64, 512)


class Constant(NamedTuple):
    value: float
    unit: str
    source: str


CORPUS, LOADER = "corpus.md", "loader.md"
SCALE, STORE = "corpus_scale.md", "large_store.md"
MEASURED = {
    "build": Constant(16.2e6, "bytes of text a second and core, with two workers", CORPUS),
    "write": Constant(1.71e9, "bytes of text a second that one process writes as shards", SCALE),
    "tokens": Constant(0.238, "tokens a byte of English prose", SCALE),
    "stored": Constant(2.349, "bytes of store a token", STORE),
    "entry": Constant(314, "bytes of the manifest a shard, both sides", STORE),
    "open": Constant(8.3e-13, "seconds a token to open a store", STORE),
    "verify": Constant(1.05e9, "bytes of store a second and core, corpus verify", STORE),
    "sign": Constant(31.9e6, "bytes of text a second and core, corpus dedup", SCALE),
    "load": Constant(12.8e6, "tokens a second and core, pairs at length 128", LOADER),
    "hash": Constant(1.62e9, "bytes a second, SHA-256 of a checkpoint", SCALE),
}
ASSUMED = {
    "base": Constant(5622, "rows of 128 a second and H100", "gpu_pretrain.md"),
    "large": Constant(1803, "rows of 128 a second and H100", "gpu_pretrain.md"),
    "inside": Constant(450e9, "bytes a second, GPU to GPU in a node", "NVLink 4, NVIDIA"),
    "between": Constant(50e9, "bytes a second and GPU between nodes", "NDR InfiniBand, NVIDIA"),
    "ethernet": Constant(3.1e9, "bytes a second and GPU between nodes", "200 GbE for 8 GPUs"),
    "share": Constant(0.8, "of a network's rate that all-reduce gets", "usual of NCCL"),
    "disk": Constant(2e9, "bytes a second written to a shared disk", "a parallel file system"),
    "document": Constant(4000, "bytes of a document", "web text; books have 18,500"),
}
PARAMETERS = {"base": 110e6, "large": 335e6}
ROWS = 256  # of a GPU, each step
SHARD = 16 << 20  # train tokens
FILES = 8  # of a shard: tokens, sentences, documents, checksums of two splits
SECTION = 1 << 28  # tokens shuffled together (docs/reference/token-store.md)
STATE = 12  # bytes a parameter: float32 weights and AdamW's two moments
SIGNATURE, GROUPING = 544, 60  # bytes a document: on disk, in memory


def corpus_table() -> str:
    rows: list[tuple[str, Callable[[float], str]]] = [
        ("tokens", lambda text: _count(tokens(text))),
        ("store", lambda text: _bytes(stored(text))),
        ("shards (and files)", lambda text: f"{_count(shards(text))} ({_count(shards(text) * 8)})"),
        ("manifest", lambda text: _bytes(shards(text) * measured("entry"))),
        ("build, core-hours", lambda text: _count(text / measured("build") / 3600)),
        ("build on 16 cores", lambda text: _time(text / measured("build") / 16)),
        (
            "build on Ray, as fast as one writer can be",
            lambda text: _time(text / measured("write")),
        ),
        (
            "- cores that keep the writer busy",
            lambda _: f"{measured('write') / measured('build'):.0f}",
        ),
        ("corpus dedup, core-hours", lambda text: _count(text / measured("sign") / 3600)),
        ("- its disk", lambda text: _bytes(SIGNATURE * text / assumed("document"))),
        ("- its memory", lambda text: _bytes(GROUPING * text / assumed("document"))),
        (
            "corpus verify, one core, from disk",
            lambda text: _time(stored(text) / measured("verify")),
        ),
        ("opening the store", lambda text: _time(tokens(text) * measured("open"))),
        ("one section, for a local cache", lambda _: _bytes(SECTION * measured("stored"))),
    ]
    return _table(["", *TEXTS], [[name, *map(cell, TEXTS.values())] for name, cell in rows])


def training_table() -> str:
    rate = assumed("base")
    rows = [
        ["rows a second", *(_count(rate * n) for n in GPUS)],
        ["tokens a second", *(_count(128 * rate * n) for n in GPUS)],
        ["ids read a second", *(_bytes(256 * rate * n) for n in GPUS)],
        ["cores that make batches", *(f"{128 * rate * n / measured('load'):.1f}" for n in GPUS)],
    ]
    for name, text in TEXTS.items():
        rows.append([f"{name} once", *(_time(tokens(text) / (128 * rate * n)) for n in GPUS)])
    return _table(["base, length 128", *(f"{n} GPUs" for n in GPUS)], rows)


def network_table() -> str:
    rows = []
    for size in PARAMETERS:
        step = ROWS / assumed(size)
        for n in GPUS:
            rows.append(
                [
                    f"{size}, {n} GPUs",
                    _count(ROWS * n),
                    _time(step),
                    _time(all_reduce(size, n, "between")),
                    f"{rows_to_hide(size, n, 'between'):.0f}",
                    _time(all_reduce(size, n, "ethernet")),
                    f"{rows_to_hide(size, n, 'ethernet'):,.0f}",
                ]
            )
    head = ["", "rows a step", "compute", "all-reduce", "hidden from", "on 200 GbE", "hidden from"]
    return _table(head, rows)


def checkpoint_table() -> str:
    rows = []
    for size, count in PARAMETERS.items():
        content = STATE * count
        seconds = content / measured("hash") + content / assumed("disk")
        steps = 1000 * ROWS / assumed(size)
        rows.append([size, _bytes(content), _time(seconds), _time(steps), f"{seconds / steps:.1%}"])
    head = ["", "bytes", "written in", "1,000 steps take", "share if nothing were asynchronous"]
    return _table(head, rows)


def constants_table() -> str:
    rows = [
        [name, _plain(one.value), one.unit, one.source]
        for constants in (MEASURED, ASSUMED)
        for name, one in constants.items()
    ]
    return _table(["", "value", "unit", "source"], rows)


def tables() -> list[str]:
    """In the order of the page."""
    return [
        constants_table(),
        corpus_table(),
        training_table(),
        network_table(),
        checkpoint_table(),
    ]


def measured(name: str) -> float:
    return MEASURED[name].value


def assumed(name: str) -> float:
    return ASSUMED[name].value


def tokens(text: float) -> float:
    return text * measured("tokens")


def stored(text: float) -> float:
    return tokens(text) * measured("stored")


def shards(text: float) -> float:
    return tokens(text) / SHARD


def all_reduce(size: str, gpus: int, network: str) -> float:
    """Seconds of a ring all-reduce of float32 gradients, over the slowest link.

    Every GPU sends and receives 2 (n - 1) / n times the gradients; within one node over NVLink.
    """
    link = "inside" if gpus <= 8 else network
    content = 4 * PARAMETERS[size]
    return 2 * (gpus - 1) / gpus * content / (assumed(link) * assumed("share"))


def rows_to_hide(size: str, gpus: int, network: str) -> float:
    """Rows a GPU from which on the backward pass, 2/3 of a step, is as long as the all-reduce."""
    return all_reduce(size, gpus, network) * 1.5 * assumed(size)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(value: float) -> str:
    return (
        f"{value:,.4g}"
        if 1e-3 <= value < 1e5
        else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    )


def _scaled(value: float, steps: Sequence[tuple[float, str]]) -> str:
    """The value in the largest unit of which it has one, or in the last.

    >>> _scaled(3.744e9, UNITS), _scaled(15, UNITS)
    ('3.74 G', '15')
    """
    size, unit = next((step for step in steps if value >= step[0]), steps[-1])
    return f"{value / size:.3g} {unit}".rstrip()


UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def _count(value: float) -> str:
    """A count in few letters.

    >>> _count(3.744e9), _count(13_554), _count(0.27)
    ('3.74 G', '13,554', '0.27')
    """
    if value >= 1e6:
        return _scaled(value, UNITS)
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(value: float) -> str:
    return _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _time(seconds: float) -> str:
    """A time in its largest unit.

    >>> _time(0.0421), _time(0.9), _time(600), _time(1.3e5), _time(9e6)
    ('42.1 ms', '900 ms', '10 min', '1.5 days', '104 days')
    """
    return _scaled(seconds, ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")))


if __name__ == "__main__":
    print("\n".join(tables()))
