"""Run folders -> pages, pictures, comparisons. No torch, no training code.

Start: `pages.py` for `bertsmith report`, `significance.py` for `bertsmith compare`.
"""
