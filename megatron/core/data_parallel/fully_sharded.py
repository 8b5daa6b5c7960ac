"""``optim_grads_params`` (ZeRO-3, FSDP; with replicas HSDP) on PyTorch's FSDP2.

FSDP2 (``fully_shard``) keeps a rank's rows of every weight, gathers a layer before it runs and frees it afterwards.
Gradients take the way of all strategies, through main_grads into buckets, one for each layer: that accumulates them in
their own format, reduces them behind the backward pass on any backend, and lets a pipeline schedule compute weight
gradients later. Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator, Work
from megatron.core.data_parallel.bucket import InFlight, RowShardedGradientBucket
from megatron.core.data_parallel.buffer import GradientView, ParameterSplit, ParamShard
from megatron.core.data_parallel.strategy import DataParallel, LocalParam, Sharing
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.parameter import ParameterInfo, attach_info, info_of
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology


@dataclass(frozen=True)
class RowPart:
    """The rows of one parameter that a rank of the shard group keeps: FSDP2's division of dim 0."""

    info: ParameterInfo
    first: int
    rows: int
    padded_rows: int
    """As many on every rank."""

    @classmethod
    def of(cls, info: ParameterInfo, rank: int, shards: int) -> "RowPart":
        """The part of ``rank`` among ``shards``: an even division, rounded up, so that the last ranks may have none."""
        padded = -(-info.local_shape[0] // shards)
        first = min(rank * padded, info.local_shape[0])
        return cls(info, first, min(padded, info.local_shape[0] - first), padded)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.info.local_shape[1:])

    @property
    def padded_size(self) -> int:
        """Elements of a part, padding included."""
        return self.padded_rows * self.width


class _Unit:
    """A module whose weights are gathered at once: those in ``infos``, by their name in the chunk."""

    def __init__(self, chunk: nn.Module, module: nn.Module, infos: Mapping[str, ParameterInfo]) -> None:
        self._chunk, self._names = chunk, list(infos)
        self.fsdp = cast(FSDPModule, module)
        self.infos = list(infos.values())
        self.main_grads = [MainGrad() for _ in infos]

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters: sharded, or whole while they are gathered."""
        return (self._chunk.get_parameter(name) for name in self._names)

    def attach_slots(self) -> None:
        """Give the whole parameters, which are made by the first gathering and kept, their main_grads."""
        self.fsdp.unshard()
        for info, main_grad, parameter in zip(self.infos, self.main_grads, self.parameters):
            attach_main_grad(attach_info(parameter, info), main_grad)
        self.fsdp.reshard()

    def local_weights(self) -> Iterator[Tensor]:
        """This rank's rows of every parameter, flat."""
        return (cast(DTensor, parameter.detach()).to_local().view(-1) for parameter in self.parameters)


class FullyShardedDataParallel(DataParallel):
    """Shards weights, gradients and optimizer state over a group of ranks, and replicates over the groups.

    ``chunk_units`` are the modules that the run calls, each with the modules in it that are gathered one at a time.
    The sharded weights are the master weights; what is gathered has the model's format.
    """

    needs_master_weights = False

    def __init__(
        self,
        chunk_units: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
        formats: NumberFormats,
        topology: Topology,
        config: ParallelConfig,
    ) -> None:
        sharing = Sharing.of(config, topology)
        shards, replicas = sharing.shards, sharing.replicas
        self._units: list[_Unit] = []
        for chunk, modules in chunk_units:
            self._units += _shard_chunk(chunk, modules, formats, shards, topology.device, config)
        share_comm_ctx([cast(FSDPModule, chunk) for chunk, _ in chunk_units])
        parts = [[RowPart.of(info, shards.rank, shards.size) for info in unit.infos] for unit in self._units]
        sizes = [sum(part.padded_size for part in unit_parts) for unit_parts in parts]
        self._gradients = torch.zeros(sum(sizes), dtype=formats.gradient, device=topology.device)
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        param_shards: list[ParamShard] = []
        buckets: list[RowShardedGradientBucket] = []
        for unit, unit_parts, gradients in zip(self._units, parts, self._gradients.split(sizes)):
            unit.attach_slots()
            param_shards += _param_shards(unit, unit_parts, gradients)
            part_sizes = [part.padded_size for part in unit_parts]
            view = _gradient_view(unit, part_sizes, gradients, shards.size)
            common = view, shards, replicas, formats.reduction, in_flight
            buckets.append(RowShardedGradientBucket(*common, config.defer_grad_reduce, part_sizes))
        self.local_params = [LocalParam(shard.info, shard.start, shard.weight) for shard in param_shards]
        # Backward comes to the last unit first.
        splits = [_split(info, shards.size) for unit in self._units for info in unit.infos]
        super().__init__(formats, topology, sharing, param_shards, buckets[::-1], splits)

    def start_param_all_gather(self) -> None:
        """Let go of weights that are still gathered; updated ones are gathered when they are used."""
        for unit in self._units:
            unit.fsdp.reshard()

    def finish_param_all_gather(self) -> None:
        """Nothing: what this rank stores, it has updated itself."""

    def memory(self) -> dict[str, int]:
        """Bytes of the shards."""
        weights = sum(stored.tensor.untyped_storage().nbytes() for stored in self.local_params)
        return {"weights": weights, "gradients": self._gradients.untyped_storage().nbytes()}


