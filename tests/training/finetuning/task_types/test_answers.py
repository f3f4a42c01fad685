"""Question answering as a kind of task: loss, decisions, figures, files, and toy runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.checkpoints.model_folder import load_model
from bertsmith.inference.model_task import read_model_task
from bertsmith.model.heads import SpanPredictor
from bertsmith.tasks.squad.answers import squad2_scores
from bertsmith.tasks.squad.questions import Question, Questions
from bertsmith.tasks.task import EncodingSettings, find_task, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task_types.answers import AnswerQuestions, answers_null
from bertsmith.training.finetuning.task_types.base import ModelTask
from bertsmith.training.finetuning.task_types.losses import LOSSES, Objective
from bertsmith.training.finetuning.trainer import InitialModel, Trainer

from ....tiny import refused, write, write_model
from .files import read_rows, squad

KIND = AnswerQuestions()
OWN = own_task("answer", "question", "context", "answers")
LETTERS = "abcdefgh"
PIECES = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]
TOKENIZER = Tokenizer(Vocabulary(PIECES))
ENCODING = EncodingSettings(max_length=16, doc_stride=4, max_question_length=3, max_answer_length=5)


def model_task(task="squad2", encoding=ENCODING, **decision):
    return ModelTask(OWN if task == "answer" else find_task(task), (), encoding, decision)


def questions_of(*found):
    """Questions from (context, span or None, or "lost")."""
    rows, contexts = [], list(dict.fromkeys(context for context, _ in found))
    for k, (context, span) in enumerate(found):
        place = span if isinstance(span, tuple) else None
        answers = [context[slice(*place)]] if place else {"lost": ["zz"], None: []}[span]
        rows.append(Question(f"q{k}", "a b", contexts.index(context), answers, place))
    return Questions.of(rows, contexts, "mem")


def featurize(questions, encoding=ENCODING):
    return KIND.featurize(TOKENIZER, questions, model_task(encoding=encoding))


def measure(outputs, questions, asked):
    """The texts that are answered; the figures of these."""
    answers = KIND.answers(outputs, featurize(questions), questions, asked)
    return [chosen.text for chosen in answers.chosen], KIND.measure(answers, questions, asked)


def tune(outputs, questions, asked):
    return KIND.tune(outputs, featurize(questions), questions, asked)


def test_the_loss_is_that_of_each_row_alone():
    """Rows without their padding, one after the other."""
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(3, 9, 2, generator=generator, requires_grad=True)
    lengths, labels = torch.tensor([9, 4, 6]), torch.tensor([[2, 8], [0, 0], [3, 3]])
    batch = {"lengths": lengths, "labels": labels}
    loss, _ = LOSSES[KIND.name](outputs, batch, Objective())
    expected = torch.tensor(0.0)
    for row, length, (start, end) in zip(outputs, lengths, labels, strict=True):
        scores = row[:length].log_softmax(dim=0)
        expected = expected - (scores[start, 0] + scores[end, 1]) / 2
    assert torch.allclose(loss, expected, rtol=1e-6)
    loss.backward()
    assert outputs.grad.isfinite().all() and (outputs.grad[1, 4:] == 0).all()
    assert KIND.num_labelled(labels.numpy()) == 3

    focal, _ = LOSSES[KIND.name](outputs, batch, Objective(focal_gamma=2.0))
    assert 0 < focal < loss


def test_right_means_start_and_end():
    outputs = torch.zeros(3, 5, 2)
    outputs[0, 2, 0] = outputs[0, 3, 1] = 1  # both
    outputs[1, 2, 0] = outputs[1, 4, 1] = 1  # the end at padding; of the rest the first
    outputs[2, 1, 0] = outputs[2, 3, 1] = 1  # the end alone
    labels = torch.tensor([[2, 3], [2, 0], [2, 3]])
    batch = {"lengths": torch.tensor([5, 4, 5]), "labels": labels}
    assert LOSSES[KIND.name](outputs, batch, Objective())[1] == 2


def test_the_loss_of_guessing_is_that_of_equal_logits():
    """... within the context, and at [CLS] by how often the answer is there."""
    context = "c d e f g h a b"  # eight tokens, read in two windows
    questions = questions_of((context, (0, 1)), (context, None), (context, (4, 5)))
    windows = featurize(questions, replace(ENCODING, max_length=10))
    assert windows.labels.tolist() == [[4, 4], [0, 0], [0, 0], [0, 0], [6, 6], [0, 0]]
    outputs = np.full((len(windows), 10, 2), -np.inf, np.float32)
    for w, length in enumerate(windows.lengths):
        inside = np.arange(windows.context_begins[w], length - 1)
        outputs[w, inside] = np.log(2 / 6 / len(inside))
        outputs[w, 0] = np.log(4 / 6)
    batch = {"lengths": torch.tensor(windows.lengths), "labels": torch.tensor(windows.labels)}
    loss, _ = LOSSES[KIND.name](torch.tensor(outputs), batch, Objective())
    assert KIND.baseline_loss(windows) == pytest.approx(loss.item() / 6)


def logits_for(questions, spans, null=0.0):
    """Outputs [T, 2] that are highest at (start, end), tokens of the first window of each."""
    windows = featurize(questions)
    outputs = np.zeros((len(windows.ids), 2), np.float32)
    for q, span in enumerate(spans):
        window = windows.question_windows[q]
        begin = windows.boundaries[window] + windows.context_begins[window]
        outputs[begin + span[0], 0] = outputs[begin + span[1], 1] = 5
        first, last = windows.question_windows[q : q + 2]
        outputs[windows.boundaries[first:last]] = null if np.isscalar(null) else null[q]
    return outputs


def test_figures_by_the_rules_of_each_version():
    questions = questions_of(("c d e", (0, 1)), ("f g", (0, 3)))
    outputs = logits_for(questions, [(0, 0), (0, 0)])
    for task in ("squad1", "squad2", "answer"):
        texts, figures = measure(outputs, questions, model_task(task))
        assert texts == ["c", "f"] and list(figures) == ["answer_f1", "exact_match"]
        assert figures == {"answer_f1": pytest.approx((1 + 2 / 3) / 2), "exact_match": 0.5}
    # an answer of articles alone: nothing to find in 1.1, nothing wrong with it in 2.0
    questions = questions_of(("a", (0, 1)), ("f", (0, 1)))
    outputs = logits_for(questions, [(0, 0)] * 2)
    for task, f1 in (("squad1", 0.5), ("squad2", 1.0)):
        assert measure(outputs, questions, model_task(task))[1]["answer_f1"] == f1


def test_the_null_threshold_is_found_and_kept():
    questions = questions_of(("c d e", (0, 1)), ("f g", None), ("h c", (2, 3)))
    places, own = [(0, 0), (0, 0), (1, 1)], model_task("answer")
    outputs = logits_for(questions, places, null=[3.0, 5.5, 4.5])
    untuned = KIND.answers(outputs, featurize(questions), questions, model_task())
    assert [chosen.text for chosen in untuned.chosen] == ["c", "", "c"]
    assert [answer.null_odds for answer in untuned.found] == [-4, 1, -1]
    assert tune(outputs, questions, own) == {"null_threshold": 0.0}
    outputs = logits_for(questions, places, null=[3.0, 4.5, 4.0])
    decision = tune(outputs, questions, own)
    assert decision == {"null_threshold": -1.5}
    _, figures = measure(outputs, questions, model_task("answer", **decision))
    has_answer = ["has_answer_f1", "has_answer_exact_match"]
    names = ["answer_f1", "exact_match", *has_answer, "no_answer_exact_match"]
    assert figures == dict.fromkeys(names, 1.0)
    # without a threshold nothing is "no answer" in data of one's own
    assert measure(outputs, questions, own)[0] == ["c", "f", "c"]
    answerable = questions_of(("c d e", (0, 1)))
    assert tune(logits_for(answerable, places[:1], null=3.0), answerable, model_task()) == {}


def test_what_training_knows_of_no_answer_holds_where_dev_has_none(tmp_path):
    rows = cities(24, 3)
    train = squad(tmp_path / "train.json", [*rows[:12], ("where", "wa wb", None)], version=2)
    model = write_model(tmp_path / "model", [*FILLERS, *PLACES, "where"], max_positions=32)
    dev = squad(tmp_path / "dev.json", rows[12:])
    changes = {"learning_rate": 1e-9, "epochs": 1}
    result = run(model, OWN, train, dev, tmp_path / "run", **changes)
    assert result["thresholds"] == {"null_threshold": 0.0}
    assert answers_null(read_model_task(tmp_path / "run"))
    words = ("predict", tmp_path / "run", dev, "--out", tmp_path / "out.json")
    line = refused(*words, "--text", "ask")
    assert f"--text ask: {dev} is no table and has no column 'ask': leave --text out" in line
    line = refused("evaluate", tmp_path / "run", "--data", dev, "--label", "right")
    assert f"--label right: {dev} is no table" in line
    all_answered = squad(tmp_path / "all.json", rows[:12])
    result = run(model, OWN, all_answered, dev, tmp_path / "other", **changes)
    assert result["thresholds"] == {}


@pytest.mark.parametrize(
    ("metrics", "threshold", "said"),
    [
        (("answer_f1", "exact_match"), 4.0, ["f", "c", "h"]),  # F1 4/9, all answered in part
        (("exact_match", "answer_f1"), 0.0, ["", "", ""]),  # one of three exactly
    ],
)
def test_the_null_threshold_is_that_of_the_main_metric(metrics, threshold, said):
    questions = questions_of(("f g", None), ("c d", (0, 3)), ("h e", (0, 3)))
    outputs = logits_for(questions, [(0, 0)] * 3, null=[5.5, 6.0, 6.5])  # odds 1, 2, 3
    asked = replace(model_task(), task=replace(find_task("squad2"), metrics=metrics))
    decision = tune(outputs, questions, asked)
    assert decision == {"null_threshold": threshold}
    texts, figures = measure(outputs, questions, replace(asked, thresholds=decision))
    assert texts == said
    assert figures[metrics[0]] == pytest.approx(4 / 9 if said[0] else 1 / 3)


@pytest.mark.parametrize(
    ("last", "asked", "is_told"),
    [
        (None, model_task("answer"), True),
        (None, model_task("squad1"), True),
        (None, model_task("squad2"), False),
        (None, model_task("answer", null_threshold=1.0), False),
        ((0, 1), model_task("answer"), False),  # all have an answer
    ],
)
def test_a_model_that_cannot_leave_a_question_says_so(last, asked, is_told):
    questions = questions_of(("c d", (0, 1)), ("f", last))
    outputs = logits_for(questions, [(0, 0)] * 2, null=9.0)
    answers = KIND.answers(outputs, featurize(questions), questions, asked)
    assert list(KIND.notes(answers, questions, asked)) == ["no_answer_exact_match"] * is_told
    if is_told:
        assert KIND.measure(answers, questions, asked)["no_answer_exact_match"] == 0


def test_only_questions_without_an_answer():
    questions = questions_of(("c d e", None), ("f g", None))
    outputs = logits_for(questions, [(0, 0), (0, 0)], null=4.0)
    assert tune(outputs, questions, model_task()) == {"null_threshold": -3.0}
    _, figures = measure(outputs, questions, model_task(null_threshold=-3.0))
    assert figures == {"answer_f1": 1.0, "exact_match": 1.0, "no_answer_exact_match": 1.0}


def test_a_model_that_says_nothing_has_collapsed():
    questions = questions_of(("c d e", (0, 1)), ("f g", (0, 1)), ("h c", None))

    def constant(null, judged=questions):
        outputs = logits_for(questions, [(0, 0)] * 3, null)
        answers = KIND.answers(outputs, featurize(questions), questions, model_task())
        return KIND.constant_prediction(answers, judged)

    assert constant(null=9.0) == "no answer"
    assert constant(9.0, questions_of(("c", None), ("d", None), ("e", (0, 1)))) is None
    assert constant(null=0.0) is None


def test_records_show_what_a_person_wants_to_see():
    long = " ".join(["f"] * 500)
    questions = questions_of((f"{long} c {long}", (1000, 1001)), ("d e", None), ("g", "lost"))
    outputs = logits_for(questions, [(0, 0), (0, 1), (0, 0)])
    answers = KIND.answers(outputs, featurize(questions), questions, model_task("squad1"))
    records = KIND.to_records(answers, questions, model_task("squad1"))
    assert list(records[0]) == ["id", "question", "context", "predicted", "probability", "answers"]
    assert [record["predicted"] for record in records] == ["f", "d e", "g"]
    assert records[0]["context"].count("c") == 1 and len(records[0]["context"]) == 400
    assert records[1]["context"] == "d e" and records[1]["answers"] == []
    best = answers.found[1].candidates[0]
    assert records[1]["probability"] == round(best.probability, 5) > 0.9
    blind = KIND.to_records(answers, replace(questions, answers=None), model_task("squad1"))
    assert "answers" not in blind[0]


# --- what must hold of any questions and any logits -------------------------------------------

WORDS = st.text(LETTERS, min_size=1, max_size=4)


@st.composite
def question_sets(draw):
    """Some questions about contexts of several windows, with answers, without, and lost ones."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        gap = draw(st.sampled_from([" ", "  ", ".", "\n", " \u00e9 ", "\x00"]))
        context = gap.join(draw(st.lists(WORDS, min_size=1, max_size=25)))
        span = draw(st.sampled_from(["place", "none", "lost"]))
        begin = draw(st.integers(0, len(context) - 1))
        end = draw(st.integers(begin + 1, len(context)))
        if span == "place" and context[begin:end].strip(" .\n\x00"):
            found.append((context, (begin, end)))
        else:
            found.append((context, None if span == "none" else "lost"))
    found.append(("a b", (0, 1)))  # not all may be lost
    return questions_of(*found)


