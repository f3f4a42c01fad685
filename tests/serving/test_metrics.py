"""Numbers for Prometheus: summed over processes, with the names of text-embeddings-inference."""

import json

from ..tiny import python

PROGRAM = """
import json, os, sys
from pathlib import Path
from bertsmith.serving.metrics import ALIASES, Metrics

metrics = Metrics(Path(sys.argv[1]))
processes = []
for number in (1, 2):
    if not (process := os.fork()):
        for _ in range(number):
            metrics.on_request("/v1/classify", 200, 0.03)
            metrics.on_batch("org/name/classify", 3, 40, 0.01)
        metrics.on_te_request(True, None)
        metrics.on_te_request(False, "overloaded")
        metrics.queued_requests.set(number)
        metrics.connections.inc()
        os._exit(0)
    os.waitpid(process, 0)
    processes.append(process)

from prometheus_client.parser import text_string_to_metric_families

def numbers():
    kind, text = metrics.text()
    assert kind.startswith("text/plain")
    families = [*text_string_to_metric_families(text.decode())]
    names = [family.name for family in families]
    assert len(names) == len(set(names)) and set(ALIASES) <= set(names), names
    return {
        " ".join([s.name, *s.labels.values()]): s.value for f in families for s in f.samples
    }

before = numbers()
metrics.forget(processes[1])
print(json.dumps([before, numbers()]))
"""


def test_the_numbers_of_two_workers_are_summed_and_outlive_them(tmp_path):
    ran = python(PROGRAM, tmp_path)
    assert ran.code == 0, ran.err
    before, after = json.loads(ran.out)
    assert before["bertsmith_requests_total /v1/classify 200"] == 3
    assert before["bertsmith_texts_total classify org/name"] == 9
    assert before["bertsmith_tokens_total classify org/name"] == 120
    assert before["bertsmith_request_seconds_bucket 0.02 /v1/classify"] == 0
    assert before["bertsmith_request_seconds_bucket 0.05 /v1/classify"] == 3
    for name in ("te_request_duration_count /v1/classify", "te_batch_next_size_count"):
        assert before[name] == 3
    assert (
        before["te_request_count_total batch"] == before["te_request_failure_total overloaded"] == 2
    )
    assert before["bertsmith_queued_requests"] == before["te_queue_size"] == 3
    assert before["bertsmith_connections"] == 2
    # of a process that has ended there is nothing in the queue, but what it has done counts
    assert after["bertsmith_queued_requests"] == after["bertsmith_connections"] == 1
    assert after["bertsmith_requests_total /v1/classify 200"] == 3
