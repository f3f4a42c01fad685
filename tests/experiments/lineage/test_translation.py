"""Translation systems from files to a report, at toy size: a language of eight words."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertsmith.base.settings import group_values
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.cli.experiments import distinct_names
from bertsmith.corpus.examples.stream import Position
from bertsmith.experiments.lineage import translation
from bertsmith.experiments.lineage.pairs import PairRows, Sentences, read_splits
from bertsmith.experiments.lineage.settings import SYSTEMS, AttentionSettings
from bertsmith.experiments.lineage.translation import (
    BestWeights,
    Translation,
    train_translation,
    translation_sums,
)
from bertsmith.experiments.lineage.translator import open_translator
from bertsmith.training.engine import Engine
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import TrainingState

from ...tiny import bertsmith, cli, contents, refused, write

WORDS = dict(
    zip(
        ["one", "two", "three", "four", "five", "six", "seven", "eight"],
        ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"],
        strict=True,
    )
)
SMALL = ("--threads", 1, "--precision", "float32", "--vocab-size", 60)
NETWORKS = {
    "rnn": ("--embedding-size", 16, "--hidden-size", 24),
    "attention": ("--embedding-size", 32, "--hidden-size", 32),
    "transformer": ("--hidden-size", 16, "--num-layers", 1, "--num-heads", 2),
}


def texts(count, seed):
    choose = random.Random(seed)
    sources = [choose.choices([*WORDS], k=choose.randint(2, 5)) for _ in range(count)]
    return {
        "en": [" ".join(row) + "." for row in sources],
        "de": [" ".join(WORDS[word] for word in row) + "." for row in sources],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    for split, count in (("train", 300), ("dev", 12), ("test_small", 12)):
        for language, lines in texts(count, split).items():
            write(folder / f"{split}.{language}", lines)
    return folder


def words_of(data, *more):
    return ("--data", data, "--source", "en", "--target", "de", *more)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A run of each system; attention has learned the language."""
    folder = tmp_path_factory.mktemp("runs")
    bertsmith("lineage", "word-for-word", *words_of(data), "--out", folder / "words")
    for name in NETWORKS:
        bertsmith("lineage", name, *words_of(data), *flags_of(name), "--out", folder / name)
    return folder


def flags_of(name):
    budget = ("--steps", 150, "--lr", 0.01) if name == "attention" else ("--steps", 3)
    flags = (*budget, "--batch-tokens", 256, "--num-evals", 3, *SMALL, *NETWORKS[name])
    return (*flags, "--label-smoothing", 0, "--dropout", 0)


def test_every_system_translates_a_file(runs, data, tmp_path):
    for name in ("words", *NETWORKS):
        out = tmp_path / f"{name}.de"
        machine = ("--device", "cpu", "--precision", "float32", "--threads", 1)
        command = ("lineage", "translate", runs / name, data / "dev.en", *machine)
        said = bertsmith(*command, "--out", out)
        assert said == f"{out}: 12 translations\n"
        lines = out.read_text(encoding="utf-8").splitlines()
        assert len(lines) == 12
        if name in ("words", "attention"):
            right = (data / "dev.de").read_text(encoding="utf-8").splitlines()
            assert np.mean([a == b for a, b in zip(lines, right, strict=True)]) > 0.7, name


def test_a_run_says_what_it_is(runs):
    record = json.loads((runs / "attention" / "run.json").read_text())
    assert record["kind"] == "lineage attention" and record["parameters"] > 0
    result = json.loads((runs / "attention" / "result.json").read_text())
    assert result["steps"] == 150 and result["dev"]["perplexity"] < 1.5
    assert 1 <= len(result["averaged_steps"]) <= 5


