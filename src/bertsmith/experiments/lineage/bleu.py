"""BLEU and chrF by sacrebleu, with intervals; by sentence length and rarest word; of two systems.

BLEU (Papineni et al. 2002) of a corpus is a function of ten sums over sentences, so that all
resamples of a bootstrap are one matrix product: the counts are sacrebleu's, the formula stands
here, too. Sizes: N sentences, R resamples.

Figures with different signatures do not compare. Publications on Multi30k lower-case and tokenise
with Moses; `bleu_lower` is lower-cased and tokenised by 13a, which leaves words with hyphens whole
as Moses does without `-a`, but also English 's and signs that are not ASCII.
"""

from __future__ import annotations

import locale
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertsmith.base.settings import nearest
from bertsmith.experiments.lineage.pairs import JOINER, Language, Pairs, words
from bertsmith.tasks import bootstrap

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

ORDER = 4  # longest n-grams
RESAMPLES, SEED = 1000, 0
SEEN = (0, 9, 99)  # ends of the groups of `by_rarest_word`


def check_language(code: str) -> None:
    """Refuse a code that stands for no language: sacrebleu takes any and says nothing.

    Known are those of Python's locales.

    Errors: ValueError with the nearest known code.
    """
    places = {name: place for name, place in locale.locale_alias.items() if "_" in place}
    known = {place.partition("_")[0] for place in places.values()}
    if code not in known:
        by_name = places.get(code.lower(), "").partition("_")[0]
        hint = f"did you mean '{by_name}'?" if by_name else nearest(code, sorted(known))
        raise ValueError(f"unknown language code '{code}': {hint}")


def scores(
    hypotheses: Sequence[str], references: Sequence[str], language: str
) -> dict[str, dict[str, Any]]:
    """BLEU as written, BLEU lower-cased and chrF: {"score", "signature"}, of BLEU "interval".

    language  code of the target: Chinese, Japanese and Korean have tokenizers of their own

    Errors: those of `statistics`; ValueError for an unknown code, or without sacrebleu.
    """
    found = {}
    for name, lowercase in (("bleu", False), ("bleu_lower", True)):
        counts = statistics(hypotheses, references, language, lowercase)
        metric = _metric(language, lowercase)
        score = metric.corpus_score(hypotheses, [references]).score
        interval = with_interval(counts)["interval"]
        signature = metric.get_signature().format()
        found[name] = {"score": score, "interval": interval, "signature": signature}
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    score = metric.corpus_score(hypotheses, [references]).score
    found["chrf"] = {"score": score, "signature": metric.get_signature().format()}
    return found


def ceiling(references: Sequence[str], language: Language, code: str) -> dict[str, dict[str, Any]]:
    """The scores of the references, encoded and decoded: no output can lose less."""
    ids, boundaries = language.encode(references)
    rows = np.split(ids, boundaries[1:-1])
    return scores([language.decode(row) for row in rows], references, code)


def statistics(
    hypotheses: Sequence[str], references: Sequence[str], language: str, lowercase: bool = False
) -> np.ndarray:
    """Counts of each sentence, int64 [N, 10]: its length, that of its reference, the n-grams of 1
    to 4 words that are right, and all of them.

    Errors: ValueError for no hypotheses, or other numbers of them and of references.
    """
    if not hypotheses or len(hypotheses) != len(references):
        found = f"{len(hypotheses):,} translations, {len(references):,} references"
        raise ValueError(f"{found}: BLEU needs one of each for every sentence")
    metric = _metric(language, lowercase, effective_order=True)
    found = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        one = metric.sentence_score(hypothesis, [reference])
        found.append([one.sys_len, one.ref_len, *one.counts, *one.totals])
    return np.array(found, np.int64)


