"""Windows of questions and contexts: by hand, and as loops make them."""

import numpy as np
import pytest

from bertsmith.tasks.features import Features
from bertsmith.tasks.squad.questions import Question, Questions
from bertsmith.tasks.squad.windows import featurize_questions
from bertsmith.tasks.task import EncodingSettings

from ..made import ALPHABET, CLS, JOINED, PAD, SEP, by_row

IDS = JOINED.vocabulary.ids


def of(*found: tuple[str, str, tuple[int, int] | None], answers=True) -> Questions:
    """Questions from (question, context, span)."""
    contexts, rows = list(dict.fromkeys(context for _, context, _ in found)), []
    for k, (text, context, span) in enumerate(found):
        right = ([context[slice(*span)]] if span else []) if answers else None
        rows.append(Question(str(k), text, contexts.index(context), right, span))
    return Questions.of(rows, contexts, "mem")


def windows_of(questions: Questions, **encoding: int):
    encoding = EncodingSettings(**{"max_length": 384, **encoding})
    return featurize_questions(JOINED, questions, encoding)


def rows(windows):
    return by_row(windows, windows.ids)


def row(text):
    """Ids of one-letter pieces, "^" and "$" for [CLS] and [SEP]."""
    return [{"^": CLS, "$": SEP}.get(c) or IDS[c] for c in text]


def test_one_window_by_hand():
    windows = windows_of(of(("a b?", "c d. e", (5, 6))), max_length=16)
    assert rows(windows) == [row("^ab?$cd.e$")]
    assert windows.token_types.tolist() == [0] * 5 + [1] * 5
    assert windows.labels.tolist() == [[8, 8]]
    assert windows.is_max_context.tolist() == [False] * 5 + [True] * 4 + [False]
    assert windows.characters(np.array([0, 0]), np.array([6, 8])).tolist() == [[2, 3], [5, 6]]
    assert windows.context_begins.tolist() == [5] and windows.num_truncated == 0
    input_ids, token_types, lengths = windows.padded(np.array([0]), PAD)
    assert input_ids.shape == token_types.shape == (1, 16) and lengths.tolist() == [10]


def test_windows_overlap_by_hand():
    # 7 - 3 - 1 leaves 3 tokens of the context; a window every 2
    context, question = "a b c d e f g", ("h", "a b c d e f g", (4, 7))  # "c d"
    windows = windows_of(of(question), max_length=7, doc_stride=2)
    assert rows(windows) == [row("^h$abc$"), row("^h$cde$"), row("^h$efg$")]
    assert windows.labels.tolist() == [[0, 0], [3, 4], [0, 0]]  # not all of it: [CLS]
    assert windows.question_windows.tolist() == [0, 3]
    # c: 0 to the right in abc, 0 to the left in cde: the first; e likewise
    marks = [m[3:-1] for m in by_row(windows, windows.is_max_context)]
    assert marks == [[True] * 3, [False, True, True], [False, True, True]]
    tokens = np.concatenate([begin + np.arange(3, 6) for begin in windows.boundaries[:-1]])
    offsets = windows.characters(np.repeat([0, 1, 2], 3), tokens)
    assert [context[b:e] for b, e in offsets] == list("abccdeefg")


def test_a_long_question_is_cut_and_a_context_is_read_once():
    questions = of(("a b c d", "h g", (0, 1)), ("a", "h g", (2, 3)), ("b", "", None))
    windows = windows_of(questions, max_length=8, max_question_length=2)
    assert windows.num_truncated == 1
    assert "maximum question length" in windows.long_hint(EncodingSettings())
    # the last has a context without a token
    assert rows(windows) == [row("^ab$hg$"), row("^a$hg$"), row("^b$$")]
    assert windows.labels.tolist() == [[4, 4], [4, 4], [0, 0]]
    assert len(windows.context_offsets) == 2


def test_answers_inside_a_token_and_without_one():
    questions = of(("a", "abc d", (1, 2)), ("a", "x\x00d", (1, 2)), ("a", "b  c", (1, 3)))
    windows = windows_of(questions)
    assert windows.labels.tolist() == [[4, 4], [3, 3], [0, 0]]  # ##b; [UNK] of "x\0d"; white space


def test_without_answers_there_are_no_labels():
    windows = windows_of(of(("a", "b", None), answers=False))
    assert windows.labels is None and isinstance(windows, Features)


