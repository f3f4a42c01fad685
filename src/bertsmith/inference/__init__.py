"""A model that answers: text in, typed answers out. Start: `predictor.py`."""
