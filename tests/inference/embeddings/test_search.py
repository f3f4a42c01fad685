"""The nearest vectors beside NumPy's sort of all cosines; files that cannot be searched."""

import numpy as np
import pytest

import bertsmith
from bertsmith.inference.embeddings import search as module
from bertsmith.inference.embeddings import vector_files
from bertsmith.inference.embeddings.search import search
from bertsmith.inference.embeddings.vector_files import StoredVectors


def made(count, size, seed=1, kind=np.float32):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(kind)


def sorted_cosines(vectors, queries, top):
    """(Rows, scores) in float64; of equal scores the first row."""
    exact = [array.astype(np.float64) for array in (vectors, queries)]
    units = [a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-300) for a in exact]
    scores = units[1] @ units[0].T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return rows, np.take_along_axis(scores, rows, axis=1)


@pytest.fixture(params=[96, 4096, vector_files.BLOCK_BYTES], ids=lambda size: f"{size} bytes")
def block(request, monkeypatch):
    """One vector a block, a few, all."""
    monkeypatch.setattr(vector_files, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("top", [1, 7, 500])
def test_the_nearest_are_those_of_a_sort(tmp_path, block, kind, top):
    vectors, queries = made(300, 24, kind=kind), made(5, 24, seed=2)
    vectors[17] = 0  # its cosine is 0
    rows, scores = sorted_cosines(vectors, queries, top)
    np.save(tmp_path / "all.npy", vectors)
    done = []
    for given in (tmp_path / "all.npy", str(tmp_path / "all.npy"), vectors):
        found = bertsmith.search(given, queries, top, done.append)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_allclose(found.scores, scores, atol=1e-6)
    assert sum(done) == 3 * 300


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, block):
    vectors, queries = made(50, 24), made(3, 24, seed=2)
    for name, part in (("b", vectors[20:21]), ("a", vectors[:20]), ("c", vectors[21:])):
        np.save(tmp_path / f"{name}.npy", part)
    (tmp_path / "notes.txt").write_text("no vectors")
    np.save(tmp_path / "b.ranges.npy", vectors[:2])  # as `bertsmith embed --quantize int8` does
    np.testing.assert_array_equal(
        search(tmp_path, queries).rows, sorted_cosines(vectors, queries, 10)[0]
    )
    stored = StoredVectors(tmp_path)
    assert stored.shape == (50, 24)
    places = [(path.name, row) for path, row in map(stored.place, (0, 19, 20, 21, 49))]
    assert places == [("a.npy", 0), ("a.npy", 19), ("b.npy", 0), ("c.npy", 0), ("c.npy", 28)]


def test_of_equal_vectors_the_first_is_found(block):
    vectors = np.tile(made(4, 24), (30, 1))
    found = search(vectors, vectors[:4], 30)
    np.testing.assert_array_equal(found.rows, np.arange(120).reshape(30, 4).T)


def test_many_queries_and_none(monkeypatch):
    vectors, queries = made(80, 24), made(9, 24, seed=2)
    monkeypatch.setattr(module, "QUERIES", 4)
    np.testing.assert_array_equal(
        search(vectors, queries).rows, sorted_cosines(vectors, queries, 10)[0]
    )
    assert search(vectors, queries[0]).rows.shape == (1, 10)
    assert search(vectors, queries[:0]).rows.shape == (0, 10)


def test_files_that_cannot_be_searched(tmp_path):
    path, queries = tmp_path / "v.npy", made(2, 24)
    with pytest.raises(ValueError, match=r"v.npy: no .npy file there"):
        search(path, queries)
    with pytest.raises(ValueError, match="no .npy file in this folder"):
        search(tmp_path, queries)
    for array, message in (
        (made(3, 24).astype(np.float64), "float64 .*search reads float32 or float16"),
        (np.ones((3, 24), np.int8), "int8 .* as `bertsmith embed` writes without --quantize$"),
        (made(3, 24)[0], r"\[24\]"),
        (np.asfortranarray(made(3, 24)), r"in Fortran order: .*\(np.ascontiguousarray\)"),
        (np.ones((0, 24), np.float32), r"\[0, 24\]"),
    ):
        np.save(path, array)
        with pytest.raises(ValueError, match=message):
            search(path, queries)
    np.save(path, made(30, 24))
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:-4], "not as long as"),
        (whole[:9], "not a .npy"),
        (b"x", "not a .npy"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            search(path, queries)
    np.save(path, made(3, 24))
    np.save(tmp_path / "w.npy", made(3, 8))
    with pytest.raises(ValueError, match=r"w.npy: vectors of 8 numbers, but those of .*v.npy"):
        search(tmp_path, queries)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_numbers_that_are_not_finite(tmp_path, block, value):
    vectors, queries = made(60, 24), made(2, 24)
    vectors[41, 3] = value
    np.save(tmp_path / "v.npy", vectors)
    with pytest.raises(ValueError, match=r"v.npy: row 41 holds NaN, infinity or too large"):
        search(tmp_path / "v.npy", queries)
    with pytest.raises(ValueError, match="vectors: row 41 holds"):
        search(vectors, queries)


def test_what_is_asked_must_fit(monkeypatch):
    vectors = made(6, 24)
    for queries, top, message in (
        (made(2, 8), 1, r"queries \[2, 8\], vectors \[6, 24\]: not of one size"),
        (np.full((1, 24), np.nan), 1, "queries: a number of them is NaN or infinite"),
        (made(2, 24), 0, "`top=0`: 1 or more"),
        (made(2, 24), 1.5, r"search\(\): top = 1.5: expected a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            search(vectors, queries, top)
    with pytest.raises(
        ValueError, match=r"search\(\): vectors = \[\[1.0\]\]: expected a text, a p"
    ):
        search([[1.0]], [1.0])
    assert search(vectors, [[1.0] * 24]).rows.shape == (1, 6)
    with pytest.raises(ValueError, match="expected floats"):
        search(np.ones((3, 24), int), made(2, 24))
