"""Masked LM with next-sentence prediction, and the other objectives (paper section 3.1).

Start: `run.py`; `objectives.py` has the losses, `settings.py` what may be set, `recipes/` the TOML
files that come along.
"""
