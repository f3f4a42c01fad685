"""`bertsmith features`, `features ner` and `embed`: what they print and write, how they refuse."""

import json
import shutil

import numpy as np
import pytest

import bertsmith as library
from bertsmith.inference.embeddings.pooling import PoolingSettings
from bertsmith.inference.embeddings.texts import embed
from bertsmith.model.config import ModelConfig

from ..tiny import bertsmith, cli, piece_tokenizer, random_model, refused, write
from ..training.finetuning.tagged import write_corpus, write_model

WORDS = "the a cat dog sat on mat . ##s good bad"
TEXTS = ["the cats sat", "", "a good dog sat on the mat . " * 5, "bad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config, path = ModelConfig(16, 8, 2, 2, 16, max_positions=24), tmp_path_factory.mktemp("models")
    return random_model(path / "model", piece_tokenizer(WORDS), config=config, std=0.4)


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts.txt", "\n".join(TEXTS))


def vectors(folder, *settings, texts=TEXTS, **more):
    """What Python computes."""
    return embed(library.load(folder), texts, PoolingSettings(*settings, **more))[0]


def test_features(tmp_path, folder, texts):
    out = tmp_path / "out"
    words = ("features", texts, "--model", folder, "--out", out)
    said = f"{out}: 4 texts, 44 words, float16 44x16, 1.4 kB, layers 1, 2\n"
    assert bertsmith(*words, "--layers=-2..-1") == said
    found = library.open_features(out)
    assert [len(found[k]) for k in range(4)] == [3, 0, 40, 1]
    assert found.description["source"] == str(texts)
    assert "out: not empty" in refused(*words)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layers 3", "--layers 3: the model has the layers 0 (embeddings) to 2"),
        ("--layers mean", "--layers mean: write last, all"),
        ("--max-length 99", "--max-length 99: the model knows 24"),
        ("--pool max", "--pool"),
        ("--text body", "--text body"),
        ("--document-context", "--document-context: without effect: no -DOCSTART- line in"),
    ],
)
def test_features_refuses_in_one_line(tmp_path, folder, texts, flags, message):
    out = tmp_path / "out"
    words = ("features", texts, "--model", folder, "--out", out)
    assert message in refused(*words, *flags.split()) and not out.exists()


def test_features_of_files_that_are_not_there(tmp_path, folder):
    model = ("--model", folder, "--out", tmp_path / "out")
    assert "no.txt" in refused("features", tmp_path / "no.txt", *model)
    empty = write(tmp_path / "empty.txt", "")
    assert "empty.txt: no text in it" in refused("features", empty, *model)


def test_embed_writes_what_it_computes_and_warns(tmp_path, folder, texts):
    out, lines = tmp_path / "out.npy", tmp_path / "out.jsonl"
    words = ("embed", texts, "--model", folder, "--max-length", 20)
    ran = cli(*words, "--out", out)
    assert (ran.code, ran.out) == (0, f"{out}: 4 vectors of 8 numbers\n")
    assert "warning: nothing says that" in ran.err and "1 of 4 texts were cut" in ran.err
    np.testing.assert_allclose(np.load(out), vectors(folder, "mean", 20), rtol=1e-6)

    bertsmith(*words, "--out", lines, "--normalize", "--pool", "cls")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["text"] for row in rows] == [text.strip() for text in TEXTS]
    expected = vectors(folder, "cls", 20)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=1e-5)


def test_embed_follows_a_folder_of_sentence_transformers(tmp_path, folder, texts):
    theirs, out = shutil.copytree(folder, tmp_path / "theirs"), tmp_path / "out.npy"
    modules = [{"type": f"sentence_transformers.models.{n}"} for n in ("Pooling", "Normalize")]
    write(theirs / "modules.json", json.dumps(modules))
    prompts = {"prompts": {"query": "a dog "}, "default_prompt_name": "query"}
    write(theirs / "config_sentence_transformers.json", json.dumps(prompts))
    words = ("embed", texts, "--model", theirs, "--out", out)
    ran = cli(*words)
    assert ran.code == 0 and "warning" not in ran.err
    assert f"{theirs}: the mean of the tokens, 'a dog ' before every text, length 1\n" in ran.err
    expected = vectors(theirs, prompt="a dog ", normalize=True)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1.0, rtol=1e-5)
    ran = cli(*words, "--no-prompt", "--no-normalize", "--pool", "max", "--max-length", 20)
    said = f"{theirs}: the largest values of the tokens, of at most 20 tokens\n"
    assert ran.code == 0 and said in ran.err
    np.testing.assert_allclose(np.load(out), vectors(theirs, "max", 20), atol=1e-6)
    for flags in (("--normalize", "--no-normalize"), ("--prompt", "a", "--no-prompt")):
        line = refused(*words, *flags)
        assert f"{flags[0]}, {flags[-1]}: give one of them" in line


