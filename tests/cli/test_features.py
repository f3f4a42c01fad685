"""`bertsmith features`, `embed` and the fill modes: what they print and write, how they refuse."""

import json
import shutil

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.inference.embeddings import PoolingSettings, embed
from bertsmith.inference.fill import fill_candidates, fill_words
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = "the a cat dog sat on mat . ##s good bad"
PIECES = [*SPECIAL, *WORDS.split()]
TEXTS = ["the cats sat", "", "a good dog sat on the mat . " * 5, "bad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelConfig(
        vocab_size=len(PIECES),
        hidden_size=8,
        num_layers=2,
        num_heads=2,
        intermediate_size=16,
        max_positions=24,
    )
    path = tmp_path_factory.mktemp("models") / "model"
    model = initialize(PreTrainingModel(config), 0.4, torch.Generator().manual_seed(1))
    save_model(model, Tokenizer(Vocabulary(PIECES)), path)
    return path


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def ran(*words):
    return main(list(map(str, words)))


def refused(capsys, *words):
    assert ran(*words) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and line.startswith(f"bertsmith {words[0]}: ")
    return line


def test_features(capsys, tmp_path, folder, texts):
    out = tmp_path / "out"
    assert ran("features", texts, "--model", folder, "--out", out, "--layers=-2..-1") == 0
    printed = capsys.readouterr().out
    assert printed == f"{out}: 4 texts, 44 words, float16 44x16, 0.0 MB, layers 1, 2\n"
    found = bertsmith.open_features(out)
    assert [len(found[k]) for k in range(4)] == [3, 0, 40, 1]
    assert found.description["source"] == str(texts)
    line = refused(capsys, "features", texts, "--model", folder, "--out", out)
    assert "out: not empty" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "3"], "--layers 3: the model has the layers 0 (embeddings) to 2"),
        (["--layers", "mean"], "--layers mean: write last, all"),
        (["--max-length", "99"], "--max-length 99: the model knows 24"),
        (["--pool", "max"], "--pool"),
        (["--text", "body"], "--text body"),
        (["--document-context"], "--document-context: without effect: no -DOCSTART- line in"),
    ],
)
def test_features_refuses_in_one_line(capsys, tmp_path, folder, texts, flags, message):
    out = tmp_path / "out"
    line = refused(capsys, "features", texts, "--model", folder, "--out", out, *flags)
    assert message in line and not out.exists()


def test_features_of_files_that_are_not_there(capsys, tmp_path, folder):
    out = tmp_path / "out"
    line = refused(capsys, "features", tmp_path / "no.txt", "--model", folder, "--out", out)
    assert "no.txt" in line
    (tmp_path / "empty.txt").write_text("")
    line = refused(capsys, "features", tmp_path / "empty.txt", "--model", folder, "--out", out)
    assert "empty.txt: no text in it" in line


def test_embed_writes_what_it_computes_and_warns(capsys, tmp_path, folder, texts):
    out = tmp_path / "out.npy"
    words = ["embed", texts, "--model", folder, "--max-length", 20]
    assert ran(*words, "--out", out) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 4 vectors of 8 numbers\n"
    assert "warning: nothing says that" in printed.err and "1 of 4 texts were cut" in printed.err
    expected, _ = embed(bertsmith.load(folder), TEXTS, PoolingSettings("mean", 20))
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-6)

    lines = tmp_path / "out.jsonl"
    assert ran(*words, "--out", lines, "--normalize", "--pool", "cls") == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["text"] for row in rows] == [text.strip() for text in TEXTS]
    expected, _ = embed(bertsmith.load(folder), TEXTS, PoolingSettings("cls", 20))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=1e-5)


def test_embed_follows_a_folder_of_sentence_transformers(capsys, tmp_path, folder, texts):
    theirs, out = shutil.copytree(folder, tmp_path / "theirs"), tmp_path / "out.npy"
    modules = [{"type": f"sentence_transformers.models.{n}"} for n in ("Pooling", "Normalize")]
    (theirs / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"query": "a dog "}, "default_prompt_name": "query"}
    (theirs / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    words = ["embed", texts, "--model", theirs, "--out", out]
    assert ran(*words) == 0
    err = capsys.readouterr().err
    assert f"{theirs}: the mean of the tokens, 'a dog ' before every text, length 1\n" in err
    assert "warning" not in err
    reading = PoolingSettings(prompt="a dog ", normalize=True)
    expected, _ = embed(bertsmith.load(theirs), TEXTS, reading)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1.0, rtol=1e-5)
    flags = ["--no-prompt", "--no-normalize", "--pool", "max", "--max-length", 20]
    assert ran(*words, *flags) == 0
    err = capsys.readouterr().err
    assert f"{theirs}: the largest values of the tokens, of at most 20 tokens\n" in err
    expected, _ = embed(bertsmith.load(theirs), TEXTS, PoolingSettings("max", 20))
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    line = refused(capsys, *words, "--normalize", "--no-normalize")
    assert "--normalize, --no-normalize: give one of them" in line
    line = refused(capsys, *words, "--prompt", "a", "--no-prompt")
    assert "--prompt, --no-prompt: give one of them" in line


