"""benchmarks/search.py measures the vectors that it was asked for, or none."""

import numpy as np
import pytest


def test_vectors_of_another_size_are_refused(module, tmp_path):
    search, path = module("search"), tmp_path / "vectors.npy"
    search.make_vectors(path, 5, 4)
    made = path.read_bytes()
    search.make_vectors(path, 5, 4)
    assert np.load(path).shape == (5, 4) and path.read_bytes() == made
    with pytest.raises(ValueError, match=r"vectors.npy has 5 x 4 numbers, not 5 x 8: remove it"):
        search.make_vectors(path, 5, 8)
