"""A tag for every word: NER, POS. Start: `sentences.py`."""