def test_training_draws_what_it_can_learn_from():
    """Lost answers are scored, so they are rows, but no units of training."""
    found = [Question(k, "a", 0, ["x"], span) for k, span in (("1", (0, 1)), ("2", None))]
    found += [Question("3", "a", 0, [], None), Question("4", "a b", 0, ["x"], (8, 9))]
    questions = Questions.of(found, ["c d e f g"], "mem")
    windows = windows_of(questions, max_length=7, doc_stride=3)
    assert windows.question_windows.tolist() == [0, 2, 4, 6, 9]
    assert windows.learnable.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert windows.unit_lengths.tolist() == [7, 6, 7, 6, 7, 7, 6]
    batch = windows.batch(np.array([2, 6]), PAD)  # question 3, first window; question 4, last
    assert batch["ids"][0, :3].tolist() == row("^a$") and batch["lengths"].tolist() == [7, 6]
    assert batch["labels"].tolist() == [[0, 0], [4, 4]]


def test_a_question_leaves_the_context_a_quarter_of_the_window():
    questions = of(("a b c d e f g h", "a b c d", (0, 1)), ("a", "h g", None))
    windows = windows_of(questions, max_length=11)  # of 8 tokens a question has 6
    assert rows(windows)[0][7] == SEP and windows.num_truncated == 1
    assert windows.lengths.tolist() == [11, 11, 6]  # two tokens of four fit beside the question
    assert [len(row) for row in rows(windows)] == windows.lengths.tolist()
    short, long = EncodingSettings(max_length=11), EncodingSettings(max_length=384)
    note = "1 of 2 questions have more than 6 tokens and lose their end"
    assert windows.long_note(short) == note
    assert windows.long_hint(short) == "a larger maximum length reads more of them"
    assert windows.long_hint(long).startswith("a larger maximum question length")


def test_bad_lengths():
    questions = of(("a b c", "d", None))
    with pytest.raises(ValueError, match="max_length = 3 has no room for a context: at least 4"):
        windows_of(questions, max_length=3)
    assert len(windows_of(questions, max_length=4)) == 1
    for name in ("doc_stride", "max_question_length"):
        with pytest.raises(ValueError, match=f"`{name}=0`: must be at least 1"):
            EncodingSettings(**{name: 0})


def reference(tokens: list[int], question: list[int], span, max_length, stride):
    """The windows of one question, with loops as the paper's code has them.

    tokens: ids of the context; span: first and last token of the answer, or None. Yields per window
    (ids, types, start, end, max-context marks of its context tokens).
    """
    room = max_length - len(question) - 3
    parts, begin = [], 0
    while True:
        length = min(len(tokens) - begin, room)
        parts.append((begin, length))
        if begin + length >= len(tokens):
            break
        begin += min(length, stride)
    for number, (begin, length) in enumerate(parts):
        ids = [CLS, *question, SEP, *tokens[begin : begin + length], SEP]
        types = [0] * (len(question) + 2) + [1] * (length + 1)
        start = end = 0
        if span and begin <= span[0] and span[1] < begin + length:
            start, end = (place - begin + len(question) + 2 for place in span)
        marks = []
        for place in range(begin, begin + length):
            scores = [
                min(place - b, b + n - 1 - place) + 0.01 * n if b <= place < b + n else -1
                for b, n in parts
            ]
            marks.append(scores.index(max(scores)) == number)
        yield ids, types, start, end, marks


@pytest.mark.parametrize("seed", range(5))
def test_as_loops_do_it(seed):
    random = np.random.default_rng(seed)

    def text(most):
        sizes = (random.integers(1, 5) for _ in range(most))
        return " ".join("".join(random.choice([*ALPHABET], size)) for size in sizes)

    found = []
    for _ in range(60):
        context = text(random.integers(1, 40))
        begin = int(random.integers(0, len(context)))
        span = (begin, int(random.integers(begin + 1, len(context) + 1)))
        if not context[slice(*span)].strip():
            span = None
        found.append((text(random.integers(1, 8)), context, span))
    questions = of(*found)
    max_length, stride = int(random.integers(14, 40)), int(random.integers(1, 30))
    windows = windows_of(questions, max_length=max_length, doc_stride=stride, max_question_length=9)
    w = 0
    for text, context, span in found:
        encoded = JOINED.encode_batch([context])
        offsets = enumerate(encoded.offsets if span else [])
        touched = [k for k, (b, e) in offsets if b < span[1] and e > span[0]]
        asked = JOINED.encode_batch([text]).ids[:9].tolist()
        inside = (touched[0], touched[-1]) if touched else None
        made = reference(encoded.ids.tolist(), asked, inside, max_length, stride)
        for ids, types, start, end, marks in made:
            part = slice(windows.boundaries[w], windows.boundaries[w + 1])
            assert windows.ids[part].tolist() == ids and len(ids) <= max_length
            assert windows.token_types[part].tolist() == types
            assert windows.labels[w].tolist() == [start, end]
            plain = [False] * (len(asked) + 2)
            assert windows.is_max_context[part].tolist() == [*plain, *marks, False]
            w += 1
    assert w == len(windows) > 100
    # every context token has its best window exactly once
    contexts = [context for _, context, _ in found]
    assert windows.is_max_context.sum() == len(JOINED.encode_batch(contexts).ids)
