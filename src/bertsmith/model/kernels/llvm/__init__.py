"""Kernels whose inner loops are written in LLVM's own code: products of blocks, rows in vectors.

Numba compiles them; nothing is installed for it. Start: `blocks.py`; `unpadded_encoder.py` answers
with them; `row_attention.py`, `tiled_masked_lm.py`, `int8_masked_lm.py` and `weight_gradient.py`
train.
"""