def test_attention_of_a_trained_system_follows_the_words(runs):
    found = open_translator(runs / "attention").alignment("two five.", "zwei fünf.")
    assert found is not None
    assert found.source[-1] == found.target[-1] == "[SEP]"
    assert found.weights.shape == (len(found.target), len(found.source))
    np.testing.assert_allclose(found.weights.sum(axis=1), 1, atol=1e-5)
    assert open_translator(runs / "rnn").alignment("two", "zwei") is None
    assert open_translator(runs / "words").alignment("two", "zwei") is None


def test_empty_and_long_texts(runs, capsys):
    translator = open_translator(runs / "transformer")
    long = " ".join(["one"] * 120)
    found = translator.translate(["", long, "two."])
    assert found[0] == ""
    aligned = open_translator(runs / "attention").alignment(long, "zwei")
    assert aligned is not None and len(aligned.source) == 100  # as `translate` reads it
    assert "text 2: more than 100 pieces: the end is not read (1 of 3)" in capsys.readouterr().err


def test_systems_are_compared(runs, tmp_path):
    out = tmp_path / "compared"
    said = bertsmith(
        "lineage", "evaluate", *(runs / n for n in ("words", "attention")), "--out", out
    )
    assert "attention against words" in said and "case:lc" in said
    result = json.loads((out / "result.json").read_text())
    assert [group["sentences"] for group in result["systems"]["words"]["joined"]] == [1, 2, 3, 4]
    assert (out / "words.txt").read_text().count("\n") == 12
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4 + 4  # lengths, two groups, curves; attention in four texts
    assert "minutes of training" in page
    (pair,) = result["pairs"]  # the difference is that of the second
    row = f'<td>attention</td><td>words</td><td class="n">{pair["difference"]:+.1f} ('
    assert pair["systems"] == ["words", "attention"] and row in page


def test_a_stopped_run_goes_on_bit_for_bit(data, tmp_path, monkeypatch):
    def train(out, stop=None):
        settings = AttentionSettings(
            **{"data": data, "source": "en", "target": "de", "out": tmp_path / out},
            **{"steps": 12, "checkpoint_every": 5, "num_evals": 4, "average": 2},
            **{"vocab_size": 60, "batch_tokens": 128, "threads": 1, "precision": "float32"},
            **{"embedding_size": 8, "hidden_size": 8},
        )
        with monkeypatch.context() as patch:
            if stop:
                first = Stepper.step

                def step(self, *given):
                    if self.run.state.step > stop:
                        raise KeyboardInterrupt
                    return first(self, *given)

                patch.setattr(Stepper, "step", step)
                with pytest.raises(KeyboardInterrupt):
                    train_translation(settings)
        return None if stop else train_translation(settings)

    peaks = iter([1e9])  # measured once
    with monkeypatch.context() as patch:
        patch.setattr(translation, "measure_peak", lambda engine: next(peaks))
        whole = train("whole")
    train("stopped", stop=8)
    resumed = train("stopped")
    assert resumed is not None and whole is not None
    assert not (tmp_path / "stopped/checkpoints").exists()
    assert resumed["averaged_steps"] == whole["averaged_steps"]
    weights = (
        read_tensor_file(tmp_path / out / "model.safetensors") for out in ("whole", "stopped")
    )
    one, other = weights
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stopped_run_goes_on_with_its_own_data_alone(data, tmp_path, monkeypatch):
    for folder in ("same", "copy", "other"):
        for path in data.iterdir():
            write(tmp_path / folder / path.name, path.read_bytes())
    write(tmp_path / "other" / "dev.en", (data / "dev.en").read_text().replace("one", "two"))
    out = tmp_path / "out"

    def command(folder, steps):
        flags = (*flags_of("rnn"), "--steps", steps)
        return ("lineage", "rnn", *words_of(tmp_path / folder), *flags, "--out", out)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(translation.RunFolder, "write_result", lambda *_: 1 / 0)
        cli(*command("same", 3))
    before = json.loads((out / "run.json").read_text())
    line = refused(*command("other", 4))
    assert f"was not begun with the data that {tmp_path / 'other'} holds now" in line
    assert json.loads((out / "run.json").read_text()) == before
    told = cli(*command("copy", 4)).err
    moved = f"data {tmp_path / 'same'} -> {tmp_path / 'copy'}"
    assert f"{out}: steps 3 -> 4, {moved} from now on" in told
    after = json.loads((out / "run.json").read_text())
    before["settings"] |= {"data": str(tmp_path / "copy"), "steps": 4}
    assert after == before


