"""One loop, two trainings: `pretraining/` and `finetuning/`, which never see one another.

In: batches of `corpus` or `tasks`, a model. Out: a run folder. Start: `loop/loop.py`, then
`pretraining/run.py`. The files here are the machine: engine, memory, replicas, ranks, optimizers.
"""
