"""What a step launches on a GPU, counted on tensors without memory, and the bytes that a rank sends.

Tensors of the GPU are on the meta device here: torch without CUDA has no autograd for fake CUDA tensors, and host
tensors stay distinguishable.

A :class:`LaunchRecorder` records the operators of a simulated rank: GEMMs, attention, and elementwise operators (all
others) with the bytes that they read and write, computed from shapes and dtypes; also collectives, copies between host
and device, and host syncs. Views and allocations launch nothing. A kernel that is compiled or written in Triton counts
as one operator. For a price (:mod:`megatron.planner.rehearsal.launch_prices`) GEMMs have their shape, attention its
FLOPs, and collectives their group. :class:`Traffic` sums the bytes of collectives by axis of the grid and by link.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.core.activations import Recomputed
from megatron.core.communication import CollectiveRecord, Communicator, Observer
from megatron.core.topology import RankGrid
from megatron.planner.simulated_rank import CompletedWork, ShapeTracker
from megatron.torch_compat import (
    local_scalar,
    operator_schema,
    storage_id,
)

LaunchKind = Literal["gemm", "attention", "elementwise", "collective", "host copy", "host sync"]
Link = Literal["in node", "across"]

EXPERTS_IN_NODE = "tp-cp-ep-dp-pp"
"""The order in which the ranks of a stage are neighbours."""

DEVICE = torch.device("meta")
_LINEAR = "mkldnn::_linear_pointwise"
"""oneDNN's product of rows ``[..., k]`` and a weight ``[n, k]`` on CPUs."""
_GEMMS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_",
        "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_addmm_",
    )
) | {_LINEAR}  # fmt: skip
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
)
_COPIES = frozenset(("aten::copy_", "aten::_to_copy"))
_PINNING = frozenset(("aten::pin_memory", "aten::_pin_memory"))
_SYNCS = frozenset(("aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"))
"""Operators whose results have a size or a value that the host reads."""
_OVERWRITING = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_"))
"""Operators that write their first argument without reading it."""
_CREATIONS = frozenset(f"aten::{name}" for name in ("new_zeros", "new_full", "zeros_like", "ones_like", "full_like"))
"""Operators that read no element of their argument."""
_LOOKUPS = frozenset(("aten::embedding", "aten::gather", "aten::index", "aten::index_select"))
"""Operators that read only as many elements of their first argument as they write."""
_SCATTERS = frozenset(("aten::scatter_add_", "aten::index_add_", "aten::scatter_", "aten::index_put_"))
"""Operators that change only as many elements of their first argument as their last argument has."""


