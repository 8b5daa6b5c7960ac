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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.communication import CollectiveRecord, Communicator, Observer, Work
from megatron.core.fp8 import Fp8Gemm
from megatron.core.gradient import DeferredWeightGrad, MainGrad, WeightGradStore, attach_main_grad, main_grad_of
from megatron.core.models.transformer import TransformerChunk
from megatron.core.ops.documents import Documents
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.recompute import Recomputed
from megatron.core.tensor_parallel.layers import LinearOp
from megatron.planner.memory import LASTING, HeldMemory, Kind, MemoryTracker, MemoryUse
from megatron.torch_compat import forward_hooks, forward_pre_hooks, storage_id

_MAX_ATTEMPTS = 3
"""Rehearsals of a kind after which its layers run in full: a first one may also allocate what all layers share."""


@dataclass(frozen=True)
class _Event:
    """What happens between two stretches: ``number`` counts the layer's parameters, for hooks its modules."""

    kind: Literal["gradient buffer", "accumulated", "hooks"]
    number: int


@dataclass(frozen=True)
class _Stretch:
    """A part of a pass: changes of the memory, in bytes relative to its start, and collectives."""

    peak: MemoryUse
    change: dict[Kind, int]
    collectives: tuple[tuple[Observer, CollectiveRecord], ...]
    event: _Event | None
    """Follows the stretch."""


_Pass = tuple[_Stretch, ...]


@dataclass(frozen=True)
class _RehearsedGradient:
    """A deferred weight gradient."""

    parameter: int
    kept: dict[Kind, int]
    """Bytes kept for it after the backward pass, except the gradient of the layer's output."""
    keeps_output_gradient: bool
    gather: _Pass
    product: _Pass
    write: _Pass
    """The accumulation, into a gradient buffer that is there."""


@dataclass(frozen=True)
class _Rehearsed:
    """The passes of a layer."""

    forward: _Pass
    backward: _Pass
    deferred: tuple[_RehearsedGradient, ...]
    saved: int
    """Bytes saved for the backward pass, except the layer's input."""
    saves_input: bool
    output: tuple[torch.Size, torch.dtype]


class _Log:
    """Records the stretches of a pass."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._is_open = False
        self._stretches: list[_Stretch] = []
        self.collectives: list[tuple[Observer, CollectiveRecord]] = []

    def open(self) -> None:
        """Begin a pass."""
        self._is_open, self._stretches = True, []
        self._start_stretch()

    def close(self) -> _Pass:
        """End the pass."""
        self._end_stretch(None)
        self._is_open = False
        return tuple(self._stretches)

    @contextmanager
    def recording(self) -> Iterator[list[_Stretch]]:
        """A pass, whose stretches are in the list at the end, without the events between them."""
        stretches: list[_Stretch] = []
        self.open()
        yield stretches
        stretches += (replace(stretch, event=None) for stretch in self.close())

    def event(self, kind: Literal["gradient buffer", "accumulated", "hooks"], number: int) -> None:
        if self._is_open:
            self._end_stretch(_Event(kind, number))
            self._start_stretch()

    def _start_stretch(self) -> None:
        self.collectives.clear()
        self._start = self._tracker.peak = self._tracker.now

    def _end_stretch(self, event: _Event | None) -> None:
        peak, now = (use.relative_to(self._start) for use in (self._tracker.peak, self._tracker.now))
        self._stretches.append(
            _Stretch(peak, {kind: size for kind, size in now.by_kind.items() if size}, tuple(self.collectives), event)
        )


class _LoggedMainGrad(MainGrad):
    """The main gradient of parameter ``number`` in a rehearsal."""

    def __init__(self, buffer: Tensor, log: _Log, number: int) -> None:
        super().__init__(buffer)
        self.is_filled = True
        self._log, self.number = log, number
        self.on_accumulated = lambda: log.event("accumulated", number)

    @property
    def buffer(self) -> Tensor:
        self._log.event("gradient buffer", self.number)
        assert self._buffer is not None
        return self._buffer


class _NoGradient:
    """A gradient whose GEMM is not computed."""

    def value(self) -> Tensor:
        raise NotImplementedError("a repeated layer has no values")

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        pass


class _Input(Function):
    """The input of a rehearsed layer: a new tensor. Its gradient ends the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, end: Callable[[], None]) -> Tensor:
        ctx.end = end
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.end()
        return None, None, None


