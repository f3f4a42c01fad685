"""Whole experiments in one function; only the command line reaches them. Start: `quickstart.py`."""