@dataclass(frozen=True)
class ProductShape:
    """``count`` products ``[rows, depth] x [depth, columns]`` in one launch."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    """The dtype of the operands."""
    count: int = 1
    is_accumulated: bool = False
    """Whether the result is added to a given tensor, or written to one of another dtype: a main gradient."""


@dataclass(frozen=True)
class Group:
    kind: str
    """The kind of its :class:`~megatron.core.communication.CollectiveRecord`."""
    axes: str
    ranks: tuple[int, ...]
    overlaps: bool = False
    """Whether a GEMM is launched between its start and the wait for it."""


@dataclass(frozen=True)
class Launch:
    """An operator on the device, or a wait of the host for the device."""

    kind: LaunchKind
    name: str
    num_bytes: int
    """Bytes read and written; for a collective the bytes of its largest tensor, for a host sync 0."""
    during: str
    """The pass that ran."""
    is_recomputed: bool = False
    """Whether it ran before, in the forward pass."""
    product: ProductShape | None = None
    """The shape of a GEMM."""
    flops: float = 0.0
    """FLOPs of attention; the masked half of a causal tile is not counted."""
    length: int = 0
    """Tokens of the longest sequence of attention over packed ones; otherwise 0."""
    group: Group | None = None
    """The group of a collective."""


CompiledKernels = Callable[[Callable[..., Any], Sequence[Any]], Sequence[int] | None]
"""The bytes of each kernel of a compiled function with given arguments; None: one that touches each argument once."""


class LaunchRecorder(ShapeTracker):
    """Records launches inside the mode: operators on tensors of ``device``. What the host reads of them is 1."""

    def __init__(
        self, device: torch.device = DEVICE, block: int = 1, kernels_of: CompiledKernels = lambda *compiled: None
    ) -> None:
        super().__init__(block)
        self.device = device
        self._kernels_of = kernels_of
        self.launches: list[Launch] = []
        self.is_recomputing = False
        self._started: list[Launch] = []
        """Collectives whose transport has not started."""
        self._kernel: _FusedKernel | None = None
        """The kernel inside of which operators are not recorded."""
        self._read_on_host: int | None = None
        """The storage that the host has read since the last launch: reading further elements is no further sync."""

    def observer(self, communicator: Communicator) -> Observer:
        """An observer that records the collectives of ``communicator``."""

        def observe(record: CollectiveRecord) -> None:
            group = Group(record.kind, record.axes, communicator.ranks)
            self._record("collective", record.kind, record.num_bytes, group=group)
            self._started.append(self.launches[-1])

        return observe

    def start_work(self) -> CompletedWork:
        """The work of the collectives that were recorded last, for the simulated transport."""
        started, self._started = self._started, []
        return _ObservedWork(self, started)

    def label_recompute(self, module: nn.Module) -> None:
        """Say of the launches in the second run of a segment of ``module`` that they are recomputed."""
        for one in module.modules():
            if isinstance(one, Recomputed):
                one.segment.forward = partial(self._recompute, one.segment.forward)

    def _recompute(self, forward: Callable[..., Tensor], *arguments: object) -> Tensor:
        self.is_recomputing = self.during.startswith("backward")
        try:
            return forward(*arguments)
        finally:
            self.is_recomputing = False

    def complete(self, collective: Launch) -> None:
        """Note what was launched between the start of ``collective`` and now, when something waits for it."""
        places = (place for place in range(len(self.launches) - 1, -1, -1) if self.launches[place] is collective)
        place = next(places, None)
        if place is None:
            return  # of an earlier step
        if any(launch.kind in ("gemm", "attention") for launch in self.launches[place + 1 :]):
            assert collective.group is not None
            self.launches[place] = replace(collective, group=replace(collective.group, overlaps=True))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, device = operator_schema(func).name, kwargs.get("device")
        if name in _PINNING:
            # Host memory cannot be pinned without a GPU.
            return args[0]
        is_made_there = device is not None and torch.device(device) == self.device
        if not (is_made_there or any(tensor.device == self.device for tensor in _tensors_of((args, kwargs)))):
            return func(*args, **kwargs)
        if name == "aten::_to_copy" and device == torch.device("cpu"):
            # What the host reads is 1.
            result: Any = torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        elif name == "aten::copy_" and args[0].device.type == "cpu":
            result = args[0].fill_(1)
        else:
            result = super().run(func, args, kwargs)
        operation = _Operation.of(func, args, kwargs, result)
        if self._kernel is not None:
            self._kernel.add(operation)
        else:
            self._record_operation(operation)
        return result

    def fused(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._kernel is not None:
            return method(*arguments)
        self._kernel = kernel = _FusedKernel(arguments)
        try:
            results = super().fused(method, *arguments)
        finally:
            self._kernel = None
        for num_bytes in self._kernels_of(method, arguments) or (kernel.num_bytes(results),):
            self._record("elementwise", method.__qualname__, num_bytes)
        return results

    def _record(self, kind: LaunchKind, name: str, num_bytes: int = 0, **details: Any) -> None:
        place = self.during, self.is_recomputing
        self.launches.append(Launch(kind, name, num_bytes, *place, **details))
        if kind != "host sync":
            self._read_on_host = None

    def _record_operation(self, operation: "_Operation") -> None:
        devices = {tensor.device.type for tensor in operation.tensors}
        name = operation.name
        # Queries and allocations launch nothing, and neither does an operator without an element.
        is_free = name.startswith("prim::") or name in _ALLOCATIONS
        if self.device.type not in devices or is_free or not any(tensor.numel() for tensor in operation.tensors):
            return
        if operation.operator is local_scalar:
            address = _address(operation.tensors[0])
            if address != self._read_on_host:
                self._record("host sync", name)
                self._read_on_host = address
        elif name in _COPIES and len(devices) == 2:
            self._record("host copy" if operation.arguments.get("non_blocking") else "host sync", name)
        elif name in _GEMMS:
            self._record("gemm", name, operation.num_bytes, product=operation.product)
        elif "attention" in name:
            flops, length = operation.attention_flops, operation.packed_length
            self._record("attention", name, operation.num_bytes, flops=flops, length=length)
        else:
            self._record("elementwise", name, operation.num_bytes)
            if name in _SYNCS:
                self._record("host sync", name)


@dataclass(frozen=True)
class _Operation:
    """A call of an operator, with the tensors that it reads and writes."""

    operator: Any
    name: str
    read: Sequence[Tensor]
    written: Sequence[Tensor]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> "_Operation":
        schema = operator_schema(operator)
        named = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        read: list[Tensor] = []
        written: list[Tensor] = []
        for argument in schema.arguments:
            tensors = _tensors_of(named.get(argument.name))
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written:
                written += tensors
            # `out` and the target of a copy are written without being read.
            is_first = argument is schema.arguments[0]
            if not (is_written and (argument.is_out or (is_first and schema.name in _OVERWRITING))):
                read += tensors
        # A view launches nothing. New results are written; results that are arguments have been counted.
        if operator.is_view:
            return cls(operator, schema.name, (), (), named)
        addresses = {_address(tensor) for tensor in written}
        written += [tensor for tensor in _tensors_of(result) if _address(tensor) not in addresses]
        return cls(operator, schema.name, read, written, named)

    @property
    def product(self) -> ProductShape:
        """The shape of a GEMM. A grouped GEMM has its mean rows, or its mean depth."""
        find = self.arguments.get
        if self.name == _LINEAR:
            inputs, weight = self.read[:2]
            return ProductShape(inputs.numel() // inputs.shape[-1], weight.shape[0], inputs.shape[-1], inputs.dtype)
        added = find("mat1", find("batch1"))
        one: Tensor = self.arguments["self"] if added is None else added
        other: Tensor = self.arguments["mat2" if "mat2" in self.arguments else "batch2"]
        rows, depth, columns = one.shape[-2], one.shape[-1], other.shape[-1]
        count = one.shape[0] if one.dim() == 3 else other.shape[0] if other.dim() == 3 else 1
        if self.name == "aten::_grouped_mm" and one.dim() == 2:
            # [rows, k] x [groups, k, n], or [m, rows] x [rows, n] for weight gradients: the groups divide the rows.
            groups = self.arguments["offs"].numel()
            is_depth = other.dim() == 2
            count, rows, depth = groups, rows // (1 if is_depth else groups), depth // (groups if is_depth else 1)
        out = self.arguments.get("out")
        is_accumulated = added is not None or (out is not None and out.dtype != one.dtype)
        return ProductShape(max(rows, 1), columns, max(depth, 1), one.dtype, count, is_accumulated)

    @property
    def attention_flops(self) -> float:
        """FLOPs of two products of queries and keys, in a backward pass five; half if causal, less with a window.
        Packed sequences count as if all were as long as the longest, since the others' lengths are not in the shapes.
        """
        query, key = self.arguments["query"], self.arguments["key"]
        products = 5 if "backward" in self.name else 2
        length = self.packed_length or key.shape[-2]
        visible = (0.5 if self.arguments.get("is_causal") else 1.0) * length
        window = self.arguments.get("window_size_left")
        if window is not None and window < length - 1:
            # The last query, which is at the last key, has length - 1 - window keys less, the one before one less.
            queries, most = int(self.arguments["max_q"]), length - 1 - window
            least = max(most - queries, 0)
            visible -= (most * (most + 1) - least * (least + 1)) / 2 / queries
        return 2.0 * products * query.numel() * visible

    @property
    def packed_length(self) -> int:
        """Tokens of the longest packed sequence; 0 for attention whose sequences are not packed."""
        return int(self.arguments["max_k"]) if self.arguments["query"].dim() == 3 else 0

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.read, *self.written]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        if self.name in _CREATIONS:
            return sum(map(_size, self.written))
        if self.name in _LOOKUPS:
            # Indices, and each element found: read from the table, and written.
            return sum(map(_size, (*self.read[1:], *self.written, *self.written)))
        if self.name in _SCATTERS:
            # Indices and values are read; elements of the target are read and written.
            *others, values = self.read[1:]
            return sum(map(_size, (*others, values, values, values)))
        return sum(map(_size, self.tensors))


class _FusedKernel:
    """The bytes of a kernel that is simulated by several operators: it reads and writes each argument at most once."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._arguments = _tensors_of(arguments)
        self._read: set[int] = set()
        self._written: set[int] = set()

    def add(self, operation: _Operation) -> None:
        self._read.update(map(_address, operation.read))
        self._written.update(map(_address, operation.written))

    def num_bytes(self, results: Any) -> int:
        """Bytes of the arguments that were read or written, and of new ``results``."""
        known = {_address(tensor) for tensor in self._arguments}
        made = [tensor for tensor in _tensors_of(results) if _address(tensor) not in known]
        return sum(map(_size, made)) + sum(
            _size(tensor) * ((_address(tensor) in self._read) + (_address(tensor) in self._written))
            for tensor in self._arguments
        )


