"""Beam search beside an enumeration of all translations, with models of a few numbers."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bertsmith.experiments.lineage.decode import (
    DecodingSettings,
    Search,
    beam_search,
    translate_ids,
)
from bertsmith.training.engine import choose_engine

PIECES, BOS, EOS = 7, 1, 2  # 0 is padding; 3 to 6 are words


class Memory(NamedTuple):
    sums_B: Tensor


class State(NamedTuple):
    before: tuple[Tensor, ...]  # the piece before the last one, [B]


class Markov:
    """The next piece depends on the last two and on the source's sum of pieces."""

    def __init__(self, seed, pieces=PIECES):
        generator = torch.Generator().manual_seed(seed)
        self.pieces, self.encoded, self.steps = pieces, [], 0
        self.tables = 2 * torch.randn(3, 16, pieces, generator=generator)
        self.output_weight, self.output_bias = torch.eye(pieces), torch.zeros(pieces)

    def eval(self):
        return self

    def encode(self, source_BS, lengths_B):
        self.encoded.append(len(source_BS))
        seen_BS = torch.arange(source_BS.shape[1]) < lengths_B[:, None]
        return Memory((source_BS * seen_BS).sum(1) % 16)

    def start(self, memory):
        return State((torch.zeros_like(memory.sums_B),))

    def step(self, memory, state, token_B):
        self.steps += len(token_B)
        places = memory.sums_B, state.before[0], token_B
        hidden_BH = sum(table[place] for table, place in zip(self.tables, places, strict=True))
        return hidden_BH, State((token_B,))


def all_translations(model, source, settings):
    """Every one that is short enough, best first, by the sum of its steps' log probabilities."""
    memory = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    words, limit = range(3, model.pieces), settings.longest(len(source))
    found = []
    for length in range(limit):
        for ids in itertools.product(words, repeat=length):
            state, log_prob, last = model.start(memory), 0.0, BOS
            for piece in (*ids, EOS):
                logits, state = model.step(memory, state, torch.tensor([last]))
                log_prob += logits[0].log_softmax(0)[piece].item()
                last = piece
            score = log_prob / ((5 + length + 1) / 6) ** settings.length_penalty
            found.append((score, list(ids)))
    return sorted(found, reverse=True)


def search(model, sources, **settings):
    lengths = torch.tensor([len(source) for source in sources])
    rows = torch.zeros(len(sources), int(lengths.max()), dtype=torch.int64)
    for row, source in zip(rows, sources, strict=True):
        row[: len(source)] = torch.tensor(source)
    return beam_search(Search(model, BOS, EOS, DecodingSettings(**settings)), rows, lengths)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_translations(seed, length_penalty):
    model, source = Markov(seed), [3, 5, EOS]
    # 85 translations of at most 3 words have 64 ancestors at a time
    given = dict(beam=85, n_best=3, length_penalty=length_penalty, max_ratio=0, max_extra=4)
    (found,) = search(model, [source], **given)
    expected = all_translations(model, source, DecodingSettings(**given))[:3]
    assert [own.ids for own in found] == [ids for _, ids in expected]
    torch.testing.assert_close(
        [own.score for own in found], [score for score, _ in expected], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy(seed):
    model, source = Markov(seed), [4, 4, EOS]
    memory = model.encode(torch.tensor([source]), torch.tensor([3]))
    state, token, ids = model.start(memory), BOS, []
    while len(ids) < 7:
        logits, state = model.step(memory, state, torch.tensor([token]))
        logits[:, [0, BOS]] = -math.inf
        token = int(logits[0].argmax())
        if token == EOS:
            break
        ids.append(token)
    ((found,),) = search(model, [source], beam=1, max_ratio=1.0, max_extra=5)
    assert found.ids == ids


def test_equal_pieces_go_to_the_lowest_id():
    model = Markov(0)
    model.tables[:] = 0.0
    model.output_bias[EOS] = -1.0
    ((found,),) = search(model, [[3, EOS]], beam=1, max_ratio=0, max_extra=4)
    assert found.ids == [3, 3, 3]
    # two pieces have 9 probabilities of 1 / 4 each, more likely than the one that ends at once
    pair = search(model, [[3, EOS]], beam=2, n_best=2, max_ratio=0, max_extra=2, length_penalty=3)
    assert [own.ids for own in pair[0]] == [[3], [4]]


def test_a_finished_hypothesis_keeps_its_place_and_is_found_once():
    model = Markov(3)
    (found,) = search(model, [[5, EOS]], beam=6, n_best=6, max_ratio=0, max_extra=5)
    assert len({tuple(own.ids) for own in found}) == 6
    assert [own.score for own in found] == sorted((own.score for own in found), reverse=True)


def test_pad_and_begin_are_never_produced():
    model = Markov(1)
    model.output_bias[[0, BOS]] = 50.0  # even where they are likeliest by far
    (found,) = search(model, [[5, EOS]], beam=4, n_best=4, max_ratio=0, max_extra=4)
    assert not {0, BOS, EOS} & {piece for own in found for piece in own.ids}


def test_a_sentence_is_done_when_no_open_hypothesis_can_reach_its_best():
    model = Markov(1)
    model.tables[:] = 0.0
    model.output_bias[EOS] = 8.0
    ((found,),) = search(model, [[5, EOS]], beam=4, max_ratio=0, max_extra=50)
    # log(4 e^-8) / (55 / 6) is above log p(end) = -0.002 for no open hypothesis
    assert found.ids == [] and model.steps == 4


def test_company_and_padding_change_nothing():
    model, sources = Markov(4), [[3, EOS], [4, 5, 6, 5, EOS], [6, 6, EOS]]
    together = search(model, sources, beam=4, n_best=2)
    assert together == [search(model, [source], beam=4, n_best=2)[0] for source in sources]


def test_results_come_in_the_order_of_the_sources_from_batches_of_like_length():
    model, engine = Markov(5, pieces=16), choose_engine("cpu", "float32", 1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (40,), generator=generator).tolist()
    words = [torch.randint(3, 16, (n,), generator=generator).tolist() for n in lengths]
    sources = [[*own, EOS] for own in words]
    given = Search(model, BOS, EOS, DecodingSettings(beam=3, max_ratio=0.2))
    found = translate_ids(given, sources, engine)
    assert len(model.encoded) > 2  # batches
    assert found == [search(model, [source], beam=3, max_ratio=0.2)[0] for source in sources]
    assert translate_ids(given, [], engine) == []


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(number):
    model = Markov(0)
    model.output_bias[4] = number
    with pytest.raises(ValueError, match="logits are not finite: its weights are damaged"):
        search(model, [[3, EOS], [4, EOS]], beam=2)


def test_a_beam_larger_than_the_vocabulary_is_refused():
    given = Search(Markov(0), BOS, EOS, DecodingSettings(beam=8))
    with pytest.raises(ValueError, match="`beam=8`: the vocabulary has 7 pieces"):
        translate_ids(given, [[3, EOS]], choose_engine("cpu", "float32", 1))


def test_more_hypotheses_than_places_are_refused():
    with pytest.raises(ValueError, match="`n_best=3`: a beam of 2"):
        DecodingSettings(beam=2, n_best=3)
