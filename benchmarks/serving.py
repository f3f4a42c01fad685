"""Requests a second and latency of servers on one machine: `bertsmith serve` beside its peers.

    python benchmarks/serving.py --peers DIR --prepare [--data DATA]     once, with a network
    python benchmarks/serving.py --peers DIR [--data DATA] [--model minilm] [--turns 5]
        [--servers bertsmith mosec] [--seconds 2]

The task is that of benchmarks/inference.py: of each text the mean of its tokens' last states, by
MiniLM-L6's weights, of SST-2's dev sentences (of prose where DATA is not given). A request has one
text or sixteen. Servers (serving_peers.py) have environments of their own and take turns: each
is started, warmed up, measured and ended. The load (serving_load.py) comes from the same cores.

- Trials. Each setting of a server is measured with a growing number of connections, four at least,
  while 99 of 100 answers come within 100 ms. The setting with the largest product of the two kinds'
  rates is kept (a server has one for all requests), and for each kind the best number.
- Turns, closed loop, with that number of connections and half of it. Capacity is the higher rate
  at which p99 is below 100 ms and nothing fails or is refused; "most" the higher rate at any
  latency. Medians of turns; ratios are medians of the turns' ratios.
- Open loop: p99 at 50% and 80% of the capacity (of "most", where nothing is below 100 ms), then at
  3 times (one text) or 10 times (sixteen) as much as "most". "Other" are answers whose vectors are
  not bit for bit those of the texts asked alone before, with the least cosine to them.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import psutil

import inference_prepare
from bertsmith.base.files import write_json, write_text
from inference import evenly, model_folder, read_texts
from inference_report import about_machine, kind_of_processor
from serving_load import Answer, closed_loop, open_loop, percentile_ms
from serving_peers import ENVIRONMENTS, SERVERS, Setting

KINDS = {"1 text": (1, 3), "16 texts": (16, 10)}  # texts of a request, times "most" of overload
LIMIT = 100.0  # ms that 99 of 100 requests may take
CONNECTIONS = (1, 2, 4, 8, 16, 32)
TRIAL, FEWEST = 1, 4  # seconds; connections that are tried at any latency
ALONE = 96  # texts whose vectors are compared
STARTING, ENDING = 90.0, 5.0  # seconds


class Running:
    """A server that answers, and the bodies of its requests."""

    def __init__(self, name: str, port: int, texts: Sequence[str]) -> None:
        self.server = SERVERS[name]
        self.url = f"http://127.0.0.1:{port}{self.server.path}"
        self.bodies = {kind: self.requests(texts, size) for kind, (size, _) in KINDS.items()}
        self.facts: dict[str, Any] = {}

    def requests(self, texts: Sequence[str], size: int) -> list[bytes]:
        last = len(texts) - len(texts) % size
        parts = [list(texts[k : k + size]) for k in range(0, last, size)]
        return [orjson.dumps({self.server.field: part}) for part in parts]

    def ask(self, bodies: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """(Status, body) of the answers to requests one after the other."""
        found, (host, _, path) = [], self.url.removeprefix("http://").partition("/")
        with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            for body in bodies:
                headers = {"content-type": "application/json"}
                connection.request("POST", f"/{path}", body, headers)
                answer = connection.getresponse()
                found.append((answer.status, answer.read()))
        return found


@contextmanager
def running(
    name: str, setting: Setting, arguments: argparse.Namespace, texts: Sequence[str]
) -> Iterator[Running]:
    """A server that is started, and ended. Errors: SystemExit with its last line."""
    server, peers = SERVERS[name], arguments.peers
    python = sys.executable
    if server.environment:
        python = inference_prepare.python_of(peers, server.environment)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Running(name, port, texts)
    off = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            server.command(python, arguments.folder, port, setting),
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **off, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        try:
            found.facts = {"start_seconds": wait_for(found, process)}
            loaded(found, "1 text", 8, 1)  # to warm up
            found.facts["memory_mb"] = memory_mb(process.pid)
            yield found
        except ChildProcessError:
            said.seek(0)
            lines = said.read().strip().splitlines() or ["it said nothing"]
            raise SystemExit(lines[-1][:300]) from None
        finally:
            end(process)


def wait_for(server: Running, process: subprocess.Popen[Any]) -> float:
    """Seconds until its first answer. Errors: ChildProcessError if it ends before."""
    started = time.perf_counter()
    while time.perf_counter() - started < STARTING:
        if process.poll() is not None:
            raise ChildProcessError
        with suppress(OSError, http.client.HTTPException):
            if server.ask(server.bodies["1 text"][:1])[0][0] == 200:
                return round(time.perf_counter() - started, 1)
        time.sleep(0.1)
    raise ChildProcessError


def family(number: int) -> list[psutil.Process]:
    whole = psutil.Process(number)
    return [whole, *whole.children(recursive=True)]


def memory_mb(number: int) -> int:
    """Of a process and its children; what several share is counted once."""
    return sum(process.memory_full_info().pss for process in family(number)) >> 20


def end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, and to what is left after a while SIGKILL."""
    with suppress(psutil.NoSuchProcess):
        left = family(process.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
            _, left = psutil.wait_procs(left, timeout=ENDING)
    process.wait()


# --- measuring


def try_settings(name: str, arguments: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """The best setting, its number of connections for each kind of request, and all trials."""
    trials: list[dict[str, dict[str, Any]]] = []
    for setting in SERVERS[name].settings:
        with running(name, setting, arguments, texts) as server:
            trials.append({kind: best_of(growing(server, kind)) for kind in KINDS})
    rates = [prod(row["rate"] for row in best.values()) for best in trials]
    place = rates.index(max(rates))
    connections = {kind: row["connections"] for kind, row in trials[place].items()}
    return {"setting": place, "connections": connections, "trials": trials}


def growing(server: Running, kind: str) -> list[dict[str, Any]]:
    """Loads by more and more connections, until answers take too long."""
    rows: list[dict[str, Any]] = []
    for connections in CONNECTIONS:
        rows.append(loaded(server, kind, connections, TRIAL))
        if not is_within(rows[-1]) and connections >= FEWEST:
            break
    return rows


def loaded(server: Running, kind: str, connections: int, seconds: int) -> dict[str, Any]:
    load = closed_loop(server.url, server.bodies[kind], connections, seconds)
    return {"connections": connections, **vars(load)}


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The highest rate at which nothing fails and p99 is below the limit; if there is none, the
    highest at which nothing fails.

    >>> names = ("rate", "p99_ms", "failed")
    >>> rows = [dict(zip(names, row)) for row in [(9, 120, 0), (5, 80, 0), (4, 50, 0), (7, 9, 99)]]
    >>> best_of(rows)["rate"], best_of(rows[:1])["rate"]
    (5, 9)
    """
    whole = [row for row in rows if not row["failed"]] or rows
    return max([row for row in whole if is_within(row)] or whole, key=lambda row: row["rate"])


def is_within(row: dict[str, Any]) -> bool:
    return row["p99_ms"] < LIMIT and not row["failed"]


def take_turn(
    name: str, row: dict[str, Any], arguments: argparse.Namespace, texts: Sequence[str]
) -> dict[str, Any]:
    """Closed loops of all kinds of requests."""
    found: dict[str, Any] = {}
    with running(name, SERVERS[name].settings[row["setting"]], arguments, texts) as server:
        for kind, connections in row["connections"].items():
            counts = sorted({max(1, connections // 2), connections})
            found[kind] = [loaded(server, kind, count, arguments.seconds) for count in counts]
    return {**server.facts, "loads": found}


def open_loops(
    name: str, row: dict[str, Any], arguments: argparse.Namespace, texts: Sequence[str]
) -> dict[str, Any]:
    """Latency at parts of the capacity, and overload, of all kinds of requests."""
    found: dict[str, Any] = {}
    few, seconds = evenly(list(texts), ALONE), arguments.seconds + 1
    with running(name, SERVERS[name].settings[row["setting"]], arguments, texts) as server:
        alone = np.concatenate(
            [read(name, body) for _, body in server.ask(server.requests(few, 1))]
        )
        for kind, (size, times) in KINDS.items():
            bodies, figures = server.requests(few, size), row["figures"][kind]
            base, most = figures["capacity"] or figures["most"], figures["most"]
            found[kind] = {}
            for label, rate in (("50%", base / 2), ("80%", base * 0.8), ("over", times * most)):
                answers, cpu = open_loop(server.url, bodies, rate, seconds)
                found[kind][label] = {"rate": rate, "cpu": cpu, **summary(answers)}
            found[kind]["over"] |= compared(name, answers, alone, size)
    return found


def read(name: str, body: bytes) -> np.ndarray:
    """The vectors of an answer, float32 [N, H]."""
    return np.array(SERVERS[name].read(orjson.loads(body)), np.float32)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """How many were answered and refused, and when."""
    good = [answer.seconds for answer in answers if answer.status == 200]
    refused = [answer.seconds for answer in answers if answer.status in (429, 503)]
    return {
        "asked": len(answers),
        "good": len(good),
        "p50_ms": percentile_ms(good, 50),
        "p99_ms": percentile_ms(good, 99),
        "refused": len(refused),
        "refused_p99_ms": percentile_ms(refused, 99),
        "refused_most_ms": percentile_ms(refused, 100),
        "failed": sum(answer.status not in (0, 200, 429, 503) for answer in answers),
        "lost": sum(not answer.status for answer in answers),
    }


def compared(name: str, answers: Sequence[Answer], alone: np.ndarray, size: int) -> dict[str, Any]:
    """Answers beside those of the texts alone, float32 [N, H]."""
    requests, least, other = len(alone) // size, 1.0, 0
    good = [answer for answer in answers if answer.status == 200]
    for answer in good:
        first = answer.number % requests * size
        own, expected = read(name, answer.body), alone[first : first + size]
        if not np.array_equal(own, expected):
            other += 1
            norms = np.linalg.norm(own, axis=1) * np.linalg.norm(expected, axis=1)
            least = min(least, float(((own * expected).sum(axis=1) / norms).min()))
    return {"other": other / max(1, len(good)), "least_cosine": round(least, 4)}


def figures(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each kind of request medians over turns, and each turn's rates."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        loads = [turn["loads"][kind] for turn in turns]
        good = [best_of(own) for own in loads]
        rates = {
            "capacity": [own["rate"] if is_within(own) else 0.0 for own in good],
            "most": [max(row["rate"] for row in own) for own in loads],
        }
        found[kind] = {
            **{name: median(of_turns) for name, of_turns in rates.items()},
            **{key: median(own[key] for own in good) for key in ("p50_ms", "p99_ms", "cpu")},
            "failed": sum(row["failed"] for own in loads for row in own),
            "turns": rates,
            **{key: median(turn[key] for turn in turns) for key in ("memory_mb", "start_seconds")},
        }
    return found


def measure(arguments: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """The figures of all servers, and why others have none."""
    rows: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, server in SERVERS.items():
        if not any(name.startswith(word) for word in arguments.servers):
            continue
        environment = server.environment
        if environment and not (arguments.peers and (arguments.peers / environment).exists()):
            absent[name] = "its environment is not prepared"
            continue
        try:
            rows[name] = try_settings(name, arguments, texts)
        except SystemExit as reason:
            absent[name] = str(reason)
        say(f"{name}: {absent.get(name) or rows[name]['connections']}")
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for number in range(arguments.turns):
        for name, row in rows.items():
            turns[name].append(take_turn(name, row, arguments, texts))
        say(f"turn {number + 1} of {arguments.turns}")
    for name, row in rows.items():
        row["version"] = version(name, arguments)
        row["figures"], row["turns"] = figures(turns[name]), turns[name]
        row["open"] = open_loops(name, row, arguments, texts)
        say(f"{name}: open loop")
    return {"servers": rows, "left_out": absent}


def version(name: str, arguments: argparse.Namespace) -> str:
    server = SERVERS[name]
    if not server.environment:
        return importlib.metadata.version(server.package)
    ask = f"import importlib.metadata as m; print(m.version({server.package!r}))"
    python = inference_prepare.python_of(arguments.peers, server.environment)
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the page


def table(result: dict[str, Any]) -> str:
    about, servers = result["machine"], result["servers"]
    text = (
        "# Servers of vectors on a CPU: bertsmith beside its peers\n\n"
        "What is compared and what the columns mean is at the top of `benchmarks/serving.py`.\n\n"
        f"`{result['command']}`, {result['date']}, {about['cpu']}, {about['cores']} cores "
        f"({', '.join(about['flags'])}). Model {result['model']}, texts {result['texts']}.\n"
    )
    for kind in KINDS:
        text += f"\n## {kind} a request\n\n{closed_table(servers, kind)}\n{ratios(servers, kind)}"
        text += f"\n{open_table(servers, kind)}"
    return text + "".join(
        f"\nLeft out: {name}: {why}\n" for name, why in result["left_out"].items()
    )


def lines(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    parts = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(map(str, part))} |\n" for part in parts)


def closed_table(servers: dict[str, Any], kind: str) -> str:
    """Highest rate first."""
    names = ["server", "version", "setting", "requests/s below 100 ms", "most requests/s"]
    names += ["connections", "p50 / p99, ms", "failed", "load's share of the cores"]
    names += ["memory, MB", "start, s"]
    rows = []
    for name in sorted(servers, key=lambda name: -servers[name]["figures"][kind]["most"]):
        own, row = servers[name]["figures"][kind], servers[name]
        rows.append(
            [
                *[name, row["version"], SERVERS[name].settings[row["setting"]]],
                *[shown(own["capacity"] or None), shown(own["most"]), row["connections"][kind]],
                *[f"{own['p50_ms']:.1f} / {own['p99_ms']:.1f}", own["failed"]],
                *[f"{own['cpu']:.1%}", own["memory_mb"], own["start_seconds"]],
            ]
        )
    return lines(names, rows)


def shown(number: float | None) -> str:
    """
    >>> shown(1234.5), shown(12.34), shown(None)
    ('1,234', '12.3', '-')
    """
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def ratios(servers: dict[str, Any], kind: str) -> str:
    """Ours in int8 beside each peer: medians of the turns' ratios, where every turn has a rate."""
    ours, text = "bertsmith, int8", ""
    if ours not in servers:
        return text
    peers = [name for name in servers if not name.startswith("bertsmith")]
    for rate, words in (("capacity", "requests/s below 100 ms"), ("most", "most requests/s")):
        parts = []
        for name in peers:
            one, two = (servers[own]["figures"][kind]["turns"][rate] for own in (ours, name))
            if all(two):
                ratio = median(mine / other for mine, other in zip(one, two, strict=True))
                parts.append(f"**{ratio:.2f}x** of {name}")
            else:
                parts.append(f"not in every turn: {name}")
        text += f"- {ours}, {words}: {'; '.join(parts)}.\n"
    return text


def open_table(servers: dict[str, Any], kind: str) -> str:
    names = ["server", "p99 at 50%, ms", "p99 at 80%, ms"]
    names += [f"overload, {KINDS[kind][1]}x: asked/s", "answered", "their p50 / p99, ms", "refused"]
    names += ["within (p99 / all), ms", "failed", "no answer", "other (least cosine)"]
    names += ["load's share of the cores"]
    rows = []
    for name, row in servers.items():
        own, over = row["open"][kind], row["open"][kind]["over"]
        rows.append(
            [
                *[name, shown(own["50%"]["p99_ms"]), shown(own["80%"]["p99_ms"])],
                *[shown(over["rate"]), over["good"]],
                f"{shown(over['p50_ms'])} / {shown(over['p99_ms'])}",
                over["refused"],
                f"{shown(over['refused_p99_ms'])} / {shown(over['refused_most_ms'])}",
                *[over["failed"], over["lost"]],
                f"{over['other']:.0%} ({over['least_cosine']:.4f})",
                f"{over['cpu']:.1%}",
            ]
        )
    return lines(names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--prepare", action="store_true", help="make it, and measure nothing")
    parser.add_argument("--data", type=Path, help="folder with glue/")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder of a model's forms")
    parser.add_argument("--servers", nargs="+", default=[""], help="first words of their names")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of a load in a turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serving")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers and arguments.peers.absolute()
    if arguments.prepare and not arguments.peers:
        raise SystemExit("--prepare: say where, with --peers DIR")
    with tempfile.TemporaryDirectory() as work:
        arguments.folder = model_folder(arguments.model, arguments.peers, Path(work))
        name = "sst2" if arguments.data else "prose"
        if (texts := read_texts(name, arguments.data)) is None:
            raise SystemExit(f"{arguments.data}: no glue/SST-2 in it")
        if arguments.prepare:
            own = {name: inference_prepare.ENVIRONMENTS[name] for name in ("torch", "onnxruntime")}
            return inference_prepare.prepare(
                arguments.peers, arguments.folder, texts[1], {**own, **ENVIRONMENTS}
            )
        result = {**about(arguments, name), **measure(arguments, texts[0])}
    path = arguments.out / f"{kind_of_processor()}.json"
    write_json(path, result)
    write_text(path.with_suffix(".md"), table(result))
    print(table(result))


def about(arguments: argparse.Namespace, texts: str) -> dict[str, Any]:
    """When, on what and by which command."""
    words = ["--peers=DIR"] if arguments.peers else []
    words += ["--data=DATA"] if arguments.data else []
    words += [f"--turns={arguments.turns}", f"--seconds={arguments.seconds}"]
    words += ["--servers", *arguments.servers] if arguments.servers != [""] else []
    return {
        "command": f"python benchmarks/serving.py {shlex.join(words)}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": about_machine(),
        "model": arguments.folder.name,
        "texts": texts,
    }


if __name__ == "__main__":
    main()
