"""ELMo's language model against PyTorch's LSTM and by what each direction can see; its heads."""

import pytest
import torch
from torch import nn

from bertsmith.model.config import ElmoConfig, config_for, elmo_config
from bertsmith.model.elmo import (
    SENTENCE_BEGIN,
    SENTENCE_END,
    WORD_BEGIN,
    WORD_END,
    WORD_PAD,
    Elmo,
    ElmoLM,
    ProjectedLSTM,
)
from bertsmith.model.elmo_heads import (
    ElmoClassifier,
    ElmoSpanPredictor,
    ElmoTagger,
    gather_words,
)
from bertsmith.model.heads import SequenceClassifier, SpanPredictor, TokenClassifier
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.text.tokenizer.characters import CharacterTokenizer

TINY = ElmoConfig(
    hidden_size=12, intermediate_size=10, embedding_size=4, filters=(3, 5, 4), num_highways=1
)
FREE = ElmoConfig(
    hidden_size=12, intermediate_size=10, filters=(1,), cell_clip=1e9, projection_clip=1e9
)
TOKENIZER = CharacterTokenizer()


def rows(texts, pairs=None):
    return torch.from_numpy(TOKENIZER.rows(texts, pairs).padded(0).input_ids)


def pair(config=FREE):
    torch.manual_seed(0)
    ours, other = ProjectedLSTM(config), nn.LSTM(6, 10, proj_size=6)
    with torch.no_grad():
        ours.inputs.weight.copy_(other.weight_ih_l0)
        ours.inputs.bias.copy_(other.bias_ih_l0 + other.bias_hh_l0)
        ours.inputs.bias[10:20] -= 1.0  # what is added to the forget gate
        ours.state.weight.copy_(other.weight_hh_l0)
        ours.project.weight.copy_(other.weight_hr_l0)
    return ours, other


