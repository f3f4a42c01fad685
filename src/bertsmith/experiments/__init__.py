"""Whole experiments on top of everything below; only `cli` reaches them."""
