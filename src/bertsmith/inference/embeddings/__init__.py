"""Texts to vectors, and what is done with vectors. Start: `texts.py`.

`pooling.py` says how a folder's vectors are made, `texts.py` makes them, `files.py` those of files;
`vectors.py` whitens and narrows them, `search.py` finds the nearest.
"""
