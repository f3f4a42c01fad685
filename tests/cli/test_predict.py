"""`bertsmith fill`, `predict` and `evaluate`: what they print and write, and how they refuse."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli import predict as fill_command
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.inference.answers import FillCandidate
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.evaluation.held_out import evaluate_held_out
from bertsmith.inference.fill import fill_candidates, fill_words
from bertsmith.inference.predict import outputs_of
from bertsmith.inference.predictor import Predictor, load
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.heads import SequenceClassifier, SpanPredictor
from bertsmith.tasks import answer_files
from bertsmith.tasks.features import Features
from bertsmith.tasks.task import find_task

from ..tiny import bertsmith, cli, piece_tokenizer, random_model, refused, write
from ..training.finetuning.task_types.files import read_rows

TOKENIZER = piece_tokenizer("the a cat dog sat ran on mat under chair . ##s play it was good bad")
NUM_PIECES = len(TOKENIZER.vocabulary)
CONFIG = ModelConfig(NUM_PIECES, 16, 1, 2, 32, max_positions=128)
REVIEWS = ["the cat was good .", "it was bad", "the dog sat on the mat " * 9, "cats", "a good dog"]
STARS = ["good", "bad", "bad", "good", "good"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = random_model(tmp_path_factory.mktemp("runs") / "books", TOKENIZER, config=CONFIG)
    RunFolder(folder).write_settings({"kind": "pretrain", "settings": {"max_length": 32}})
    return folder


def fine_tuned(folder, labels=("bad", "good"), text="review", **settings):
    """A classifier of random weights, the same for all."""
    run = {"task": "classify", "text": text, "text_pair": None, "label": "stars", **settings}
    made = {"config": CONFIG, "std": 0.7, "seed": 5, "run": run, "label_names": labels}
    made["extra_config"] = {"max_length": 24}
    return random_model(folder, TOKENIZER, SequenceClassifier, 2, **made)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return fine_tuned(tmp_path_factory.mktemp("runs") / "reviews")


@pytest.fixture
def data(tmp_path):
    rows = zip("abcde", REVIEWS, STARS, strict=True)
    return write(tmp_path / "data.csv", ["id,review,stars", *map(",".join, rows)])


def test_fill_as_json_and_as_lines(pretrained):
    text = "the [MASK] sat on the [MASK]."
    expected, words = load(pretrained).fill(text, 3), ("fill", text, "--model", pretrained, "--top")
    answer = json.loads(bertsmith(*words, 3, "--json"))
    assert answer["text"] == text and len(answer["predictions"]) == 2
    for mask, rows in zip(answer["predictions"], expected, strict=True):
        assert mask == [{"token": c.token, "probability": c.probability} for c in rows]
    lines = bertsmith(*words, 1).splitlines()
    assert lines[:2] == [text, "[MASK] 1"] and lines[3] == "[MASK] 2" and len(lines) == 5
    assert lines[2].split() == [f"{expected[0][0].probability:.4f}", expected[0][0].token]


def test_fill_on_a_terminal_shows_the_sentence_filled(capsys):
    rows = [FillCandidate("[b]cat", 7, 0.75), FillCandidate("dog", 8, 0.001)]
    fill_command.show_predictions("the [MASK] sat, [i]so", [rows])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the [b]cat sat, [i]so"  # brackets are text, not the terminal's markup
    assert lines[1].split() == ["[b]cat", "75.0%", "█" * 18]
    assert lines[2].split() == ["dog", "0.1%", "█"]
    other = [FillCandidate("a", 9, 0.75)]
    fill_command.show_predictions("the [MASK] sat, [MASK]", [rows, other])
    bars = [line.index("█") for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert len(set(bars)) == 1 and len(bars) == 3  # both masks' bars begin at one place


def test_fill_together(pretrained, tmp_path):
    filler, text = load(pretrained).filler, "the [MASK] sat on [MASK]"
    words = ("fill", text, "--model", pretrained, "--top", 2)
    answer = json.loads(bertsmith(*words, "--joint", "--json"))
    assert answer == {"text": text, "fillings": filler.joint(text, 2)}
    lines = bertsmith(*words, "--joint").splitlines()
    best = filler.joint(text, 1)[0]
    assert lines[0] == text and len(lines) == 3
    assert lines[1].split() == [f"{best['probability']:.4f}", *best["tokens"]]

    lines = bertsmith(*words, "--max-pieces", 2).splitlines()
    best = fill_words(filler, text, 2, 1)[0]
    assert lines[1].split() == [f"{best['score']:.4f}", f"{best['words'][0]},", best["words"][1]]

    given = fill_candidates(filler, "a [MASK]", ["cats", "dog"])
    words = ("fill", "a [MASK]", "--model", pretrained, "--candidates")
    answer = json.loads(bertsmith(*words, "cats, dog", "--json"))
    assert answer == {"text": "a [MASK]", "candidates": given}
    file = write(tmp_path / "words.txt", "cats\n\ndog\n")
    lines = bertsmith(*words, f"@{file}").splitlines()
    assert lines[1:] == [f"  {row['probability']:.4f}  {row['candidate']}" for row in given]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--top 0", "--top 0:"),
        ("--joint --max-pieces 2", "--joint, --max-pieces: give one of them"),
        ("--candidates cat,zebra", "candidate 'zebra': the model's vocabulary cannot spell"),
        ("--candidates cat,,dog", "candidate '': no word in it"),
        ("--max-pieces 0", "--max-pieces 0"),
        ("--joint --top 0", "--top 0"),
        ("--candidates @absent.txt", "absent.txt"),
    ],
)
def test_fill_refuses_a_flag(pretrained, flags, message):
    assert message in refused("fill", "a [MASK]", "--model", pretrained, *flags.split())


def test_fill_refuses_a_text_or_model(tmp_path, pretrained, reviews):
    assert "no [MASK] in" in refused("fill", "the cat", "--model", pretrained)
    assert "no masked-LM head" in refused("fill", "a [MASK]", "--model", reviews)
    assert "absent" in refused("fill", "a [MASK]", "--model", tmp_path / "absent")


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.jsonl"])
def test_predict_adds_answers_to_the_rows(tmp_path, reviews, data, name):
    out = tmp_path / name
    ran = cli("predict", reviews, data, "--out", out)
    assert (ran.code, ran.out) == (0, f"5 answers written to {out}\n")
    note = "1 of 5 examples have more than 24 tokens and lose their end, as in training\n"
    assert note in ran.err
    rows = read_rows(out)
    assert [(row["id"], row["review"]) for row in rows] == list(zip("abcde", REVIEWS, strict=True))
    for row, answer in zip(rows, load(reviews).classify(REVIEWS), strict=True):
        assert row["predicted_stars"] == answer.label
        assert float(row["probability"]) == round(answer.confidence, 4)
        if name == "out.jsonl":
            assert row["probabilities"] == pytest.approx(answer.probabilities, abs=6e-5)


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("name", ["o.jsonl", "o.csv"])
def test_predict_goes_on_where_it_was_interrupted(tmp_path, reviews, data, monkeypatch, runs, name):
    out, whole, partial = (tmp_path / one for one in (name, f"w{name}", f"{name}.partial"))
    words = ("predict", reviews, data, *["--ensemble", reviews][: 2 * (runs - 1)], "--out")
    bertsmith(*words, whole)  # in one window
    monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", 2)
    outputs, windows, last = Predictor.outputs, [], 2 * runs

    def counting(self, features, *on_batch):
        if len(windows) == last:
            raise KeyboardInterrupt
        windows.append(len(features))
        return outputs(self, features, *on_batch)

    monkeypatch.setattr(Predictor, "outputs", counting)
    ran = cli(*words, out)
    done = f"4 rows are kept in {partial}"
    line = f"bertsmith predict: interrupted: {done}: the same command goes on"
    assert ran.code == 130 and ran.err.splitlines()[-1] == line and not out.exists()
    last = None
    ran = cli(*words, out)
    assert ran.code == 0 and f"{done}: going on behind them" in ran.err
    assert windows == [2] * 2 * runs + [1] * runs and not partial.exists()
    assert out.read_bytes() == whole.read_bytes()
    assert "1 of 5 examples have more than 24 tokens" in ran.err  # of all, also those kept


def test_a_late_row_that_is_broken_is_mended_and_predict_goes_on(tmp_path, reviews, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", 2)
    rows = [json.dumps({"review": text}) for text in REVIEWS]
    source = write(tmp_path / "in.jsonl", [*rows[:4], rows[4][:-1]])
    out, whole = tmp_path / "o.jsonl", tmp_path / "w.jsonl"
    ran = cli("predict", reviews, source, "--out", out)
    kept = f"4 rows are kept in {out}.partial"
    *_, before, line = ran.err.splitlines()
    assert ran.code == 2 and f"{source}:5: not valid JSON" in line and not out.exists()
    assert before == f"{kept}: the same command goes on behind them"
    write(source, rows)
    ran = cli("predict", reviews, source, "--out", out)
    assert ran.code == 0 and f"{kept}: going on behind them" in ran.err
    bertsmith("predict", reviews, source, "--out", whole)
    assert out.read_bytes() == whole.read_bytes() and len(read_rows(out)) == 5


def test_every_kind_of_input_gets_the_same_answers(tmp_path, reviews, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", 2)
    table = pa.table({"review": REVIEWS})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    with (
        pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=3)
    write(tmp_path / "in.txt", "\n".join(REVIEWS))
    write(tmp_path / "in.csv", ["review", *REVIEWS])
    write(tmp_path / "in.tsv", ["review", *REVIEWS])
    write(tmp_path / "in.jsonl", [json.dumps({"review": text}) for text in REVIEWS])
    found = set()
    for source in sorted(tmp_path.glob("in.*")):
        bertsmith("predict", reviews, source, "--out", tmp_path / "out.jsonl")
        found.add((tmp_path / "out.jsonl").read_text())
    assert len(found) == 1 and len(read_rows(tmp_path / "out.jsonl")) == 5


@pytest.mark.parametrize("of_tokens", [False, True])
def test_blocks_of_outputs_come_back_in_the_order_of_the_rows(
    tmp_path, reviews, monkeypatch, of_tokens
):
    """A block has rows of like length; a head gives something for a row, or for each token."""
    monkeypatch.setattr("bertsmith.inference.bulk.BLOCK_TOKENS", 7)
    lengths = np.array([3, 5, 2, 5, 9, 2])
    ids = np.arange(lengths.sum(), dtype=np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    rows = Features(ids, np.zeros_like(ids), boundaries, None, 16, 0)
    asked = []

    class Echo:
        folder = reviews
        asked = processor = Processor("cpu", "float32", 1)

        def resolve_for(self, features):
            assert features is rows

        def outputs(self, features, on_batch):
            asked.append(len(features))
            first = features.ids if of_tokens else features.ids[features.boundaries[:-1]]
            return first[:, None].astype(np.float32)

    with outputs_of([Echo(), Echo()], rows, tmp_path / "out.csv", "local") as outputs:
        assert outputs[:, 0].tolist() == (ids if of_tokens else boundaries[:-1]).tolist()
        assert (tmp_path / "out.csv.partial").exists()
    assert asked == [2, 2, 1, 1, 3, 3]
    assert list(tmp_path.iterdir()) == []


def test_predict_reads_lines_from_standard_input(tmp_path, reviews, standard_input):
    standard_input("\n".join(REVIEWS).encode())
    bertsmith("predict", reviews, "-", "--out", tmp_path / "out.jsonl")
    assert [row["review"] for row in read_rows(tmp_path / "out.jsonl")] == REVIEWS


def test_predict_says_how_many_texts_are_empty(tmp_path, reviews):
    table = write(tmp_path / "in.csv", 'id,review\n1,a cat\n2,\n3," "\n')
    lines = write(tmp_path / "in.txt", "a cat\n\na dog\n")
    for path, note in ((table, "2 of 3 texts are empty"), (lines, "1 of 3 texts are empty")):
        ran = cli("predict", reviews, path, "--out", tmp_path / "o.csv")
        assert ran.code == 0 and ran.err.splitlines()[-1] == note


def test_predict_refuses_a_column_of_texts_a_line(tmp_path, reviews):
    path, out = write(tmp_path / "in.txt", "body\tstars\ngood\t5\n"), tmp_path / "o.csv"
    for source in (path, "-"):
        line = refused("predict", reviews, source, "--text", "bodies", "--out", out)
        assert f"--text bodies: {source} is no table and has no column 'bodies'" in line
    bertsmith("predict", reviews, path, "--text", "body", "--out", out)
    assert out.read_text().splitlines()[0] == "body,stars,predicted_stars,probability"


def test_predict_a_published_task_of_pairs(tmp_path):
    folder = fine_tuned(tmp_path / "mrpc", "01", task="mrpc", text=None, label=None)
    rows = ["#1 String\t#2 String", "the cat\ta dog", 'it "was\tgood']
    source, out = write(tmp_path / "new.txt", rows), tmp_path / "o.csv"
    bertsmith("predict", folder, source, "--out", out)
    expected = load(folder).classify(["the cat", 'it "was'], ["a dog", "good"])
    assert [row["Quality"] for row in read_rows(out)] == [answer.label for answer in expected]
    line = refused("predict", folder, "-", "--out", out)
    assert "pairs of texts are read from a file" in line


def test_runs_of_other_columns_do_not_answer_together(tmp_path, reviews, data):
    other = fine_tuned(tmp_path / "other", text="body")
    pairs = fine_tuned(tmp_path / "pairs", text="body", text_pair="id")
    out = tmp_path / "o.csv"
    together = ("predict", reviews, data, "--out", out, "--ensemble", other)
    assert f"{other}: reads the column 'body', but {reviews} 'review'" in refused(*together)
    bertsmith(*together, "--text", "review")  # their weights are the same
    expected = [row.label for row in load(reviews).classify(REVIEWS)]
    assert [row["predicted_stars"] for row in read_rows(out)] == expected
    for first, second in ((other, pairs), (pairs, other)):
        line = refused("predict", first, data, "--out", out, "--ensemble", second)
        assert f"{other}: reads no second text, but {pairs} reads that of 'id'" in line
    line = refused("predict", other, data, "--out", out, "--text-pair", "id")
    assert "--text-pair id: the model was trained without a second text: leave it out" in line


def test_predict_refuses_and_writes_nothing(tmp_path, reviews, pretrained, data):
    out, bad = tmp_path / "out" / "o.csv", write(tmp_path / "other.csv", "reviews,id\ngood,1\n")
    for run, source, to, message in (
        (reviews, bad, out, "other.csv: no column 'review' for --text: did you mean 'reviews'?"),
        (tmp_path / "absent", data, out, "absent"),
        (reviews, "in.csv", out, "in.csv: no such file"),
        (pretrained, data, out, "not a fine-tuned classifier but a run of 'pretrain'"),
        (reviews, data, out.with_suffix(".xml"), "'.xml'"),
    ):
        assert message in refused("predict", run, source, "--out", to)
        assert not list(tmp_path.glob("out/*"))
    bertsmith("predict", reviews, bad, "--text", "reviews", "--out", out)


def test_predict_does_not_write_over_its_input(reviews, data):
    before = data.read_bytes()
    line = refused("predict", reviews, data, "--out", data)
    assert "data.csv is an input itself" in line and "name another file" in line
    assert data.read_bytes() == before


CONTEXT = "Ann met Bob in Rome"


@pytest.fixture(scope="module")
def answerers(tmp_path_factory):
    """Three models of random weights; the last was not tuned for questions without an answer."""
    folder = tmp_path_factory.mktemp("answerers")
    tokenizer = piece_tokenizer(f"{CONTEXT.lower()} who where left")
    config = config_for("1x64", len(tokenizer.vocabulary), max_positions=16)
    extra = {"task": "answer", "kind": "answer", "max_length": 8, "doc_stride": 2}  # many windows
    models = []
    for seed, decision in enumerate(({"null_threshold": 0.5}, {"null_threshold": -1.5}, {}), 1):
        made = {"config": config, "seed": seed, "extra_config": extra | {"thresholds": decision}}
        models.append(random_model(folder / f"run{seed}", tokenizer, SpanPredictor, **made))
    return models


def test_runs_answer_together_by_their_mean_logits(answerers, tmp_path):
    out = tmp_path / "out.json"
    qas = [{"id": f"q{k}", "question": text} for k, text in enumerate(["who left", "where"])]
    paragraphs = [{"context": CONTEXT, "qas": qas}]
    questions = write(tmp_path / "new.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    words = ("predict", answerers[0], questions, "--out", out, "--ensemble")
    assert f"2 answers written to {out}" in bertsmith(*words, answerers[1])

    models = [load(run) for run in answerers[:2]]
    kind, model_task = models[0].task_type, models[0].model_task
    data = kind.read_input(str(questions), model_task)
    rows = kind.featurize(models[0].tokenizer, data, model_task)
    assert len(rows) > 2
    outputs = np.mean([model.outputs(rows) for model in models], axis=0)
    expected = kind.answers(outputs, rows, data, model_task).found
    odds = json.loads((tmp_path / "out.null_odds.json").read_text())
    assert odds == {answer.id: pytest.approx(answer.null_odds) for answer in expected}
    texts = {answer.id: answer.chosen(-0.5).text for answer in expected}  # the mean threshold
    assert json.loads(out.read_text()) == texts
    assert "has another set of tuned thresholds than" in refused(*words, answerers[2])


def test_answers_of_a_table_keep_its_columns(answerers, tmp_path):
    out = tmp_path / "out.csv"
    table = write(tmp_path / "new.csv", ["ask,about", f"who left,{CONTEXT}", f"where,{CONTEXT}"])
    words = ("predict", answerers[2], table, "--out", out, "--text", "ask")
    bertsmith(*words, "--text-pair", "about")
    rows = read_rows(out)
    assert [row["ask"] for row in rows] == ["who left", "where"]
    for row in rows:
        begin = int(row["answer_start"])
        assert row["answer"] == CONTEXT[begin : begin + len(row["answer"])] != ""
        assert 0 < float(row["probability"]) <= 1
    assert "name the column of the contexts with --text-pair" in refused(*words)


def test_figures_of_questions_with_and_without_an_answer(answerers, tmp_path):
    rows = ["ask,about,right", f"who left,{CONTEXT},Bob", f"where,{CONTEXT},"]
    columns = ["--text", "ask", "--text-pair", "about", "--label", "right", "--json"]
    table = write(tmp_path / "dev.csv", rows)
    out = bertsmith("evaluate", answerers[0], "--data", table, *columns)
    metrics = json.loads(out)["metrics"]
    assert list(metrics)[:2] == ["answer_f1", "exact_match"]
    parts = metrics["has_answer_f1"] + metrics["no_answer_exact_match"]
    assert metrics["answer_f1"] == pytest.approx(parts / 2)


FILMS = piece_tokenizer("good bad old new film")
FIRSTS = ["good film", "bad old film", "new", "film film", "old good new"]
SECONDS = ["new film", "old", "good good", "bad film", "film"]
PAGES = {  # columns of the official test files, the texts among others
    "cola": "index|sentence",
    "sst2": "index|sentence",
    "mrpc": "index|#1 ID|#2 ID|#1 String|#2 String",
    "stsb": "index|genre|sentence1|sentence2",
    "qqp": "id|question1|question2",
    "mnli": "index|pairID|sentence1|sentence2",
    "qnli": "index|question|sentence",
    "rte": "index|sentence1|sentence2",
    "wnli": "index|sentence1|sentence2",
}


def of_glue(folder, task):
    """A model of random weights that says it was fine-tuned for a task of GLUE."""
    outputs = len(task.labels) if task.labels else 1
    made = {"seed": 2, "run": {"task": task.name, "metrics": list(task.metrics)}}
    made["extra_config"] = {"task": task.name, "kind": task.task_type, "max_length": 32}
    made["problem_type"] = "regression" if outputs == 1 else "single_label_classification"
    made["label_names"] = task.labels
    return random_model(folder, FILMS, SequenceClassifier, outputs, **made)


def write_test_file(path, task, rows):
    names, given = PAGES[task.name].split("|"), {task.text: FIRSTS, task.text_pair: SECONDS}
    lines = [[given[name][k] if name in given else str(k) for name in names] for k in range(rows)]
    return write(path, map("\t".join, [names, *lines]))


OFFICIAL = {  # names of the test files that are not test.tsv
    ("mrpc", "test"): "msr_paraphrase_test.txt",
    ("mnli", "test"): "test_matched.tsv",
    ("mnli", "test_mismatched"): "test_mismatched.tsv",
    ("mnli", "diagnostic"): "diagnostic.tsv",
}


@pytest.mark.parametrize(
    ("name", "split", "own_name"),
    [*((*key, OFFICIAL.get(key, "test.tsv")) for key in answer_files.FILES)]
    + [("mrpc", "test", "test.tsv")],
)
def test_from_a_test_file_to_a_submission(name, split, own_name, tmp_path, monkeypatch):
    task, (server_name, _) = find_task(name), answer_files.FILES[name, split]
    monkeypatch.setitem(answer_files.FILES, (name, split), (server_name, len(FIRSTS)))
    folder, out = of_glue(tmp_path / "run", task), tmp_path / "upload"
    file = write_test_file(tmp_path / own_name, task, len(FIRSTS))
    bertsmith("predict", folder, file, "--submission", "--out", out)
    assert [path.name for path in out.iterdir()] == [server_name]
    header, *lines = (out / server_name).read_text().splitlines()
    model, pairs = load(folder), SECONDS if task.text_pair else None
    if task.labels is None:
        wanted = [f"{min(max(score, 0), 5):.3f}" for score in model.score(FIRSTS, pairs)]
    else:
        wanted = [answer.label for answer in model.classify(FIRSTS, pairs)]
    assert header == "index\tprediction"
    assert lines == [f"{k}\t{answer}" for k, answer in enumerate(wanted)]


def test_a_part_of_the_test_file_is_refused_before_it_is_answered(tmp_path, monkeypatch):
    task, out = find_task("rte"), tmp_path / "upload"
    folder, file = of_glue(tmp_path / "run", task), write_test_file(tmp_path / "test.tsv", task, 3)
    monkeypatch.setattr(Predictor, "outputs", lambda *_: pytest.fail("it answers"))
    words = ("predict", folder, "--submission", "--out", out)
    message = "RTE.tsv: the server wants 3,000 answers, but the input has 3 examples: predict the"
    assert message in refused(*words, file) and not out.exists()
    line = refused(*words, file.rename(tmp_path / "new.tsv"))
    assert "no submission for task rte: its test files are test.tsv" in line


def test_evaluate_counts_what_predict_answers(tmp_path, reviews, data):
    out, labels = tmp_path / "out.csv", ["bad", "good"]
    bertsmith("predict", reviews, data, "--out", out)
    pairs = [(row["stars"], row["predicted_stars"]) for row in read_rows(out)]
    result = json.loads(bertsmith("evaluate", reviews, "--data", data, "--json"))
    right = sum(true == answer for true, answer in pairs)
    assert result["labels"] == labels and result["examples"] == 5
    assert result["metrics"]["accuracy"] == pytest.approx(right / 5)
    counts = [[pairs.count((true, answer)) for answer in labels] for true in labels]
    assert result["confusion"] == counts
    text = bertsmith("evaluate", reviews, "--data", data)
    assert f"accuracy             {right / 5:.4f}" in text and "columns: answer" in text


def test_evaluate_refuses_in_one_line(tmp_path, reviews, pretrained, data):
    for run, table, message in (
        (tmp_path / "absent", data, "absent"),
        (reviews, tmp_path / "absent", "absent"),
        (pretrained, data, "not a fine-tuned classifier but a run of 'pretrain'"),
    ):
        assert message in refused("evaluate", run, "--data", table)


def test_mnli_is_scored_on_both_dev_sets(tmp_path):
    tokenizer, labels = piece_tokenizer("a b"), find_task("mnli").labels
    own = {"std": 0.7, "seed": 5, "run": {"task": "mnli"}, "label_names": labels}
    run = random_model(tmp_path / "run", tokenizer, SequenceClassifier, 3, **own)
    header, data, results = "index\tsentence1\tsentence2\tgold_label", tmp_path / "MNLI", {}
    matched = ["0\ta\tb\tneutral", "1\tb\ta\tentailment", "2\tb\tb\tcontradiction"]
    for split, name, rows in (
        ("dev", "dev_matched.tsv", matched),
        ("dev_mismatched", "dev_mismatched.tsv", ["0\tb\ta\tneutral"]),
    ):
        file = write(data / name, [header, *rows])
        results[split] = json.loads(bertsmith("evaluate", run, "--data", file, "--json"))
        assert "splits" not in results[split]
    both = json.loads(bertsmith("evaluate", run, "--data", data, "--json"))
    assert both.pop("splits") == {split: one["metrics"] for split, one in results.items()}
    assert both == results["dev"]
    accuracy = results["dev_mismatched"]["metrics"]["accuracy"]
    out = bertsmith("evaluate", run, "--data", data)
    assert f"dev_mismatched: accuracy {accuracy:.4f}\n" in out


def test_evaluate_a_model_that_knows_nothing_on_a_token_store(tmp_path, pretrained):
    documents = [f"the cat sat .\nit was {k} .\nthe dog ran .\n" for k in range(40)]
    text, store = write(tmp_path / "text.txt", "\n".join(documents)), tmp_path / "store"
    build_store([text], TOKENIZER, store, BuildSettings(held_out=0.25))

    config = ModelConfig(NUM_PIECES, 32, 1, 1, 64, max_positions=128)  # which our engine can read
    zero = random_model(tmp_path / "zero", TOKENIZER, config=config, std=0.0)
    metrics = json.loads(bertsmith("evaluate", zero, "--held-out", store, "--json"))["metrics"]
    assert metrics["mlm_loss"] == pytest.approx(math.log(NUM_PIECES), rel=1e-5)
    assert metrics["nsp_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["unigram_entropy"] < math.log(NUM_PIECES)
    assert "mlm_accuracy" in bertsmith("evaluate", pretrained, "--held-out", store)
    model = load(zero)
    model.fill("the [MASK]")  # by our own engine, which was not asked for
    assert evaluate_held_out(model, [str(store)])["metrics"] == metrics
    text = write(tmp_path / "text.txt", "the cat sat on the mat . " * 40)
    with pytest.raises(ValueError, match="store: a token store is measured alone"):
        evaluate_held_out(model, [text, store])
    line = refused("evaluate", zero, "--held-out", store, "--engine", "bertsmith")
    assert "--engine bertsmith: PyTorch measures on a token store" in line
    piece_tokenizer(" ".join([*TOKENIZER.vocabulary.pieces[5:-1], "sad"])).save(zero)
    assert "built with tokenizer" in refused("evaluate", zero, "--held-out", store)
