"""Run folders -> pages, pictures, comparisons. No torch, no training code. Start: `pages.py`."""
