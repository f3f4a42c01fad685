"""Learn, extend and report on WordPiece vocabularies. Start: `train.py`."""
