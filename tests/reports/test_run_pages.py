import json
import os
import re

import pytest

from bertsmith.reports.run_pages import phase_marks
from bertsmith.reports.runs import read_run

GAIN = "gain over unigram entropy 6.50: 1.50 nats"
GAIN_LTR = "gain over unigram entropy 6.75: 1.75 nats"


def test_pretraining_run(page, pretrained):
    words, source = page(pretrained())
    assert "4.25 held-out MLM loss gain over unigram entropy 6.50: 2.25 nats" in words
    assert "31.2% MLM accuracy of the masked tokens of held-out text" in words
    assert "75.0% NSP accuracy of the next sentences of held-out text" in words
    assert "bertsmith pretrain --out 'a b'" in words
    assert "<span>--out</span> <span>&#x27;a b&#x27;</span>" in source  # breaks between words only
    assert "Accuracy masked tokens masked tokens, held-out next sentences Speed" in words
    assert source.count('<svg class="wide"') + source.count('role="img" class="wide"') == 1
    assert "model.size tiny" in words
    assert "Abacus <3000>" in words and "went on after <SIGTERM>" in words
    assert "unigram entropy 6.50" in re.findall(r"<text[^>]*>([^<]*)<", source)
    assert source.count("<svg") == 5
    assert "in progress" not in words


@pytest.mark.parametrize(
    ("predicted", "said", "unsaid"),
    [
        (["mlm"], f"5 held-out MLM loss {GAIN} 25.0% MLM accuracy of the masked tokens", "next"),
        (
            ["ltr"],
            f"5 held-out LTR loss {GAIN_LTR} 25.0% LTR accuracy of the next tokens",
            "masked",
        ),
        (["mlm", "sop"], "50.0% SOP accuracy of the sentence orders of held-out text", "next"),
        (["mlm", "nsp"], "50.0% NSP accuracy of the next sentences of held-out text", "order"),
    ],
)
def test_figures_have_the_words_of_their_objective(page, in_two_phases, predicted, said, unsaid):
    words, source = page(in_two_phases("run", *predicted, phases=1))
    shown = words[: words.index("How it was made")]
    assert said in shown
    assert unsaid not in shown
    assert "phase" not in shown
    assert "unigram entropy 6." in source


def test_a_second_phase_is_marked_and_not_joined_to_the_first(page, in_two_phases):
    run = in_two_phases("run", "mlm", "nsp")
    words, source = page(run)
    assert "25.0% MLM accuracy of the masked tokens of held-out text, rows of 512" in words
    assert "12 k tokens seen 120 steps, 6% padding" in words  # 3 of 12 lines with a quarter
    assert re.findall(r"<text[^>]*>(phase [^<]*)<", source) == ["phase 2"] * 3  # each chart
    first, second = read_run(run).pieces("evaluate", "mlm_loss")
    assert first[0] == list(range(10, 91, 10)) and second[0] == [100, 110, 120, 120]
    assert phase_marks(read_run(run)) == [(90, "phase 2")]
    assert first[1][-1] == 4.5 and second[1][0] == 6.0 and second[1][-1] == 5.0


@pytest.mark.parametrize(("last", "length"), [("train", 128), ("evaluate", 512)])
def test_held_out_rows_are_those_last_measured(page, in_two_phases, last, length):
    run = in_two_phases("run", "mlm")
    (run / "result.json").unlink()
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    newest = next(k for k, line in enumerate(lines) if '"phase": 2' in line and last in line)
    (run / "log.jsonl").write_text("".join(lines[: newest + 1]))
    words, _ = page(run)
    assert f"of the masked tokens of held-out text, rows of {length}" in words


def test_a_phase_of_one_line_is_a_dot(page, in_two_phases):
    run = in_two_phases("run", "mlm")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    second = next(k for k, line in enumerate(lines) if '"phase": 2' in line)
    (run / "log.jsonl").write_text("".join(lines[: second + 1]))
    words, source = page(run)
    assert "rows of 512" in words  # finished: its figures are of the second phase
    speed = source[source.index("Speed (tokens a second)") :]
    speed = speed[: speed.index("</svg>")]
    assert "fill: var(--c4)" in speed and "stroke: var(--c4)" in speed


