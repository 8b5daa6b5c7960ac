"""The training step of a simulated rank, recorded launch by launch, with the unit of the model each belongs to."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.models.transformer import TransformerChunk
from megatron.core.parameter import ParameterInfo
from megatron.core.recompute import Recomputed
from megatron.planner.fake_backend import SimulatedTopology
from megatron.planner.launches import DEVICE, Launch, LaunchRecorder
from megatron.planner.plan import Run, fake_processes
from megatron.planner.simulated_rank import build_rank, run_step
from megatron.torch_compat import FakeTensorMode


def label_units(chunks: Iterable[TransformerChunk], recorder: LaunchRecorder) -> None:
    """Give launches the unit they belong to: ``embedding``, ``layer 3`` (of all layers or groups of layers of the rank)
    or ``output``; and whether they are recomputed.

    In the backward pass a unit begins with the gradient of its output. Deferred weight gradients have no unit.
    """
    number = 0
    for chunk in chunks:
        for unit in chunk.layers:
            _label(unit, f"layer {number}", recorder)
            number += 1
        for name, end in (("embedding", chunk.embedding), ("output", chunk.output_layer)):
            if end is not None:
                _label(end, name, recorder)
        for module in chunk.modules():
            if isinstance(module, Recomputed):
                _label_recompute(module.segment, recorder)


def _label(unit: nn.Module, name: str, recorder: LaunchRecorder) -> None:
    def enter(*_: Any) -> None:
        recorder.unit = name

    def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(enter)

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(leave)


def _label_recompute(segment: nn.Module, recorder: LaunchRecorder) -> None:
    def enter(*_: Any) -> None:
        recorder.is_recomputing = recorder.during.startswith("backward")

    def leave(*_: Any) -> None:
        recorder.is_recomputing = False

    segment.register_forward_pre_hook(enter)
    segment.register_forward_hook(leave)


@dataclass(frozen=True)
class RecordedStep:
    """The second training step of a rank."""

    launches: list[Launch]
    parameters: tuple[ParameterInfo, ...]
    """Those of the rank before sharding."""


def record_step(run: Run, rank: int, num_microbatches: int, document_length: int | None = None) -> RecordedStep:
    """Record the second training step of ``rank``.

    With ``document_length`` every sample consists of documents of that length. FSDP2 does not know the meta device, so
    its tensors are fake ones on a CPU; there launches between host and device are not told apart.
    """
    is_fully_sharded = run.config.parallel.sharding_strategy == "optim_grads_params"
    device = torch.device("cpu") if is_fully_sharded else DEVICE
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fully_sharded else nullcontext()
    recorder = LaunchRecorder(device)
    starts = None
    if document_length is not None:
        starts = (torch.arange(run.config.seq_length) % document_length == 0).repeat(run.config.micro_batch_size, 1)
    with fake_processes(run, rank), mode, recorder:
        topology = SimulatedTopology(
            run.grid, rank, run.device, recorder, recorder.observer, device, recorder.start_work
        )
        module = build_rank(run.config, topology, run.vocabulary, recorder, run.device)
        label_units((cast(TransformerChunk, chunk) for chunk in module.executor.chunks), recorder)
        for _ in range(2):
            recorder.launches.clear()
            run_step(run.config, topology, module, num_microbatches, recorder, starts)
    return RecordedStep(recorder.launches, tuple(split.info for split in module.data_parallel.splits))


def passes_of(launches: Iterable[Launch], microbatch: int) -> Iterator[Launch]:
    """The launches of the forward and backward passes of ``microbatch``."""
    names = tuple(f"{name} pass, microbatch {microbatch}," for name in ("forward", "backward"))
    return (launch for launch in launches if launch.during.startswith(names))