class _Output(Function):
    """The output of a rehearsed layer. Its gradient, a new tensor, begins the backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, start: Callable[[Tensor], None]) -> Tensor:
        ctx.start = start
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = torch.empty_like(gradients[0])
        ctx.start(gradient)
        return gradient, None


class _RepeatedProduct:
    """A deferred weight gradient whose GEMM is not computed."""

    def __init__(self, layer: "_RepeatedLayer", gradient: _RehearsedGradient) -> None:
        self._layer, self._gradient = layer, gradient
        layer.repeat(gradient.product)
        self._memory = layer.hold(_change(gradient.product))

    def value(self) -> Tensor:
        raise NotImplementedError("a repeated layer has no values")

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        self._layer.repeat(self._gradient.write)


class _RepeatedFunction(Function):
    """Repeats the passes of a rehearsed layer."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rotary: Tensor, layer: "_RepeatedLayer", rehearsed: _Rehearsed) -> Tensor:
        ctx.layer, ctx.rehearsed, ctx.shape = layer, rehearsed, inputs.shape
        # Positions that restart at each document have rotations of their own in each microbatch.
        ctx.rotary = rotary
        if rehearsed.saves_input:
            ctx.save_for_backward(inputs)
        # Under FSDP the parameters are whole only while they are gathered.
        ctx.parameters = layer.parameters
        layer.repeat(rehearsed.forward, ctx.parameters)
        ctx.saved = HeldMemory(layer.tracker, rehearsed.saved)
        shape, dtype = rehearsed.output
        return torch.empty(shape, dtype=dtype, device=inputs.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        layer: _RepeatedLayer = ctx.layer
        layer.repeat(ctx.rehearsed.backward, ctx.parameters)
        ctx.saved.free()
        ctx.rotary = None
        gradient = torch.empty(ctx.shape, dtype=gradients[0].dtype, device=gradients[0].device)
        for deferred in ctx.rehearsed.deferred:
            layer.defer(deferred, ctx.parameters[deferred.parameter], gradients[0])
        return gradient, None, None, None


class _RepeatedLayer:
    """Takes the place of ``unit.forward``; ``unit`` is a layer, or layers that are recomputed together.

    Units of an equal ``kind`` have equal memory and collectives.
    """

    def __init__(self, unit: nn.Module, kind: Hashable, is_first: bool, is_last: bool, rehearsal: "Rehearsal") -> None:
        self._unit, self._kind, self._rehearsal = unit, (kind, is_last), rehearsal
        self._forward = unit.forward
        self._is_first, self._is_last = is_first, is_last
        self._modules = list(unit.modules())
        self.tracker = rehearsal.tracker

    def __call__(self, inputs: Tensor, rotary: Tensor, documents: Documents | None = None) -> Tensor:
        if torch.is_grad_enabled() and self._is_repeatable:
            makes_documents = documents is not None and self._is_first
            kind = self._kind, makes_documents, inputs.shape, inputs.dtype, self._has_scales
            rehearsed = self._rehearsal.of(kind, lambda log: self._rehearse(log, inputs, rotary, documents))
            if rehearsed is not None:
                repeated: Tensor = _RepeatedFunction.apply(inputs, rotary, self, rehearsed)
                return repeated
        return cast(Tensor, self._forward(inputs, rotary, documents))

    @property
    def _fp8_gemms(self) -> Iterator[Fp8Gemm]:
        operations = (getattr(module, "op", None) for module in self._modules)
        gemms = (operation.gemm for operation in operations if isinstance(operation, LinearOp))
        return (gemm for gemm in gemms if isinstance(gemm, Fp8Gemm))

    @property
    def _is_repeatable(self) -> bool:
        """Whether no FP8 weight is yet to be quantised, and the modules inside have no other hooks than before their
        forward passes."""
        if any(gemm.needs_weight_memory for gemm in self._fp8_gemms):
            return False
        return not any(forward_hooks(module) for module in self._modules[1:])

    @property
    def _has_scales(self) -> tuple[bool, ...]:
        """Of every FP8 GEMM."""
        return tuple(gemm.has_scales for gemm in self._fp8_gemms)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._unit.parameters())

    def repeat(self, stretches: _Pass, parameters: Sequence[nn.Parameter] = ()) -> None:
        """Repeat a pass. At its end the memory is as before it: the caller allocates and frees what lasts."""
        for stretch in stretches:
            self.tracker.raise_peak(stretch.peak)
            self.tracker.shift(stretch.change)
            for observe, record in stretch.collectives:
                observe(record)
            if stretch.event is not None:
                self._perform(stretch.event, parameters)
        for stretch in stretches:
            self.tracker.shift(stretch.change, sign=-1)

    def _perform(self, event: _Event, parameters: Sequence[nn.Parameter]) -> None:
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

    def defer(self, gradient: _RehearsedGradient, parameter: nn.Parameter, output_gradient: Tensor) -> None:
        """Defer the weight gradient of ``parameter``."""
        kept: list[object] = [*self.hold(gradient.kept)]
        if gradient.keeps_output_gradient:
            kept.append(output_gradient)

        def gather() -> Work[Any]:
            self.repeat(gradient.gather)
            gathered = self.hold(_change(gradient.gather))
            return Work((), lambda: gathered)

        def product(gathered: object, kept: list[object] = kept) -> _RepeatedProduct:
            return _RepeatedProduct(self, gradient)

        self._rehearsal.weight_gradients.put(parameter, gather, product)

    def _rehearse(self, log: _Log, inputs: Tensor, rotary: Tensor, documents: Documents | None) -> _Rehearsed | None:
        """Both passes apart from the step; None if they do not leave the memory as it was."""
        tracker = self.tracker
        before, peak = tracker.now, tracker.peak
        # The first layer of a chunk allocates what all its layers read.
        others = None if documents is None else replace(documents)
        kept = [] if others is None or self._is_first else [others, others.spans, others.packed]
        with self._logged_main_grads(log), self._logged_hooks(log):
            rehearsed = self._run(log, inputs, rotary, [others])
        del others, kept
        tracker.peak = peak
        return rehearsed if tracker.now.by_kind == before.by_kind else None

    def _run(self, log: _Log, like: Tensor, rotary: Tensor, documents: list[Documents | None]) -> _Rehearsed | None:
        """``documents`` is one, which is taken from the list so that the layer alone refers to it."""
        tracker, known = self.tracker, self.tracker.addresses()
        passes: list[_Pass] = []
        gradient_of_chunk: list[Tensor] = []
        output_gradient: list[tuple[int, int]] = []

        def start_backward(gradient: Tensor) -> None:
            output_gradient.append((storage_id(gradient.untyped_storage()), tracker.size_of(gradient)))
            if self._is_last:
                # The executor holds the gradient of a chunk's output.
                gradient_of_chunk.append(gradient)
            log.open()

        def end_backward() -> None:
            passes.append(log.close())

        inputs = _Input.apply(torch.empty(0, requires_grad=True), like.detach(), end_backward)
        input_address, input_size = storage_id(inputs.untyped_storage()), tracker.size_of(inputs)
        start = tracker.now
        log.open()
        output: Tensor = self._forward(inputs, rotary, documents.pop())
        passes.append(log.close())
        form, address = (output.shape, output.dtype), storage_id(output.untyped_storage())
        is_whole = tracker.size_of(output) == tracker.rounded(output.numel() * output.element_size())
        root = get_gradient_edge(_Output.apply(output, start_backward))
        del output, inputs
        saves_output, saves_input = tracker.is_allocated(address), tracker.is_allocated(input_address)
        saved = tracker.now.relative_to(start)
        tracker.mark_activations(known)
        deferred = self._run_backward(root, *form)
        gradient_of_chunk.clear()
        gradients = tuple(self._rehearse_gradients(log, deferred, *output_gradient))
        if saves_output or not is_whole or any(saved.by_kind[kind] for kind in LASTING):
            return None
        size = saved.total + (0 if saves_input else input_size)
        return _Rehearsed(passes[0], passes[1], gradients, size, saves_input, form)

    def _run_backward(self, root: GradientEdge, shape: torch.Size, dtype: torch.dtype) -> list[DeferredWeightGrad]:
        """Returns the deferred weight gradients."""
        # Without memory: the gradient of the layer's output is allocated by _Output.
        gradient = torch.empty((), dtype=dtype).expand(shape)
        if not self._rehearsal.defers_gradients:
            torch.autograd.backward(root, gradient)
            return []
        with self._rehearsal.weight_gradients.deferring() as deferred:
            torch.autograd.backward(root, gradient)
        return deferred

    @torch.no_grad()
    def _rehearse_gradients(
        self, log: _Log, deferred: list[DeferredWeightGrad], output_gradient: tuple[int, int]
    ) -> Iterator[_RehearsedGradient]:
        """Compute the ``deferred`` weight gradients, which empties the list. ``output_gradient`` is the address and the
        size of the gradient of the layer's output."""
        address, size = output_gradient
        deferred.reverse()
        while deferred:
            current = deferred.pop()
            with log.recording() as gather:
                gathering = current.gather()
            with log.recording() as multiply:
                product = current.product(gathering.wait())
            with log.recording() as write:
                current.main_grad.add(product)
            number = cast(_LoggedMainGrad, current.main_grad).number
            del gathering, product
            before, was_kept = self.tracker.now, self.tracker.is_allocated(address)
            del current
            kept = {kind: -change for kind, change in self.tracker.now.relative_to(before).by_kind.items() if change}
            is_freed = was_kept and not self.tracker.is_allocated(address)
            if is_freed:
                kept["working memory"] -= size
            yield _RehearsedGradient(number, kept, is_freed, tuple(gather), tuple(multiply), tuple(write))

    @contextmanager
    def _logged_main_grads(self, log: _Log) -> Iterator[None]:
        """Log gradients instead of accumulating them."""
        parameters = self.parameters
        main_grads = list(map(main_grad_of, parameters))
        for number, (parameter, main_grad) in enumerate(zip(parameters, main_grads)):
            if main_grad is not None:
                buffer = torch.empty(parameter.shape, dtype=self._rehearsal.gradient_dtype, device=parameter.device)
                attach_main_grad(parameter, _LoggedMainGrad(buffer, log, number))
        yield
        for parameter, main_grad in zip(parameters, main_grads):
            if main_grad is not None:
                attach_main_grad(parameter, main_grad)

    @contextmanager
    def _logged_hooks(self, log: _Log) -> Iterator[None]:
        """Log the hooks before the forward passes of modules inside the layer instead of calling them."""
        hooked = [
            (number, module) for number, module in enumerate(self._modules) if number and forward_pre_hooks(module)
        ]
        originals = [dict(forward_pre_hooks(module)) for _, module in hooked]
        for number, module in hooked:
            hooks = forward_pre_hooks(module)
            first = next(iter(hooks))
            hooks.clear()
            hooks[first] = partial(_log_hooks, log, number)
        yield
        for (_, module), original in zip(hooked, originals):
            forward_pre_hooks(module).clear()
            forward_pre_hooks(module).update(original)


