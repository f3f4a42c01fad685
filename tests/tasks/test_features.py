"""Rows and batches by hand: cut, head and tail, windows and the one answer for them."""

from itertools import pairwise

import numpy as np
import pytest

from bertsmith.tasks.choice import ChoiceExamples, featurize_choice
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.features import featurize, pool, token_budget_batches, training_batches
from bertsmith.tasks.task import EncodingSettings

from .made import ALPHABET, CLS, LETTERS, PAD, SEP, by_row

PIECES = ["-", "?", "[", "]", "_", *ALPHABET]  # by id: [a b] is CLS a b SEP


def of(texts, pairs=None, labels=None) -> Examples:
    return Examples(texts, pairs, labels, ("0", "1"), "mem", list(range(1, len(texts) + 1)))


def choices(contexts, options, labels=None) -> ChoiceExamples:
    return ChoiceExamples(contexts, options, labels, "mem", list(range(1, len(contexts) + 1)))


def spaced(*texts: str) -> list[str]:
    return [" ".join(text) for text in texts]


def shown(features) -> list[str]:
    """Rows as "[abc]bc]"; the second text is of type 1, with its ]."""
    texts = ["".join(PIECES[k] for k in row) for row in by_row(features, features.ids)]
    for text, types in zip(texts, by_row(features, features.token_types), strict=True):
        second = len(text) - text.index("]") - 1
        assert types == [0] * (len(text) - second) + [1] * second
    return texts


def test_single_texts_by_hand():
    features = featurize(LETTERS, of(["a b", "c d e f g h", "h"]), EncodingSettings(max_length=6))
    rows = by_row(features, features.ids)
    assert rows == [[CLS, 5, 6, SEP], [CLS, 7, 8, 9, 10, SEP], [CLS, 12, SEP]]  # the head stays
    assert not features.token_types.any()
    assert features.num_truncated == 1
    assert (features.ids.dtype, features.boundaries.dtype) == (np.int32, np.int64)


def test_pairs_by_hand():
    examples = of(["a b", "a"], ["c", "c d e f g"], np.array([1, 0]))
    features = featurize(LETTERS, examples, EncodingSettings(max_length=7))
    rows, types = by_row(features, features.ids), by_row(features, features.token_types)
    assert rows[0] == [CLS, 5, 6, SEP, 7, SEP]
    assert types[0] == [0, 0, 0, 0, 1, 1]
    assert rows[1] == [CLS, 5, SEP, 7, 8, 9, SEP]  # the longer text is cut
    assert types[1] == [0, 0, 0, 1, 1, 1, 1]
    assert features.labels.tolist() == [1, 0]
    assert features.unit_lengths.tolist() == [6, 7]
    outputs = np.ones((2, 3))
    assert features.pooled(outputs, "vote") is outputs  # a row an example

    input_ids, token_types, lengths = features.padded(np.array([1, 0]), pad_id=PAD)
    assert input_ids.shape == (2, 7)  # not 8: never above max_length
    assert input_ids.tolist() == [rows[1], [*rows[0], PAD]]
    assert token_types.tolist() == [types[1], [*types[0], 0]]
    assert lengths.tolist() == [7, 6]
    batch = {name: part.tolist() for name, part in features.batch(np.array([1, 0]), PAD).items()}
    assert (batch["ids"], batch["types"]) == (input_ids.tolist(), token_types.tolist())
    assert (batch["lengths"], batch["labels"]) == ([7, 6], [0, 1])


def test_padding_is_rounded_up():
    features = featurize(LETTERS, of(["a b c", "a"]), EncodingSettings(max_length=64))
    assert features.padded(np.array([0, 1]), PAD)[0].shape == (2, 8)


def test_some_rows_by_themselves():
    examples = of(["a b", "c d e", "a", "b"], pairs=[*"cdef"])
    features = featurize(LETTERS, examples, EncodingSettings(8))
    some = features.of_rows(np.array([3, 0]))
    both = some.padded(np.array([0, 1]), PAD), features.padded(np.array([3, 0]), PAD)
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(some) == 2