@pytest.mark.usefixtures("unwritten_charts")
def test_run_in_progress_shows_its_newest_figures(page, pretrained):
    words, _ = page(pretrained(finished=False))
    assert "in progress at step 100" in words
    assert "4.25 held-out MLM loss" in words


def test_finetuning_run(page, finetuned):
    words, source = page(finetuned())
    # 0.81, 0.82, 0.90 by hand
    assert "84.3% accuracy mean of 3 seeds ± 4.9%, of 120 dev examples" in words
    assert re.search(r"seed accuracy loss 1 81\.0% 0\.5 2 82\.0% 0\.5 10 \(kept\) 90\.0%", words)
    # cat: 30 of 40 right, 50 taken for cats; <dog>: 40 of 60 right, 50 taken for dogs
    assert "cat 40 60.0% 75.0% 66.7% <dog> 60 80.0% 66.7% 72.7%" in words
    errors = "Most confident errors text true predicted confidence sure & wrong cat <dog> 99.0%"
    assert errors in words
    assert "<script>x</script>" in words
    kept = "those of seed 10, which was kept (accuracy 90.0%); the figures at the top are means"
    assert f"Confusion matrix The answers here and below are {kept} of 3 seeds" in words
    cells = re.findall(r"<title>(\S+) predicted as (\S+): (\d+)</title>", source)
    dog = "&lt;dog&gt;"
    assert cells == [("cat", "cat", "30"), ("cat", dog, "10"), (dog, "cat", "20"), (dog, dog, "40")]


def test_two_seeds_have_a_mean_and_nothing_more(page, finetuned):
    run = finetuned(seeds=(1, 2))
    words, _ = page(run)
    assert "81.5% accuracy mean of 2 seeds, of 120 dev examples" in words
    assert "interval" not in words and "std" not in words
    words, _ = page(run, finetuned("other"))
    assert "classifier 2 120 81.5% 0.5 other" in words


@pytest.mark.usefixtures("unwritten_charts")
def test_a_share_of_few_cases_has_their_number(page, pretrained, change):
    run = pretrained()
    change(run / "result.json", "held_out", nsp_cases=256, mlm_cases=5000)
    words, _ = page(run)
    assert "31.2% MLM accuracy of the masked tokens" in words
    assert "75.0% NSP accuracy of 256 next sentences" in words
    words, _ = page(run, pretrained("other"))
    assert "4.250 2.250 31.2% 75.0% of 256 10 k" in words


@pytest.mark.usefixtures("unwritten_charts")
def test_runs_side_by_side(page, pretrained, finetuned):
    first, second = pretrained("first"), pretrained("second", learning_rate=0.001, loss=4.0)
    words, _ = page(first, second, finetuned(), finetuned("other", seeds=(1,)))
    assert "first mlm+nsp 4.250 2.250 31.2% 75.0% 10 k" in words
    assert "second mlm+nsp 4.000 2.500" in words
    assert "classifier 3 120 84.3% ± 4.9%" in words
    assert "Accuracy on the development set classifier, a line a seed other What differs" in words
    differing = words[words.index("What differs") : words.index("Each run in full")]
    assert differing.strip() == "What differs setting first second learning_rate 0.002 0.001"


@pytest.mark.usefixtures("unwritten_charts")
def test_names_of_folders_need_not_be_utf_8(page, pretrained):
    names = os.fsdecode(b"caf\xe9"), "second"
    words, _ = page(*(pretrained(name, learning_rate=k) for k, name in enumerate(names)))
    assert "What differs setting caf? second" in words


