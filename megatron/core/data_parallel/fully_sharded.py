"""``optim_grads_params`` (ZeRO-3, FSDP; with replicas HSDP) on PyTorch's FSDP2.

FSDP2 (``fully_shard``) keeps a rank's rows of every weight, gathers a layer before it runs and frees it afterwards.
Gradients go into buckets as in all strategies, one bucket for each layer: they accumulate in their own dtype, the
reduction overlaps on any backend, and a pipeline schedule can defer weight gradients. Sources: ZeRO (arXiv 1910.02054),
PyTorch FSDP (arXiv 2304.11277).
"""

#     forward     gather 0 - layer 0 - free 0         backward    gather 1 - layer 1 - free 1 - reduce 1
#                     gather 1 - layer 1 - free 1                     gather 0 - layer 0 - free 0 - reduce 0

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from megatron.config.parallel import ParallelConfig
from megatron.core.communication import Communicator, Work
from megatron.core.data_parallel.bucket import InFlight, ShardedGradientBucket
from megatron.core.data_parallel.buffer import GradientView, ParameterSplit, ParamShard
from megatron.core.data_parallel.strategy import DataParallel, LocalParam, ParallelGroups, expert_modules
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.parameter import ParameterInfo, RowDivision, attach_info, info_of
from megatron.core.precision import NumberFormats
from megatron.core.topology import Topology
from megatron.torch_compat import lazy_fsdp_chunks


