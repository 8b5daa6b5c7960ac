#!/usr/bin/env python3
"""Train one step of a tiny model, and print in order what rank 0 computes and communicates. See docs/one_step.md.

torchrun --nproc-per-node 4 examples/one_step.py [FLAGS OF pretrain_llama.py]
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.communication import CollectiveRecord
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import build_kernels
from megatron.core.models.parallelize import parallelize
from megatron.core.optimizer import Optimizer
from megatron.core.parameter import info_of
from megatron.core.precision import build_loss_scaler
from megatron.core.topology import Topology
from megatron.schedules.schedule import Action
from megatron.training.context import TrainModule
from megatron.training.initialize import Process, init_distributed
from megatron.training.loop.step import train_step

VOCABULARY = 192
FLAGS = f"""
    --num-layers 1 --hidden-size 64 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 160
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 96 --mock-data
    --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-3 --device cpu
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
"""

GEMMS = ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm")
OTHERS = {
    "aten::silu": "SwiGLU",
    "aten::logsumexp": "log-sum-exp",
    "aten::index_add_": "rows",
    "aten::_foreach_norm": "norm",
    "aten::_foreach_mul_": "clip",
    "aten::_fused_adamw_": "AdamW",
}
"""Operators that are printed although they read no parameter."""


def short(name: str) -> str:
    """The name of a parameter without its block: ``layers.0.linear_qkv``."""
    return name.removesuffix(".weight").replace(".self_attention", "").replace(".mlp", "")


class Trace(TorchDispatchMode):
    """Prints what rank 0 does: the phases of the step, GEMMs, norms and attention with their shapes, collectives with
    their bytes. It is the timers of the step, the recorder of passes, and the observer of collectives and operators."""

    def __init__(self, topology: Topology, model: torch.nn.Module) -> None:
        super().__init__()
        self.topology, self.is_backward, self.weight = topology, False, ""
        self.names = {one.data_ptr(): short(info_of(one).name) for one in model.parameters()}
        for communicator in topology.communicators:
            communicator.observer = self.collective

    def line(self, what: str, where: str = "", size: str = "") -> None:
        if self.topology.rank == 0:
            print(f"{what:<21}{where:<28}{size}".rstrip())

    def operation(self, kind: str, weight: str, size: str) -> None:
        backward = "input gradient" if kind == "GEMM" else f"{kind} backward"
        self.line(f"  {backward if self.is_backward else kind}", weight, size)

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        """A phase of the step, by the name of its timer."""
        self.is_backward = False
        if name != "forward-backward":
            self.line(f"\n{name}")
        return nullcontext()

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """A forward or backward pass."""
        self.is_backward = action.kind == "B"
        self.line(f"\n{'backward' if self.is_backward else 'forward'} pass of microbatch {action.microbatch}")
        yield

    def collective(self, record: CollectiveRecord) -> None:
        grid, known = self.topology.grid, self.topology.coordinates
        # Axes of one rank are left out; a channel of the pipeline has a name that is no axis.
        axes = [axis for axis in record.axes.split("x") if axis not in known or len(grid.group(0, (axis,))) > 1]
        kind = record.kind.replace("_", "-")
        self.line(f"  {kind}", f"{' x '.join(axes)}: {record.group_size} ranks", f"{record.num_bytes:,} bytes")

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = operator(*args, **(kwargs or {})), operator._schema.name
        tensors = [one for one in args if isinstance(one, Tensor)]
        read = next((one for one in tensors if one.data_ptr() in self.names), None)
        if operator.is_view or self.topology.rank > 0:
            return result
        if read is not None and result.dim() > 1:
            self.weight = self.names[read.data_ptr()]
            kind = "RMSNorm" if read.dim() == 1 else "GEMM" if name in GEMMS else "rows"
            self.operation(kind, self.weight, f"{list(tensors[0].shape)} -> {list(result.shape)}")
        elif name in GEMMS:
            shapes = " x ".join(str(list(one.shape)) for one in (tensors[0], tensors[1].t()))
            self.line("  weight gradient", self.weight, shapes)
        elif name in OTHERS or "attention" in name:
            size = list(tensors[0].shape) if tensors else f"{sum(one.numel() for one in args[0]):,} elements"
            self.operation(OTHERS.get(name, "attention"), "", str(size))
        return result


def main(flags: Sequence[str]) -> None:
    process = Process.from_environment(os.environ)
    config = parse_command_line([*FLAGS.split(), *flags])
    check_run(config, process.world_size)
    if config.parallel.sharding_strategy == "optim_grads_params":
        sys.exit("FSDP replaces the parameters whose names this script prints: use another sharding strategy.")
    with init_distributed(config.parallel, process, torch.device("cpu")) as topology:
        # Build this rank's part, as megatron/training/build/run.py does.
        kernels = build_kernels(config, topology, VOCABULARY)
        parallel = parallelize(config, topology, VOCABULARY, kernels)
        parallel.data_parallel.initialize(config.training.seed)
        optimizer = Optimizer(config.optimizer, parallel.data_parallel, topology, kernels.optimizer)
        scaler = build_loss_scaler(config.precision)
        module = TrainModule(parallel.executor, parallel.data_parallel, optimizer, scaler, topology)
        # The same samples in every layout: each replica has its part of them, each context-parallel rank its positions.
        size, replicas = config.training.global_batch_size, topology.data_parallel
        text = torch.randint(VOCABULARY, (size, config.seq_length + 1), generator=torch.Generator().manual_seed(1))
        here = parallel.model.context.context_parallel.split.positions(config.seq_length)
        microbatches = [
            {"tokens": one[:, here], "labels": one[:, here + 1], "loss_mask": torch.ones(len(one), len(here))}
            for one in text.split(config.micro_batch_size)[replicas.rank :: replicas.size]
        ]
        trace = module.executor.recorder = Trace(topology, parallel.model)
        position = ", ".join(f"{axis} {topology.coordinates[axis]}" for axis in ("tp", "cp", "pp", "dp"))
        shape = list(microbatches[0]["tokens"].shape)
        trace.line(f"rank 0 of {process.world_size} ({position}): tokens and labels, {shape} each")
        with trace:
            outcome = train_step(
                module,
                iter(microbatches),
                Hyperparameters(learning_rate=1e-3, weight_decay=0.1),
                num_microbatches=len(microbatches),
                expected_tokens=size * config.seq_length,
                timers=trace,
            )
        loss, count, norm = outcome.loss, outcome.num_tokens, outcome.grad_norm
        trace.line(f"\nloss {loss:.3f} of {count:.0f} tokens, gradient norm {norm:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
