"""Models measured: in a `Runner` and files, out figures as they are printed; start at labelled.py,
for models that were only pre-trained at minimal_pairs.py."""
