"""TensorFlow's checkpoints in its V2 format (the tensor bundle), read and written with NumPy.

In: `PREFIX.index` and `PREFIX.data-00000-of-00001` ..., from anybody. Out: arrays by name. Start:
`bundle.py`; `table.py` has the index's format, `google.py` the folders of google-research/bert.
"""
