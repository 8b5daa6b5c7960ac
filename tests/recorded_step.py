"""The training step of a simulated rank, recorded launch by launch."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import cast

import torch

from megatron.core.models.transformer import TransformerChunk
from megatron.planner.launches import DEVICE, CompiledKernels, Launch, LaunchRecorder
from megatron.planner.plan import Run, fake_processes
from megatron.planner.simulated_rank import SimulatedTopology, build_rank, run_step
from megatron.torch_compat import FakeTensorMode


def record_step(
    run: Run,
    rank: int,
    num_microbatches: int,
    document_length: int | None = None,
    kernels_of: CompiledKernels = lambda *compiled: None,
) -> list[Launch]:
    """The launches of the second training step of ``rank``.

    With ``document_length`` every sample consists of documents of that length. FSDP2 does not know the meta device, so
    its tensors are fake ones on a CPU; there launches between host and device are not told apart.
    """
    is_fully_sharded = run.config.parallel.sharding_strategy == "optim_grads_params"
    device = torch.device("cpu") if is_fully_sharded else DEVICE
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fully_sharded else nullcontext()
    recorder = LaunchRecorder(device, kernels_of=kernels_of)
    starts = None
    if document_length is not None:
        starts = (torch.arange(run.config.seq_length) % document_length == 0).repeat(run.config.micro_batch_size, 1)
    with fake_processes(run, rank), mode, recorder:
        topology = SimulatedTopology(
            run.grid, rank, run.device, recorder, recorder.observer, device, recorder.start_work
        )
        module = build_rank(run.config, topology, run.vocabulary, recorder, run.device)
        for chunk in module.executor.chunks:
            recorder.label_recompute(cast(TransformerChunk, chunk))
        for _ in range(2):
            recorder.launches.clear()
            run_step(run.config, topology, module, num_microbatches, recorder, starts)
    return recorder.launches


def passes_of(launches: Iterable[Launch], microbatch: int) -> Iterator[Launch]:
    """The launches of the forward and backward passes of ``microbatch``."""
    names = tuple(f"{name} pass, microbatch {microbatch}," for name in ("forward", "backward"))
    return (launch for launch in launches if launch.during.startswith(names))