def test_embed_whitens_with_the_texts_or_with_a_file(tmp_path, folder):
    random = np.random.default_rng(1)
    rows = [" ".join(random.choice(WORDS.split()[:8], 6)) for _ in range(60)]
    table = ["id,body", *(f"{k},{row}" for k, row in enumerate(rows))]
    many, lines = write(tmp_path / "many.csv", table), write(tmp_path / "lines.txt", rows)
    out, column = tmp_path / "out.npy", ("--text", "body")
    model = ("--model", folder, "--out", out)
    bertsmith("embed", many, *column, *model, "--whiten", "input")
    variances = np.linalg.eigvalsh(np.cov(np.load(out).T, bias=True))
    np.testing.assert_allclose(variances, [0, *[1] * 7], atol=2e-3)  # LayerNorm takes one away
    given = library.load(folder).embed(rows)
    white = library.Whitening.fit(given).apply(given)
    np.testing.assert_allclose(np.load(out), white, atol=2e-3)
    found = []
    for read, whiten in ((many, many), (many, lines), (lines, many)):  # --text: the table's alone
        flags = ("--whiten", whiten, "--dimensions", 3, "--normalize")
        bertsmith("embed", read, *column, *model, *flags)
        found.append(np.load(out))
    assert found[0].shape == (60, 3)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    np.testing.assert_allclose(np.linalg.norm(found[0], axis=1), np.ones(60), rtol=1e-5)


def test_embed_refuses_before_it_computes(monkeypatch, tmp_path, folder, texts):
    never = lambda *_: pytest.fail("it computes")  # noqa: E731
    monkeypatch.setattr("bertsmith.inference.engines.runner.Runner.vectors", never)
    words = ("embed", texts, "--model", folder, "--out", tmp_path / "v.npy", "--whiten")
    assert "absent.txt: no such file" in refused(*words, "absent.txt")
    words += ("input", "--dimensions")
    assert "--dimensions 9: the model's vectors have 1 to 8" in refused(*words, 9)
    assert "4 texts span 3 of 4 directions" in refused(*words, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out v.csv", "v.csv: end --out in .npy or .jsonl"),
        ("--whiten x.txt", "x.txt: no such file"),
        ("--dimensions 9", "--dimensions 9: the model's vectors have 1 to 8"),
        ("--whiten input", "4 texts span 3 of 8 directions"),
        ("--max-length 25", "--max-length 25: the model reads 3 to 24"),
        ("--max-length 0", "--max-length 0: the model reads 3 to 24"),
    ],
)
def test_embed_refuses_in_one_line(tmp_path, folder, texts, flags, message):
    words = ("embed", texts, "--model", folder, "--out", tmp_path / "v.npy", *flags.split())
    assert message in refused(*words)
    assert list(tmp_path.iterdir()) == [texts]


def test_embed_reads_long_texts_in_windows_and_keeps_the_first_numbers(tmp_path, folder, texts):
    out = tmp_path / "out.npy"
    words = ("embed", texts, "--model", folder, "--max-length", 12, "--out", out)
    ran = cli(*words)
    assert f"{texts}: 1 of 4 texts were cut: windows read all of them" in ran.err
    ran = cli(*words, "--long-texts", "windows", "--dimensions", 5, "--normalize")
    assert ran.code == 0 and ran.out == f"{out}: 4 vectors of 5 numbers\n"
    assert "were cut" not in ran.err and "100% · " in ran.err
    expected = vectors(folder, "mean", 12, long_texts="windows", dimensions=5, normalize=True)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)


