"""Counters and histograms in Prometheus' format, summed over the workers.

Those that begin with te_ have the names of text-embeddings-inference, so that its dashboards work.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
COUNTS = tuple(4**k for k in range(1, 9))
ALIASES = {
    "te_request_duration": "bertsmith_request_seconds",
    "te_request_queue_duration": "bertsmith_queue_seconds",
    "te_request_inference_duration": "bertsmith_compute_seconds",
    "te_request_input_length": "bertsmith_request_tokens",
    "te_queue_size": "bertsmith_queued_requests",
    "te_batch_next_size": "bertsmith_batch_texts",
    "te_batch_next_tokens": "bertsmith_batch_tokens",
}


class Metrics:
    """The numbers, in files of `folder`, one a process, which outlive a process that dies.

    prometheus_client takes the folder from the environment when it is first imported: make this
    object before.
    """

    def __init__(self, folder: Path) -> None:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        import prometheus_client as prometheus

        self.folder, registry = folder, prometheus.CollectorRegistry()
        counter = functools.partial(prometheus.Counter, registry=registry)
        histogram = functools.partial(prometheus.Histogram, registry=registry)
        gauge = functools.partial(prometheus.Gauge, registry=registry, multiprocess_mode="livesum")
        self._requests = counter(
            "bertsmith_requests", "Requests by route and status.", ["route", "status"]
        )
        self._seconds = histogram(
            "bertsmith_request_seconds", "From the request to its answer.", ["route"],
            buckets=SECONDS,
        )  # fmt: skip
        self.queue_seconds = histogram(
            "bertsmith_queue_seconds", "Wait for the first text's turn.", buckets=SECONDS
        )
        self.request_tokens = histogram(
            "bertsmith_request_tokens", "Tokens of a request, about.", buckets=COUNTS
        )
        self._compute_seconds = histogram(
            "bertsmith_compute_seconds", "A call of the model.", buckets=SECONDS
        )
        self._batch_texts = histogram(
            "bertsmith_batch_texts", "Texts in a call of the model.", buckets=COUNTS
        )
        self._batch_tokens = histogram(
            "bertsmith_batch_tokens", "Tokens in a call of the model, about.", buckets=COUNTS
        )
        self._texts = counter("bertsmith_texts", "Texts that were answered.", ["model", "method"])
        self._tokens = counter("bertsmith_tokens", "Their tokens, about.", ["model", "method"])
        self.queued_requests = gauge("bertsmith_queued_requests", "Requests that wait.")
        self.queued_tokens = gauge("bertsmith_queued_tokens", "Their tokens, about.")
        self.connections = gauge("bertsmith_connections", "Open connections.")
        self._te_count = counter("te_request_count", "Requests.", ["method"])
        self._te_success = counter("te_request_success", "Requests answered.", ["method"])
        self._te_failure = counter("te_request_failure", "Requests failed.", ["err"])
        # finding a child by its labels takes longer than counting
        self._request_of = functools.cache(self._requests.labels)
        self._seconds_of = functools.cache(self._seconds.labels)
        self._work_of = functools.cache(
            lambda kind: [c.labels(*kind.rsplit("/", 1)) for c in (self._texts, self._tokens)]
        )

    def on_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered or refused."""
        self._request_of(route, str(status)).inc()
        self._seconds_of(route).observe(seconds)

    def on_te_request(self, is_batch: bool, error: str | None) -> None:
        """Count a request of a client of text-embeddings-inference."""
        method = "batch" if is_batch else "single"
        self._te_count.labels(method).inc()
        if error is None:
            self._te_success.labels(method).inc()
        else:
            self._te_failure.labels(error).inc()

    def on_batch(self, kind: str, texts: int, tokens: int, seconds: float) -> None:
        """Count a call of a model; `kind` is "MODEL/METHOD"."""
        self._compute_seconds.observe(seconds)
        self._batch_texts.observe(texts)
        self._batch_tokens.observe(tokens)
        of_texts, of_tokens = self._work_of(kind)
        of_texts.inc(texts)
        of_tokens.inc(tokens)

    def text(self) -> tuple[str, bytes]:
        """(Content type, the numbers of all workers)."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))
        lines = generate_latest(registry).decode()
        blocks: list[str] = [lines]
        for alias, name in ALIASES.items():
            own = [line for line in lines.splitlines() if _is_of(line, name)]
            blocks += [line.replace(name, alias) + "\n" for line in own]
        return CONTENT_TYPE_LATEST, "".join(blocks).encode()

    def forget(self, process: int) -> None:
        """Leave a process that has died out of what is summed over those that live."""
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(process, str(self.folder))


def _is_of(line: str, name: str) -> bool:
    """True for a line of a metric, its comments included."""
    start = line.split(" ", 3)[2] if line.startswith("# ") else line
    return start.startswith(name) and not start[len(name) :][:1].isalpha()