def test_embed_whitens_with_the_texts_or_with_a_file(tmp_path, folder, texts):
    many = tmp_path / "many.csv"
    random = np.random.default_rng(1)
    rows = [" ".join(random.choice(WORDS.split()[:8], 6)) for _ in range(60)]
    many.write_text("id,body\n" + "".join(f"{k},{row}\n" for k, row in enumerate(rows)))
    out = tmp_path / "out.npy"
    words = ["embed", many, "--text", "body", "--model", folder, "--out", out]
    assert ran(*words, "--whiten", "input") == 0
    variances = np.linalg.eigvalsh(np.cov(np.load(out).T, bias=True))
    np.testing.assert_allclose(variances, [0, *[1] * 7], atol=2e-3)  # LayerNorm takes one away
    assert ran(*words, "--dimensions", 3, "--whiten", many, "--normalize") == 0
    vectors = np.load(out)
    assert vectors.shape == (60, 3)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(rows))
    assert ran(*words, "--dimensions", 3, "--whiten", lines, "--normalize") == 0
    np.testing.assert_array_equal(np.load(out), vectors)  # --text is the table's alone
    words[1:4] = [lines]
    from_table = ("--whiten", many, "--text", "body")
    assert ran(*words, "--dimensions", 3, *from_table, "--normalize") == 0
    np.testing.assert_array_equal(np.load(out), vectors)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.ones(60), rtol=1e-5)


def test_embed_refuses_before_it_computes(capsys, monkeypatch, tmp_path, folder, texts):
    def never(*arguments):
        raise AssertionError("it computes")

    monkeypatch.setattr("bertsmith.inference.embeddings.sentence_vectors", never)
    words = ["embed", texts, "--model", folder, "--out", tmp_path / "v.npy", "--whiten"]
    assert "absent.txt: no such file" in refused(capsys, *words, "absent.txt")
    words.append("input")
    message = "--dimensions 9: the model's vectors have 1 to 8"
    assert message in refused(capsys, *words, "--dimensions", 9)
    assert "4 texts span 3 of 4 directions" in refused(capsys, *words, "--dimensions", 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "v.csv"], "v.csv: end --out in .npy or .jsonl"),
        (["--whiten", "x.txt"], "x.txt: no such file"),
        (["--dimensions", "4"], "--dimensions 4: only with --whiten"),
        (["--whiten", "input"], "4 texts span 3 of 8 directions"),
        (["--max-length", "25"], "--max-length 25: the model reads 3 to 24"),
    ],
)
def test_embed_refuses_in_one_line(capsys, tmp_path, folder, texts, flags, message):
    words = ["embed", texts, "--model", folder, "--out", tmp_path / "v.npy", *flags]
    assert message in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == [texts]


def test_embed_does_not_write_over_its_input(capsys, tmp_path, folder):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "the cat"}\n')
    line = refused(capsys, "embed", path, "--model", folder, "--out", path)
    assert "is an input itself" in line


