"""A layer of each kind is rehearsed once; its memory and its collectives are repeated for the layers and microbatches
that are equal.

A rehearsal runs a layer forward and backward apart from the step, and records how its memory grows and shrinks, in
*stretches* between two events: the access to a gradient buffer, the end of an accumulation, the hooks of a module
inside the layer. In the step an autograd function then takes the place of the layer's operators: it repeats stretches
and collectives, and calls the real gradient buffers and hooks, so that buckets, shards and the schedule are rehearsed
in full. The result is the result of a full rehearsal, byte for byte. Everything outside of the layers runs as always.

A layer runs in full where a repetition would not be equal: if it keeps memory for later microbatches (FP8 weights that
are quantised in the first one), or contains a module that FSDP2 gathers by itself (experts).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.communication import CollectiveRecord, Communicator, Observer, Work
from megatron.core.fp8 import Fp8Gemm
from megatron.core.gradient import WeightGradStore, main_grad_of
from megatron.core.models.layer import SequencePositions
from megatron.core.models.transformer import TransformerChunk
from megatron.core.pipeline_parallel import PipelineExecutor
from megatron.core.tensor_parallel.layers import LinearOp
from megatron.planner.memory import HeldMemory, Kind, MemoryTracker
from megatron.planner.rehearsal.layer import (
    MAX_ATTEMPTS,
    Event,
    LayerRehearsal,
    Pass,
    PassLog,
    RehearsalSetting,
    RehearsedGradient,
    RehearsedLayer,
)
from megatron.torch_compat import forward_hooks, forward_pre_hooks


class _NoGradient:
    """A gradient whose GEMM is not computed."""

    def value(self) -> Tensor:
        raise NotImplementedError("a repeated layer has no values")

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        pass


class _RepeatedProduct(_NoGradient):
    """A deferred weight gradient whose GEMM is not computed."""

    def __init__(self, layer: "_RepeatedLayer", gradient: RehearsedGradient) -> None:
        self._layer, self._gradient = layer, gradient
        layer.repeat(gradient.product)
        self._memory = layer.hold(_change(gradient.product))

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        self._layer.repeat(self._gradient.write)


class _RepeatedFunction(Function):
    """Repeats the passes of a rehearsed layer."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, positions: SequencePositions, layer: "_RepeatedLayer", rehearsed: RehearsedLayer
    ) -> Tensor:
        ctx.layer, ctx.rehearsed, ctx.shape = layer, rehearsed, inputs.shape
        # Positions that restart at each document have rotations of their own in each microbatch.
        ctx.positions = positions
        if rehearsed.saves_input:
            ctx.save_for_backward(inputs)
        # Under FSDP the parameters are whole only while they are gathered.
        ctx.parameters = layer.parameters
        layer.repeat(rehearsed.forward, ctx.parameters)
        # What the layer saves is one allocation without a tensor, until its backward pass.
        ctx.saved = HeldMemory(layer.tracker, rehearsed.saved)
        shape, dtype = rehearsed.output
        return torch.empty(shape, dtype=dtype, device=inputs.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        layer: _RepeatedLayer = ctx.layer
        layer.repeat(ctx.rehearsed.backward, ctx.parameters)
        ctx.saved.free()
        ctx.positions = None
        gradient = torch.empty(ctx.shape, dtype=gradients[0].dtype, device=gradients[0].device)
        # With W passes the schedule computes these later.
        for deferred in ctx.rehearsed.deferred:
            layer.defer(deferred, ctx.parameters[deferred.parameter], gradients[0])
        return gradient, None, None, None


class _RepeatedLayer:
    """Takes the place of ``unit.forward``; ``unit`` is a layer, or layers that are recomputed together.

    Units of an equal ``kind`` have equal memory and collectives.
    """

    def __init__(
        self, unit: nn.Module, kind: Hashable, is_first: bool, is_last: bool, extrapolation: "Extrapolation"
    ) -> None:
        self._unit, self._extrapolation, self._is_first = unit, extrapolation, is_first
        self._forward = unit.forward
        self._modules = list(unit.modules())
        # Layers of one kind may still differ in the modules that wrap them, and in what FSDP has sharded.
        weights = tuple((tuple(parameter.shape), parameter.dtype) for parameter in unit.parameters())
        self._kind = kind, is_last, tuple(type(module).__name__ for module in self._modules), weights
        self._rehearsal = LayerRehearsal(extrapolation.setting, unit, self._forward, is_first, is_last)
        self.tracker = extrapolation.setting.tracker

    def __call__(self, inputs: Tensor, positions: SequencePositions) -> Tensor:
        operations = (getattr(module, "op", None) for module in self._modules)
        gemms = [operation.gemm for operation in operations if isinstance(operation, LinearOp)]
        quantizing = [gemm for gemm in gemms if isinstance(gemm, Fp8Gemm)]
        # Not if an FP8 weight is yet to be quantised, or a module inside has hooks after its forward pass.
        is_repeatable = not any(gemm.needs_weight_memory for gemm in quantizing)
        if torch.is_grad_enabled() and is_repeatable and not any(forward_hooks(one) for one in self._modules[1:]):
            makes_spans = self._is_first and not (positions.spans is None and positions.chunks is None)
            scales = tuple(gemm.has_scales for gemm in quantizing)
            kind = self._kind, makes_spans, inputs.shape, inputs.dtype, scales
            rehearsed = self._extrapolation.of(kind, lambda log: self._rehearsal.run(log, inputs, positions))
            if rehearsed is not None:
                repeated: Tensor = _RepeatedFunction.apply(inputs, positions, self, rehearsed)
                return repeated
        return cast(Tensor, self._forward(inputs, positions))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._unit.parameters())

    def repeat(self, stretches: Pass, parameters: Sequence[nn.Parameter] = ()) -> None:
        """Repeat a pass. At its end the memory is as before it: the caller allocates and frees what lasts."""
        for stretch in stretches:
            self.tracker.raise_peak(stretch.peak)
            self.tracker.shift(stretch.change)
            for observe, record in stretch.collectives:
                observe(record)
            if stretch.event is not None:
                # Real buffers and hooks may allocate and send in the middle of a pass.
                self._perform(stretch.event, parameters)
        for stretch in stretches:
            self.tracker.shift(stretch.change, sign=-1)

    def _perform(self, event: Event, parameters: Sequence[nn.Parameter]) -> None:
        if event.kind == "output gradient freed":
            return
        if event.kind == "hooks":
            module = self._modules[event.number]
            for hook in forward_pre_hooks(module).values():
                hook(module, ())
            return
        main_grad = main_grad_of(parameters[event.number])
        assert main_grad is not None
        if event.kind == "gradient buffer":
            # With sharded gradients the first access allocates whole gradients.
            _ = main_grad.buffer
        else:
            main_grad.add(_NoGradient())

    def hold(self, sizes: Mapping[Kind, int]) -> list[HeldMemory]:
        """Memory by kind, until nothing refers to the list."""
        return [HeldMemory(self.tracker, size, kind) for kind, size in sizes.items()]

    def defer(self, gradient: RehearsedGradient, parameter: nn.Parameter, output_gradient: Tensor) -> None:
        kept: list[object] = [*self.hold(gradient.kept)]
        if gradient.keeps_output_gradient:
            kept.append(output_gradient)

        def gather() -> Work[Any]:
            self.repeat(gradient.gather)
            gathered = self.hold(_change(gradient.gather))
            return Work((), lambda: gathered)

        # The default argument keeps what the gradient waits for until its product is computed.
        def product(gathered: object, kept: list[object] = kept) -> _RepeatedProduct:
            return _RepeatedProduct(self, gradient)

        self._extrapolation.setting.weight_gradients.put(parameter, gather, product)