def _log_hooks(log: _Log, number: int, *_: object) -> None:
    log.event("hooks", number)


def _change(stretches: _Pass) -> Counter[Kind]:
    """Bytes by which a pass changes the memory, by kind."""
    changes: Counter[Kind] = Counter()
    for stretch in stretches:
        changes.update(stretch.change)
    return changes


class Rehearsal:
    """The rehearsed layers of a rank. ``observers`` makes the observer of each group's collectives."""

    def __init__(
        self,
        tracker: MemoryTracker,
        observers: Callable[[Communicator], Observer],
        gradient_dtype: torch.dtype,
        defers_gradients: bool,
    ) -> None:
        self.tracker, self._observers = tracker, observers
        self.gradient_dtype, self.defers_gradients = gradient_dtype, defers_gradients
        self.weight_gradients = WeightGradStore()
        self._rehearsed: dict[Hashable, _Rehearsed] = {}
        self._attempts: dict[Hashable, int] = {}
        self._log: _Log | None = None
        """Of the rehearsal that runs."""

    @property
    def has_repeated(self) -> bool:
        """Whether a layer was repeated."""
        return bool(self._rehearsed)

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
        """Let the layers of all chunks of ``executor``, which are of these ``kinds``, be repeated."""
        self.weight_gradients = executor.weight_gradients
        for chunk, chunk_kinds in zip(executor.chunks, kinds):
            self._repeat_chunk(cast(TransformerChunk, chunk), chunk_kinds)

    def _repeat_chunk(self, chunk: TransformerChunk, kinds: Sequence[Hashable]) -> None:
        first, units = 0, list(chunk.layers)
        for place, unit in enumerate(units):
            count = len(unit.segment.layers) if isinstance(unit, Recomputed) else 1  # type: ignore[arg-type]
            kind = type(unit).__name__, tuple(kinds[first : first + count])
            is_last = place + 1 == len(units) and chunk.output_layer is None
            unit.forward = _RepeatedLayer(unit, kind, place == 0, is_last, self)
            first += count

    def of(self, kind: Hashable, rehearse: Callable[[_Log], _Rehearsed | None]) -> _Rehearsed | None:
        """The rehearsed layer of a ``kind``; None if it must run in full."""
        if kind in self._rehearsed:
            return self._rehearsed[kind]
        attempts = self._attempts[kind] = self._attempts.get(kind, 0) + 1
        if attempts > _MAX_ATTEMPTS:
            return None
        self._log = log = _Log(self.tracker)
        try:
            rehearsed = rehearse(log)
        finally:
            self._log = None
        if rehearsed is not None:
            self._rehearsed[kind] = rehearsed
        return rehearsed