def test_a_word_for_word_run_that_was_killed_begins_again(data, tmp_path, monkeypatch):
    command = ("lineage", "word-for-word", *words_of(data), "--out", tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # between its files
        patch.setattr(translation.RunFolder, "write_result", lambda *_: 1 / 0)
        cli(*command)
    assert (tmp_path / "table.npz").exists() and bertsmith(*command)


def test_smoothing_is_that_of_pytorch():
    """The loss without logits against `F.cross_entropy`, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(30, 8, generator=generator, requires_grad=True)
    hidden = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    bias = torch.randn(30, generator=generator, requires_grad=True)
    targets = torch.tensor([[3, 4, 29, 0, 0], [1, 2, 3, 4, 5]])

    class Model:
        output_weight, output_bias = table, bias

        def encode(self, source, lengths):
            return None

        def decode(self, memory, target_in):
            return hidden

    batch = {"source": targets, "source_lengths": targets, "target_in": targets}
    loss, nll, right = translation_sums(Model(), batch | {"target_out": targets}, 0.1)
    logits = (hidden @ table.t() + bias).flatten(0, 1)
    how = {"ignore_index": 0, "reduction": "sum"}
    wanted = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1, **how)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(nll, F.cross_entropy(logits, targets.flatten(), **how).detach())
    real = targets.flatten() != 0
    assert right == (logits.argmax(dim=1) == targets.flatten())[real].sum()
    inputs = (table, hidden, bias)
    for one, other in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("system", NETWORKS)
def test_each_weight_is_counted_once(system, shared, tmp_path):
    """Of as many source as target pieces; lookups cost nothing, the output's table does."""
    settings = SYSTEMS[system](data=tmp_path, source="", target="", out=tmp_path, steps=1)
    shape, config, network = translation.NETWORKS[system]
    sizes = {"source_vocab_size": 40, "target_vocab_size": 40 if shared else 50}
    model = network(config(**vars(group_values(settings, shape)), **sizes, shared=shared))
    ids = np.array([7, 8, 3], np.int32)
    source = Sentences(ids, np.array([0, 3]))
    rows = PairRows(source, source.framed(np.array([2]), [2], 3))
    engine = Engine(torch.device("cpu"), "float32", threads=1)
    task = Translation(model, rows, rows, settings, engine, TrainingState(), BestWeights(1))
    batch, _ = task.batch(Position())
    looked_up = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    weights = sum(weight.numel() for weight in model.parameters())
    weights -= sum(weight.numel() for weight in looked_up)
    if any(weight is model.output_weight for weight in looked_up):
        weights += model.output_weight.numel()
    assert task.flops(batch) == 6 * 3 * weights


def test_the_best_weights_are_kept_and_averaged():
    model, best = torch.nn.Linear(1, 1, bias=False), BestWeights(count=2)
    for step, (loss, value) in enumerate([(3.0, 1.0), (1.0, 4.0), (5.0, 100.0), (2.0, 2.0)]):
        model.weight.data.fill_(value)
        best.offer(step, loss, model)
    assert best.steps == [1, 3] and best.mean(2)["weight"].item() == 3.0
    other = BestWeights(count=2)
    about, tensors = best.stored()
    other.resume(tensors, **about)
    assert other.losses == [1.0, 2.0] and other.mean(2)["weight"].item() == 3.0
    assert other.mean(1)["weight"].item() == 4.0
    other.offer(3, 0.0, model)  # measured already, before the stop
    assert other.steps == [1, 3]


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_one_line(runs, data, tmp_path):
    out = ("--out", tmp_path / "out")
    train = ("lineage", "attention", *words_of(data), *SMALL)
    assert "exactly one of" in refused(*train, *out)
    again = ("lineage", "attention", *words_of(data), *flags_of("attention"))
    assert "finished run" in refused(*again, "--out", runs / "attention")
    assert "learning_rate = 0.01, not 0.5" in refused(
        *again, "--lr", 0.5, "--out", runs / "attention"
    )
    assert "finished run" in refused(*train, "--steps", 3, "--out", runs / "rnn")
    assert "no such file or folder" in refused(*words(train, data, data / "x"), "--steps", 3, *out)
    translate = ("lineage", "translate", runs / "attention", data / "dev.en")
    assert "--beam 99: the vocabulary has 60 pieces" in refused(
        *translate, "--beam", 99, "--out", tmp_path / "t"
    )
    assert "--precision half" in refused(*translate, "--precision", "half", "--out", tmp_path / "t")
    for flag, most in (("--max-ratio", 100), ("--length-penalty", 10)):
        line = refused(*translate, flag, "1e308", "--out", tmp_path / "t")
        assert f"{flag} 1e+308: must be in [0, {most}]" in line
    assert "n-best" not in bertsmith("lineage", "translate", "--help-all")
    predict = ("predict", runs / "rnn", data / "dev.en", "--out", tmp_path / "p.csv")
    assert "use `bertsmith lineage translate`" in refused(*predict)
    assert "unknown command 'lineage transfomer': did you mean" in cli("lineage", "transfomer").err
    evaluate = ("lineage", "evaluate", runs / "words")
    assert "no split 'tset'" in refused(*evaluate, "--split", "tset", *out)
    assert "name each system once" in refused(*evaluate, runs / "words", *out)


TEXTS = ("--text", "gone.txt", "--steps", 1)
PAIRS = words_of("gone", "--steps", 1)
WRITTEN = [
    *(("elmo", TEXTS, name) for name in ("model/a", "words.txt", "checkpoint-500/weights.bin")),
    *(("transformer", PAIRS, f"{name}/a") for name in ("vocab", "source", "target")),
    *((name, PAIRS, "checkpoints/step-1/weights.bin") for name in ("rnn", "attention")),
    ("word-for-word", words_of("gone"), "table.npz"),
]


@pytest.mark.parametrize(("system", "given", "name"), WRITTEN)
def test_files_of_the_user_are_left_alone(system, given, name, tmp_path):
    write(tmp_path / name, "mine")
    line = refused("lineage", system, *given, "--out", tmp_path)
    first = name.partition("/")[0]
    assert f"{tmp_path} holds '{first}', which is of no run: name another --out" in line
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize(("system", "given"), [("elmo", TEXTS), ("transformer", PAIRS)])
def test_seeds_out_of_bounds(system, given, tmp_path):
    for seed in (-1, 10**30):
        line = refused("lineage", system, *given, "--seed", seed, "--out", tmp_path / "out")
        assert f"--seed {seed}: must be at least 0 and at most 2**63 - 1" in line
    assert not (tmp_path / "out").exists()


def test_a_refused_run_occupies_no_folder(data, tmp_path):
    out = tmp_path / "out"
    command = ("lineage", "rnn", *words_of(data), *flags_of("rnn"), "--out", out)
    line = refused(*command, "--max-length", 1)
    assert "every pair has more than 1 pieces" in line and [*contents(out)] == ["run.lock"]
    bertsmith(*command, "--max-length", 40)


def test_a_run_that_was_killed_before_its_vocabulary_goes_on(data, tmp_path, monkeypatch):
    command = ("lineage", "rnn", *words_of(data), *flags_of("rnn"), "--out", tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(translation.Languages, "save", lambda *_: 1 / 0)
        cli(*command)
    assert "vocab" not in contents(tmp_path / "out") and bertsmith(*command)
    assert (tmp_path / "out" / "vocab" / "vocab.txt").exists()


def words(train, old, new):
    return [new if word == old else word for word in train]


def test_a_folder_of_another_kind_is_refused(data, tmp_path):
    write(tmp_path / "run.json", json.dumps({"format": 2, "kind": "pretrain", "settings": {}}))
    command = ("lineage", "translate", tmp_path, data / "dev.en", "--out", tmp_path / "o")
    assert "a run of pretrain, which does not translate" in refused(*command)


def test_an_unknown_language_is_refused(data, tmp_path):
    for name in ("train", "dev"):
        write(tmp_path / f"{name}.en", (data / f"{name}.en").read_bytes())
        write(tmp_path / f"{name}.gr", (data / f"{name}.de").read_bytes())
    command = ("lineage", "attention", "--data", tmp_path, "--source", "en", "--target", "gr")
    line = refused(*command, "--steps", 3, *SMALL, "--out", tmp_path / "out")
    assert "unknown language code 'gr'" in line
    assert not (tmp_path / "out").exists()


def test_data_without_a_split_names_what_is_there(data, tmp_path):
    write(tmp_path / "train.en", "a\n")
    command = ("lineage", "rnn", "--data", tmp_path, "--source", "en", "--target", "de")
    command = (*command, "--steps", 1, "--out", tmp_path / "out")
    assert "dev.en and dev.de, or one table dev.tsv, but has none" in refused(*command)
    write(tmp_path / "dev.en", "a\n")
    assert f"{tmp_path / 'train.de'}: no such file" in refused(*command)
    write(tmp_path / "val.en", "a\n")
    assert "but has dev, val" in refused(*command)


def test_a_folder_of_a_test_alone_is_enough_to_measure_on(runs, data, tmp_path):
    for language in ("en", "de"):
        write(tmp_path / f"test.{language}", (data / f"test_small.{language}").read_bytes())
    evaluate = ("lineage", "evaluate", runs / "words", "--data", tmp_path, "--out", tmp_path / "o")
    bertsmith(*evaluate)
    result = json.loads((tmp_path / "o" / "result.json").read_text())
    assert result["systems"]["words"]["by_rarest_word"] == []  # no training text to count in
    assert "Rarest word" not in (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    for language in ("en", "de"):  # fewer sentences than are read as one text
        lines = (data / f"test_small.{language}").read_text(encoding="utf-8").splitlines()
        write(tmp_path / f"test.{language}", lines[:3])
    bertsmith(*evaluate[:-1], tmp_path / "three")
    result = json.loads((tmp_path / "three" / "result.json").read_text())
    assert [one["sentences"] for one in result["systems"]["words"]["joined"]] == [1, 2, 3]
    again = (*evaluate[:-1], tmp_path / "p")
    assert "dev.en and dev.de, or one table dev.tsv, but has none" in refused(
        *again, "--split", "dev"
    )


def test_a_table_gives_its_own_dev(data, tmp_path):
    sides = (data / "train.en", data / "train.de")
    rows = zip(*(side.read_text(encoding="utf-8").splitlines() for side in sides), strict=True)
    table = write(tmp_path / "pairs.tsv", ["en\tde", *("\t".join(row) for row in rows)])
    splits = read_splits(table, "en", "de")
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 270, "dev": 30}
    assert not {*splits["dev"].lines} & {*splits["train"].lines}  # pyright: ignore
    few = write(tmp_path / "few.tsv", ["en\tde", "a\tb", "c\td"])
    with pytest.raises(ValueError, match="2 pairs are too few"):
        read_splits(few, "en", "de")


def test_names_of_runs():
    with pytest.raises(ValueError, match="name each system once"):
        distinct_names([translation.RunFolder("a/b").path] * 2)
    assert cli("lineage").code == 2