def _change(stretches: Pass) -> Counter[Kind]:
    """Bytes by which a pass changes the memory, by kind."""
    changes: Counter[Kind] = Counter()
    for stretch in stretches:
        changes.update(stretch.change)
    return changes


class Extrapolation:
    """The rehearsed layers of a rank. ``observers`` makes the observer of each group's collectives."""

    def __init__(
        self,
        tracker: MemoryTracker,
        observers: Callable[[Communicator], Observer],
        gradient_dtype: torch.dtype,
        defers_gradients: bool,
    ) -> None:
        self.setting = RehearsalSetting(tracker, gradient_dtype, WeightGradStore(), defers_gradients)
        self._observers = observers
        self.rehearsed: dict[Hashable, RehearsedLayer] = {}
        """Rehearsed layers by kind; empty if no layer is repeated."""
        self._attempts: dict[Hashable, int] = {}
        self._log: PassLog | None = None
        """The log of the rehearsal that runs."""

    def observer(self, communicator: Communicator) -> Observer:
        """The observer of ``communicator``; collectives of a rehearsal are recorded and not observed."""
        observe = self._observers(communicator)

        def observe_or_log(record: CollectiveRecord) -> None:
            if self._log is None:
                observe(record)
            else:
                self._log.collectives.append((observe, record))

        return observe_or_log

    def repeat_layers(self, executor: PipelineExecutor, kinds: Sequence[Sequence[Hashable]]) -> None:
        """Let the units of all chunks of ``executor``, which are of these ``kinds``, be repeated."""
        self.setting = replace(self.setting, weight_gradients=executor.weight_gradients)
        for one, kinds_of_chunk in zip(executor.chunks, kinds):
            chunk = cast(TransformerChunk, one)
            units = list(chunk.layers)
            for place, (unit, kind) in enumerate(zip(units, kinds_of_chunk, strict=True)):
                is_last = place + 1 == len(units) and chunk.output_layer is None
                unit.forward = _RepeatedLayer(unit, (type(unit).__name__, kind), place == 0, is_last, self)

    def of(self, kind: Hashable, rehearse: Callable[[PassLog], RehearsedLayer | None]) -> RehearsedLayer | None:
        """The rehearsed layer of a ``kind``; None if it must run in full."""
        if kind in self.rehearsed:
            return self.rehearsed[kind]
        # While the log is set, collectives are recorded in it and not counted.
        attempts = self._attempts[kind] = self._attempts.get(kind, 0) + 1
        if attempts > MAX_ATTEMPTS:
            return None
        self._log = log = PassLog(self.setting.tracker)
        try:
            rehearsed = rehearse(log)
        finally:
            self._log = None
        if rehearsed is not None:
            self.rehearsed[kind] = rehearsed
        return rehearsed
