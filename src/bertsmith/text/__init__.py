"""Text in, piece ids out: normalisation, WordPiece, vocabularies, readers, sentences."""
