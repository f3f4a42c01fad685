"""The command line: a file a family of commands. Start: `main.py`.

What is heavy is imported inside a command's `run_...` function, so that `--help` is quick.
"""
