"""Files -> lines, rows, documents: local, compressed or behind a URL, in bounded memory.

`files.py` opens and reads lines, `tables.py` and `columnar.py` read rows, `documents.py` reads the
documents of a corpus, `wikipedia.py` those of a dump.
"""