def test_an_lstm_with_projection_is_pytorchs():
    ours, other = pair()
    x, h, c = torch.randn(7, 3, 6), torch.randn(3, 6), torch.randn(3, 10)
    above = torch.randn(7, 3, 6)
    found, last = ours(x, type(ours.zeros(3))(h, c))
    wanted, (h_last, c_last) = other(x, (h[None], c[None]))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(last.output_BP, h_last[0].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(last.cells_BC, c_last[0].detach(), atol=1e-5, rtol=0)
    (found * above).sum().backward()
    (wanted * above).sum().backward()
    for mine, theirs in (
        (ours.inputs.weight, other.weight_ih_l0),
        (ours.inputs.bias, other.bias_ih_l0),
        (ours.state.weight, other.weight_hh_l0),
        (ours.project.weight, other.weight_hr_l0),
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def plain(lstm, x, h, c):
    """The equations, step by step, for PyTorch to differentiate."""
    found = []
    for step in lstm.inputs(x):
        i, f, g, o = (step + lstm.state(h)).chunk(4, dim=1)
        c = (f + 1).sigmoid() * c + i.sigmoid() * g.tanh()
        c = c.clamp(-lstm.cell_clip, lstm.cell_clip)
        h = lstm.project(o.sigmoid() * c.tanh())
        h = h.clamp(-lstm.projection_clip, lstm.projection_clip)
        found.append(h)
    return torch.stack(found)


def test_clips_and_their_gradients_are_those_of_the_equations():
    lstm, _ = pair(ElmoConfig(hidden_size=12, intermediate_size=10, cell_clip=0.4))
    lstm.projection_clip = 0.15
    x, state = torch.randn(9, 4, 6, requires_grad=True), lstm.zeros(4)
    above, gradients = torch.randn(9, 4, 6), []
    outputs = []

    def by_operators():
        with without_kernels():
            return lstm(x, state)[0]

    for run in (lambda: lstm(x, state)[0], lambda: plain(lstm, x, *state), by_operators):
        outputs.append(run())
        given = (x, *lstm.parameters())
        gradients.append(torch.autograd.grad((outputs[-1] * above).sum(), given))
    assert (outputs[0].abs() == 0.15).any()
    for k in (0, 2):
        torch.testing.assert_close(outputs[k], outputs[1], atol=1e-6, rtol=0)
        torch.testing.assert_close(gradients[k], gradients[1], atol=1e-5, rtol=1e-4)


def test_in_bf16_it_is_off_by_rounding_alone():
    # 96 cells fit blocks of 32, 80 do not: the products are then PyTorch's
    for cells in (96, 80):
        torch.manual_seed(1)
        config = ElmoConfig(hidden_size=64, intermediate_size=cells)
        lstm = ProjectedLSTM(config).bfloat16().float()
        x, above = (torch.randn(9, 11, 32).bfloat16().float() for _ in range(2))
        state, found = lstm.zeros(11), []
        state = type(state)(*(torch.randn_like(part) / 9 for part in state))
        for low in (False, True):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=low):
                outputs = lstm(x, state)[0].float() if low else plain(lstm, x, *state)
            gradients = torch.autograd.grad((outputs * above).sum(), [*lstm.parameters()])
            found.append((outputs, *gradients))
        for exact, rounded in zip(*found, strict=True):
            assert (rounded - exact).norm() < 0.01 * exact.norm()  # 0.0026 to 0.0039 were seen


def test_the_state_at_the_end_of_a_short_row_is_that_of_the_row_alone():
    lstm, _ = pair()
    x = torch.randn(5, 2, 6)
    _, both = lstm(x, lstm.zeros(2), torch.tensor([5, 3]))
    _, alone = lstm(x[:3, 1:], lstm.zeros(1))
    torch.testing.assert_close(both.output_BP[1:], alone.output_BP)
    torch.testing.assert_close(both.cells_BC[1:], alone.cells_BC)


@pytest.fixture
def elmo():
    lm = ElmoLM(TINY, 5).initialize(torch.Generator().manual_seed(3))
    return lm.encoder.eval()


def read(elmo, *texts):
    words = gather_words(rows(list(texts)))
    (numbers, lengths), *_ = words.texts
    with torch.no_grad():
        return elmo(words.words_UK, numbers, lengths + 2)


def test_directions_do_not_see_each_other(elmo):
    before = read(elmo, "one two three four")
    after = read(elmo, "one two other four")  # word 3, behind <S>
    half = TINY.projection_size
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = (old != new).any(dim=2) if layer == 0 else None
        if layer == 0:
            assert changed.tolist() == [[False, False, False, True, False, False]]
            continue
        ahead = (old[0, :, :half] != new[0, :, :half]).any(dim=1)
        back = (old[0, :, half:] != new[0, :, half:]).any(dim=1)
        assert ahead.tolist() == [False, False, False, True, True, True]
        assert back.tolist() == [True, True, True, True, False, False]


def test_a_text_alone_and_among_longer_ones_is_alike(elmo):
    alone, among = read(elmo, "a dog"), read(elmo, "a much longer text than that", "a dog")
    for one, two in zip(alone, among, strict=True):
        torch.testing.assert_close(one[0], two[1, :4], atol=1e-6, rtol=0)


def test_a_stateful_model_goes_on_where_the_row_before_ended(elmo):
    fresh, again = read(elmo, "a dog", "so be it"), read(elmo, "a dog", "so be it")
    torch.testing.assert_close(fresh, again, atol=0, rtol=0)
    elmo.stateful = True
    first, second = read(elmo, "a dog", "so be it"), read(elmo, "a dog")
    third = read(elmo, "a dog", "so be it")
    torch.testing.assert_close(fresh, first, atol=1e-6, rtol=0)
    assert (second[1][0, 1] - first[1][0, 1]).abs().max() > 1e-4
    # the second row had to wait: it goes on from its first text
    lone = Elmo(TINY).eval()
    lone.load_state_dict(elmo.state_dict())
    lone.stateful = True
    read(lone, "so be it")
    wanted = read(lone, "so be it")
    for one, two in zip(third, wanted, strict=True):
        torch.testing.assert_close(one[1], two[0], atol=1e-6, rtol=0)


def test_rows_give_back_their_words():
    words = gather_words(rows(["Ab é", ""], ["c", "d"]))
    numbers, lengths = words.texts[0]
    assert lengths.tolist() == [2, 0] and words.texts[1].lengths_B.tolist() == [1, 1]
    assert words.row_N.tolist() == [0, 0, 0, 1] and words.text_N.tolist() == [0, 0, 1, 1]
    assert words.place_N.tolist() == [0, 1, 0, 0]
    first = words.words_UK[numbers[0]]
    assert first[0, :4].tolist() == [WORD_BEGIN, SENTENCE_BEGIN, WORD_END, WORD_PAD]
    assert first[1, :5].tolist() == [WORD_BEGIN, ord("A") + 1, ord("b") + 1, WORD_END, WORD_PAD]
    assert first[2, :5].tolist() == [WORD_BEGIN, 0xC3 + 1, 0xA9 + 1, WORD_END, WORD_PAD]
    assert first[3, 1] == SENTENCE_END
    # a row that was cut within a word, and one that begins with the end of a word
    cut = torch.tensor([[257, 98, 99, 258, 0], [257, WORD_END, 98, WORD_END, 258]])
    found = gather_words(cut)
    assert found.texts[0].lengths_B.tolist() == [1, 2]
    assert found.size_N.tolist() == [2, 0, 1] and found.first_N.tolist() == [1, 6, 7]


def test_only_the_longest_words_windows_count():
    """What the filters leave out of the padding changes nothing."""
    lm = ElmoLM(TINY, 5).initialize(torch.Generator().manual_seed(4))
    layer = lm.encoder.embeddings
    words = gather_words(rows(["a bb", "c" * 60])).words_UK
    short = words[(words == WORD_END).nonzero()[:, 1] < 10]
    wanted = layer._vectors(words)  # all 50
    torch.testing.assert_close(layer(words), wanted)
    torch.testing.assert_close(layer(short), layer._vectors(short))


def made(kind, outputs):
    torch.manual_seed(5)
    model = kind(TINY, outputs)
    model.encoder.load_state_dict(
        ElmoLM(TINY, 5).initialize(torch.Generator().manual_seed(5)).encoder.state_dict()
    )
    return model


def test_a_classifier_reads_pairs_and_trains_its_head_alone():
    model = made(ElmoClassifier, 3)
    ids = rows(["a dog", "", "so"], ["some cat", "x", ""])
    outputs = model.train()(ids, ids, None)
    assert outputs.shape == (3, 3) and outputs.isfinite().all()
    outputs.sum().backward()
    assert all(weight.grad is None for weight in model.encoder.parameters())
    assert model.mix.scores.grad.abs().sum() > 0 and not model.encoder.training
    model.eval()
    padded = torch.nn.functional.pad(ids, (0, 5))
    torch.testing.assert_close(model(ids, ids, None), model(padded, padded, None))
    assert model.flops(2, 60) > 0


def test_a_tagger_answers_at_first_bytes():
    model = made(ElmoTagger, 4).eval()
    ids = rows(["ab c", "d"])
    logits = model(ids, ids, None)
    assert (logits != 0).any(dim=2).nonzero().tolist() == [[0, 1], [0, 4], [1, 1]]


def test_spans_stand_at_borders_of_words_of_the_passage():
    model = made(ElmoSpanPredictor, 2).eval()
    ids = rows(["who"], ["abc de"])  # [CLS] w h o . [SEP] a b c . d e . [SEP]
    logits = model(ids, ids, None)[0]
    probabilities = logits.softmax(dim=0)
    for part, places in enumerate(([0, 6, 10], [0, 8, 11])):
        likely = (probabilities[:, part] > 1e-3).nonzero()[:, 0].tolist()
        assert likely == places
    # an answer inside of a word teaches the word
    loss = nn.functional.cross_entropy(model(ids, ids, None)[0, :, 0][None], torch.tensor([7]))
    assert 5 < loss < 20
    loss.backward()
    assert model.span.weight.grad.abs().max() > 1e-3


def test_with_a_head_it_is_as_large_as_a_bert_of_the_lineage():
    elmo, bert = elmo_config("64x240"), config_for("2x128", 6000)
    for theirs, plain, outputs in (
        (ElmoClassifier, SequenceClassifier, 2),
        (ElmoTagger, TokenClassifier, 9),
        (ElmoSpanPredictor, SpanPredictor, 2),
    ):
        models = theirs(elmo, outputs), plain(bert, outputs)
        sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
        assert abs(sizes[0] / sizes[1] - 1) < 0.1


def test_only_an_elmo_is_an_elmo():
    with pytest.raises(ValueError, match="two directions of one size"):
        ElmoConfig(hidden_size=7)
