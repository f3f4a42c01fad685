"""One model, one task, many seeds (paper section 4). Start: `run.py`, then `trainer.py`."""