def test_embed_narrows_vectors(tmp_path, folder, texts):
    out, whole = tmp_path / "out.npy", vectors(folder)
    words = ("embed", texts, "--model", folder, "--out", out)
    said = bertsmith(*words, "--quantize", "binary")
    assert said == f"{out}: 4 vectors of 1 numbers\n"
    np.testing.assert_array_equal(np.load(out), library.quantize(whole, "binary"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "texts.txt"]
    bertsmith(*words, "--quantize", "int8")
    ranges = tmp_path / "out.ranges.npy"
    np.testing.assert_array_equal(np.load(ranges), [whole.min(axis=0), whole.max(axis=0)])
    np.testing.assert_array_equal(np.load(out), library.quantize(whole, "int8"))
    one, lines = write(tmp_path / "one.txt", "a dog"), tmp_path / "one.jsonl"
    words = ("embed", one, "--model", folder, "--out", lines, "--quantize", "int8")
    assert "the ranges of one vector say nothing: give --ranges" in refused(*words)
    bertsmith(*words, "--ranges", ranges)
    expected = library.quantize(vectors(folder, texts=["a dog"]), "int8", np.load(ranges))
    assert json.loads(lines.read_text())["vector"] == expected[0].tolist()
    words = (*words[:-1], "binary", "--ranges", ranges)
    assert f"--ranges {ranges}: only with --quantize int8" in refused(*words)


def test_search_finds_the_nearest_texts(tmp_path, folder, texts):
    """Each text is nearest to itself."""
    out, empty = tmp_path / "out.npy", vectors(folder, texts=[""])
    model, read = ("--model", folder), ("--vectors", out, "--texts", texts)
    bertsmith("embed", texts, *model, "--out", out)
    said = bertsmith("search", "bad", *model, *read, "--top", 2).splitlines()
    assert said[:2] == ["bad", "  1.0000  bad"] and len(said) == 3
    said = bertsmith("search", "--queries", texts, *model, "--vectors", out, "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["query"] for row in rows] == [text.strip() for text in TEXTS]
    assert [row["found"][0]["row"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["found"][0] == {"row": 0, "score": pytest.approx(1.0, abs=1e-5)}
    np.save(tmp_path / "q.npy", empty)
    said = bertsmith("search", "--queries", tmp_path / "q.npy", "--vectors", out, "--top", 1)
    assert said == "query 0\n  1.0000  1\n"


def test_search_refuses_in_one_line(tmp_path, folder, texts):
    out, few = tmp_path / "out.npy", write(tmp_path / "few.txt", "one\ntwo\n")
    bertsmith("embed", texts, "--model", folder, "--out", out, "--dimensions", 3)
    search = ("search", "--vectors", out)
    assert "QUERY, --queries: give one of them" in refused(*search)
    assert "QUERY, --queries: give one of them" in refused(*search, "bad", "--queries", texts)
    assert "missing --model: it turns texts into vectors" in refused(*search, "bad")
    alone = ("bad", "--model", folder, "--text", "t")
    for flags in (alone, (*alone, "--texts", texts), ("--queries", texts, *alone[1:])):
        assert "--text t: no table is read: leave it out" in refused(*search, *flags)
    line = refused(*search, "--queries", out, "--model", folder, "--prompt", "query: ")
    assert "--model, --prompt: without effect: " in line and "out.npy has vectors" in line
    line = refused(*search, "--queries", out, "--device", "cpu", "--precision", "int8")
    assert "--device, --precision: without effect: " in line
    assert "few.txt: 2 texts, but" in refused(*search, "bad", "--texts", few)
    ran = cli(*search, "bad", "--model", folder)  # whose vectors are warned of first
    assert ran.code == 2 and "warning: nothing says that" in ran.err
    assert "queries [1, 8], vectors [4, 3]: not of one size" in ran.err.splitlines()[-1]
    assert "--top 0: 1 or more" in refused(*search, "--queries", out, "--top", 0)
    line = refused(*search, "bad", "--model", folder, "--prompt", "query")
    assert "--prompt query: no prompt of" in line


def test_embed_does_not_write_over_its_input(tmp_path, folder):
    path = write(tmp_path / "in.jsonl", '{"text": "the cat"}\n')
    assert "is an input itself" in refused("embed", path, "--model", folder, "--out", path)


def test_embed_reads_standard_input(tmp_path, folder, texts, standard_input):
    model = ("--model", folder, "--out")
    bertsmith("embed", texts, *model, tmp_path / "file.npy")
    standard_input("\n".join(TEXTS).encode())
    bertsmith("embed", "-", *model, tmp_path / "piped.npy")
    found = [np.load(tmp_path / name) for name in ("file.npy", "piped.npy")]
    assert np.array_equal(*found) and len(found[0]) == len(TEXTS)
    for data, message in (
        (b"\n \n", "-: no text in it"),
        (b"id,text\n7,the cat\n", "standard input:1: a table with the column 'text'"),
    ):
        standard_input(data)
        assert message in refused("embed", "-", *model, tmp_path / "none.npy")


def test_embed_goes_on_where_it_was_interrupted(tmp_path, folder, texts, monkeypatch):
    more = write(tmp_path / "more.txt", "\n".join(TEXTS * 6))
    words = ("embed", texts, "--model", folder, "--dimensions", 2, "--whiten", more, "--out")
    monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", 3)
    whole, out, partial = (tmp_path / name for name in ("w.npy", "out.npy", "out.npy.partial"))
    said, read = cli(*words, whole).err.splitlines(), []

    def counting(predictor, texts, *rest):
        if len(read) == 3:
            raise KeyboardInterrupt
        read.append(len(texts))
        return embed(predictor, texts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.inference.embeddings.files.embed", counting)
        ran = cli(*words, out)
    done = f"{sum(read)} texts are kept in {partial}"
    line = f"bertsmith embed: interrupted: {done}: the same command goes on"
    assert ran.code == 130 and ran.err.splitlines()[-1] == line
    ran = cli(*words, out)
    again = ran.err.splitlines()
    assert ran.code == 0 and f"{done}: going on behind them" in again
    cut = [line for line in said if "texts were cut" in line]
    assert len(cut) == 2 and cut == [line for line in again if "texts were cut" in line]
    assert out.read_bytes() == whole.read_bytes() and not partial.exists()


def test_vectors_of_other_texts_are_not_taken(tmp_path, folder, texts, monkeypatch):
    def broken(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", 1)
    out = tmp_path / "out.npy"
    words = ("embed", texts, "--model", folder, "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.cli.features._write_vectors", broken)  # all is computed
        ran = cli(*words)
    assert ran.code == 130 and "4 texts are kept" in ran.err
    write(texts, "\n".join(reversed(TEXTS)))
    ran = cli(*words)
    said = f"{out}.partial: another input behind 0 texts: what it keeps of that is dropped"
    assert ran.code == 0 and said in ran.err
    wanted = vectors(folder, "mean", texts=TEXTS[::-1])
    np.testing.assert_allclose(np.load(out), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "flags", ["", "--whiten input --dimensions 2", "--quantize int8", "--quantize binary"]
)
@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_embed_writes_the_same_in_any_windows(tmp_path, folder, texts, monkeypatch, flags, name):
    found = []
    for rows in (8192, 3, 1):
        monkeypatch.setattr("bertsmith.inference.bulk.WINDOW_ROWS", rows)
        bertsmith("embed", texts, "--model", folder, "--out", tmp_path / name, *flags.split())
        if name == "out.npy":
            found.append(np.load(tmp_path / name).astype(np.float32))
        else:
            lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
            assert [line["text"] for line in lines] == [text.strip() for text in TEXTS]
            found.append(np.array([line["vector"] for line in lines]))
    assert len(found[0]) == 4
    for other in found[1:]:  # int8 and whitening show the last bits of rows that are computed alone
        np.testing.assert_allclose(other, found[0], atol=1 if "int8" in flags else 1e-3)


@pytest.fixture(scope="module")
def ner(tmp_path_factory):
    """The words of `bertsmith features ner` on a small model, briefly."""
    model = write_model(tmp_path_factory.mktemp("model"), "4x64")
    flags = "--epochs 2 --learning-rate 1e-2 --hidden-size 16 --max-length 48 --threads 1"
    flags = f"{flags} --tokens-per-window 20 --precision float32"
    return "features", "ner", "--model", model, *flags.split()


def test_a_table_of_two_rows_and_then_a_third(ner, tmp_path):
    data, out = write_corpus(tmp_path / "data", train=30), tmp_path / "run"
    words = (*ner, "--data", data, "--out", out, "--rows")
    lines = bertsmith(*words, "last", "concat-last-four").splitlines()
    assert lines[0].startswith("| features | dev F1 | test F1 | paper")
    rows = ["| Last Hidden", "| Concat Last Four Hidden"]
    assert [line.split(" | ")[0] for line in lines[2:]] == rows
    record = json.loads((out / "run.json").read_text())["settings"]
    assert set(record["data_sha256"]) == {"train", "dev", "test"} and record["epochs"] == 2
    again = bertsmith(*words, "embeddings").splitlines()
    assert again[2].startswith("| Embeddings") and again[3:] == lines[2:]


def test_a_single_file_gives_its_own_dev_set(ner, tmp_path):
    data = write_corpus(tmp_path / "data", train=30) / "train.conll"
    out = bertsmith(*ner, "--data", data, "--out", tmp_path / "run", "--rows", "last")
    assert out.startswith("| features | dev F1 | paper")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data {}/data", "test.conll:1: tag 'B-ORG' is unknown to the training data"),
        ("--data {}/no", "no such file or folder"),
        ("--data {}/data --seeds a", "--seeds a: write 1,2,3 or 1..3"),
    ],
)
def test_features_ner_refuses_in_one_line(ner, tmp_path, words, message):
    write(write_corpus(tmp_path / "data", train=30) / "test.conll", "ann B-ORG\n")
    line = refused(*ner, "--out", tmp_path / "run", *words.format(tmp_path).split())
    assert message in line and not (tmp_path / "run").exists()
