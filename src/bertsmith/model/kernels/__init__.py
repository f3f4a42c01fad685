"""Fused operators with their gradients, on a CPU (Numba) and on CUDA.

Each has a plain PyTorch form, which its test compares it with. Start: `fused_layers.py`.
"""