@pytest.mark.usefixtures("unwritten_charts")
def test_runs_that_cannot_be_compared_stand_in_full(page, pretrained, finetuned):
    words, source = page(pretrained(), finetuned())
    assert "2 runs Runs 2 runs first, classifier" in words
    assert "side by side" not in words and "What differs" not in words
    assert source.count("<details open><summary>") == 2
    assert "4.25 held-out MLM loss" in words and "84.3% accuracy" in words
    words, source = page(pretrained(), pretrained("second"), finetuned())
    assert "Pre-training, side by side" in words and "Fine-tuning, side by side" not in words
    assert source.count("<details open><summary>classifier") == source.count("<details open>") == 1


def test_objectives_side_by_side(page, in_two_phases):
    orders = in_two_phases("orders", "mlm", "sop", phases=1)
    plain = in_two_phases("<plain>", "mlm", phases=1)
    words, source = page(in_two_phases("letters", "ltr"), orders, plain)
    head = "run objective loss (nats) gain over unigram entropy LTR/MLM accuracy SOP accuracy"
    assert f"{head} tokens parameters" in words  # no run has a time: the column is left out
    assert "letters ltr 5.000 1.750 25.0% – 12 k" in words
    assert "orders mlm+sop 5.000 1.500 25.0% 50.0% 12 k" in words
    assert "letters (ltr) orders (mlm+sop) <plain> (mlm)" in words
    assert "A curve breaks where a run's second phase begins" in words
    assert "unigram entropy 6.50 to 6.75" in source
    loss = source[source.index("Training loss (nats)") :]
    loss = loss[: loss.index("</svg>")]
    lines = re.findall(r'<path d="[^"]*"[^>]*stroke: var\(--c(\d)\); stroke-width: 1.7', loss)
    assert lines == ["0", "0", "1", "2"]  # the first run in two pieces


@pytest.mark.usefixtures("unwritten_charts")
def test_runs_without_pairs_have_no_column_of_them(page, in_two_phases):
    words, _ = page(*(in_two_phases(k, "ltr", phases=1) for k in "ab"))
    assert "LTR accuracy tokens parameters" in words and words.count("accuracy tokens") == 1
    assert "A curve breaks" not in words


def test_a_finetuning_says_from_what_and_for_how_long(page, tuned, change):
    metrics = {"macro_f1": 0.5, "answer_f1": 0.25}
    sizes = {"train_examples": 1800, "dev_examples": 2000, "best_step": 57, "steps": 114}
    run = tuned("classify", [], metrics=metrics, seeds={"3": metrics}, best_seed=3, **sizes)
    log = {"event": "train", "step": 114, "loss": 1.0, "seconds": 75.0}
    (run / "log.jsonl").write_text(json.dumps(log) + "\n")
    change(run / "run.json", "settings", model="my/bert", from_scratch=False)
    words, _ = page(run)
    assert "classify · from my/bert · Abacus" in words
    assert "50.0% macro F1 25.0% answer F1 1,800 training examples 2,000 dev examples" in words
    assert "1 min 15 s of training 57 step that was kept of 114 1.5 M parameters" in words
    assert "Seeds" not in words and "which was kept" not in words  # there is one
    change(run / "run.json", "settings", from_scratch=True)
    assert "my/bert&#x27;s shape, from scratch" in page(run)[1]


def test_settings_are_those_that_were_chosen(page, tuned, change):
    run = tuned("classify", [])
    settings = {"task_kind": "classify", "max_question_length": 64, "doc_stride": 99}
    settings |= {"dropout": 0.1, "max_grad_norm": 2.0, "device": "cpu", "text_pair": None}
    change(run / "run.json", "settings", **settings)
    words, source = page(run, defaults={"finetune": {"dropout": 0.1, "max_grad_norm": 1.0}})
    shown, folded = words.split("2 settings at their defaults, or of other tasks")
    assert "setting task classify task_kind classify doc_stride 99 max_grad_norm 2" in shown
    assert "setting max_question_length 64 dropout 0.1 SHA-256" in folded
    assert words.count("device cpu") == 1  # the machine's
    assert "settings at their defaults" in source[source.index("<details><summary>") :]
