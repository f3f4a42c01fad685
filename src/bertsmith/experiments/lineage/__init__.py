"""The systems BERT came from and is compared with, a file each."""
