"""The systems BERT came from and is compared with, each working: one file a system.

In: pairs of texts, or corpora and tasks. Out: run folders and tables. Start: `pairs.py`, the data.
"""
