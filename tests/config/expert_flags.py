"""Flags of mixture of experts that must be refused, and combinations that must pass: rows of ``test_checks.py``."""

GOOD = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
EXPERTS = f"{GOOD} --num-experts 8"

REFUSED = [
    (f"{GOOD} --expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2, --num-experts"),
    (f"{EXPERTS} --moe-layer-freq 0", 1, "--moe-layer-freq 0, 1"),
]
