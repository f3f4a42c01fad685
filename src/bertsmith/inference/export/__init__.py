"""Models as files of other programs: ONNX (ONNX Runtime, transformers.js) and OpenVINO.

In comes a model folder, out a folder in the layout that sentence-transformers, optimum and
transformers.js look for, and the figures of a comparison with the model itself. Start reading at
`export.py`; `graph.py` writes the model down as an ONNX graph, `targets.py` makes and opens the
files, `comparison.py` measures.
"""