def bleu(sums: np.ndarray) -> np.ndarray:
    """BLEU of 0 to 100 of sums of `statistics`, [..., 10] -> float64 [...].

    A count of 0 is smoothed as in NIST's mteval (sacrebleu's "exp"): the k-th of them to 2 ** -k.

    >>> bleu(np.array([[8, 8, 8, 7, 6, 5, 8, 7, 6, 5], [4, 8, 4, 3, 2, 0, 4, 3, 2, 1]])).round(2)
    array([100.  ,  30.93])
    """
    length, reference = sums[..., 0], sums[..., 1]
    right, all_of = sums[..., 2 : 2 + ORDER], sums[..., 2 + ORDER :]
    is_none = right == 0
    smoothed = np.where(is_none, 2.0 ** -is_none.cumsum(-1), right)
    precisions = smoothed / np.maximum(all_of, 1)
    brevity = np.exp(np.minimum(0, 1 - reference / np.maximum(length, 1)))
    found = 100 * brevity * np.exp(np.log(precisions).mean(-1))
    return np.where(is_none.all(-1) | (all_of == 0).any(-1), 0.0, found)


def by_length(counts: np.ndarray, sources: Sequence[str]) -> list[dict[str, Any]]:
    """BLEU of the shortest, the middle and the longest third, by words of the source.

    {"from", "to": words, "sentences", "score", "interval"} of each; sentences of one length are in
    one group.
    """
    lengths = np.array([len(text.split()) for text in sources])
    edges = np.quantile(lengths, (1 / 3, 2 / 3), method="inverted_cdf").tolist()
    return _grouped(counts, lengths, edges)


def with_interval(counts: np.ndarray) -> dict[str, Any]:
    """BLEU of some sentences' `statistics`, {"score", "interval"}: 95% by bootstrap."""
    return bootstrap.bootstrap(_weighted(counts), len(counts), RESAMPLES, SEED)


def by_rarest_word(
    counts: np.ndarray, sources: Sequence[str], training: Sequence[str]
) -> list[dict[str, Any]]:
    """BLEU by how often training had the rarest word of the source: never, below 10, 100, more.

    As `by_length`; "from" and "to" are numbers of times.
    """
    seen = Counter(word.strip(JOINER) for row in words(training) for word in row)
    rows = words(sources)
    rarest = [min((seen[word.strip(JOINER)] for word in row), default=0) for row in rows]
    return _grouped(counts, np.array(rarest), SEEN)


def _grouped(counts: np.ndarray, values: np.ndarray, edges: Sequence[int]) -> list[dict[str, Any]]:
    """BLEU of the sentences with values up to each edge, and above the last."""
    groups = []
    group_of = np.searchsorted(edges, values)
    for group in np.unique(group_of):
        inside = group_of == group
        spread = {"from": int(values[inside].min()), "to": int(values[inside].max())}
        part = counts[inside]
        groups.append({**spread, "sentences": len(part), **with_interval(part)})
    return groups


def joined(pairs: Pairs, count: int) -> Pairs:
    """Every `count` neighbouring pairs as one long pair; what is left at the end is dropped.

    >>> joined(Pairs(["a.", "b.", "c."], ["A.", "B.", "C."], "x"), 2)
    Pairs(source=['a. b.'], target=['A. B.'], name='x, 2 joined', lines=None)
    """
    starts = range(0, len(pairs) - count + 1, count)
    sides = (pairs.source, pairs.target)
    source, target = ([" ".join(side[k : k + count]) for k in starts] for side in sides)
    return Pairs(source, target, f"{pairs.name}, {count} joined")


def paired_bootstrap(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    language: str,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Are the hypotheses of the second system better, on these sentences, by more than luck?

    {"first", "second": BLEU, "difference": second minus first, "interval", "p"}
    """
    one, other = (
        _weighted(statistics(side, references, language, lowercase)) for side in (first, second)
    )
    return bootstrap.paired_bootstrap({"bleu": (one, other)}, len(references), RESAMPLES, SEED)[
        "bleu"
    ]


def _weighted(counts: np.ndarray) -> bootstrap.Score:
    return lambda weights: bleu(weights @ counts)


def _metric(language: str, lowercase: bool, effective_order: bool = False) -> BLEU:
    check_language(language)
    try:
        from sacrebleu.metrics.bleu import BLEU

        return BLEU(trg_lang=language, lowercase=lowercase, effective_order=effective_order)
    except ImportError as error:
        raise ValueError("BLEU needs sacrebleu: pip install 'bertsmith[lineage]'") from error
    except RuntimeError as error:  # the language's tokenizer is not installed
        raise ValueError(f"BLEU of '{language}': {' '.join(str(error).split())}") from error
