"""The training loop: task -> step -> loop. Start: `task.py`, then `step.py`, `loop.py`."""