def _shard_chunk(
    chunk: nn.Module,
    modules: Sequence[nn.Module],
    formats: NumberFormats,
    shards: Communicator,
    device: torch.device,
    config: ParallelConfig,
) -> list[_Unit]:
    """Put one chunk under FSDP2, and give its weights memory if they have none."""
    if device.type == "cpu":
        # There logits are a view of what the product returned. Nobody writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .*(Head|Chunk).* returned a view tensor")
    for parameter in chunk.parameters():
        # Not chunk.to(), which makes other parameters where tensors are fake ones.
        parameter.data = parameter.data.to(formats.master)
    infos = {name: info_of(parameter) for name, parameter in chunk.named_parameters()}
    uses = Counter(parameter for module in modules for parameter in module.parameters())
    # Modules that share a weight are gathered together, with the chunk, from the first's turn to the last's.
    alone = [module for module in modules if all(uses[parameter] == 1 for parameter in module.parameters())]
    mesh = shards.device_mesh(device.type, "dp_shard")
    for module in (*alone, chunk):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=config.torch_fsdp2_reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=formats.weight if formats.weight != formats.master else None, cast_forward_inputs=False
            ),
        )
    root = cast(FSDPModule, chunk)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(config.torch_fsdp2_reshard_after_forward)
    if any(parameter.is_meta for parameter in chunk.parameters()):
        chunk.to_empty(device=device)
    paths = {module: f"{path}." for path, module in chunk.named_modules()}
    units = []
    for module in alone:
        mine = [name for name in infos if name.startswith(paths[module])]
        units.append(_Unit(chunk, module, {name: infos.pop(name) for name in mine}))
    if infos:
        units.append(_Unit(chunk, chunk, infos))
    _plan_gathers([cast(FSDPModule, module) for module in alone], root, shards, config.overlap_param_gather)
    return units


def _plan_gathers(units: Sequence[FSDPModule], root: FSDPModule, shards: Communicator, ahead: bool) -> None:
    """Say when each unit is gathered: when it is used, or ``ahead``, while the one before it runs."""
    for unit in (*units, root):
        unit.set_custom_all_gather(cast(Any, _AllGather(shards)))
        unit.set_unshard_in_backward(getattr(unit, "backward_reads_weights", True))
    for number, unit in enumerate(units):
        if ahead and number + 1 < len(units):
            unit.set_modules_to_forward_prefetch([units[number + 1]])
    for unit, before in zip((*units, root), (None, *units)):
        # Itself, which is there already, means none. Left to itself, FSDP2 would take the one before in the order of
        # all forward passes so far, which is of no use with several microbatches in flight.
        unit.set_modules_to_backward_prefetch([before if ahead and before is not None else unit])


class _AllGather:
    """Lets FSDP2 gather through a communicator, like everybody else."""

    def __init__(self, shards: Communicator) -> None:
        self._shards = shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is gathered."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; a result is to be waited for."""
        pending = self._shards.start_all_gather(input_tensor, output_tensor)
        # FSDP2 overlaps what is not asynchronous by streams, which CPUs do not have.
        if async_op or output_tensor.device.type == "cpu":
            return _Work(pending)
        pending.wait()
        return None


class _Work(dist.Work):
    """A pending result in the form that FSDP2 waits for."""

    def __init__(self, pending: Work[Tensor]) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, *_: object) -> bool:
        """Wait until it is there."""
        self._pending.wait()
        return True


def _split(info: ParameterInfo, shards: int) -> ParameterSplit:
    parts = [RowPart.of(info, rank, shards) for rank in range(shards)]
    return ParameterSplit(
        info, tuple((part.first * part.width, (part.first + part.rows) * part.width) for part in parts)
    )


def _param_shards(unit: _Unit, parts: Sequence[RowPart], gradients: Tensor) -> Iterator[ParamShard]:
    """What this rank updates of a unit, whose gradients it keeps in ``gradients``, one padded part after another."""
    start = 0
    for part, weight in zip(parts, unit.local_weights()):
        first, size = part.first * part.width, part.rows * part.width
        assert weight.numel() == size, (part, weight.shape)
        if size:
            yield ParamShard(part.info, first, first + size, weight, gradients[start : start + size])
        start += part.padded_size


def _gradient_view(unit: _Unit, part_sizes: Sequence[int], shard: Tensor, shards: int) -> GradientView:
    """A unit's bucket: whole parameters one after another, each padded to a part for every rank."""
    starts = accumulate((size * shards for size in part_sizes), initial=0)
    return GradientView(sum(part_sizes) * shards, None, shard, list(zip(unit.infos, unit.main_grads, starts)))
