"""The network: torch and nothing else of others. Start: `encoder.py`.

In: token ids, token types, lengths. Out: hidden states, losses, logits.
"""
