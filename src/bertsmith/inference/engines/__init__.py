"""Engines that compute answers: our own, compiled, on a CPU, or PyTorch.

In: rows of token ids. Out: hidden states and a head's outputs, float32. Start: `native.py`.
"""
