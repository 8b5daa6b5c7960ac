"""Layouts of up to four ranks that share one device equal one process on a CPU, to 1e-9 in fp64.

    pytest tests/parallel/test_staged_layouts.py --device cuda --whole-matrix

runs all rows on CUDA tensors, kernels and streams, on a machine with one GPU; with TORCH_CUDA_SANITIZER=1 torch
reports accesses of two streams that nothing orders. On a CPU the rehearsed rows run by default. Rows with FSDP2 are
missing, because torch communicates there itself, and NCCL refuses two ranks on one device.

On the late transport a missing wait is seen in the losses of a run; without it gloo mostly hides one.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import isnan
from typing import Any

import pytest

from megatron.config.activations import ActivationConfig
from megatron.config.training import OptimizerConfig
from megatron.core.activations import OffloadedTensors
from tests.parallel.comparison import compare_with_one_process
from tests.parallel.layout_run import Layout, Task, train
from tests.parallel.rows import Case
from tests.parallel.tasks import (
    ADAM,
    CONTEXT,
    CONTEXT_IN_DOCUMENTS,
    DEEP_ADAM,
    DEEP_SGD,
    DEEP_TIED,
    DELAYED,
    MUON,
    QWEN3,
    SGD,
    TENSORWISE,
    TIED,
    full,
    selective,
)
from tests.rank_pool import RankPool

OVERLAP: dict[str, Any] = {"bucket_size": 3000, "overlap_grad_reduce": True}
BOTH: dict[str, Any] = {**OVERLAP, "overlap_param_gather": True}
HOST = ActivationConfig(cpu_offloading_num_layers=2)

REHEARSED: dict[str, Case] = {
    "tensor and sequence": (SGD, Layout(2, 1, True, microbatches=2)),
    "ZeRO-1, both overlaps": (SGD, Layout(1, 2, strategy="optim", microbatches=2, **BOTH)),
    "zb-h1": (replace(DEEP_SGD, steps=1), Layout(pp=2, schedule="zb-h1", microbatches=4)),
    "ring attention in documents": (CONTEXT_IN_DOCUMENTS, Layout(cp=2, microbatches=2)),
}
OTHERS: dict[str, Case] = {
    "tensor of four": (ADAM, Layout(4, 1, True)),
    "tensor, overlapped by messages": (TIED, Layout(4, 1, True, tp_overlap="pipelined", microbatches=2)),
    "replicas, overlap": (SGD, Layout(1, 4, microbatches=2, **OVERLAP)),
    "ZeRO-1 in two instances": (ADAM, Layout(1, 4, strategy="optim", instances=2, **BOTH)),
    "ZeRO-2, both overlaps": (SGD, Layout(1, 2, strategy="optim_grads", microbatches=2, **BOTH)),
    "tensor and ZeRO-1": (TIED, Layout(2, 2, True, "optim", microbatches=2, **BOTH)),
    "gpipe": (DEEP_SGD, Layout(pp=4, schedule="gpipe", microbatches=4)),
    "1f1b": (DEEP_TIED, Layout(pp=4, schedule="1f1b", microbatches=8)),
    "interleaved": (DEEP_SGD, Layout(pp=4, schedule="interleaved", microbatches=8)),
    "zb-v": (DEEP_ADAM, Layout(1, 2, pp=2, schedule="zb-v", microbatches=4, strategy="optim", **BOTH)),
    "dualpipe-v": (DEEP_SGD, Layout(2, 1, True, pp=2, schedule="dualpipe-v", microbatches=4)),
    "ring attention of four": (CONTEXT, Layout(cp=4, microbatches=2)),
    "gathered keys": (CONTEXT_IN_DOCUMENTS, Layout(2, 1, True, cp=2, cp_comm_type=("allgather",))),
    "heads exchanged": (CONTEXT, Layout(cp=4, cp_comm_type=("a2a",))),
    "attention in two levels": (CONTEXT_IN_DOCUMENTS, Layout(cp=4, cp_comm_type=("a2a+p2p",), cp_sizes=(2, 2))),
    "Muon": (MUON, Layout(2, 2, True, "optim", microbatches=2, bucket_size=3000, overlap_param_gather=True)),
    "QK norm": (QWEN3, Layout(2, pp=2, schedule="zb-v", microbatches=4)),
    "offload": (SGD, Layout(2, 1, True, microbatches=2, activations=HOST)),
    "recompute of layers": (SGD, Layout(2, microbatches=2, activations=full("uniform", 1))),
    "recompute of modules": (SGD, Layout(2, 1, True, activations=selective("core_attn", "layernorm", "mlp_act"))),
    "FP8 delayed": (DELAYED, Layout(2, 1, True, pp=2, schedule="zb-h1", microbatches=4)),
    "FP8 tensorwise": (TENSORWISE, Layout(2, 1, True)),
}


def rows() -> Iterator[Any]:
    for name, case in REHEARSED.items():
        yield pytest.param(*case, id=f"rehearsed {name}")
    for name, case in OTHERS.items():
        yield pytest.param(*case, id=name, marks=pytest.mark.whole_matrix)


@pytest.mark.parametrize(("task", "layout"), list(rows()))
def test_ranks_on_one_device_equal_one_process(
    four_ranks: RankPool, device_name: str, task: Task, layout: Layout
) -> None:
    compare_with_one_process(four_ranks, task, replace(layout, staged=True, device=device_name))


TASK = Task(OptimizerConfig(optimizer="sgd"), steps=2)
OFFLOADED = Layout(activations=full("uniform", 1, cpu_offloading_num_layers=2), late=True)


def test_copies_from_the_host_that_are_not_waited_for_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = OffloadedTensors.fetch

    def fetch_and_forget(saved: OffloadedTensors) -> None:
        fetch(saved)
        saved._on_device = None

    assert not isnan(train(TASK, OFFLOADED).grad_norms[0])
    monkeypatch.setattr(OffloadedTensors, "fetch", fetch_and_forget)
    assert isnan(train(TASK, OFFLOADED).grad_norms[0])
