"""Raw text -> shards of a token store; restartable, the same bytes for any number of workers.

Start: `build.py`; `batches.py` reads, `encode.py` writes shards, `ray.py` does so on a cluster.
"""
