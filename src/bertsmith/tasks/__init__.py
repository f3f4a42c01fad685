"""Labelled data: files -> examples -> features -> metrics -> answer files. No torch.

Start: `task.py`, the table of data sets; a new one like GLUE's is a row there.
"""
