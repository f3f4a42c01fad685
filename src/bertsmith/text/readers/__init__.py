"""Files -> lines, rows, documents: local, compressed or behind a URL, in bounded memory.

`files.py` opens, `tables.py` reads rows, `documents.py` reads the documents of a corpus.
"""
