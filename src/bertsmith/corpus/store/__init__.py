"""The token store on disk or behind a URL, verified by block. Start: `store.py`."""
