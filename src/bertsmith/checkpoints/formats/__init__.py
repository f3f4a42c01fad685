"""Files of other programs: TensorFlow's checkpoints (V2, the tensor bundle) and PyTorch's pickles.

In: files from anybody, read with NumPy or PyTorch's restricted reader. Out: arrays by name. Start:
`google.py`, the folders of google-research/bert; `tensorflow_bundle.py` reads their tensors, by
`tensorflow_table.py`, the format of the index.
"""
