"""The systems BERT came from and is compared with, each working: one file a system."""
