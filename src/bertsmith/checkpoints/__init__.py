"""Models and runs on disk: Hugging Face folders, run folders, conversions.

Start: `model_folder.py`; `tensors.py` has the one table of tensor names.
"""
