"""Run by test_memory.py: python memory_of_steps.py SIZE SHAPE prints the bytes that steps took."""

import json
import resource
import sys

import torch

from bertsmith.base.processes import keep_freed_memory
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, Targets
from bertsmith.model.initialization import initialize
from bertsmith.training.engine import choose_engine
from bertsmith.training.loop.update import make_update
from bertsmith.training.memory import StepShape
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import Replicas


def steps(size, pieces, shape, count):
    config = config_for(size, pieces, dropout=0.0, attention_dropout=0.0)
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    optimizer = build_optimizer(model, shape.optimizer, 1e-4, 0.01)
    engine = choose_engine("cpu", shape.precision, shape.workers)

    def gradients(replica, rows, number):
        replica.train()
        ids = torch.full((rows, shape.length), number + 5)
        positions = torch.arange(1, shape.predictions + 1).repeat(rows, 1)
        labels = torch.full((rows * shape.predictions,), 7)
        with engine.autocast():
            losses = replica.losses(ids, ids * 0, None, Targets(positions, None, labels))
        (losses.mlm_loss + losses.nsp_logits.sum()).backward()

    with Replicas(model, engine) as replicas:
        for _ in range(count):
            replicas.map(
                gradients, [shape.micro_batch_size] * (shape.batch_size // shape.micro_batch_size)
            )
            update = make_update(optimizer, replicas, clip=1.0)
            update.norm()
            update.move()


def resident():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def main():
    keep_freed_memory()
    shape = StepShape(**json.loads(sys.argv[2]))
    steps("1x64", 100, StepShape(**{**vars(shape), "batch": 2, "micro_batch": 1}), 1)  # libraries
    before = resident()
    steps(sys.argv[1], 30522, shape, 3)
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    main()
