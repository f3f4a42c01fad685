"""One system of benchmarks/inference.py in a process of its own: texts into vectors on command.

    PYTHON benchmarks/inference_peers.py SYSTEM JOB

JOB is a JSON file, see `read_job` of benchmarks/inference.py. It runs in the system's environment,
so nothing but the standard library and NumPy is imported before the system is known.

A line of JSON says that it is loaded and has seen some texts, which are not measured. Then it
answers each line of its input with a line: "fresh" (latency of texts of any shape), "turn" (all
modes), "memory", and "vectors FILE" (of the last turn).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

BATCH = 32  # of rows sorted by length, with all texts at hand
POSITIONS = 512


@dataclass(frozen=True)
class Job:
    """What every system is told."""

    folder: Path
    """Of a model: "hf" has the weights, the others what inference_prepare.py made of them."""
    threads: int
    modes: dict[str, list[str]]
    """Texts by mode: "batch 1", "batch 8", "batch 32", "offline"."""
    fresh: list[str]
    warm: list[str]


class Engine(Protocol):
    """What a system makes of texts: vectors float32 [N, H], the mean of each one's last states."""

    def call(self, texts: list[str]) -> np.ndarray:
        """Of a batch that came just now."""
        ...

    def all(self, texts: list[str]) -> np.ndarray:
        """Of many texts, in whatever order the system does them best."""
        ...


class Whole:
    """A library that does it all by itself."""

    def __init__(self, embed: Callable[[list[str]], np.ndarray]) -> None:
        self.call = self.all = embed


Compute = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(ids, mask), int64 [B, L] -> vectors float32 [B, H]."""


class Padded:
    """A library that reads padded rows; tokens are those of `tokenizers`."""

    def __init__(self, job: Job, compute: Compute, at_once: int = 1) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(job.folder / "hf" / "tokenizer.json"))
        self.tokenizer.enable_truncation(POSITIONS)
        self.tokenizer.no_padding()
        self.compute = compute
        self.pool = ThreadPoolExecutor(at_once) if at_once > 1 else None

    def call(self, texts: list[str]) -> np.ndarray:
        return self.compute(*padded([row.ids for row in self.tokenizer.encode_batch_fast(texts)]))

    def all(self, texts: list[str]) -> np.ndarray:
        rows = [row.ids for row in self.tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(rows)), key=lambda k: -len(rows[k]))
        chosen = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
        found = np.concatenate(self.map([padded([rows[k] for k in few]) for few in chosen]))
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors

    def map(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> Sequence[np.ndarray]:
        if self.pool is None:
            return [self.compute(*batch) for batch in batches]
        return list(self.pool.map(lambda batch: self.compute(*batch), batches))


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), int64 [B, L]; [PAD] is 0."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask.astype(np.int64)


def mean(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    weights = (mask / mask.sum(axis=1, keepdims=True)).astype(np.float32)
    return np.matmul(weights[:, None], states)[:, 0]


def ours(job: Job, precision: str) -> Engine:
    import bertsmith

    model = bertsmith.load(job.folder / "hf", device="cpu", precision=precision)
    model.processor = replace(model.processor, threads=job.threads)
    return Whole(model.embed)


class OpenVINO(Padded):
    """Requests of its own queue, as many at once as its streams want."""

    def __init__(self, job: Job, file: str, streams: int, hint: str) -> None:
        import openvino

        settings = {
            "PERFORMANCE_HINT": "THROUGHPUT" if streams > 1 else "LATENCY",
            "NUM_STREAMS": str(streams),
            "INFERENCE_NUM_THREADS": str(job.threads),
        }
        if hint:
            settings["INFERENCE_PRECISION_HINT"] = hint
        model = openvino.Core().compile_model(str(job.folder / "openvino" / file), "CPU", settings)
        self.request, self.queue = model.create_infer_request(), openvino.AsyncInferQueue(model)
        self.queue.set_callback(self.keep)
        self.found: dict[int, np.ndarray] = {}
        super().__init__(job, lambda *batch: self.request.infer(inputs(*batch))[0].copy())

    def keep(self, request: Any, number: int) -> None:
        self.found[number] = request.get_output_tensor(0).data.copy()

    def map(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        for number, batch in enumerate(batches):
            self.queue.start_async(inputs(*batch), number)
        self.queue.wait_all()
        return [self.found.pop(number) for number in range(len(batches))]


def inputs(ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def onnx_runtime(job: Job, file: str, sessions: int) -> Engine:
    """That many sessions with the threads shared out among them; idle threads do not spin."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, job.threads // sessions)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    path = str(job.folder / "onnxruntime" / file)
    free = [
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for _ in range(sessions)
    ]

    def compute(*batch: np.ndarray) -> np.ndarray:
        session = free.pop()
        try:
            return session.run(None, inputs(*batch))[0]
        finally:
            free.append(session)

    return Padded(job, compute, sessions)


