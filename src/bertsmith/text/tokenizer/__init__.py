"""Raw text -> words -> WordPiece tokens -> rows; each file adds one idea.

`wordpiece.py` is the algorithm as the paper has it, `normalize.py` what comes before it, `rows.py`
what comes after. `tables.py` and `kernel.py` make it fast, `tokenizer.py` is what others call.
"""
