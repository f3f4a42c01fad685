"""MODEL -> folder: local folders, a hub on this machine, and names that are neither."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.model.heads import PreTrainingModel

SAFE = ".safetensors"
UNREACHABLE = "http://127.0.0.1:9"  # nobody listens there
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(folder):
    """The part of the hub's HTTP interface that a download uses, with a model, "lab/mini", the same
    with pickled weights alone, "lab/old", and one that is not for everybody, "lab/gated"."""
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "README.md").write_text("a model")
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(send_body=False)

        def do_GET(self):
            self.answer(send_body=True)

        def answer(self, send_body):
            path = self.path.split("?")[0]
            asked.append(path)
            headers, body, status = {}, b"{}", 200
            name = "lab/old" if "/lab/old" in path else "lab/mini"
            files = [file for file in folder.iterdir() if name == "lab/mini" or file.suffix != SAFE]
            prefix = f"/{name}/resolve/{COMMIT}/"
            if path.startswith(f"/api/models/{name}/tree/"):
                body = json.dumps([entry(file) for file in files]).encode()
            elif path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": file.name} for file in files]
                body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith("/api/models/lab/gated"):
                headers, status = {"X-Error-Code": "GatedRepo"}, 403
            elif path.startswith(prefix):
                name = path.removeprefix(prefix)
                body = (folder / name).read_bytes()
                headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
            else:
                headers, status = {"X-Error-Code": "RepoNotFound"}, 404
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if send_body:
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    def entry(file):
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


ASK = """
import sys
from bertsmith.checkpoints.hub import open_model_folder
for name in sys.argv[1:]:
    try:
        print(open_model_folder(name))
    except (ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
"""


def ask(endpoint, cache, *names):
    """What a process of its own prints for each name: the hub's address is read at import."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    words = [sys.executable, "-c", ASK, *names]
    answer = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()


def test_a_hub_name_is_downloaded_without_what_is_not_needed(hub, tmp_path, pretrained):
    endpoint, asked = hub
    lines = ask(endpoint, tmp_path / "cache", "lab/mini", "lab/none", "none", "no/such/folder")
    assert lines[1:] == [
        f"ValueError: lab/none: neither a folder here nor a model that {endpoint} has",
        f"ValueError: none: neither a folder here nor a model that {endpoint} has",
        "ValueError: no/such/folder: no such folder",
    ]
    loaded = load_model(type(tmp_path)(lines[0]), PreTrainingModel)
    assert loaded.missing == [] and (loaded.model.nsp.weight == pretrained.nsp.weight).all()
    fetched = {path.rsplit("/", 1)[1] for path in asked if "/resolve/" in path}
    tokenizer = {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert fetched == {"config.json", "model.safetensors", *tokenizer}
    cached, none = ask(UNREACHABLE, tmp_path / "cache", "lab/mini", "lab/none")
    assert cached == lines[0]
    why = f"and {UNREACHABLE} cannot be reached: check name and network"
    assert none == f"FileNotFoundError: lab/none: no folder here, {why}"


def test_a_hub_model_that_cannot_be_opened_is_told_why(hub, folder, tmp_path):
    endpoint, asked = hub
    old, gated = ask(endpoint, tmp_path / "cache", "lab/old", "lab/gated")
    assert not any(path.endswith(".bin") for path in asked)
    assert read_config(Path(old)) == read_config(folder)  # for whoever needs no weights
    with pytest.raises(ValueError, match="hub has only pickled weights of it, .*: convert it"):
        load_model(Path(old), PreTrainingModel)
    terms = f"ValueError: lab/gated: accept the model's terms at {endpoint}, and log in"
    assert gated.startswith(terms)


def test_a_misspelt_folder_is_told_the_one_beside_it(hub, tmp_path, monkeypatch):
    for name in ("two", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    neither = f"neither a folder here nor a model that {hub[0]} has"
    assert ask(hub[0], tmp_path / "cache", "twoo", str(tmp_path / "twoo"), "date") == [
        f"ValueError: twoo: {neither} (did you mean 'two'?)",
        f"ValueError: {tmp_path / 'twoo'}: no such folder (did you mean 'two'?)",
        f"ValueError: date: {neither}",
    ]
    (line,) = ask(UNREACHABLE, tmp_path / "cache", "twoo")
    why = f"and {UNREACHABLE} cannot be reached: check name and network"
    assert line == f"FileNotFoundError: twoo: no folder here (did you mean 'two'?), {why}"


def test_local_folders_come_first_and_are_checked(folder, tmp_path, monkeypatch):
    assert open_model_folder(folder) == open_model_folder(str(folder)) == folder
    RunFolder(tmp_path / "run").write_settings({"kind": "pretrain"})
    for path, message in (
        (folder / "vocab.txt", "vocab.txt: a file, not a model"),
        (tmp_path / "none", "/none: no such folder"),
        (tmp_path, "no config.json, so not a folder with a model"),
        (tmp_path / "run", "run: no model in this run yet"),
    ):
        with pytest.raises(ValueError, match=message):
            open_model_folder(path)
