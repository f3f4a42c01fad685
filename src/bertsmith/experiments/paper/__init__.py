"""Experiments as data: the paper's tables and figure, and the comparison with the lineage.

In: an experiment (tables/*.toml), text, folders of tasks. Out: cells that are computed once, and a
table with the paper's figures, tests and verdicts. Start: `reproduce.py`.
"""
