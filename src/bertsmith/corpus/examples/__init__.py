"""A pre-training batch by its position: a pure function of (seed, epoch, index).

Start: `pairs.py` (sentence pairs) and `masking.py`; `stream.py` hands batches out,
`mixture.py` mixes several stores.
"""
