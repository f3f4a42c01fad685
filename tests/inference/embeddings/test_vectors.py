"""Whitening by its definition; int8 and bits beside sentence-transformers."""

import numpy as np
import pytest
import torch

from bertsmith.inference.embeddings.vectors import Whitening, quantize, read_ranges, value_ranges


def correlated(count, size, seed=1):
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(size, size)) * np.geomspace(5.0, 0.05, size)
    return (random.normal(size=(count, size)) @ mixing.T + 3.0).astype(np.float32)


@pytest.mark.parametrize("dimensions", [None, 6, 2])
def test_whitened_vectors_have_mean_0_and_the_identity_as_covariance(dimensions):
    vectors = correlated(300, 6)
    white = Whitening.fit(vectors, dimensions).apply(vectors).astype(np.float64)
    size = dimensions or 6
    np.testing.assert_allclose(white.mean(axis=0), np.zeros(size), atol=1e-4)
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(size), atol=1e-3)


def test_whitening_without_dimensions_is_the_inverse_root_of_the_covariance():
    vectors = correlated(300, 5)
    whitening = Whitening.fit(vectors)
    root, covariance = whitening.matrix, np.cov(vectors.astype(np.float64).T, bias=True)
    np.testing.assert_allclose(root, root.T, atol=1e-8)
    np.testing.assert_allclose(root @ covariance @ root, np.eye(5), atol=1e-6)
    # cosines are those of the principal directions, which are only turned
    turned, white = (w.apply(vectors)[:9] for w in (Whitening.fit(vectors, 5), whitening))
    np.testing.assert_allclose(turned @ turned.T, white @ white.T, atol=1e-3)


def test_the_direction_that_a_layer_norm_takes_away_stays_empty():
    vectors = correlated(300, 6)
    normed = torch.nn.functional.layer_norm(torch.from_numpy(vectors), (6,)).numpy()
    white = Whitening.fit(normed).apply(normed)
    variances = np.linalg.eigvalsh(np.cov(white.T, bias=True))
    np.testing.assert_allclose(variances, [0, 1, 1, 1, 1, 1], atol=1e-3)
    assert Whitening.fit(normed, 5).matrix.shape == (6, 5)
    with pytest.raises(ValueError, match="300 texts span 5 of 6 directions"):
        Whitening.fit(normed, 6)


def test_dimensions_are_the_directions_of_largest_variance():
    random = np.random.default_rng(2)
    vectors = random.normal(size=(500, 3)) * [1.0, 9.0, 3.0]
    matrix = Whitening.fit(vectors, 2).matrix
    assert np.abs(matrix).argmax(axis=0).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("count", "dimensions", "message"),
    [
        (4, None, "4 texts span 3 of 6 directions: give more texts"),
        (4, 4, "4 texts span 3 of 4 directions"),
        (1, 1, "1 texts span 0 of 1"),
        (50, 7, "`dimensions=7`: the model's vectors have 1 to 6"),
        (50, 0, "`dimensions=0`: the model's vectors have 1 to 6"),
    ],
)
def test_too_few_texts_to_whiten(count, dimensions, message):
    with pytest.raises(ValueError, match=message):
        Whitening.fit(correlated(count, 6), dimensions)
    assert Whitening.fit(correlated(4, 6), 3).matrix.shape == (6, 3)


@pytest.mark.parametrize("dimensions", [3, 16, 384])
def test_int8_and_bits_are_those_of_sentence_transformers(dimensions):
    theirs = pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings
    random = np.random.default_rng(1)
    vectors = random.normal(size=(500, dimensions)).astype(np.float32)
    vectors[:, 0] = 0.25  # a range of 0
    others = 1.5 * random.normal(size=(40, dimensions)).astype(np.float32)  # beyond the ranges
    ranges = value_ranges(vectors)
    np.testing.assert_array_equal(quantize(vectors, "int8"), theirs(vectors, "int8"))
    expected = theirs(others, "int8", calibration_embeddings=vectors)
    np.testing.assert_array_equal(quantize(others, "int8", ranges), expected)
    np.testing.assert_array_equal(quantize(vectors, "binary"), theirs(vectors, "binary"))


@pytest.mark.parametrize(
    ("vectors", "kind", "ranges", "message"),
    [
        (np.ones((3, 4)), "uint4", None, r"quantize\(\): kind = 'uint4': expected int8 or binary"),
        ([[1.0, 2.0]], "int8", None, r"quantize\(\): vectors = .*: expected ndarray"),
        (np.array([[1.0, 2.0], [np.nan, 1.0]]), "int8", None, "vectors: row 1 holds NaN"),
        (np.array([[1.0, np.inf], [2.0, 1.0]]), "binary", None, "vectors: row 0 holds NaN"),
        (np.ones((3, 4), int), "binary", None, "vectors of int64"),
        (np.ones((1, 4)), "int8", None, "the ranges of one vector say nothing"),
        (np.ones((3, 4)), "int8", np.ones((2, 5)), r"ranges \[2, 5\]: expected"),
        (np.ones((3, 4)), "int8", np.full((2, 4), np.nan), "finite"),
    ],
)
def test_vectors_that_cannot_be_narrowed(vectors, kind, ranges, message):
    with pytest.raises(ValueError, match=message):
        quantize(vectors, kind, ranges)


def test_ranges_of_a_file(tmp_path):
    np.save(tmp_path / "r.npy", np.ones((2, 4), np.float32))
    assert read_ranges(tmp_path / "r.npy").shape == (2, 4)
    np.save(tmp_path / "v.npy", np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="3 rows: ranges are 2"):
        read_ranges(tmp_path / "v.npy")