def split_rows(info: ParameterInfo, shards: int) -> ParameterSplit:
    """FSDP2's division of dim 0: even, rounded up to a row, so that the last ranks may have no rows."""
    return ParameterSplit(info, 0, -(-info.local_shape[0] // shards) * prod(info.local_shape[1:]))


class _Unit:
    """A module whose weights are gathered at once: all expert parameters of an expert module, or all dense parameters
    of another one. ``infos`` are by the weights' names in the chunk. Weights that are trained have main gradients."""

    def __init__(
        self, chunk: nn.Module, module: nn.Module, infos: Mapping[str, ParameterInfo], sharing: ParallelGroups
    ) -> None:
        self._chunk, self._names = chunk, list(infos)
        self.fsdp = cast(FSDPModule, module)
        self.infos = list(infos.values())
        self.group = sharing.of_parameter(self.infos[0])
        self.splits = [split_rows(info, self.group.shards.size) for info in self.infos]
        self.is_trained = [parameter.requires_grad for parameter in self.parameters]
        self.trained = [split for split, is_trained in zip(self.splits, self.is_trained) if is_trained]
        self.main_grads = [MainGrad() for _ in self.trained]

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters: sharded, or whole while they are gathered."""
        return (self._chunk.get_parameter(name) for name in self._names)

    def attach_main_grads(self) -> None:
        """Attach main gradients to the whole parameters, which FSDP2 makes in its first all-gather and keeps."""
        self.fsdp.unshard()
        main_grads = iter(self.main_grads)
        for info, is_trained, parameter in zip(self.infos, self.is_trained, self.parameters):
            attach_info(parameter, info)
            if is_trained:
                attach_main_grad(parameter, next(main_grads))
        self.fsdp.reshard()


class FullyShardedDataParallel(DataParallel):
    """Shards weights, gradients and optimizer state over a group of ranks, and replicates them over the groups.

    ``chunk_units`` are the chunks, each with its modules that are gathered one at a time. The experts in a module are
    gathered apart from it, over their own ranks. The sharded weights are the master weights; gathered weights have the
    model's dtype.
    """

    needs_master_weights = False

    def __init__(
        self,
        chunk_units: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
        formats: NumberFormats,
        topology: Topology,
        config: ParallelConfig,
        has_experts: bool = False,
    ) -> None:
        sharing = ParallelGroups.of(config, topology, has_experts)
        sharing.open()
        self._units: list[_Unit] = []
        for chunk, modules in chunk_units:
            self._units += _shard_chunk(chunk, modules, formats, sharing, topology.device, config)
        share_comm_ctx([cast(FSDPModule, chunk) for chunk, _ in chunk_units])
        sizes = [sum(split.part for split in unit.trained) for unit in self._units]
        self._gradients = torch.zeros(sum(sizes), dtype=formats.gradient, device=topology.device)
        in_flight = InFlight(2 if config.overlap_grad_reduce else 0)
        param_shards: list[ParamShard] = []
        splits: list[ParameterSplit] = []
        stored: list[tuple[ParameterInfo, int, Tensor]] = []
        buckets: list[ShardedGradientBucket] = []
        for unit, gradients in zip(self._units, self._gradients.split(sizes)):
            unit.attach_main_grads()
            shards, start = unit.group.shards, 0
            for split, parameter, is_trained in zip(unit.splits, unit.parameters, unit.is_trained):
                weight = cast(DTensor, parameter.detach()).to_local().view(-1)  # this rank's rows
                first, last = split.range_of(shards.rank)
                assert weight.numel() == last - first, (split, weight.shape)
                if first < last:
                    stored.append((split.info, first, weight))
                if not is_trained:
                    continue
                if first < last:
                    gradient = gradients[start : start + last - first]
                    param_shards.append(ParamShard(split.info, first, last, weight, gradient))
                start += split.part
            if not unit.trained:
                continue
            splits += unit.trained
            # Each parameter is padded so that all ranks have equal parts: | p0: rank 0, rank 1 | p1: rank 0, rank 1 |
            part_sizes = [split.part for split in unit.trained]
            whole_sizes = [size * shards.size for size in part_sizes]
            starts = accumulate(whole_sizes, initial=0)
            main_grads = list(zip((split.info for split in unit.trained), unit.main_grads, starts))
            view = GradientView(sum(whole_sizes), None, gradients, main_grads)
            buckets.append(
                ShardedGradientBucket(
                    view, shards, unit.group.replicas, in_flight, config.defer_grad_reduce, part_sizes
                )
            )
        parameters = [pair for unit in self._units for pair in zip(unit.infos, unit.parameters)]
        # The backward pass runs the last unit first.
        super().__init__(formats, topology, sharing, param_shards, buckets[::-1], splits, parameters)
        self.local_params = [
            LocalParam(info, start, weight, sharing.holders(info, of_shard=True), self.row_division(info))
            for info, start, weight in stored
        ]

    def start_param_all_gather(self) -> None:
        """Free the gathered weights; updated weights are gathered when they are used."""
        for unit in self._units:
            unit.fsdp.reshard()

    def finish_param_all_gather(self) -> None:
        """A no-op: each rank updates all weights that it stores."""

    def finish_skipped_step(self) -> None:
        """A no-op: weights are gathered when they are used."""

    def row_division(self, info: ParameterInfo) -> RowDivision | None:
        shards = self.sharing.of_parameter(info).shards
        if shards.stride is None or len(self.sharing.holders(info, of_shard=True)) > 1:
            return None
        return RowDivision(-(-info.local_shape[0] // shards.size), shards.ranks[0], shards.stride)

    def memory(self) -> dict[str, int]:
        weights = sum(stored.tensor.untyped_storage().nbytes() for stored in self.local_params)
        return {"weights": weights, "gradients": self._gradients.untyped_storage().nbytes()}


def _shard_chunk(
    chunk: nn.Module,
    modules: Sequence[nn.Module],
    formats: NumberFormats,
    sharing: ParallelGroups,
    device: torch.device,
    config: ParallelConfig,
) -> list[_Unit]:
    """Apply FSDP2 to a chunk, and allocate its shards if the weights are on the meta device."""
    if device.type == "cpu":
        # On CPUs the logits are a view of the GEMM's output, into which nothing writes.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .*(Head|Chunk).* returned a view tensor")
    for parameter in chunk.parameters():
        # Not chunk.to(), which replaces parameters that are fake tensors.
        parameter.data = parameter.data.to(formats.master)
    infos = {name: info_of(parameter) for name, parameter in chunk.named_parameters()}
    uses = Counter(parameter for module in modules for parameter in module.parameters())
    # Modules that share a weight are gathered with the chunk.
    alone = [module for module in modules if all(uses[parameter] == 1 for parameter in module.parameters())]
    nested = {module: list(expert_modules(module)) for module in alone}
    # An inner module first: FSDP2 leaves its weights out of the outer one.
    for group, kind_modules, axis in (
        (sharing.experts, [experts for inner in nested.values() for experts in inner], "edp_shard"),
        (sharing.dense, [*alone, chunk], "dp_shard"),
    ):
        if group is None:
            continue
        mesh = group.shards.device_mesh(device.type, axis)
        for module in kind_modules:
            with lazy_fsdp_chunks():
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=config.torch_fsdp2_reshard_after_forward,
                    mp_policy=MixedPrecisionPolicy(
                        param_dtype=formats.weight if formats.weight != formats.master else None,
                        cast_forward_inputs=False,
                    ),
                )
            cast(FSDPModule, module).set_custom_all_gather(cast(Any, _AllGather(group.shards)))
    root = cast(FSDPModule, chunk)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(config.torch_fsdp2_reshard_after_forward)
    if any(parameter.is_meta for parameter in chunk.parameters()):
        chunk.to_empty(device=device)
    paths = {module: f"{path}." for path, module in chunk.named_modules()}
    units = []
    for outer, inner in nested.items():
        # The weights of the experts first, the others are left for the outer module.
        gathered = []
        for module in (*inner, outer):
            mine = [name for name in infos if name.startswith(paths[module])]
            gathered.append(_Unit(chunk, module, {name: infos.pop(name) for name in mine}, sharing))
        units += [gathered[-1], *gathered[:-1]]
    if infos:
        units.append(_Unit(chunk, chunk, infos, sharing))
    _plan_gathers(
        [(cast(FSDPModule, outer), [cast(FSDPModule, one) for one in inner]) for outer, inner in nested.items()],
        root,
        config.overlap_param_gather,
    )
    return units


def _plan_gathers(units: Sequence[tuple[FSDPModule, Sequence[FSDPModule]]], root: FSDPModule, ahead: bool) -> None:
    """Set when each unit, given with the experts in it, is gathered: when it is used, or ``ahead``, while the unit
    before it runs.

    A unit prefetches its first experts and the next unit. Experts prefetch only experts of the same unit, because a
    recomputed unit runs them in the backward pass, when the next unit is not needed any more.
    """
    for unit in (*(one for outer, inner in units for one in (outer, *inner)), root):
        unit.set_unshard_in_backward(getattr(unit, "backward_reads_weights", True))
        # Prefetching the unit itself is a no-op. It disables FSDP2's default, which follows the order of all forward
        # passes so far and is useless with several microbatches in flight.
        unit.set_modules_to_backward_prefetch([unit])
    if not ahead:
        return
    for number, (outer, inner) in enumerate(units):
        following = [units[number + 1][0]] if number + 1 < len(units) else []
        before = [units[number - 1][0]] if number > 0 else []
        if inner or following:
            outer.set_modules_to_forward_prefetch([*inner[:1], *following])
        if inner or before:
            outer.set_modules_to_backward_prefetch([*inner[-1:], *before])
        for one, other in pairwise(inner):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    if units:
        root.set_modules_to_backward_prefetch([units[-1][0]])


class _AllGather:
    """FSDP2's all-gather through a communicator, which counts and times it."""

    def __init__(self, shards: Communicator) -> None:
        self._shards = shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        pending = self._shards.start_all_gather(input_tensor, output_tensor)
        # FSDP2 overlaps synchronous collectives by streams, which CPUs do not have.
        if async_op or output_tensor.device.type == "cpu":
            return _Work(pending)
        pending.wait()
        return None


class _Work(dist.Work):
    """:class:`~megatron.core.communication.Work` as FSDP2 waits for it."""

    def __init__(self, pending: Work[Tensor]) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, *_: object) -> bool:
        self._pending.wait()
        return True
