"""Question answering: SQuAD 1.1 and 2.0, TriviaQA, own columns. Start: `questions.py`."""
