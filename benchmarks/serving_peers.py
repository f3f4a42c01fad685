"""The servers of benchmarks/serving.py: how each is started and asked, and those that we write.

    PYTHON benchmarks/serving_peers.py SERVER FOLDER PORT WORKERS THREADS BATCH WAIT

starts one of `WRITTEN` in its own environment, so nothing but the standard library and NumPy is
imported before it is known. They are what their documentation shows, around one engine: ONNX
Runtime int8 beside `tokenizers`, rows sorted by length, answers by orjson.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference_peers import Engine, Job, onnx_runtime

THIN = ["onnxruntime==1.32.0", "tokenizers==0.23.3", "orjson==3.13.0"]
ENVIRONMENTS = {  # beside those of inference_prepare.py
    "serving-mosec": ["mosec==0.9.8", *THIN],
    "serving-litserve": ["litserve==0.2.19", *THIN],
    "serving-ray": ["ray[serve]==2.60.0", *THIN],
    "serving-fastapi": [
        *["torch==2.13.0", "transformers==5.23.0", "fastapi==0.165.0", "uvicorn==0.54.0"],
        *["httptools==0.9.0", "uvloop==0.23.0"],
    ],
    "serving-infinity": ["infinity-emb[optimum,server]==0.0.78"],
}


@dataclass(frozen=True)
class Setting:
    """How a server shares out its work."""

    workers: int = 1
    threads: int = 1
    """Of a worker."""
    batch: int = 1
    """Requests that are computed together at most."""
    wait_ms: int = 0
    """For them to come."""

    def __str__(self) -> str:
        """
        >>> print(Setting(2, 1, 8, 2))
        2 x 1 thread, 8 at once, 2 ms
        """
        threads = f"{self.workers} x {self.threads} thread{'s' * (self.threads > 1)}"
        return threads + (f", {self.batch} at once, {self.wait_ms} ms" if self.batch > 1 else "")


Command = Callable[[str, Path, int, Setting], Sequence[str]]
"""(Python, folder of a model's forms, port, setting) -> the words that start a server."""


@dataclass(frozen=True)
class Server:
    """A row of the table."""

    environment: str  # "": that of the benchmark
    package: str  # whose version is told
    precision: str
    settings: Sequence[Setting]
    """Those that are tried."""
    command: Command
    path: str = "/vectors"
    field: str = "texts"
    """Of a request, for a list of texts."""
    read: Callable[[Any], Any] = lambda answer: answer["vectors"]
    """The vectors in an answer."""


def ours(precision: str) -> Server:
    def command(python: str, folder: Path, port: int, setting: Setting) -> Sequence[str]:
        return [
            *[python, "-m", "bertsmith", "serve", f"model={folder / 'hf'}", "--port", str(port)],
            *["--precision", precision, "--workers", str(setting.workers), "--log", "errors"],
        ]

    return Server(
        *["", "bertsmith", precision, [Setting(1, 2), Setting(2, 1)], command],
        "/v1/embed",
        "text",
        lambda answer: [own["vector"] for own in answer["answers"]],
    )


def infinity(python: str, folder: Path, port: int, setting: Setting) -> Sequence[str]:
    return [  # from the folder: optimum 2.1 finds the file by its bare name alone
        *["env", "-C", str(folder / "infinity"), str(Path(python).with_name("infinity_emb"))],
        *["v2", "--model-id", ".", "--pooling-method", "mean", "--engine", "optimum"],
        *["--device", "cpu", "--batch-size", str(setting.batch), "--no-model-warmup"],
        *["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"],
    ]


def written(name: str) -> Command:
    def command(python: str, folder: Path, port: int, setting: Setting) -> Sequence[str]:
        numbers = port, *vars(setting).values()
        return [python, "-W", "ignore", __file__, name, str(folder), *map(str, numbers)]

    return command


BATCHED = [Setting(2, 1), Setting(2, 1, 8, 2), Setting(1, 2, 32, 5)]
SERVERS = {
    "bertsmith, int8": ours("int8"),
    "bertsmith, float32": ours("float32"),
    "mosec, ONNX Runtime": Server("serving-mosec", "mosec", "int8", BATCHED, written("mosec")),
    "LitServe, ONNX Runtime": Server(
        "serving-litserve", "litserve", "int8", BATCHED, written("litserve")
    ),
    "Ray Serve, ONNX Runtime": Server("serving-ray", "ray", "int8", BATCHED, written("ray")),
    "infinity, optimum": Server(
        *["serving-infinity", "infinity-emb", "int8"],
        [Setting(1, 2, 8, 0), Setting(1, 2, 32, 0)],
        infinity,
        "/embeddings",
        "input",
        lambda answer: [own["embedding"] for own in answer["data"]],
    ),
    "pipeline, FastAPI": Server(
        *["serving-fastapi", "transformers", "float32", [Setting(1, 2), Setting(2, 1)]],
        written("fastapi"),
    ),
}


# --- in the environments ---


def engine_of(folder: Path, threads: int) -> Engine:
    return onnx_runtime(Job(folder, threads, {}, [], []), "int8.onnx", 1)


def together(engine: Engine, requests: Sequence[dict[str, list[str]]]) -> list[bytes]:
    """The answers to several requests, computed as one."""
    import orjson

    vectors = engine.all([text for request in requests for text in request["texts"]])
    ends = np.cumsum([len(request["texts"]) for request in requests])[:-1]
    return [
        orjson.dumps({"vectors": own}, option=orjson.OPT_SERIALIZE_NUMPY)
        for own in np.split(vectors, ends)
    ]


def run_mosec(folder: Path, port: int, setting: Setting) -> None:
    import mosec
    import orjson

    class Vectors(mosec.Worker):
        def __init__(self) -> None:
            self.engine = engine_of(folder, setting.threads)

        def deserialize(self, data: bytes) -> Any:
            return orjson.loads(data)

        def serialize(self, data: bytes) -> bytes:
            return data

        def forward(self, data: Any) -> Any:
            if setting.batch > 1:
                return together(self.engine, data)
            return together(self.engine, [data])[0]

    sys.argv[1:] = ["--port", str(port), "--address", "127.0.0.1", "--timeout", "30000"]
    server = mosec.Server()
    server.append_worker(
        *[Vectors, setting.workers, setting.batch, setting.wait_ms, "fork"], route="/vectors"
    )
    server.run()


def run_litserve(folder: Path, port: int, setting: Setting) -> None:
    import litserve

    server = litserve.LitServer(
        litserve_api(folder, setting), accelerator="cpu", workers_per_device=setting.workers
    )
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


def litserve_api(folder: Path, setting: Setting) -> Any:
    import litserve
    from fastapi import Response

    class Vectors(litserve.LitAPI):
        def __reduce__(self) -> Any:  # workers are spawned, and do not know this class by name
            return litserve_api, (folder, setting), vars(self)

        def setup(self, device: str) -> None:
            self.engine = engine_of(folder, setting.threads)

        def batch(self, inputs: Any) -> Any:
            return inputs

        def predict(self, x: Any) -> Any:
            return together(self.engine, x if setting.batch > 1 else [x])

        def unbatch(self, output: Any) -> Any:
            return output

        def encode_response(self, output: Any) -> Response:
            [answer] = [output] if setting.batch > 1 else output
            return Response(answer, media_type="application/json")

    return Vectors(setting.batch, setting.wait_ms / 1000, "/vectors")


def run_ray(folder: Path, port: int, setting: Setting) -> None:
    import orjson
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    @serve.deployment(
        num_replicas=setting.workers,
        max_ongoing_requests=2 * setting.batch,
        ray_actor_options={"num_cpus": setting.threads},
    )
    class Vectors:
        def __init__(self) -> None:
            self.engine = engine_of(folder, setting.threads)

        @serve.batch(max_batch_size=setting.batch, batch_wait_timeout_s=setting.wait_ms / 1000)
        async def compute(self, requests: list[Any]) -> list[bytes]:
            return together(self.engine, requests)

        async def __call__(self, request: Request) -> Response:
            body = orjson.loads(await request.body())
            return Response(await self.compute(body), media_type="application/json")

    ray.init(include_dashboard=False, num_cpus=setting.workers * setting.threads)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Vectors.bind(), route_prefix="/vectors", blocking=True)


def run_fastapi(folder: Path, port: int, setting: Setting) -> None:
    """As people write it: a function that FastAPI calls in a thread for each request."""
    import os
    import socket

    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    for _ in range(setting.workers - 1):
        if os.fork() == 0:
            break
    import torch
    import uvicorn
    from fastapi import Body, FastAPI
    from transformers import pipeline

    torch.set_num_threads(setting.threads)
    extract = pipeline("feature-extraction", str(folder / "hf"), device="cpu")
    app = FastAPI()

    @app.post("/vectors")
    def vectors(texts: list[str] = Body(embed=True)) -> dict[str, list[list[float]]]:  # noqa: B008
        states = extract(texts, return_tensors=True)
        return {"vectors": [own[0].mean(dim=0).tolist() for own in states]}

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


WRITTEN = {"mosec": run_mosec, "litserve": run_litserve, "ray": run_ray, "fastapi": run_fastapi}


if __name__ == "__main__":
    name, folder, port, *numbers = sys.argv[1:]
    WRITTEN[name](Path(folder), int(port), Setting(*map(int, numbers)))