def test_training_batches_cover_once_are_random_and_save_padding():
    lengths = np.random.default_rng(0).integers(3, 60, 5003)
    batches = training_batches(lengths, 32, seed=1, epoch=2)
    assert sorted(np.concatenate(batches).tolist()) == list(range(5003))
    assert sorted(map(len, batches)) == [5003 % 32] + [32] * (5003 // 32)
    again = training_batches(lengths, 32, seed=1, epoch=2)
    assert all(np.array_equal(x, y) for x, y in zip(batches, again, strict=True))
    for seed, epoch in ((1, 3), (2, 2)):
        assert not np.array_equal(batches[0], training_batches(lengths, 32, seed, epoch)[0])
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded < 1.05 * lengths.sum()  # unsorted batches: 1.8
    means = [lengths[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # short ones are not first


def test_token_budget():
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    batches = token_budget_batches(lengths, 512)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    assert all(len(batch) * lengths[batch].max() <= 512 for batch in batches)
    assert [len(batch) for batch in token_budget_batches(np.array([5, 900]), 512)] == [1, 1]


def test_head_and_tail_by_hand():
    encoding = EncodingSettings(max_length=10, long_texts="head-tail")
    texts = spaced("hgfedcbaabcdefgh", "abcdefgh", "")
    features = featurize(LETTERS, of(texts, labels=np.array([1, 0, 1])), encoding)
    assert shown(features) == ["[hgcdefgh]", "[abcdefgh]", "[]"]  # 2 and 6 of 8
    assert features.num_truncated == 1
    assert features.labels.tolist() == [1, 0, 1] and features.unit_examples is None


def test_head_and_tail_are_those_of_the_paper():
    """128 and 382 of 510 (arXiv 1905.05583, section 5.3.1)."""
    text = spaced("a" * 128 + "b" * 200 + "c" * 382)
    features = featurize(LETTERS, of(text), EncodingSettings(512, "head-tail"))
    assert shown(features) == ["[" + "a" * 128 + "c" * 382 + "]"]


def test_a_context_without_a_token_is_one_window():
    encoding = EncodingSettings(max_length=6, long_texts="windows", doc_stride=2)
    with np.errstate(all="raise"):
        features = featurize_choice(LETTERS, choices(["\u200b"], [["a b c d", "b"]]), encoding)
    assert shown(features) == ["[]abc]", "[]b]"] and features.num_truncated == 1


def test_the_longer_text_of_a_pair_loses_its_middle():
    encoding = EncodingSettings(max_length=9, long_texts="head-tail")  # room for 6
    first = spaced("abcdefgh", "ab", "abcdefgh", "abc")
    second = spaced("gh", "abcdefgh", "habcdefg", "def")
    features = featurize(LETTERS, of(first, second), encoding)
    assert shown(features) == ["[afgh]gh]", "[ab]afgh]", "[agh]hfg]", "[abc]def]"]
    assert features.num_truncated == 3


def test_windows_by_hand():
    encoding = EncodingSettings(max_length=6, long_texts="windows", doc_stride=3)
    examples = of(spaced("abcdefgh", "a", "abcde", ""), labels=np.array([1, 0, 1, 0]))
    features = featurize(LETTERS, examples, encoding)
    assert shown(features) == ["[abcd]", "[defg]", "[efgh]", "[a]", "[abcd]", "[bcde]", "[]"]
    assert features.unit_examples.tolist() == [0, 0, 0, 1, 2, 2, 3]
    assert features.labels.tolist() == [1, 1, 1, 0, 1, 1, 0]
    assert features.num_truncated == 0  # nothing is lost
    # a stride longer than a window would leave tokens out
    wide = featurize(LETTERS, of(spaced("abcdefgh")), EncodingSettings(6, "windows", 100))
    assert shown(wide) == ["[abcd]", "[efgh]"] and wide.labels is None


def test_windows_of_pairs_by_hand():
    encoding = EncodingSettings(max_length=9, long_texts="windows", doc_stride=2)  # room for 6
    first = spaced("abcdefgh", "ab", "abcd", "abc")
    second = spaced("gh", "abcdef", "efgh", "def")
    labels = np.array([[0, 1], [1, 0], [1, 1], [0, 0]], bool)
    features = featurize(LETTERS, of(first, second, labels), encoding)
    assert shown(features) == [
        *("[abcd]gh]", "[cdef]gh]", "[efgh]gh]"),
        *("[ab]abcd]", "[ab]cdef]"),
        *("[abc]efg]", "[abc]fgh]"),  # equally long: the first is cut to half, the second moves
        "[abc]def]",
    ]
    assert features.unit_examples.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert features.labels.tolist() == labels[features.unit_examples].tolist()
    assert features.num_truncated == 1


def test_windows_of_a_choice_by_hand():
    encoding = EncodingSettings(max_length=9, long_texts="windows", doc_stride=3)  # room for 6
    contexts = spaced("abcdefg", "a", "abcd")
    options = [spaced("h", "ab"), spaced("bcdefgh", "h"), spaced("abcde", "c")]
    examples = choices(contexts, options, np.array([1, 0, 1]))
    features = featurize_choice(LETTERS, examples, encoding)
    assert shown(features) == [
        *("[abcd]h]", "[abcd]ab]", "[defg]h]", "[defg]ab]"),
        *("[a]bcdef]", "[a]h]"),  # the option takes what the context leaves
        *("[abc]abc]", "[abc]c]", "[bcd]abc]", "[bcd]c]"),  # else half of the room
    ]
    assert features.unit_examples.tolist() == [0, 0, 1, 2, 2]
    assert features.labels.tolist() == [1, 1, 0, 1, 1]
    assert features.num_truncated == 2
    assert features.unit_lengths.tolist() == [9, 9, 9, 9, 9]
    batch = features.batch(np.array([1, 2]), pad_id=0)
    assert batch["labels"].tolist() == [1, 0] and batch["ids"].shape == (4, 9)
    right = np.log([[0.2], [0.8], [0.6], [0.4], [0.5], [0.5], [0.9], [0.1], [0.3], [0.7]])
    pooled = features.pooled(right + 7.0, "max").reshape(3, 2)  # 7: a choice has no zero
    np.testing.assert_allclose(np.exp(pooled), [[0.6, 0.8], [0.5, 0.5], [0.9, 0.7]], rtol=1e-6)
    unlabelled = featurize_choice(LETTERS, choices(contexts, options), encoding)
    assert unlabelled.labels is None and shown(unlabelled) == shown(features)


def test_a_choice_keeps_heads_and_tails():
    examples = choices(spaced("abcdefgh"), [["a", "b c"]], np.array([1]))
    features = featurize_choice(LETTERS, examples, EncodingSettings(9, "head-tail"))
    assert shown(features) == ["[aefgh]a]", "[afgh]bc]"]
    assert features.num_truncated == 1 and features.labels.tolist() == [1]  # one text


def slow_windows(first, second, max_length, stride) -> list[tuple[str, str]]:
    """One token at a time: what stands in each window."""
    room = max_length - (2 if second is None else 3)
    second_moves = second is not None and len(second) >= len(first)
    moving, other = (second, first) if second_moves else (first, second or "")
    while len(other) > room // 2:
        other = other[:-1]
    size, begin, found = room - len(other), 0, []
    while True:
        last = begin + size >= len(moving)
        if last:
            begin = max(len(moving) - size, 0)
        part = moving[begin : begin + size]
        found.append((other, part) if second_moves else (part, other))
        if last:
            return found
        begin += min(stride, size)


@pytest.mark.parametrize("paired", [False, True])
def test_windows_are_those_of_a_slow_reference(paired):
    random = np.random.default_rng(1 + paired)
    for _ in range(60):
        sizes = random.integers(0, 25, (2, 8))
        texts = [["".join(random.choice(list(ALPHABET), n)) for n in row] for row in sizes]
        first, second = texts if paired else (texts[0], None)
        max_length, stride = int(random.integers(5, 20)), int(random.integers(1, 25))
        encoding = EncodingSettings(max_length, "windows", stride)
        examples = of(spaced(*first), second and spaced(*second))
        features = featurize(LETTERS, examples, encoding)
        expected, owners = [], []
        for k, text in enumerate(first):
            windows = slow_windows(text, second and second[k], max_length, stride)
            expected += [f"[{a}]{b}]" if paired else f"[{a}]" for a, b in windows]
            owners += [k] * len(windows)
        assert shown(features) == expected
        assert features.unit_examples.tolist() == owners
        assert features.lengths.max() <= max_length
        lost = sum(min(a, b) > (max_length - 3) // 2 for a, b in sizes.T) if paired else 0
        assert features.num_truncated == lost


@pytest.mark.parametrize("way", ["head-tail", "windows"])
@pytest.mark.parametrize("paired", [False, True])
def test_what_fits_is_laid_out_as_ever(way, paired):
    random = np.random.default_rng(3)
    first, second = (spaced(*(ALPHABET[:n] for n in random.integers(0, 9, 20))) for _ in range(2))
    examples = of(first, second if paired else None)
    plain = featurize(LETTERS, examples, EncodingSettings(19))
    features = featurize(LETTERS, examples, EncodingSettings(19, way))
    assert shown(features) == shown(plain) and features.num_truncated == 0
    assert features.ids.dtype == plain.ids.dtype
    assert features.boundaries.dtype == plain.boundaries.dtype == np.int64


@pytest.mark.parametrize("way", ["cut", "head-tail", "windows"])
@pytest.mark.parametrize(
    ("made", "examples", "max_length", "least"),
    [
        (featurize, of(["a"], ["b"]), 4, 5),
        (featurize, of(["a"]), 2, 3),
        (featurize, of(["a"]), -1, 3),
        (featurize_choice, choices(["a"], [["b", "c"]]), 4, 5),
    ],
)
def test_no_room(way, made, examples, max_length, least):
    message = f"max_length = {max_length} is too short: at least {least}"
    with pytest.raises(ValueError, match=message):
        made(LETTERS, examples, EncodingSettings(max_length, way))


TEXTS = np.array([0, 0, 0, 1])


def test_pooled_classes_by_hand():
    probabilities = np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    logits = np.log(probabilities) + np.array([[5.0], [-5.0], [0.0], [9.0]])
    pooled = {how: pool(logits, TEXTS, how, exclusive=True) for how in ("mean", "max", "vote")}
    assert all(values.dtype == np.float32 and values.shape == (2, 3) for values in pooled.values())
    np.testing.assert_allclose(np.exp(pooled["max"][0]), [0.5, 0.6, 0.7], rtol=1e-6)
    means = np.cbrt([0.1 * 0.5 * 0.1, 0.6 * 0.2 * 0.2, 0.3 * 0.3 * 0.7])
    np.testing.assert_allclose(np.exp(pooled["mean"][0]), means, rtol=1e-6)
    # a vote each; the mean of the probabilities, [7, 10, 13] / 30, decides
    expected = np.array([1 + 7 / 30, 1 + 10 / 30, 1 + 13 / 30]) / 4
    np.testing.assert_allclose(np.exp(pooled["vote"][0]), expected, rtol=1e-6)
    assert {how: values[1].argmax() for how, values in pooled.items()} == dict.fromkeys(pooled, 2)
    # two votes are more than certainty in one
    certain = np.log([[0.99, 0.01], [0.4, 0.6], [0.4, 0.6]])
    assert pool(certain, np.zeros(3, np.int64), "vote", True).argmax() == 1


def test_pooled_scores_and_labels_by_hand():
    outputs = np.array([[-9.0, 1.0], [2.0, 1.0], [3.0, -7.0], [4.0, -2.0]])
    for how, expected in (
        ("mean", [[-4 / 3, -5 / 3], [4, -2]]),
        ("max", [[3, 1], [4, -2]]),
        ("vote", [[2, 1], [4, -2]]),  # two windows of three have each label
    ):
        np.testing.assert_allclose(pool(outputs, TEXTS, how, exclusive=False), expected, rtol=1e-6)
    even = pool(np.array([[1.0], [5.0], [-3.0], [2.0]]), np.zeros(4, np.int64), "vote", False)
    assert even.tolist() == [[1.5]]  # between the two in the middle


def test_pooling_is_that_of_each_text_alone():
    random = np.random.default_rng(2)
    texts = np.repeat(np.arange(40), random.integers(1, 7, 40))
    outputs = random.normal(0, 3, (len(texts), 4)).astype(np.float32)
    ends = np.flatnonzero(np.diff(texts, append=-1)) + 1
    log_probabilities = outputs - np.log(np.exp(outputs).sum(axis=1, keepdims=True))
    slow = {"mean": np.mean, "max": np.max, "vote": np.median}
    for how, function in slow.items():
        pooled = pool(outputs, texts, how, exclusive=False)
        chosen = pool(outputs, texts, how, exclusive=True)
        for k, (begin, end) in enumerate(pairwise([0, *ends])):
            one = function(outputs[begin:end], axis=0)
            np.testing.assert_allclose(pooled[k], one, rtol=1e-5, atol=1e-6)
            rows = log_probabilities[begin:end]
            if how != "vote":
                np.testing.assert_allclose(chosen[k], function(rows, axis=0), rtol=1e-5, atol=1e-6)
                continue
            votes = np.bincount(rows.argmax(axis=1), minlength=4)
            assert votes[chosen[k].argmax()] == votes.max()
            assert np.exp(chosen[k]).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("max_length", "way", "note"),
    [
        (40, "cut", None),
        (40, "head-tail", None),
        (40, "windows", None),
        (6, "cut", "1 of 2 examples have more than 6 tokens and lose their end"),
        (6, "head-tail", "1 of 2 examples have more than 6 tokens and lose their middle"),
        (6, "windows", "2 examples are read in 3 windows of at most 6 tokens"),
    ],
)
def test_what_became_of_long_texts_is_said(max_length, way, note):
    encoding = EncodingSettings(max_length, way)
    assert featurize(LETTERS, of(spaced("abcdefgh", "a")), encoding).long_note(encoding) == note


def test_that_the_shorter_text_is_cut_is_said():
    encoding = EncodingSettings(8, "windows", doc_stride=9)  # room for 5: 2 of the shorter text
    features = featurize(LETTERS, of(["a b c"], ["d e f"]), encoding)
    assert shown(features) == ["[ab]def]"]
    assert features.long_note(encoding) == (
        "1 examples are read in 1 windows of at most 8 tokens; of 1 the end of the shorter text is"
        " lost"
    )
    assert features.long_hint(encoding) == "a larger maximum length reads more of them"
