import json
import re
from pathlib import Path

import pytest

import bertsmith as library
from bertsmith.reports.pages import write_report
from bertsmith.reports.runs import read_run

from ..tiny import bertsmith, refused, write
from .conftest import write_run


@pytest.mark.usefixtures("unwritten_charts")
def test_half_written_line_of_a_running_log_is_no_hindrance(page, pretrained):
    run = pretrained(finished=False)
    with (run / "log.jsonl").open("a") as file:
        file.write('{"event": "tra')
    assert len(read_run(run).events) == 12
    page(run)


@pytest.mark.usefixtures("unwritten_charts")
def test_nats_and_unigram_entropy_are_explained_once(page, pretrained, quickstart, finetuned):
    for folders in ([pretrained()], [pretrained("one"), pretrained("other")], [quickstart]):
        words, _ = page(*folders)
        assert words.count("A loss is given in nats a token") == 1
        explained = words.index("The unigram entropy is")
        assert words.index("nats") < explained == words.lower().index("unigram entropy") - 4
    assert "nats" not in page(finetuned())[0]


@pytest.mark.usefixtures("unwritten_charts")
def test_namesakes_are_told_apart(tmp_path, pretrained, page):
    words, _ = page(pretrained("a/run"), pretrained("b/run"))
    assert str(tmp_path / "a" / "run") in words and str(tmp_path / "b" / "run") in words


def test_quickstart_page(page, quickstart):
    words, source = page(quickstart)
    assert "2.25 nats gain over unigram entropy held-out loss 4.25" in words
    assert "82.0% accuracy of the classifier +11.0 points" in words
    assert "pre-trained 80.0% 82.0% 84.0% 82.0% 2.0%" in words
    assert "5 min 00 s on Abacus" in words
    assert "The <mark>[MASK]</mark> &amp; &lt;i&gt;I&lt;/i&gt;" in source
    assert "<b> 25.0%" in words
    story = json.loads((quickstart / "quickstart.json").read_text())
    story["classification"]["pretrained"]["mean"] = 0.8301  # which the verdict is about
    predictions = [[{"token": "dog", "probability": 0.5}]]
    story["fill"].append({"text": "A [MASK].", "predictions": predictions})
    write(quickstart / "quickstart.json", json.dumps(story))
    words, source = page(quickstart)
    assert "83.0% accuracy of the classifier +12.0 points" in words
    widths = re.findall(r'class="bar"><i style="width:([\d.]+)%', source)
    assert widths == ["50.0", "100.0"]  # one scale for all texts


def test_quickstart_without_a_task(page, quickstart):
    story = json.loads((quickstart / "quickstart.json").read_text())
    del story["classification"], story["fill"]
    write(quickstart / "quickstart.json", json.dumps(story))
    words, _ = page(quickstart)
    assert "Pre-training" in words and "Does pre-training help?" not in words


def test_page_is_small_and_always_the_same(page, pretrained):
    run = pretrained()
    losses = (9 - (step % 97) / 20 for step in range(20_000))
    lines = ({"event": "train", "step": k, "mlm_loss": loss} for k, loss in enumerate(losses))
    write(run / "log.jsonl", map(json.dumps, lines))
    (_, first), (_, second) = page(run), page(run)
    assert first == second and len(first) < 150_000


@pytest.mark.parametrize("missing", ["run.json", "log.jsonl"])
def test_missing_file_is_named(tmp_path, pretrained, missing):
    run = pretrained()
    (run / missing).unlink()
    with pytest.raises(ValueError, match=f"{run}/{missing} is missing") as caught:
        write_report([run], tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_damaged_files_are_named(tmp_path, pretrained, finetuned, quickstart):
    damaged, gone = pretrained(), quickstart / "pretrain" / "run.json"
    write(damaged / "result.json", "[1]")
    gone.unlink()
    for run, message in (
        (damaged, r"first/result\.json: not a JSON object"),
        (finetuned(labels="abc"), r"result\.json: the confusion matrix is not 3 by 3"),
        (tmp_path / "nowhere", "nowhere: no such run directory"),
        (quickstart, r"pretrain/run\.json is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            write_report([run], tmp_path / "report.html")


def test_quickstart_is_not_compared(tmp_path, quickstart, pretrained):
    with pytest.raises(ValueError, match="give the run directory inside it"):
        write_report([pretrained(), quickstart], tmp_path / "report.html")


@pytest.mark.usefixtures("unwritten_charts")
def test_command_writes_into_the_run_and_says_where(tmp_path, pretrained, monkeypatch):
    run = pretrained()
    assert bertsmith("report", run).strip() == str(run / "report.html")
    assert (run / "report.html").exists()
    monkeypatch.chdir(tmp_path)
    bertsmith("report", run, pretrained("second"))
    assert (tmp_path / "report.html").exists()
    out = bertsmith("report", run, "--out", tmp_path / "rep")
    assert out.strip() == str(tmp_path / "rep.html")
    assert (tmp_path / "rep.html").exists()
    before = (tmp_path / "rep.html").read_bytes()
    assert library.report(str(run), tmp_path / "again") == tmp_path / "again.html"
    assert (tmp_path / "again.html").read_bytes() == before
    assert library.report([run, str(tmp_path / "second")]) == Path("report.html")
    line = refused("report", run, "--out", tmp_path / "rep.pdf")
    assert "rep.pdf: a report is HTML: end --out in .html" in line


def test_a_feature_ner_run_has_no_report(tmp_path):
    run = write(tmp_path / "table7" / "run.json", '{"kind": "features ner"}').parent
    with pytest.raises(ValueError, match=f"^{run}: .* has no report: see {run}/table.md"):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_dictionary_has_no_report(tmp_path):
    run = write(tmp_path / "words" / "run.json", '{"kind": "lineage word-for-word"}').parent
    with pytest.raises(ValueError, match="has no report: `bertsmith lineage evaluate` measures it"):
        write_report([run], tmp_path / "report.html")


def test_a_translators_minutes_are_no_metric(page, tmp_path):
    log = [{"event": "train", "step": step, "loss": 9 / step} for step in (1, 2, 3)]
    figures = {"step": 3, "minutes": 0.7, "nll": 2.5, "perplexity": 12.2, "accuracy": 0.5}
    settings = {"data": "multi30k", "seed": 1}
    result = {"steps": 3, "tokens": 90, "seconds": 42.0}
    log.append({"event": "evaluate", **figures})
    words, _ = page(write_run(tmp_path / "tf", "lineage transformer", settings, log, result))
    assert "2.5 nll" in words and "12.2 perplexity" in words and "50.0% accuracy" in words
    assert "Nll on the development set" in words and "inutes" not in words
