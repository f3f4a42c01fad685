import json
import re
from html.parser import HTMLParser

import pytest

from bertsmith.cli import inspect as report
from bertsmith.reports.pages import write_report
from bertsmith.reports.run_pages import phase_marks
from bertsmith.reports.runs import read_run

UNDER = "1.50 nats under the unigram entropy, 6.50"
UNDER_LTR = "1.75 nats under the unigram entropy, 6.75"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """The words of a page; fails on a tag that is not closed or that a browser would fetch for."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert tag not in ("script", "link", "iframe", "object", "img")
        for name, value in attributes:
            assert name != "src" and not name.startswith("on")
            if name.endswith("href"):
                assert value.startswith("#")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, words):
        if self.open and self.open[-1] != "style":
            self.words.append(words)


def report_of(tmp_path, *runs):
    """(words of the page, its source)."""
    out = tmp_path / "out" / "report.html"
    write_report(list(runs), out)
    source = out.read_text(encoding="utf-8")
    assert "@import" not in source and "url(http" not in source
    return " ".join(" ".join(Reader(source).words).split()), source


def test_pretraining_run(tmp_path, pretrained):
    words, source = report_of(tmp_path, pretrained())
    assert "4.25 held-out MLM loss 2.25 nats under the unigram entropy, 6.50" in words
    assert "31.2% of the masked tokens right on held-out text" in words
    assert "75.0% of the next sentences right" in words
    assert "bertsmith pretrain --out 'a b'" in words
    assert "model.size tiny" in words
    assert "Abacus <3000>" in words and "went on after <SIGTERM>" in words
    assert "unigram entropy 6.50" in re.findall(r"<text[^>]*>([^<]*)<", source)
    assert source.count("<svg") == 5
    assert "in progress" not in words


@pytest.mark.parametrize(
    ("predicted", "said", "unsaid"),
    [
        (["mlm"], f"5 held-out MLM loss {UNDER} 25.0% of the masked tokens right", "next"),
        (["ltr"], f"5 held-out LTR loss {UNDER_LTR} 25.0% of the next tokens right", "masked"),
        (["mlm", "sop"], "50.0% of the sentence orders right on held-out text", "next"),
        (["mlm", "nsp"], "50.0% of the next sentences right on held-out text", "order"),
    ],
)
def test_figures_have_the_words_of_their_objective(
    tmp_path, in_two_phases, predicted, said, unsaid
):
    words, source = report_of(tmp_path, in_two_phases("run", *predicted, phases=1))
    shown = words[: words.index("How it was made")]
    assert said in shown
    assert unsaid not in shown
    assert "phase" not in shown
    assert "unigram entropy 6." in source


def test_a_second_phase_is_marked_and_not_joined_to_the_first(tmp_path, in_two_phases):
    run = in_two_phases("run", "mlm", "nsp")
    words, source = report_of(tmp_path, run)
    assert "25.0% of the masked tokens right on held-out text, rows of 512" in words
    assert "12 k tokens seen 120 steps, 6% padding" in words  # 3 of 12 lines with a quarter
    assert re.findall(r"<text[^>]*>(phase [^<]*)<", source) == ["phase 2"] * 3  # each chart
    first, second = read_run(run).pieces("evaluate", "mlm_loss")
    assert first[0] == list(range(10, 91, 10)) and second[0] == [100, 110, 120, 120]
    assert phase_marks(read_run(run)) == [(90, "phase 2")]
    assert first[1][-1] == 4.5 and second[1][0] == 6.0 and second[1][-1] == 5.0


@pytest.mark.parametrize(("last", "length"), [("train", 128), ("evaluate", 512)])
def test_held_out_rows_are_those_last_measured(tmp_path, in_two_phases, last, length):
    run = in_two_phases("run", "mlm")
    (run / "result.json").unlink()
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    newest = next(k for k, line in enumerate(lines) if '"phase": 2' in line and last in line)
    (run / "log.jsonl").write_text("".join(lines[: newest + 1]))
    words, _ = report_of(tmp_path, run)
    assert f"right on held-out text, rows of {length}" in words


def test_a_phase_of_one_line_is_a_dot(tmp_path, in_two_phases):
    run = in_two_phases("run", "mlm")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    second = next(k for k, line in enumerate(lines) if '"phase": 2' in line)
    (run / "log.jsonl").write_text("".join(lines[: second + 1]))
    words, source = report_of(tmp_path, run)
    assert "rows of 512" in words  # finished: its figures are of the second phase
    speed = source[source.index("Speed (tokens a second)") :]
    speed = speed[: speed.index("</svg>")]
    assert "fill: var(--c4)" in speed and "stroke: var(--c4)" in speed


def test_run_in_progress_shows_its_newest_figures(tmp_path, pretrained):
    words, _ = report_of(tmp_path, pretrained(finished=False))
    assert "in progress at step 100" in words
    assert "4.25 held-out MLM loss" in words


def test_half_written_line_of_a_running_log_is_no_hindrance(tmp_path, pretrained):
    run = pretrained(finished=False)
    with (run / "log.jsonl").open("a") as file:
        file.write('{"event": "tra')
    assert len(read_run(run).events) == 12
    report_of(tmp_path, run)


def test_finetuning_run(tmp_path, finetuned):
    words, source = report_of(tmp_path, finetuned())
    # 0.81, 0.82, 0.90 by hand
    assert "84.3% accuracy mean of 3 seeds ± 4.9%, of 120 dev examples" in words
    assert re.search(r"seed accuracy loss 1 81\.0% 0\.5 2 82\.0% 0\.5 10 \(kept\) 90\.0%", words)
    # cat: 30 of 40 right, 50 taken for cats; <dog>: 40 of 60 right, 50 taken for dogs
    assert "cat 40 60.0% 75.0% 66.7% <dog> 60 80.0% 66.7% 72.7%" in words
    assert "Wrong, and sure of it text true predicted sure sure & wrong cat <dog> 99.0%" in words
    assert "<script>x</script>" in words
    cells = re.findall(r"<title>(\S+) taken for (\S+): (\d+)</title>", source)
    dog = "&lt;dog&gt;"
    assert cells == [("cat", "cat", "30"), ("cat", dog, "10"), (dog, "cat", "20"), (dog, dog, "40")]


def test_two_seeds_have_a_mean_and_nothing_more(tmp_path, finetuned):
    run = finetuned(seeds=(1, 2))
    words, _ = report_of(tmp_path, run)
    assert "81.5% accuracy mean of 2 seeds, of 120 dev examples" in words
    assert "interval" not in words and "deviation" not in words
    words, _ = report_of(tmp_path, run, finetuned("other"))
    assert "classifier 2 120 81.5% 0.5 other" in words


def test_a_share_of_few_cases_has_their_number(tmp_path, pretrained):
    run = pretrained()
    path = run / "result.json"
    result = json.loads(path.read_text())
    result["held_out"] |= {"nsp_cases": 256, "mlm_cases": 5000}
    path.write_text(json.dumps(result))
    words, _ = report_of(tmp_path, run)
    assert "31.2% of the masked tokens right" in words
    assert "75.0% of 256 next sentences right" in words
    words, _ = report_of(tmp_path, run, pretrained("other"))
    assert "4.250 2.250 31.2% 75.0% of 256 10 k" in words


def test_nats_and_unigram_entropy_are_explained_once(tmp_path, pretrained, quickstart, finetuned):
    for folders in ([pretrained()], [pretrained("one"), pretrained("other")], [quickstart]):
        words, _ = report_of(tmp_path, *folders)
        assert words.count("A loss is given in nats a token") == 1
        explained = words.index("The unigram entropy is")
        assert words.index("nats") < explained == words.lower().index("unigram entropy") - 4
    assert "nats" not in report_of(tmp_path, finetuned())[0]


def test_runs_side_by_side(tmp_path, pretrained, finetuned):
    first, second = pretrained("first"), pretrained("second", rate=0.001, loss=4.0)
    words, _ = report_of(tmp_path, first, second, finetuned())
    assert "first mlm+nsp 4.250 2.250 31.2% 75.0% 10 k" in words
    assert "second mlm+nsp 4.000 2.500" in words
    assert "classifier 3 120 84.3% ± 4.9%" in words
    differing = words[words.index("What differs") : words.index("Each run in full")]
    assert differing.strip() == "What differs setting first second rate 0.002 0.001"


def test_objectives_side_by_side(tmp_path, in_two_phases):
    runs = [
        in_two_phases("letters", "ltr"),
        in_two_phases("orders", "mlm", "sop", phases=1),
        in_two_phases("<plain>", "mlm", phases=1),
    ]
    words, source = report_of(tmp_path, *runs)
    head = "run objective token loss under unigrams tokens right pairs right tokens parameters"
    assert head in words  # no run has a time: the column is left out
    assert "letters ltr 5.000 1.750 25.0% – 12 k" in words
    assert "orders mlm+sop 5.000 1.500 25.0% 50.0% 12 k" in words
    assert "letters (ltr) orders (mlm+sop) <plain> (mlm)" in words
    assert "A curve breaks where a run's second phase begins" in words
    assert "unigram entropy 6.50 to 6.75" in source
    loss = source[source.index("Token loss in training") :]
    loss = loss[: loss.index("</svg>")]
    lines = re.findall(r'<path d="[^"]*"[^>]*stroke: var\(--c(\d)\); stroke-width: 1.7', loss)
    assert lines == ["0", "0", "1", "2"]  # the first run in two pieces


def test_runs_without_pairs_have_no_column_of_them(tmp_path, in_two_phases):
    words, _ = report_of(tmp_path, *(in_two_phases(k, "ltr", phases=1) for k in "ab"))
    assert "tokens right tokens parameters" in words and "pairs right" not in words
    assert "A curve breaks" not in words


def test_namesakes_are_told_apart(tmp_path, pretrained):
    words, _ = report_of(tmp_path, pretrained("a/run"), pretrained("b/run"))
    assert str(tmp_path / "a" / "run") in words and str(tmp_path / "b" / "run") in words


def test_quickstart_page(tmp_path, quickstart):
    words, source = report_of(tmp_path, quickstart)
    assert "2.25 nats better than word frequencies held-out loss 4.25" in words
    assert "82.0% accuracy of the classifier +11.0 points" in words
    assert "pre-trained 80.0% 82.0% 84.0% 82.0% 2.0%" in words
    assert "5 min 00 s on Abacus" in words
    assert "The <mark>[MASK]</mark> &amp; &lt;i&gt;I&lt;/i&gt;" in source
    assert "<b> 25.0%" in words


def test_quickstart_without_a_task(tmp_path, quickstart):
    story = json.loads((quickstart / "quickstart.json").read_text())
    del story["classification"], story["fill"]
    (quickstart / "quickstart.json").write_text(json.dumps(story))
    words, _ = report_of(tmp_path, quickstart)
    assert "Pre-training" in words and "Does pre-training help?" not in words


def test_page_is_small_and_always_the_same(tmp_path, pretrained):
    run = pretrained()
    lines = [
        {"event": "train", "step": step, "mlm_loss": 9 - (step % 97) / 20} for step in range(20_000)
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, first = report_of(tmp_path, run)
    _, second = report_of(tmp_path, run)
    assert first == second and len(first) < 150_000


@pytest.mark.parametrize("missing", ["run.json", "log.jsonl"])
def test_missing_file_is_named(tmp_path, pretrained, missing):
    run = pretrained()
    (run / missing).unlink()
    with pytest.raises(ValueError, match=f"{run}/{missing} is missing") as caught:
        write_report([run], tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_damaged_files_are_named(tmp_path, pretrained, finetuned):
    run = pretrained()
    (run / "result.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"first/result\.json: holds no JSON object"):
        write_report([run], tmp_path / "report.html")
    run = finetuned(labels=("cat", "dog", "cow"))
    with pytest.raises(ValueError, match=r"result\.json: the confusion matrix is not 3 by 3"):
        write_report([run], tmp_path / "report.html")
    with pytest.raises(ValueError, match="nowhere: no such run directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_quickstart_whose_run_is_gone(tmp_path, quickstart):
    (quickstart / "pretrain" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"pretrain/run\.json is missing"):
        write_report([quickstart], tmp_path / "report.html")


def test_quickstart_is_not_compared(tmp_path, quickstart, pretrained):
    with pytest.raises(ValueError, match="give the run directory inside it"):
        write_report([pretrained(), quickstart], tmp_path / "report.html")


def test_command_writes_into_the_run_and_says_where(tmp_path, pretrained, capsys, monkeypatch):
    run = pretrained()
    report.run_report(report.Report(runs=[run]))
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").exists()
    monkeypatch.chdir(tmp_path)
    report.run_report(report.Report(runs=[run, pretrained("second")]))
    assert (tmp_path / "report.html").exists()


def test_a_feature_ner_run_has_no_report(tmp_path):
    run = tmp_path / "table7"
    run.mkdir()
    (run / "run.json").write_text('{"kind": "features ner"}')
    with pytest.raises(ValueError, match=f"^{run}: a features ner run .* in {run}/table.md and"):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