def ctranslate2(job: Job, precision: str) -> Engine:
    """Encoders of one thread each, and a call of Python for each of them at once."""
    import ctranslate2

    encoder = ctranslate2.Encoder(
        str(job.folder / "ctranslate2"),
        device="cpu",
        compute_type=precision,
        inter_threads=job.threads,
        intra_threads=1,
    )

    def compute(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        lengths = ctranslate2.StorageView.from_array(mask.sum(axis=1).astype(np.int32))
        ids = ctranslate2.StorageView.from_array(ids.astype(np.int32))
        return mean(np.array(encoder.forward_batch(ids, lengths).last_hidden_state), mask)

    return Padded(job, compute, job.threads)


def transformers(job: Job, dtype: str, compiler: str | None = None) -> Engine:
    """The model and its pooling; `compiler`: the backend of torch.compile, any shape at once."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(job.threads)
    model = AutoModel.from_pretrained(job.folder / "hf", dtype=getattr(torch, dtype)).eval()

    def pooled(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = model(ids, attention_mask=mask).last_hidden_state
        weights = mask / mask.sum(1, keepdim=True)
        return (weights[:, None].to(states.dtype) @ states)[:, 0].float()

    forward: Any = pooled
    if compiler:
        import torch._inductor.config

        torch._inductor.config.freezing = True
        torch._dynamo.config.recompile_limit = 64
        forward = torch.compile(pooled, backend=compiler, dynamic=True)

    def compute(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return forward(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()

    return Padded(job, compute)


def zentorch(job: Job, dtype: str) -> Engine:
    if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
        raise SystemExit("it is made for AMD's processors")
    import zentorch as _  # noqa: F401

    return transformers(job, dtype, "zentorch")


def sentence_transformers(job: Job, backend: str) -> Engine:
    """It sorts by length and pads by itself."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(job.threads)
    folder = job.folder / ("hf" if backend == "torch" else f"sentence-transformers-{backend}")
    model = SentenceTransformer(str(folder), backend=backend, device="cpu", local_files_only=True)
    return Whole(lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False))


def fastembed(job: Job) -> Engine:
    """Under the name of a model that it knows, from our files."""
    from fastembed import TextEmbedding

    model = TextEmbedding(
        "sentence-transformers/all-MiniLM-L6-v2",
        specific_model_path=str(job.folder / "fastembed"),
        threads=job.threads,
    )
    return Whole(lambda texts: np.stack(list(model.embed(texts, batch_size=BATCH))))


@dataclass(frozen=True)
class System:
    """A row of the table."""

    environment: str  # "": that of the benchmark
    package: str  # whose version is told
    precision: str
    open: Callable[[Job], Engine]


