#!/bin/bash
# Pre-train on two machines without a scheduler. On each of them, at about the same time:
#
#   bash two-hosts.sh HOST        HOST: the name of one of the two, the same on both
#
# --corpus and --out are on a disk that both see. Port 29500 of HOST must be open to the other one.
set -euo pipefail
host=${1:?the name of the machine where the two meet}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # so that a torchrun started again is let in (PyTorch 2.13)

exec torchrun \
    --nnodes=2 --nproc-per-node=gpu \
    --rdzv-backend=c10d --rdzv-endpoint="$host:29500" --rdzv-id=bertsmith \
    --max-restarts=10 --shutdown-timeout=170 \
    -m bertsmith pretrain --resume \
    --corpus /shared/store --out /shared/run \
    --config fast --size base --batch-size 2048 --steps 100000
