"""Pre-training batches, pure functions of (seed, epoch, index). Start: `pairs.py`, `stream.py`."""