SYSTEMS = {
    "bertsmith, float32": System("", "bertsmith", "float32", lambda job: ours(job, "float32")),
    "bertsmith, bf16": System("", "bertsmith", "bf16", lambda job: ours(job, "bf16")),
    "bertsmith, int8": System("", "bertsmith", "int8", lambda job: ours(job, "int8")),
    **{
        f"OpenVINO, {precision}, {streams} stream{'s' * (streams > 1)}": System(
            "openvino",
            "openvino",
            precision,
            lambda job, of=(file, streams, hint): OpenVINO(job, *of),
        )
        for precision, file, hint in (
            ("float32", "float32.xml", "f32"),
            ("bf16", "float32.xml", "bf16"),
            ("int8", "int8.xml", ""),  # what stays float is computed in what it thinks best
        )
        for streams in (1, 2)
    },
    **{
        f"ONNX Runtime, {precision}, {name}": System(
            "onnxruntime",
            "onnxruntime",
            precision,
            lambda job, of=(f"{precision}.onnx", sessions): onnx_runtime(job, *of),
        )
        for precision in ("float32", "int8")
        for name, sessions in (("1 x 2 threads", 1), ("2 x 1 thread", 2))
    },
    "CTranslate2, int8, 2 x 1 thread": System(
        "torch", "ctranslate2", "int8", lambda job: ctranslate2(job, "int8")
    ),
    "transformers, float32": System(
        "torch", "transformers", "float32", lambda job: transformers(job, "float32")
    ),
    "transformers, bf16": System(
        "torch", "transformers", "bf16", lambda job: transformers(job, "bfloat16")
    ),
    "transformers, bf16, compiled": System(
        "torch", "transformers", "bf16", lambda job: transformers(job, "bfloat16", "inductor")
    ),
    "zentorch, bf16": System("zentorch", "zentorch", "bf16", lambda job: zentorch(job, "bfloat16")),
    **{
        f"sentence-transformers, {backend}": System(
            environment,
            "sentence-transformers",
            precision,
            lambda job, backend=backend: sentence_transformers(job, backend),
        )
        for backend, environment, precision in (
            ("torch", "torch", "float32"),
            ("onnx", "sentence-transformers-onnx", "float32"),
            ("openvino", "sentence-transformers-openvino", "bf16"),  # OpenVINO's own choice
        )
    },
    "fastembed": System("fastembed", "fastembed", "float32", fastembed),
}


def latencies(engine: Engine, texts: list[str], size: int) -> list[float]:
    """Seconds of each call with so many texts."""
    found = []
    for start in range(0, len(texts), size):
        started = time.perf_counter()
        engine.call(texts[start : start + size])
        found.append(time.perf_counter() - started)
    return found


def turn(engine: Engine, modes: dict[str, list[str]]) -> tuple[dict[str, list[float]], np.ndarray]:
    """(Seconds of each call, by mode, the vectors of "offline")."""
    found, vectors = {}, np.empty(0)
    for mode, texts in modes.items():
        if mode == "offline":
            started = time.perf_counter()
            vectors = engine.all(texts)
            found[mode] = [time.perf_counter() - started]
        else:
            found[mode] = latencies(engine, texts, int(mode.split()[1]))
    return found, vectors


def memory_mb() -> int:
    """Resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def warm_up(engine: Engine, texts: list[str]) -> None:
    for size in (1, 8, 32):
        latencies(engine, texts, size)
    engine.all(texts)


def main() -> None:
    name = sys.argv[1]
    job = Job(**json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries talk

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    started = time.perf_counter()
    engine = SYSTEMS[name].open(Job(**{**vars(job), "folder": Path(job.folder)}))
    warm_up(engine, job.warm)
    answer(
        {
            "version": importlib.metadata.version(SYSTEMS[name].package),
            "load_seconds": round(time.perf_counter() - started, 2),
        }
    )
    vectors = np.empty(0)
    for line in sys.stdin:
        command, _, file = line.strip().partition(" ")
        if command == "fresh":
            answer(latencies(engine, job.fresh, 1))
        elif command == "turn":
            seconds, vectors = turn(engine, job.modes)
            answer(seconds)
        elif command == "memory":
            answer(memory_mb())
        else:
            np.save(file, vectors)
            answer(True)


if __name__ == "__main__":
    main()
