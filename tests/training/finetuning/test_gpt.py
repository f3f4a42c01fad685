"""GPT's fine-tuning: its rows, its two losses, and that it cannot see the future."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bertsmith as library
from bertsmith.checkpoints.config_json import read_extra_config
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.inference.export.subject import find_subject
from bertsmith.inference.predictor import load
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier, SpanPredictor, TokenClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.features import Features, text_rows
from bertsmith.tasks.squad.windows import featurize_questions
from bertsmith.tasks.tagging.features import featurize_sentences
from bertsmith.tasks.task import EncodingSettings, own_task
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task import FineTuning
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.losses import Objective
from bertsmith.training.finetuning.trainer import InitialModel

from ...gpt import write_openai
from ...tiny import bertsmith, cli, piece_tokenizer, refused, write, write_model

CONFIG = ModelConfig(
    *(40, 32, 2, 4, 128),
    **{"family": "gpt", "causal": True, "type_vocab_size": 0, "activation": "gelu_tanh"},
    **{"max_positions": 16, "dropout": 0.0, "attention_dropout": 0.0},
)
IDS = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0))
TYPES, LENGTHS = torch.zeros_like(IDS), torch.tensor([12, 5, 9])


def model_of(kind, outputs):
    return initialize(kind(CONFIG, outputs), 0.3, torch.Generator().manual_seed(1)).double().train()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt") / "openai"
    write_openai(folder)
    return folder


# --- rows


def test_the_forms_of_figure_1(gpt):
    tokenizer = InitialModel(gpt).tokenizer
    size = len(load_tokenizer(gpt).vocabulary)
    start, delimiter, extract = tokenizer.vocabulary.borders
    assert (start, delimiter, extract) == (size, size + 1, size + 2)
    old, house = (tokenizer.encode_batch([word]).ids.tolist() for word in ("old", "house"))
    assert tokenizer.encode("old") == [start, *old, extract]
    pair = [start, *old, delimiter, *house, extract]
    assert tokenizer.encode("old", "house") == pair
    encoding = EncodingSettings(both_orders="on")
    found = text_rows(tokenizer, ["old", "old"], ["house", "old"], encoding)
    assert found.orders == 2 and found.is_cut.tolist() == [False, False]
    other = [start, *house, delimiter, *old, extract]
    assert found.rows.ids[: 2 * len(pair)].tolist() == pair + other


def test_the_question_comes_before_the_passage(gpt, tmp_path):
    tokenizer, task = InitialModel(gpt).tokenizer, own_task("answer", "q", "passage", "answer")
    lines = ["q\tpassage\tanswer", "old\tthe house\thouse"]
    data = TASK_TYPES["answer"].read(write(tmp_path / "q.tsv", lines), task, ())
    windows = featurize_questions(tokenizer, data, EncodingSettings(32))
    assert windows.ids.tolist() == tokenizer.encode("old", "the house")
    first, last = windows.labels[0]
    word = tokenizer.encode_batch(["house"]).ids.tolist()
    assert windows.ids[first : last + 1].tolist() == word


def test_a_word_is_labelled_at_its_last_piece(tmp_path):
    file = write(tmp_path / "t.conll", ["ab O", "a B-X", "ab O"])
    data = TASK_TYPES["tag"].read(file, own_task("tag", "words", None, "tags"))
    plain = piece_tokenizer("a ##b")
    for tokenizer, places in ((plain, [1, 3, 4]), (plain.with_borders(), [2, 3, 5])):
        rows = featurize_sentences(tokenizer, data, np.array([0, 1, 2]), EncodingSettings(16))
        assert np.flatnonzero(rows.word_numbers >= 0).tolist() == places
        assert rows.labels[places].tolist() == rows.word_numbers[places].tolist() == [0, 1, 2]


def test_the_pieces_of_a_word_are_those_before_its_last(gpt, tmp_path):
    rows = [f"the {name} house {k},{name}" for name in ("old", "green") for k in range(20)]
    data, out = write(tmp_path / "data.csv", ["text,label", *rows]), tmp_path / "tuned"
    about = {"epochs": 1, "max_length": 32, "evals_per_epoch": 0, "max_retries": 0}
    library.finetune("classify", data=data, model=gpt, out=out, device="cpu", **about)
    model = load(out)
    words, borders = model.tokenizer.encode_batch(["greenhouse", "old"]), model.tokenizer.vocabulary
    row = torch.tensor([[borders.cls_id, *words.ids, borders.sep_id]])
    encoder = load_model(out, SequenceClassifier).model.encoder.eval()
    with torch.inference_mode():
        states = encoder(row)[0, 1:-1].numpy()
    parts = np.split(states, words.boundaries[1:2])
    assert [len(part) for part in parts] == [4, 1]
    for align, expected in (("pieces", states), ("mean", [part.mean(0) for part in parts])):
        found = model.features("greenhouse old", align=align)
        np.testing.assert_allclose(found, expected, atol=1e-4)  # float32 in another order


def test_new_pieces_are_drawn_by_the_seed(gpt):
    start = InitialModel(gpt)
    settings = FinetuneSettings(dropout=0.0, attention_dropout=0.0)
    one, again, other = (start.model(SequenceClassifier, 2, settings, k) for k in (1, 1, 2))
    tables = [model.encoder.embeddings.token.weight for model in (one, again, other)]
    old = load_model(gpt, SequenceClassifier, num_outputs=2).model.encoder.embeddings.token.weight
    size = len(old)
    assert len(tables[0]) == one.config.vocab_size == size + 3
    assert torch.equal(tables[0][:size], old) and torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0][size:], tables[2][size:])
    assert 0.015 < tables[0][size:].std().item() < 0.025
    scratch = InitialModel(gpt, from_scratch=True).model(SequenceClassifier, 2, settings, 1)
    assert len(scratch.encoder.embeddings.token.weight) == size + 3


# --- the model


@pytest.mark.parametrize(("kind", "outputs"), [(TokenClassifier, 3), (SpanPredictor, 2)])
def test_no_token_sees_the_future(kind, outputs):
    """In training, by its gradients: the output at a token has none at the tokens behind it."""
    model = model_of(kind, outputs)
    kept = []
    model.encoder.embeddings.register_forward_hook(lambda *call: kept.append(call[2]))
    logits = model(IDS, TYPES, LENGTHS)
    (embedded,) = kept
    for place in range(1, 12):
        (gradient,) = torch.autograd.grad(logits[0, place].sum(), embedded, retain_graph=True)
        seen = gradient[0].abs().sum(1) > 0
        assert seen.tolist() == [k <= place for k in range(12)]


def test_what_is_not_of_one_token_is_read_at_the_last():
    classifier, span = model_of(SequenceClassifier, 3), model_of(SpanPredictor, 2)
    hidden = classifier.encoder(IDS, TYPES, LENGTHS)
    expected = classifier.classifier(hidden[torch.arange(3), LENGTHS - 1])
    torch.testing.assert_close(classifier(IDS, TYPES, LENGTHS), expected)
    hidden, logits = span.encoder(IDS, TYPES, LENGTHS), span(IDS, TYPES, LENGTHS)
    torch.testing.assert_close(logits[:, 0], span.span(hidden[torch.arange(3), LENGTHS - 1]))
    real = torch.arange(1, 12) < LENGTHS[:, None]
    torch.testing.assert_close(logits[:, 1:][real], span.span(hidden[:, 1:][real]))


def test_an_answer_is_read_at_real_tokens_alone():
    """Where vectors multiply bf16 padding is left out: there is nothing to read at it."""
    lengths = torch.tensor([70, 5, 9])
    ids = torch.randint(40, (3, 70), generator=torch.Generator().manual_seed(0))
    config = replace(CONFIG, hidden_size=64, num_heads=2, max_positions=70)
    model = initialize(SpanPredictor(config), 0.1, torch.Generator().manual_seed(1)).train()
    assert (model.positions(ids, lengths) < lengths[:, None]).all()
    given = ids, torch.zeros_like(ids), lengths
    exact = model(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(*given)
    real = torch.arange(70) < lengths[:, None]
    assert (found - exact)[real].norm() < 0.05 * exact[real].norm()


def by_hand(model, lengths):
    """Each row's mean loss of the tokens after its first, over the whole table."""
    hidden, table = model.encoder(IDS, TYPES, LENGTHS), model.encoder.embeddings.token.weight
    rows = zip(hidden, IDS, lengths.tolist(), strict=True)
    return [F.cross_entropy(states[: n - 1] @ table.T, ids[1:n]) for states, ids, n in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and PyTorch's form
@pytest.mark.parametrize(("kind", "outputs"), [(SequenceClassifier, 3), (TokenClassifier, 2)])
def test_the_language_model_loss_and_its_gradients(kind, outputs, dtype):
    model = model_of(kind, outputs).to(dtype)
    found, loss = model.with_next_tokens(IDS, TYPES, LENGTHS)
    expected = sum(by_hand(model, LENGTHS))
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(loss.to(dtype), expected, **near)
    torch.testing.assert_close(found, model(IDS, TYPES, LENGTHS), **near)
    names, weights = zip(*model.encoder.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(part, weights, retain_graph=True) for part in (loss, expected))
    for name, mine, theirs in zip(names, *gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **near, msg=name)


def test_the_loss_of_a_step_is_that_of_the_paper():
    """clf + 0.5 * mean of the rows' mean token losses, however the step is cut up."""
    model, labels = model_of(SequenceClassifier, 3), torch.tensor([0, 2, 1])
    engine = Engine(torch.device("cpu"), "float32", threads=1)
    rows = Features(
        np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(1, np.int64), None, 12, 0
    )
    task = FineTuning(
        TASK_TYPES["classify"], model, rows, None, dict, Objective(), engine, None, 0.5
    )  # type: ignore
    parts = [slice(0, 1), slice(1, 3)]
    arrays = {"ids": IDS, "types": TYPES, "lengths": LENGTHS, "labels": labels}
    counts = {"labels": 3, "rows": 3}
    found, sums = zip(
        *(
            task.loss(model, {name: x[part].numpy() for name, x in arrays.items()}, counts)
            for part in parts
        ),
        strict=True,
    )
    clf = F.cross_entropy(model(IDS, TYPES, LENGTHS), labels)
    lm = sum(by_hand(model, LENGTHS)) / 3
    torch.testing.assert_close(sum(found).float(), (clf + 0.5 * lm).float())
    window = {name: float(sum(part[name] for part in sums)) for name in sums[0]}
    assert task.metrics(window)["lm_loss"] == pytest.approx(lm.item(), rel=1e-6)


# --- as a user asks for it


def test_a_similarity_is_the_same_in_both_orders(gpt, tmp_path):
    sizes = "small", "large", "green"
    rows = [(int(a == b), f"the {a} house", f"a {b} house") for a in sizes for b in sizes] * 4
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    lines = [f"{label}\t1\t2\t{a}\t{b}" for label, a, b in rows]
    for name in ("train.tsv", "dev.tsv"):
        write(tmp_path / "mrpc" / name, [header, *lines])
    run, asked = tmp_path / "run", tmp_path / "asked.tsv"
    how = ["--epochs", 2, "--device", "cpu", "--threads", 1, "--max-retries", 0]
    bertsmith("finetune", "mrpc", "--data", tmp_path / "mrpc", "--model", gpt, "--out", run, *how)
    assert read_extra_config(run)["both_orders"] == "on"
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert settings["lm_weight"] == 0.5
    pairs = [("the small house", "a large house"), ("a large house", "the small house")]
    write(asked, ["#1 String\t#2 String", *("\t".join(pair) for pair in pairs)])
    bertsmith("predict", run, asked, "--out", tmp_path / "answers.jsonl")
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    one, other = (json.loads(line)["probability"] for line in answers)
    assert one == pytest.approx(other, abs=1e-5)
    found = json.loads(bertsmith("evaluate", run, "--data", tmp_path / "mrpc", "--json"))
    assert found["examples"] == len(rows)


def last_line(*words):
    """The error of a command that may say something on the data before."""
    ran = cli(*words)
    assert ran.code == 2, ran
    return ran.err.splitlines()[-1]


def test_what_is_refused(gpt, tmp_path):
    data = write(tmp_path / "data.tsv", ["text\tlabel", *(f"old {k}\t{k % 2}" for k in range(40))])
    given = ["finetune", "classify", "--data", data, "--out", tmp_path / "out", "--model"]
    plain = write_model(tmp_path / "bert", ["old"])
    assert "is no GPT: leave --lm-weight out" in last_line(*given, plain, "--lm-weight", 0.5)
    windows = refused(*given, gpt, "--both-orders", "on", "--long-texts", "windows")
    assert "--both-orders: not of windows" in windows
    tag = ["finetune", "tag", *given[2:], gpt, "--freeze-encoder", "--lm-weight", 1]
    assert "--freeze-encoder: no layer learns words" in last_line(*tag)
    embed = last_line("embed", data, "--model", gpt, "--out", tmp_path / "vectors.npy")
    assert "has no pieces to stand around a text" in embed
    with pytest.raises(ValueError, match="a GPT is not exported: PyTorch answers"):
        find_subject(load(gpt, device="cpu"), None)