@settings(max_examples=100, deadline=None)
@given(question_sets(), st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
def test_of_any_questions_and_logits(questions, seed, stride, rounded):
    encoding = replace(ENCODING, doc_stride=stride)
    windows = featurize(questions, encoding)
    outputs = np.random.default_rng(seed).normal(size=(len(windows.ids), 2)) * 4
    outputs = (outputs.round() if rounded else outputs).astype(np.float32)

    # windows cover every token, each with one best window
    for q, number in enumerate(questions.context_numbers):
        seen, best = [], []
        for w in range(*windows.question_windows[q : q + 2]):
            begin = windows.boundaries[w] + windows.context_begins[w]
            places = np.arange(begin, windows.boundaries[w + 1] - 1)
            tokens = windows.context_tokens[w] + np.arange(len(places))
            seen += tokens.tolist()
            best += tokens[windows.is_max_context[places]].tolist()
        count = len(TOKENIZER.encode_batch([questions.contexts[number]]).ids)
        first = min(seen, default=0)
        assert sorted(set(seen)) == sorted(best) == list(range(first, first + count))

    both = model_task(encoding=encoding)
    decision = KIND.tune(outputs, windows, questions, both)
    tuned = replace(both, thresholds=decision)
    answers = KIND.answers(outputs, windows, questions, tuned)
    for q, (answer, chosen) in enumerate(zip(*answers, strict=True)):
        context = questions.contexts[questions.context_numbers[q]]
        assert answer.id == questions.ids[q] and chosen in answer.candidates
        assert sum(c.probability for c in answer.candidates) == pytest.approx(1)
        for candidate in answer.candidates:
            assert context[candidate.begin : candidate.end] == candidate.text
            assert 0 <= candidate.probability <= 1

    # the threshold is never worse than 0, than answering always, and than never
    if decision:
        reached = KIND.measure(answers, questions, tuned)["answer_f1"]
        always = [answer.best.text for answer in answers.found]
        for texts in (always, [""] * len(always)):
            scores = squad2_scores(questions, dict(zip(questions.ids, texts, strict=True)))
            assert reached >= scores["f1"] / 100 - 1e-9
        plain = KIND.answers(outputs, windows, questions, both)
        assert reached >= KIND.measure(plain, questions, both)["answer_f1"] - 1e-9


# --- files -------------------------------------------------------------------------------------


def test_a_training_file_tells_what_is_wrong_once(tmp_path, capsys):
    path = squad(tmp_path / "train.json", [("a", "c d", "d"), ("a", "c d", "x"), ("b", "e", None)])
    questions = KIND.read(path, OWN)
    assert capsys.readouterr().err == (
        f"warning: {path}: 1 answers not in their context, left out of training"
        " (first: '1' at data[0].paragraphs[1].qas[0])\n"
    )
    assert len(questions) == 3 and KIND.label_names(questions) == () and KIND.num_outputs(()) == 2
    assert KIND.read(path, OWN, ()).answers == [["d"], ["x"], []]  # as dev set: scored, no word
    assert KIND.read_input(str(path), ModelTask(OWN, (), EncodingSettings())).answers is None
    assert not capsys.readouterr().err
    assert featurize(questions).learnable.tolist() == [0, 2]
    summary = KIND.summarize(questions, questions)
    assert "3 questions about 3 contexts; 1 without an answer" in summary
    train, dev = KIND.split_dev(questions, 0.3, seed=0)
    assert len(train) + len(dev) == 3 and not set(train.contexts) & set(dev.contexts)
    assert KIND.find_file(OWN, tmp_path, "train") == path


def test_a_training_file_must_have_something_to_learn(tmp_path):
    path = squad(tmp_path / "train.json", [("a", "c d", "x")])
    with pytest.raises(ValueError, match=r"train.json: not one answer is in its context"):
        KIND.read(path, OWN)
    assert KIND.read(path, OWN, ()).answers == [["x"]]  # as dev set
    path = squad(tmp_path / "none.json", [("a", "c d", None)])
    with pytest.raises(ValueError, match=r"none.json: no question has an answer: there is nothing"):
        KIND.read(path, OWN)
    assert KIND.read(path, OWN, ()).answers == [[]]


@pytest.fixture
def predict(tmp_path):
    """The questions of a file, and a function that answers these and writes to a file's name."""

    def read(path, spans):
        data = KIND.read_input(str(path), model_task())
        outputs = logits_for(data, spans, null=[0.0, 9.0])
        answers = KIND.answers(outputs, featurize(data), data, model_task())

        def answer(name):
            KIND.check_output(data, tmp_path / name, model_task())
            KIND.write_answers(tmp_path / name, answers, data, model_task())
            return tmp_path / name

        return data, answer

    return read


def test_predictions_for_json(tmp_path, predict):
    path = squad(tmp_path / "new.json", [("a", "c d", "d"), ("b", "e f", None)])
    data, answer = predict(path, [(0, 1), (0, 0)])
    assert data.answers is None and data.rows is None
    with pytest.raises(ValueError, match="out.csv: answers to a JSON file are JSON too: end `out`"):
        answer("out.csv")
    assert json.loads(answer("out.json").read_text()) == {"0": "c d", "1": ""}
    odds = json.loads((tmp_path / "out.null_odds.json").read_text())
    assert odds["0"] < 0 < odds["1"]
    best = json.loads((tmp_path / "out.nbest.json").read_text())["0"][0]
    assert best["text"] == "c d" and best["start_logit"] == best["end_logit"] == 5


def test_predictions_for_rows(tmp_path, predict):
    path = write(tmp_path / "new.csv", ["question,context,answers", "a,c d,?", "b,e f,?"])
    data, answer = predict(path, [(1, 1), (0, 0)])
    assert data.ids == ["2", "3"]
    assert data.rows[0] == {"question": "a", "context": "c d", "answers": "?"}
    first, second = read_rows(answer("out.csv"))
    assert (first["answers"], first["predicted_answers"], first["answer_start"]) == ("?", "d", "2")
    assert (second["predicted_answers"], second["answer_start"]) == ("", "")
    assert 0.5 < float(first["probability"]) <= 1
    assert json.loads(answer("out.json").read_text()) == {"2": "d", "3": ""}
    with pytest.raises(ValueError, match="cannot write '.xml'"):
        answer("out.xml")
    with pytest.raises(ValueError, match="read from a file, not from '-'"):
        KIND.read_input("-", model_task())


# --- runs --------------------------------------------------------------------------------------

FILLERS, PLACES = [f"w{letter}" for letter in LETTERS], ["rome", "oslo", "bonn"]
SETTINGS = FinetuneSettings(
    epochs=3, batch_size=16, learning_rate=3e-3, max_length=24, doc_stride=8,
    precision="float32", threads=1,
)  # fmt: skip


def cities(count, seed):
    """(question, context, answer): the answer is the one city of the context."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = random.choice(FILLERS, random.integers(3, 30)).tolist()
        answer = str(random.choice(PLACES))
        words.insert(random.integers(len(words)), answer)
        rows.append(("where", " ".join(words), answer))
    return rows


def run(model, task, train, dev, out, **changes):
    train, dev = KIND.read(train, task), KIND.read(dev, task, ())
    chosen = replace(SETTINGS, **changes)
    trainer = Trainer.prepare(InitialModel(model), task, train, {"dev": dev}, chosen)
    return train_seeds(trainer, out, chosen, [1])


def test_trivia_is_a_first_stage_whose_head_is_kept(tmp_path):
    """As in Table 2 of the paper: what the first run learned about spans goes into the second."""
    items = []
    for k, (question, context, answer) in enumerate(cities(96, 3)):
        write(tmp_path / "evidence" / "web" / f"{k}.txt", context)
        values = {"Value": answer, "Aliases": [answer.upper()]}
        found = [{"Filename": f"{k}.txt"}]
        items.append({"QuestionId": f"t{k}", "Question": question, "Answer": values,
                      "SearchResults": found})  # fmt: skip
    trivia = write(tmp_path / "qa" / "web-train.json", json.dumps({"Data": items}))
    dev = squad(tmp_path / "dev.json", cities(30, 4))
    model = write_model(tmp_path / "model", [*FILLERS, *PLACES, "where"], max_positions=32)
    first = tmp_path / "first"
    assert run(model, OWN, trivia, dev, first)["metrics"]["answer_f1"] > 0.9

    start = InitialModel(first).model(SpanPredictor, 2, SETTINGS, seed=9)
    saved = load_model(first, SpanPredictor)
    assert saved.missing == [] and torch.equal(start.span.weight, saved.model.span.weight)
    # so that a second stage of one step at no rate to speak of knows all of it
    train = squad(tmp_path / "train.json", cities(16, 5))
    changes = {"learning_rate": 1e-9, "epochs": 1}
    second = run(first, find_task("squad1"), train, dev, tmp_path / "second", **changes)
    assert second["metrics"]["answer_f1"] > 0.9
