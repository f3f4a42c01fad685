"""What a browser is sent: the page and its files, reports, and nothing else of the disk."""

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from bertsmith.inference.engines.processor import choose_processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import BareModel
from bertsmith.serving.application import Application, read_keys
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of
from bertsmith.serving.settings import ServingSettings

from ..tiny import piece_tokenizer, random_model, write

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
UNCOUNTED = SimpleNamespace(on_request=lambda *of: None, on_batch=lambda *of: None)
TRICKS = [
    "/page/",
    "/page/page.js",
    "/page/../page.py",
    "/reports/",
    "/reports/reviews/",
    "/reports/reviews/report",
    "/reports/reviews/config.json",
    "/reports/reviews/../reviews/report.html",
    "/reports/reviews/../secret.html",
    "/reports/reviews/%2e%2e/secret.html",
    "/reports/reviews/..\\secret.html",
    "/reports/reviews//report.html",
    "/reports/reviews/seeds/deep.html",
    "/reports/reviews/folder.html",
    "/reports/reviews/report.html/",
    "/reports/reviews/report.html\0.txt",
    "/reports/./reviews/report.html",
    "/reports/other/report.html",
    "//etc/passwd",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tokenizer = piece_tokenizer("a b")
    config = ModelConfig(len(tokenizer.vocabulary), 64, 1, 2, 64, 32)
    run = random_model(folder / "run", tokenizer, BareModel, config=config)
    write(run / "report.html", "<p>one")
    write(run / "a report 2.html", "<p>two")
    write(run / "seeds" / "deep.html", "deep")
    write(run / "folder.html" / "index.html", "index")
    write(folder / "secret.html", "secret")
    processor = choose_processor("cpu", "float32", "bertsmith")
    return {"reviews": ServedModel.open("reviews", run, processor)}


def application(models, **settings):
    settings = ServingSettings(log="errors", **settings)
    keys = read_keys(settings.api_key_file)
    return Application(models, operations_of(models, settings), settings, UNCOUNTED, keys)


def get(app, path, method="GET", **headers):
    """(Status, headers, body) of a request, by the application's own protocol."""
    sent = []

    async def send(message):
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    asyncio.run(app(scope, None, send))
    start, end = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, end["body"].decode()


def policy(headers):
    """The directives of a Content-Security-Policy."""
    parts = headers["content-security-policy"].split(";")
    words = [part.split() for part in parts if part.strip()]
    return {name: values for name, *values in words}


def test_a_browser_gets_the_page_and_a_probe_an_empty_answer(models):
    app = application(models)
    status, headers, page = get(app, "/", **BROWSER)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert page.startswith("<!doctype html>")
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        status, probed, body = get(app, "/", **accept)
        assert (status, body) == (200, "") and "content-type" not in probed
        assert probed["vary"] == headers["vary"] == "Accept"


def test_every_address_in_the_page_is_a_file_that_may_be_kept_for_ever(models):
    app = application(models)
    _, headers, page = get(app, "/", **BROWSER)
    assert headers["cache-control"] == "no-cache"
    addresses = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page)
    assert len(addresses) > 3 and "HASH" not in page
    for address in addresses:
        status, found, body = get(app, f"/{address}")
        assert status == 200 and body, address
        assert "immutable" in found["cache-control"]
        kind = {"css": "text/css", "js": "text/javascript"}[address.rpartition(".")[2]]
        assert found["content-type"] == f"{kind}; charset=utf-8"
        assert found["x-content-type-options"] == "nosniff"
        for name in re.findall(r'from "\./([^"]+)"', body):  # what modules import is there, too
            assert get(app, f"/{address.rpartition('/')[0]}/{name}")[0] == 200, name


def test_the_page_may_load_nothing_from_elsewhere_and_nothing_inline(models):
    app = application(models)
    _, headers, page = get(app, "/", **BROWSER)
    allowed = policy(headers)
    assert allowed["default-src"] == allowed["form-action"] == allowed["base-uri"] == ["'none'"]
    assert allowed["frame-ancestors"] == ["'none'"]
    for kind in ("script-src", "style-src", "connect-src"):
        assert allowed[kind] == ["'self'"]
    assert headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)


def test_a_report_runs_by_itself_and_reaches_nobody(models):
    app = application(models)
    status, headers, body = get(app, "/reports/reviews/report.html")
    assert (status, body) == (200, "<p>one")
    allowed = policy(headers)
    assert allowed["default-src"] == ["'none'"]  # of connections, frames and forms also
    assert allowed["form-action"] == ["'none'"]
    assert allowed["img-src"] == allowed["font-src"] == ["data:"]
    assert allowed["script-src"] == allowed["style-src"] == ["'unsafe-inline'"]
    assert allowed["sandbox"] == ["allow-scripts"]  # of no origin: it cannot read the page's key
    assert get(app, "/reports/reviews/a report 2.html")[2] == "<p>two"


def test_reports_are_what_the_list_of_models_says(models):
    app = application(models)
    _, _, listed = get(app, "/v1/models")
    assert '"reports":["a report 2.html","report.html"]' in listed


@pytest.mark.parametrize("path", TRICKS)
def test_no_path_leads_elsewhere(models, path):
    status, _, body = get(application(models), path)
    assert status == 404 and "secret" not in body and str(models["reviews"].folder) not in body


def test_a_report_that_has_gone_is_not_found(models):
    app = application(models)
    report = models["reviews"].folder / "a report 2.html"
    report.rename(report.with_suffix(".away"))
    try:
        status, _, body = get(app, "/reports/reviews/a report 2.html")
    finally:
        report.with_suffix(".away").rename(report)
    assert status == 404 and "is gone" in body and str(report.parent) not in body


def test_with_keys_the_page_is_open_and_reports_are_not(models, tmp_path):
    keys = write(tmp_path / "keys", "abc\n")
    app = application(models, api_key_file=keys)
    assert get(app, "/", **BROWSER)[0] == get(app, "/openapi.json")[0] == 200
    assert get(app, "/reports/reviews/report.html")[0] == 401
    assert get(app, "/reports/reviews/report.html", authorization="Bearer abc")[0] == 200


def test_files_are_read_only_by_get(models):
    app = application(models)
    assert get(app, "/reports/reviews/report.html", "HEAD")[0] == 200
    assert get(app, "/reports/reviews/report.html", "DELETE")[0] == 405


def test_attention_of_masked_tokens_is_that_of_transformers(models):
    model = models["reviews"]
    call = model.call("attention", masked=(2,))
    (found,) = call([("a b a",)], 1)
    assert found["tokens"] == ("[CLS]", "a", "[MASK]", "a", "[SEP]")
    ids = torch.tensor(
        [model.predictor.tokenizer.vocabulary.ids[piece] for piece in found["tokens"]]
    )
    other = transformers.BertModel.from_pretrained(model.folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = other(ids[None], output_attentions=True).attentions
    # told to four digits
    np.testing.assert_allclose(found["weights"], torch.cat(expected).numpy(), atol=6e-5)


@pytest.mark.parametrize("number", [0, 4, 9])
def test_neither_cls_nor_sep_nor_what_is_not_there_is_masked(models, number):
    with pytest.raises(ValueError, match=f"masked: token {number}: expected 1 to 3, of 'a b a'"):
        models["reviews"].call("attention", masked=(number,))([("a b a",)], 1)
