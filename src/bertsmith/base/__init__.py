"""Things any Python program has: settings, files, a terminal, processes, compiled functions.

No torch and nothing of BERT; every other room may import it. Start: `settings.py`.
"""

VERSION = "0.1.0"
