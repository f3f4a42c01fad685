"""Models and runs on disk: Hugging Face folders, run folders, conversions.

Start: `model_folder.py`; `names.py` has the one table of tensor names.
"""
