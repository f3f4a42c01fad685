"""Raw text -> shards of a token store, the same bytes for any workers. Start: `build.py`."""
