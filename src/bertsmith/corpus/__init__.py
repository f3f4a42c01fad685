"""Raw text -> token store -> pre-training batches. No torch.

In: documents of `text/readers`. Out: batches as arrays, each a pure function of its position.
Start: `examples/pairs.py`; a store is built by `build/` and read by `store/`.
"""
