"""MODEL -> folder: local folders, a hub on this machine, and names that are neither."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.model.heads import PreTrainingModel

from ..tiny import write

WEIGHTS, SAFE = "model.safetensors", ".safetensors"
UNREACHABLE = "http://127.0.0.1:9"  # nobody listens there
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40
TOKEN = "hf_" + 34 * "x"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


class Hub:
    """The part of the hub's HTTP interface that a download uses.

    Models: "lab/mini", with an older commit "v1" of other weights; "lab/old" with pickled weights
    alone; "lab/gated", "lab/private" and "lab/down", which are not for everybody or for nobody.
    """

    def __init__(self, folder):
        self.folder = folder
        self.asked = []  # (path, its Range) of every question
        self.breaks = 0  # so many answers with the weights end in the middle
        handler = type("Handler", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None})
        handler.do_HEAD = lambda request: self.answer(request, send_body=False)
        handler.do_GET = lambda request: self.answer(request, send_body=True)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fetched(self):
        return {path.rsplit("/", 1)[1] for path, _ in self.asked if "/resolve/" in path}

    def files(self, model):
        unwanted = SAFE if model == "lab/old" else "never"
        return [file for file in sorted(self.folder.iterdir()) if file.suffix != unwanted]

    def body(self, commit, name):
        data = (self.folder / name).read_bytes()
        return data[:-4] + b"\1\0\0\0" if (commit, name) == (OLDER, WEIGHTS) else data

    def found(self, path, token):
        """Status, headers and body; the body of a file is given by its commit and name."""
        model = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if token not in (None, f"Bearer {TOKEN}"):
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return 401, message, b"{}"
        if model == "lab/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if model == "lab/down":
            return 503, {}, b"{}"
        if model not in ("lab/mini", "lab/old") and (model, token) != (
            "lab/private",
            f"Bearer {TOKEN}",
        ):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = OLDER if OLDER in path or path.endswith("/revision/v1") else COMMIT
        if "/tree/" in path:
            sizes = [(file.name, file.stat().st_size) for file in self.files(model)]
            listed = [{"type": "file", "path": n, "size": s, "oid": n + commit} for n, s in sizes]
            return 200, {}, json.dumps(listed).encode()
        if "/resolve/" in path:
            name = path.rsplit("/", 1)[1]
            headers = {"ETag": f'"{name}{commit}"', "X-Repo-Commit": commit}
            return 200, headers, self.body(commit, name)
        if "/revision/" in path and not path.endswith(("/main", "/v1", COMMIT, OLDER)):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        siblings = [{"rfilename": file.name} for file in self.files(model)]
        return 200, {}, json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode()

    def answer(self, request, send_body):
        path, wanted = request.path.split("?")[0], request.headers.get("Range")
        self.asked.append((path, wanted))
        status, headers, body = self.found(path, request.headers.get("Authorization"))
        if wanted and status == 200:
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[begin:]
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(name, value)
        request.end_headers()
        if send_body and self.breaks and path.endswith((WEIGHTS, ".bin")):
            self.breaks -= 1
            body = body[: len(body) // 2]
            request.close_connection = True
        if send_body:
            request.wfile.write(body)


@pytest.fixture
def hub(folder):
    torch.save(read_tensor_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / "README.md").write_text("a model")
    hub = Hub(folder)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """The folders, or errors, of some names; huggingface_hub reads the environment at its import,
    so that its constants are changed here. A chunk is the least that a resumed download keeps."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def asked(endpoint, *names, cache="cache", offline=False):
        values = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / cache)}
        values["HUGGINGFACE_CO_URL_TEMPLATE"] = (
            endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        values |= {"HF_HUB_OFFLINE": offline, "DOWNLOAD_CHUNK_SIZE": 1024}
        values["HF_TOKEN_PATH"] = str(tmp_path / "no-token")
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        return [said(name) for name in names]

    def said(name):
        try:
            return str(open_model_folder(name))
        except (ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    return asked


def test_the_environment_names_hub_token_cache_and_offline(hub, tmp_path):
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    kept |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": TOKEN}
    words = "from bertsmith.checkpoints.hub import open_model_folder as o; print(o('lab/private'))"
    folders = []
    for offline in ("0", "1"):
        answer = subprocess.check_output(
            [sys.executable, "-c", words], env=kept | {"HF_HUB_OFFLINE": offline}, text=True
        )
        folders.append(Path(answer.strip()))
        hub.server.shutdown()
    assert folders[0] == folders[1] and folders[0].is_relative_to(tmp_path / "cache")
    assert (folders[0] / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()


def test_a_hub_name_is_downloaded_without_what_is_not_needed(hub, ask, pretrained):
    lines = ask(hub.endpoint, "lab/mini", "lab/none", "none", "no/such/folder")
    assert lines[1:] == [
        f"ValueError: {name}: neither a folder here nor a model that {hub.endpoint} has; if it is "
        f"private, {LOG_IN}"
        for name in ("lab/none", "none")
    ] + ["ValueError: no/such/folder: no such folder"]
    loaded = load_model(Path(lines[0]), PreTrainingModel)
    assert loaded.missing == [] and (loaded.model.nsp.weight == pretrained.nsp.weight).all()
    tokenizer = {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert hub.fetched() == {"config.json", WEIGHTS, *tokenizer}
    cached, none = ask(UNREACHABLE, "lab/mini", "lab/none")
    assert cached == lines[0]
    why = f"and {UNREACHABLE} cannot be reached: check name and network"
    assert none == f"FileNotFoundError: lab/none: no folder here, {why}"
    asked = len(hub.asked)
    offline = ask(hub.endpoint, "lab/mini", "lab/mini@v1", offline=True)
    why = f"HF_HUB_OFFLINE keeps it from {hub.endpoint}: download it first"
    assert offline == [cached, f"FileNotFoundError: lab/mini@v1: no folder here, and {why}"]
    assert len(hub.asked) == asked


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, ask):
    names = [f"lab/mini{revision}" for revision in ("", "@v1", f"@{OLDER}", "@main", "@v2", "@")]
    *folders, unknown, empty = ask(hub.endpoint, *names)
    assert [Path(folder).name for folder in folders] == [COMMIT, OLDER, OLDER, COMMIT]
    now, older = ((Path(folder) / WEIGHTS).read_bytes() for folder in folders[:2])
    assert now != older and older == hub.body(OLDER, WEIGHTS)
    why = f"{hub.endpoint} has the model, but no branch, tag or commit 'v2' of it"
    assert unknown == f"ValueError: lab/mini@v2: {why}"
    assert empty == "ValueError: lab/mini@: no such folder"


def test_a_model_with_pickled_weights_alone_is_downloaded(hub, ask, pretrained):
    (old,) = ask(hub.endpoint, "lab/old")
    loaded = load_model(Path(old), PreTrainingModel)
    assert loaded.missing == [] and (loaded.model.nsp.weight == pretrained.nsp.weight).all()
    assert "pytorch_model.bin" in hub.fetched() and WEIGHTS not in hub.fetched()
    assert ask(UNREACHABLE, "lab/old") == [old]


def test_a_broken_transfer_goes_on_where_it_broke(hub, ask):
    """huggingface_hub waits a second after each break, and gives up after five without a byte."""
    hub.breaks = 2
    (folder,) = ask(hub.endpoint, "lab/mini")
    whole = (hub.folder / WEIGHTS).read_bytes()
    assert (Path(folder) / WEIGHTS).read_bytes() == whole
    ranges = [wanted for path, wanted in hub.asked if path.endswith(WEIGHTS) and wanted]
    first, second = (int(wanted.removeprefix("bytes=").rstrip("-")) for wanted in ranges)
    assert len(whole) // 4 < first < len(whole) // 2 < second < len(whole)  # whole chunks are kept


def test_a_transfer_that_breaks_for_good_is_repeated_for_what_lacks(hub, ask, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.breaks = 10**9
    whole = (hub.folder / WEIGHTS).read_bytes()
    (hub.folder / WEIGHTS).write_bytes(whole[:2000])  # less than a chunk arrives each time
    (broken,) = ask(hub.endpoint, "lab/mini")
    why = f"and the transfer from {hub.endpoint} broke off: repeat the command"
    assert broken == f"FileNotFoundError: lab/mini: no folder here, {why}"
    tries = sum(path.endswith(WEIGHTS) for path, _ in hub.asked) - 1  # a HEAD comes first
    assert tries == 6
    (part,) = ask(hub.endpoint, "lab/mini", offline=True)
    assert "only a part of it was downloaded, and HF_HUB_OFFLINE keeps it" in part
    hub.breaks = 0
    hub.asked.clear()
    (folder,) = ask(hub.endpoint, "lab/mini")
    assert hub.fetched() == {WEIGHTS} and len((Path(folder) / WEIGHTS).read_bytes()) == 2000


def test_a_download_that_was_killed_is_no_model_and_is_completed(hub, ask):
    """The files that came whole are not fetched again."""
    (folder,) = ask(hub.endpoint, "lab/mini")
    blob = (Path(folder) / WEIGHTS).resolve()
    blob.unlink()
    (Path(folder) / WEIGHTS).unlink()
    (part,) = ask(UNREACHABLE, "lab/mini")
    assert part.startswith(
        "FileNotFoundError: lab/mini: only a part of it was downloaded, and http"
    )
    hub.asked.clear()
    assert ask(hub.endpoint, "lab/mini") == [folder]
    assert hub.fetched() == {WEIGHTS}
    assert (Path(folder) / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()


def test_a_model_that_is_not_for_everybody_is_told_how_to_log_in(hub, ask, monkeypatch):
    names = ("lab/gated", "lab/private", "lab/down")
    gated, private, down = ask(hub.endpoint, *names)
    terms = f"accept the model's terms at {hub.endpoint}, and {LOG_IN}"
    assert gated == f"ValueError: lab/gated: {terms}"
    assert private.endswith(f"has; if it is private, {LOG_IN}")
    assert down.endswith(f"and {hub.endpoint} answered with error 503: try again later")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (folder,) = ask(hub.endpoint, "lab/private")
    assert (Path(folder) / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    (wrong,) = ask(hub.endpoint, "lab/private", cache="other")
    assert wrong == f"ValueError: lab/private: {hub.endpoint} refuses your token: {LOG_IN}"


def test_a_misspelt_folder_is_told_the_one_beside_it(hub, ask, tmp_path, monkeypatch):
    for name in ("two", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    neither = f"neither a folder here nor a model that {hub.endpoint} has"
    private = f"; if it is private, {LOG_IN}"
    assert ask(hub.endpoint, "twoo", str(tmp_path / "twoo"), "date") == [
        f"ValueError: twoo: {neither} (did you mean 'two'?){private}",
        f"ValueError: {tmp_path / 'twoo'}: no such folder (did you mean 'two'?)",
        f"ValueError: date: {neither}{private}",
    ]
    (line,) = ask(UNREACHABLE, "twoo")
    why = f"and {UNREACHABLE} cannot be reached: check name and network"
    assert line == f"FileNotFoundError: twoo: no folder here (did you mean 'two'?), {why}"


def test_an_empty_name_is_not_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert open_model_folder(".") == Path()
    with pytest.raises(ValueError, match="^model '': name a folder or a model of the hub"):
        open_model_folder("")


def test_local_folders_come_first_and_are_checked(folder, tmp_path, monkeypatch):
    assert open_model_folder(folder) == open_model_folder(str(folder)) == folder
    RunFolder(tmp_path / "run").write_settings({"kind": "pretrain"})

    def make(name, *files):
        return [write(tmp_path / name / file, "") for file in files][0].parent

    for path, message in (
        (folder / "vocab.txt", "vocab.txt: a file, not a model"),
        (tmp_path / "none", "/none: no such folder"),
        (tmp_path, "no config.json, so not a folder with a model"),
        (tmp_path / "run", "run: no model in this run yet"),
        (make("store", "manifest.json", "vocab.txt"), "a token store is for `bertsmith pretrain"),
        (make("words", "vocab.txt", "tokenizer.json"), "a vocabulary is for `bertsmith corpus"),
    ):
        with pytest.raises(ValueError, match=message):
            open_model_folder(path)
