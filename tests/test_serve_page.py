"""What docs/how-to/serve.md shows, run against servers that it starts, and the files it gives."""

import asyncio
import contextlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from bertsmith.cli.flags import read_command
from bertsmith.cli.models import Serve
from bertsmith.model.config import config_for
from bertsmith.model.heads import SequenceClassifier

from .serving.serving_tools import server
from .tiny import random_model, word_tokenizer, write_model

ROOT = Path(__file__).parents[1]
FILES = ROOT / "docs" / "serving"
PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TEXTS = ["A fine film. Two hours of rain. The sat."]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with the runs of the page."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "runs" / "books", TEXTS)
    tokenizer = word_tokenizer(TEXTS)
    config = config_for("1x64", len(tokenizer.vocabulary), max_positions=64)
    settings = {"task": "classify", "text": "text", "text_pair": None, "label": "stars"}
    written = {"label_names": ("bad", "good"), "extra_config": {"max_length": 16}}
    return random_model(
        *(tmp_path / "runs" / "reviews", tokenizer, SequenceClassifier, 2),
        **{"config": config, "run": settings, **written},
    ).parent


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_what_the_page_asks_is_answered(runs, capsys):
    running, asked = None, 0
    with contextlib.ExitStack() as stack:
        for kind, block in BLOCK.findall(PAGE):
            for line in block.splitlines() if kind == "sh" else [block]:
                words = shlex.split(line) if kind == "sh" else [kind]
                if words[0] == "pip":
                    continue
                if words[:2] == ["bertsmith", "serve"]:
                    assert not running or running.end() == 0
                    running = stack.enter_context(server(*words[2:]))
                    continue
                port = running.port if running else "none"
                line = line.replace("localhost:8000", f"localhost:{port}")
                if kind == "python":
                    exec(compile(line, "serve.md", "exec"), {})
                    continue
                line = line.replace("curl ", "curl -sS --fail ")
                subprocess.run(["bash", "-ec", line], check=True, stdout=subprocess.DEVNULL)
                asked += words[0] == "curl"
        assert running.end() == 0
    assert asked == 7
    assert re.fullmatch(r"((bad|good) 0\.\d+\n){2}", capsys.readouterr().out)


def test_the_files_for_a_cluster_start_the_server_with_flags_that_it_has():
    service, deployment = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    settings = read_command(Serve, "serve", container["args"])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + settings.drain + settings.timeout
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert container["resources"]["limits"]["cpu"] == container["resources"]["requests"]["cpu"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in ("/health/ready", "/health/live")


def test_nginx_waits_longer_than_a_server_and_keeps_connections_shorter():
    from bertsmith.serving.server import KEEP_ALIVE
    from bertsmith.serving.settings import ServingSettings

    text = (FILES / "nginx.conf").read_text()
    assert float(re.search(r"proxy_read_timeout (\d+)s", text)[1]) > ServingSettings().timeout
    assert float(re.search(r"keepalive_timeout (\d+)s", text)[1]) < KEEP_ALIVE
    size = int(re.search(r"client_max_body_size (\d+)m", text)[1]) * 2**20
    assert size >= ServingSettings().max_body


def test_the_container_starts_the_server_and_prometheus_finds_it():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    [start] = [line for line in lines if line.startswith("ENTRYPOINT")]
    words = yaml.safe_load(start.removeprefix("ENTRYPOINT"))
    assert words[:2] == ["bertsmith", "serve"]
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    settings = read_command(Serve, "serve", [*words[2:], *services["serve"]["command"]])
    assert settings.host == "0.0.0.0"
    [job] = yaml.safe_load((FILES / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"serve:{settings.port}"]}]


def test_the_deployment_of_ray_serve_answers_each_request_with_its_own_texts(runs, monkeypatch):
    """Ray's decorators are stood in for; what is theirs is not tested here."""
    ray, serve = types.ModuleType("ray"), types.ModuleType("ray.serve")

    def deployment(**options):
        def decorated(kind):
            kind.bind = classmethod(lambda cls, *words: cls(*words))
            return kind

        return decorated

    serve.deployment, serve.batch, ray.serve = deployment, lambda **options: lambda own: own, serve
    requests = types.ModuleType("starlette.requests")
    requests.Request = object
    for name, module in (("ray", ray), ("ray.serve", serve), ("starlette.requests", requests)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MODEL", "runs/reviews")
    spec = importlib.util.spec_from_file_location("ray_serve", FILES / "ray_serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    one, two = ["a fine film"], ["the rain", "two hours"]
    found = asyncio.run(module.app.classify([one, two]))
    model = module.app.model
    expected = [
        [(own.label, own.confidence) for own in model.classify(part)] for part in (one, two)
    ]
    assert [[tuple(own.values()) for own in part] for part in found] == expected

    class Request:
        async def json(self):
            return {"text": one[0]}

    async def batched(texts, together=module.app.classify):
        return (await together([texts]))[0]

    module.app.classify = batched  # as Ray's decorator has it for a caller
    assert asyncio.run(module.app(Request())) == {"answers": found[0]}
