#!/usr/bin/env python3
"""What the checks of numbers cost: replicas, replays and the known product, in processor time of this rank.

A run of the quickstart's model on --mock-data, with checks more often than by default; more flags of pretrain_llama.py
may follow. On several ranks:

    OMP_NUM_THREADS=1 python -m megatron.operation.launch --standalone --nproc-per-node 2 benchmarks/benchmark_guard.py
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.commands import pretrain_llama
from megatron.features.known_product.listener import KnownProduct
from megatron.features.replay.listener import REPLAY_INTERVAL, Replay
from megatron.features.replicas.flags import GuardConfig
from megatron.features.replicas.listener import StateCheck
from megatron.training.loop.trainer import Trainer

FLAGS = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 --num-query-groups 4
    --mock-data --vocab-size 4096 --seq-length 256 --micro-batch-size 8 --global-batch-size 16 --num-workers 0
    --train-iters 33 --lr 2e-3 --log-interval 8 --peak-tflops 1
    --check-replicas-interval 4 --replay-interval 8
"""


class Meter:
    """Seconds of processor time of the calls of a method."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds: list[float] = []
        self._original: Callable[..., Any] = getattr(owner, name)
        self.patch = mock.patch.object(owner, name, lambda *arguments, **named: self._call(*arguments, **named))

    def _call(self, *arguments: Any, **named: Any) -> Any:
        started = time.process_time()
        result = self._original(*arguments, **named)
        self.seconds.append(time.process_time() - started)
        return result


def main(arguments: list[str]) -> int:
    """Print a table on rank 0."""
    checks, digests = Meter(StateCheck, "_check"), Meter(StateCheck, "_digests")
    replays, products = Meter(Replay, "run"), Meter(KnownProduct, "count_errors")
    steps = Meter(Trainer, "_train_iteration")
    with checks.patch, digests.patch, replays.patch, products.patch, steps.patch:
        code = pretrain_llama.main([*FLAGS.split(), *arguments])
    if int(os.environ.get("RANK", 0)) == 0:
        # Most iterations have neither a check nor a replay.
        step = median(steps.seconds)
        # A check has the digests before the update and those after the update before it.
        check = median(checks.seconds) + 2 * median(digests.seconds)
        interval = GuardConfig().check_replicas_interval
        print(f"step: {step * 1e3:.1f} ms of processor time")
        print(f"check: {check * 1e3:.2f} ms, {100 * check / step / interval:.3f} % of a step every {interval} steps")
        if replays.seconds:
            replay = median(replays.seconds)
            share = 100 * replay / step / REPLAY_INTERVAL
            print(f"replay: {replay * 1e3:.1f} ms, {share:.3f} % of a step every {REPLAY_INTERVAL} steps")
        print(f"known product: {median(products.seconds) * 1e3:.2f} ms")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