def test_fill_together(capsys, tmp_path, folder):
    filler = bertsmith.load(folder).filler
    text = "the [MASK] sat on [MASK]"
    words = ["fill", text, "--model", folder, "--top", 2]
    assert ran(*words, "--joint", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"text": text, "fillings": filler.joint(text, 2)}
    assert ran(*words, "--joint") == 0
    lines = capsys.readouterr().out.splitlines()
    best = filler.joint(text, 1)[0]
    assert lines[0] == text and len(lines) == 3
    assert lines[1].split() == [f"{best['probability']:.4f}", *best["tokens"]]

    assert ran(*words, "--max-pieces", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    best = fill_words(filler, text, 2, 1)[0]
    assert lines[1].split() == [f"{best['score']:.4f}", f"{best['words'][0]},", best["words"][1]]

    given = fill_candidates(filler, "a [MASK]", ["cats", "dog"])
    words = ["fill", "a [MASK]", "--model", folder]
    assert ran(*words, "--candidates", "cats, dog", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"text": "a [MASK]", "candidates": given}
    (tmp_path / "words.txt").write_text("cats\n\ndog\n")
    assert ran(*words, "--candidates", f"@{tmp_path / 'words.txt'}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"  {row['probability']:.4f}  {row['candidate']}" for row in given]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--joint", "--max-pieces", 2], "--joint, --max-pieces: give one of them"),
        (["--candidates", "cat,zebra"], "candidate 'zebra': the model's vocabulary cannot spell"),
        (["--candidates", "cat,,dog"], "candidate '': no word in it"),
        (["--max-pieces", 0], "--max-pieces 0"),
        (["--joint", "--top", 0], "--top 0"),
        (["--candidates", "@absent.txt"], "absent.txt"),
    ],
)
def test_fill_together_refuses_in_one_line(capsys, folder, flags, message):
    assert message in refused(capsys, "fill", "a [MASK]", "--model", folder, *flags)


def test_embed_reads_standard_input(capsys, tmp_path, folder, texts, standard_input):
    ran("embed", texts, "--model", folder, "--out", tmp_path / "file.npy")
    standard_input("\n".join(TEXTS).encode())
    assert ran("embed", "-", "--model", folder, "--out", tmp_path / "piped.npy") == 0
    found = [np.load(tmp_path / name) for name in ("file.npy", "piped.npy")]
    assert np.array_equal(*found) and len(found[0]) == len(TEXTS)
    capsys.readouterr()
    standard_input(b"\n \n")
    assert "-: no text in it" in refused(
        capsys, "embed", "-", "--model", folder, "--out", tmp_path / "none.npy"
    )
    standard_input(b"id,text\n7,the cat\n")
    line = refused(capsys, "embed", "-", "--model", folder, "--out", tmp_path / "none.npy")
    assert "standard input:1: a table with the column 'text'" in line


def test_embed_goes_on_where_it_was_interrupted(capsys, tmp_path, folder, texts, monkeypatch):
    (tmp_path / "more.txt").write_text("\n".join(TEXTS * 6))
    words = ["embed", texts, "--model", folder, "--dimensions", 2]
    words += ["--whiten", tmp_path / "more.txt"]
    monkeypatch.setattr("bertsmith.inference.kept_blocks.BLOCK_CHARACTERS", 30)
    assert ran(*words, "--out", tmp_path / "whole.npy") == 0
    said = capsys.readouterr().err.splitlines()
    read = []

    def counting(predictor, texts, *rest):
        if len(read) == 3:
            raise KeyboardInterrupt
        read.append(len(texts))
        return embed(predictor, texts, *rest)

    out, partial = tmp_path / "out.npy", tmp_path / "out.npy.partial"
    monkeypatch.setattr("bertsmith.inference.embeddings.embed", counting)
    assert ran(*words, "--out", out) == 130
    done = f"{sum(read)} of 28 texts are kept in {partial}"
    line = f"bertsmith embed: interrupted: {done}: the same command goes on"
    assert capsys.readouterr().err.splitlines()[-1] == line
    monkeypatch.setattr("bertsmith.inference.embeddings.embed", embed)
    assert ran(*words, "--out", out) == 0
    again = capsys.readouterr().err.splitlines()
    assert f"{done}: going on behind them" in again
    cut = [line for line in said if "texts were cut" in line]
    assert len(cut) == 2 and cut == [line for line in again if "texts were cut" in line]
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes() and not partial.exists()


def test_vectors_of_other_texts_are_not_taken(capsys, tmp_path, folder, texts, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.kept_blocks.BLOCK_CHARACTERS", 1)
    out = tmp_path / "out.npy"
    words = ["embed", texts, "--model", folder, "--out", out]

    def broken(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", broken)  # all is computed, and nothing is written
        assert ran(*words) == 130
    assert "4 of 4 texts are kept" in capsys.readouterr().err
    texts.write_text("\n".join(reversed(TEXTS)))
    assert ran(*words) == 0
    said = f"{out}.partial: of another input, model or flags: what it keeps is dropped"
    assert said in capsys.readouterr().err
    reading = PoolingSettings("mean")
    wanted, _ = embed(bertsmith.load(folder), TEXTS[::-1], reading)
    np.testing.assert_allclose(np.load(out), wanted, atol=1e-6)
