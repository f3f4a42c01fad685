"""What a corpus costs a run before it starts: sentences said twice, and next-sentence labels that
do not say what they should.

The paper's procedure makes three kinds of bad pairs. A random B may come from A's own document
(after ten tries, where documents are few); it may begin with the very sentence that follows A
(where sentences repeat); and a B that does follow A may not touch it any more, when tokens at the
seam were dropped to fit the row.
"""

from __future__ import annotations

import numpy as np

from bertsmith.compiled import compiled
from bertsmith.corpus.draws import bits
from bertsmith.corpus.pairs import EpochPairs
from bertsmith.corpus.store import Section
from bertsmith.corpus.stream import PretrainingStream

TOKENS_LOOKED_AT = 1 << 24  # 32 MiB of ids, verified, hashed and sorted in a quarter of a second


def corpus_health(stream: PretrainingStream, rows: int = 4096) -> dict[str, float]:
    """Shares from 0 to 1, of the text alone and, for next-sentence pairs, of their labels.

    duplicate_sentences   sentences that stood in the text before
    duplicate_tokens      tokens in such sentences: short ones repeat in any text
    nsp_...               see `label_noise`; only when the stream has next-sentence labels

    Bounded in time (some 0.3 s) and memory, whatever the size of the store.
    """
    health = duplicate_shares(stream.epoch(0).section)
    if stream.settings.objective == "mlm+nsp":
        health |= label_noise(stream, rows)
    return health


def label_noise(stream: PretrainingStream, rows: int, epoch: int = 0) -> dict[str, float]:
    """Bad pairs among the first `rows` of an epoch's pairs, taken evenly from the whole text.

    nsp_own_document   random Bs that come from A's own document
    nsp_true_next      random Bs whose first sentence equals the one that follows A
    nsp_cut_seam       true Bs that do not touch A: tokens of the seam were dropped
    nsp_label_noise    pairs of any kind with one of these faults
    """
    pairs = stream.epoch(epoch)
    assert isinstance(pairs, EpochPairs)
    numbers = np.linspace(0, len(pairs) - 1, min(rows, len(pairs))).astype(np.int64)
    segments = pairs.segments(numbers)
    is_random = segments["label"] == 1
    own = is_random & (segments["b_document"] == segments["a_document"])
    true_next = pairs.begins_like_the_true_one(segments)
    pairs.fit(segments)
    cut = ~is_random & (segments["a_stop"] != segments["b_start"])

    def share(faults: np.ndarray, of: np.ndarray) -> float:
        return float(faults.sum() / max(1, of.sum()))

    return {
        "nsp_own_document": share(own, is_random),
        "nsp_true_next": share(true_next, is_random),
        "nsp_cut_seam": share(cut, ~is_random),
        "nsp_label_noise": share(own | true_next | cut, np.ones_like(is_random)),
    }


def duplicate_shares(section: Section, most_tokens: int = TOKENS_LOOKED_AT) -> dict[str, float]:
    """Sentences that stood before, as a share of the sentences and of the tokens looked at.

    Looked at is the beginning of every shard, `most_tokens` together; where the text is longer the
    shares are lower bounds.
    """
    a_shard = most_tokens // len(section.shards)
    hashes, lengths = [], []
    for shard in section.shards:
        count = int(np.searchsorted(shard.sentences, a_shard, side="right")) - 1
        bounds = shard.sentences[: count + 1]
        hashes.append(hash_sentences(shard.tokens.read(0, int(bounds[-1])), bounds))
        lengths.append(np.diff(bounds))
    all_lengths = np.concatenate(lengths)
    _, first = np.unique(np.concatenate(hashes), return_index=True)
    return {
        "duplicate_sentences": 1 - len(first) / max(1, len(all_lengths)),
        "duplicate_tokens": 1 - int(all_lengths[first].sum()) / max(1, int(all_lengths.sum())),
    }


@compiled
def hash_sentences(tokens, bounds):
    """uint64 [S], of tokens[bounds[s]:bounds[s + 1]]: two sentences differ where these do."""
    hashes = np.empty(len(bounds) - 1, np.uint64)
    for sentence in range(len(hashes)):
        value = np.uint64(0)
        for place in range(bounds[sentence], bounds[sentence + 1]):
            value = bits(value, tokens[place])
        hashes[sentence] = value
    return hashes