class _ObservedWork(CompletedWork):
    """Calls the recorder when something waits for ``collectives``."""

    def __init__(self, recorder: LaunchRecorder, collectives: Sequence[Launch]) -> None:
        self._recorder, self._collectives = recorder, collectives

    def wait(self) -> None:
        collectives, self._collectives = self._collectives, ()
        for collective in collectives:
            self._recorder.complete(collective)


def _tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operator, which are nested in tuples, lists and dicts alone."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for one in tree for tensor in _tensors_of(one)]


def _address(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _size(tensor: Tensor) -> int:
    """Bytes of the distinct elements of ``tensor``."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return torch.Size(sizes).numel() * tensor.element_size()


# --- traffic -------------------------------------------------------------------------------------------------


def bytes_sent(record: CollectiveRecord) -> int:
    """Bytes that one rank of n sends, ring algorithms: 2 (n - 1) / n of the tensor for all-reduce, (n - 1) / n for
    all-gather, reduce-scatter, all-to-all and broadcast. A message counts at its sender."""
    share = (record.group_size - 1) / record.group_size
    match record.kind:
        case "all_reduce":
            return round(2 * share * record.num_bytes)
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast":
            return round(share * record.num_bytes)
        case "send" | "shift" | "exchange":
            return record.num_bytes
    return 0


def expert_placement_advice(grid: RankGrid, node_size: int) -> str | None:
    """A sentence if groups of expert-parallel ranks span nodes and another order of the ranks avoids it, else None.

    Tokens are exchanged in every MoE layer. They stay in a node if the ranks of a pipeline stage are neighbours.
    """
    # The ranks with a copy of the experts, where they are not on one node, in the given and in the better order.
    given, better = (
        [group for group in one.groups(("etp", "ep")) if not is_in_node(group, node_size)]
        for one in (grid, replace(grid, order=EXPERTS_IN_NODE))
    )
    if not given or better:
        return None
    return (
        f"expert-parallel ranks are on several nodes (such as {' '.join(map(str, given[0]))}): add --rank-order "
        f"{EXPERTS_IN_NODE}, which keeps them in a node"
    )


def is_in_node(ranks: Sequence[int], node_size: int) -> bool:
    """Whether all ``ranks`` are on one node of ``node_size`` ranks."""
    return len({rank // node_size for rank in ranks}) == 1


@dataclass
class Traffic:
    """Sums the bytes that a rank sends."""

    rank: int
    node_size: int
    records: list[CollectiveRecord] = field(default_factory=list)
    by_axis: Counter[str] = field(default_factory=Counter)
    by_link: Counter[Link] = field(default_factory=Counter)

    def observer(self, communicator: Communicator) -> Observer:
        """An observer that counts the collectives of ``communicator``.

        A collective of ranks on several nodes counts as sent across nodes completely: the part that stays inside is
        the library's choice.
        """
        in_node = is_in_node(communicator.ranks, self.node_size)

        def observe(record: CollectiveRecord) -> None:
            self.records.append(record)
            sent = bytes_sent(record)
            if sent == 0:
                return
            # Messages have a peer of their own; a collective stays in a node with all of its ranks.
            stays = in_node if record.peer is None else is_in_node((self.rank, record.peer), self.node_size)
            self.by_axis[axis_of(record.axes)] += sent
            self.by_link["in node" if stays else "across"] += sent

        return observe

    def extrapolate(self, one: "Traffic", count: int, wanted: int) -> "Traffic":
        """The traffic of a step of ``wanted`` microbatches; ``self`` is a step of ``count``, ``one`` a step of one.
        Every microbatch sends equal bytes."""

        # sent(m) = constant + m * per microbatch; steps of 1 and of ``count`` microbatches determine both.
        def extend(counted: Counter[Any], single: Counter[Any]) -> Counter[Any]:
            per_microbatch = {key: (counted[key] - single[key]) // (count - 1) for key in counted}
            return Counter({key: counted[key] + per_microbatch[key] * (wanted - count) for key in counted})

        by_axis, by_link = extend(self.by_axis, one.by_axis), extend(self.by_link, one.by_link)
        return Traffic(self.rank, self.node_size, [], by_axis, by_link)

    def clear(self) -> None:
        for counted in (self.records, self.by_axis, self.by_link):
            counted.clear()


def axis_of(axes: str) -> str:
    """The axis of a group's traffic. Gradient groups span ``cp`` and ``dp``, of experts ``edp``; tokens are gathered
    over ``etp`` and ``ep``, which counts as ``ep``. ``several`` is the rest: single numbers that all ranks exchange."""
    if axes in ("tp", "cp", "etp", "ep"):
        return axes
    if axes.startswith("pp "):
        return "pp"
    parts = set(axes.split("x"))
    if parts == {"etp", "ep"}:
        return "ep"
    if parts <= {"edp", "edp_shard", "edp_replicate"}:
        return "edp"
    return "dp" if parts <= {"cp", "dp", "dp_shard", "dp_replicate"} else "several"
