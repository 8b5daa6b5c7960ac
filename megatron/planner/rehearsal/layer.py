"""A layer is rehearsed apart from the step: how its passes change the memory, and their collectives."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from megatron.core.communication import CollectiveRecord, Observer
from megatron.core.gradient import DeferredWeightGrad, MainGrad, WeightGradStore, attach_main_grad, main_grad_of
from megatron.core.models.layer import SequencePositions
from megatron.planner.memory import LASTING, Kind, MemoryTracker, MemoryUse
from megatron.torch_compat import forward_pre_hooks, storage_id

MAX_ATTEMPTS = 3
"""Rehearsals after which a unit cannot be rehearsed. A first one may also allocate what lasts: FP8 weights, and what
all units share."""
EventKind = Literal["gradient buffer", "accumulated", "hooks", "output gradient freed"]


@dataclass(frozen=True)
class Event:
    """What happens between two stretches: ``number`` counts the layer's parameters, for hooks its modules."""

    kind: EventKind
    number: int = 0


@dataclass(frozen=True)
class Stretch:
    """A part of a pass: changes of the memory, in bytes relative to its start, and collectives."""

    peak: MemoryUse
    change: dict[Kind, int]
    collectives: tuple[tuple[Observer, CollectiveRecord], ...]
    event: Event | None
    """Follows the stretch."""


Pass = tuple[Stretch, ...]


@dataclass(frozen=True)
class RehearsedGradient:
    """A deferred weight gradient."""

    parameter: int
    kept: dict[Kind, int]
    """Bytes kept for it after the backward pass, except the gradient of the layer's output."""
    keeps_output_gradient: bool
    gather: Pass
    product: Pass
    write: Pass
    """The accumulation, into a gradient buffer that is there."""


@dataclass(frozen=True)
class RehearsedLayer:
    """The passes of a layer."""

    forward: Pass
    backward: Pass
    deferred: tuple[RehearsedGradient, ...]
    saved: int
    """Bytes saved for the backward pass, except the layer's input."""
    saves_input: bool
    output: tuple[torch.Size, torch.dtype]


class PassLog:
    """Records the stretches of a pass."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._is_open = False
        self._stretches: list[Stretch] = []
        self.collectives: list[tuple[Observer, CollectiveRecord]] = []

    def open(self) -> None:
        self._is_open, self._stretches = True, []
        self._start_stretch()

    def close(self) -> Pass:
        self._end_stretch(None)
        self._is_open = False
        return tuple(self._stretches)

    @contextmanager
    def recording(self) -> Iterator[list[Stretch]]:
        """A pass, whose stretches are in the list at the end, without the events between them."""
        stretches: list[Stretch] = []
        self.open()
        yield stretches
        stretches += (replace(stretch, event=None) for stretch in self.close())

    def event(self, kind: EventKind, number: int = 0) -> None:
        if self._is_open:
            self._end_stretch(Event(kind, number))
            self._start_stretch()

    def _start_stretch(self) -> None:
        self.collectives.clear()
        self._start = self._tracker.peak = self._tracker.now

    def _end_stretch(self, event: Event | None) -> None:
        peak, now = (use.relative_to(self._start) for use in (self._tracker.peak, self._tracker.now))
        self._stretches.append(
            Stretch(peak, {kind: size for kind, size in now.by_kind.items() if size}, tuple(self.collectives), event)
        )


class _LoggedMainGrad(MainGrad):
    """The main gradient of parameter ``number`` in a rehearsal.

    It is added to, as in later microbatches, unless every microbatch allocates it (``is_new``).
    """

    def __init__(self, buffer: Tensor, log: PassLog, number: int, is_new: bool) -> None:
        super().__init__(buffer)
        self.is_filled = not is_new
        self._log, self.number = log, number
        self.on_accumulated = lambda: log.event("accumulated", number)

    @property
    def buffer(self) -> Tensor:
        self._log.event("gradient buffer", self.number)
        assert self.storage is not None
        return self.storage


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


@dataclass(frozen=True)
class RehearsalSetting:
    """What the rehearsals of a rank share."""

    tracker: MemoryTracker
    gradient_dtype: torch.dtype
    """The dtype of the gradient buffers."""
    weight_gradients: WeightGradStore
    defers_gradients: bool
    """Whether backward passes defer weight gradients."""


class LayerRehearsal:
    """Runs a layer, or layers that are recomputed together, apart from the step.

    ``forward`` is the layer's forward pass; ``is_first`` and ``is_last`` are its place among the units of a chunk.
    """

    def __init__(
        self,
        setting: RehearsalSetting,
        unit: nn.Module,
        forward: Callable[..., Tensor],
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._setting, self._unit, self._forward = setting, unit, forward
        self._is_first, self._is_last = is_first, is_last
        self._tracker = setting.tracker

    def run(self, log: PassLog, inputs: Tensor, positions: SequencePositions) -> RehearsedLayer | None:
        """Run both passes apart from the step; None if they do not leave the memory as it was."""
        tracker = self._tracker
        before, peak = tracker.now, tracker.peak
        # The first layer of a chunk allocates what all its layers read.
        spans, chunks = (None if one is None else replace(one) for one in (positions.spans, positions.chunks))
        own = replace(positions, spans=spans, chunks=chunks)
        kept = [] if self._is_first else [spans.packed for spans in (own.spans, own.chunks) if spans is not None]
        with self._logged_main_grads(log), self._logged_hooks(log):
            rehearsed = self._run_passes(log, inputs, [own])
        del own, kept, spans, chunks  # with them goes what was packed
        tracker.peak = peak
        return rehearsed if tracker.now.by_kind == before.by_kind else None

    def _run_passes(self, log: PassLog, like: Tensor, positions: list[SequencePositions]) -> RehearsedLayer | None:
        """``positions`` is one element, which is taken from the list so that the layer alone refers to it."""
        tracker, known = self._tracker, self._tracker.addresses()
        passes: list[Pass] = []
        gradient_of_chunk: list[Tensor] = []
        output_gradient: list[tuple[int, int]] = []

        def start_backward(gradient: Tensor) -> None:
            storage = gradient.untyped_storage()
            output_gradient.append((storage_id(storage), tracker.size_of(gradient)))
            weakref.finalize(storage, log.event, "output gradient freed").atexit = False
            if self._is_last:
                # The executor holds the gradient of a chunk's output.
                gradient_of_chunk.append(gradient)
            log.open()

        # Forward: from a new input to an output whose place a graph node without memory takes.
        inputs = _Input.apply(torch.empty(0, requires_grad=True), like.detach(), lambda: passes.append(log.close()))
        input_address, input_size = storage_id(inputs.untyped_storage()), tracker.size_of(inputs)
        start = tracker.now
        log.open()
        output: Tensor = self._forward(inputs, positions.pop())
        passes.append(log.close())
        form, device, address = (output.shape, output.dtype), output.device, storage_id(output.untyped_storage())
        is_whole = tracker.size_of(output) == tracker.rounded(output.numel() * output.element_size())
        root = get_gradient_edge(_Output.apply(output, start_backward))
        # Whatever is still allocated now is saved for the backward pass.
        del output, inputs
        saves_output, saves_input = tracker.is_allocated(address), tracker.is_allocated(input_address)
        saved = tracker.now.relative_to(start)
        tracker.mark_activations(known)
        # Without memory: the gradient of the layer's output is allocated by _Output.
        gradient = torch.empty((), dtype=form[1], device=device).expand(form[0])
        nothing: list[DeferredWeightGrad] = []
        defers = self._setting.defers_gradients
        with self._setting.weight_gradients.deferring() if defers else nullcontext(nothing) as deferred:
            torch.autograd.backward(root, gradient)
        # What deferred gradients alone keep is measured next.
        del root, gradient
        gradient_of_chunk.clear()
        gradients = tuple(self._rehearse_gradients(log, deferred, *output_gradient))
        if saves_output or not is_whole or any(saved.by_kind[kind] for kind in LASTING):
            return None
        size = saved.total + (0 if saves_input else input_size)
        return RehearsedLayer(passes[0], passes[1], gradients, size, saves_input, form)

    @torch.no_grad()
    def _rehearse_gradients(
        self, log: PassLog, deferred: list[DeferredWeightGrad], output_gradient: tuple[int, int]
    ) -> Iterator[RehearsedGradient]:
        """Compute the ``deferred`` weight gradients, which empties the list. ``output_gradient`` is the address and the
        size of the gradient of the layer's output."""
        address, size = output_gradient
        deferred.reverse()
        while deferred:
            before, was_kept = self._tracker.now, self._tracker.is_allocated(address)
            current = deferred.pop()
            with log.recording() as gather:
                gathering = current.gather()
            with log.recording() as multiply:
                product = current.product(gathering.wait())
            with log.recording() as write:
                current.main_grad.add(product)
            number = cast(_LoggedMainGrad, current.main_grad).number
            del gathering, product, current
            kept = {kind: -change for kind, change in self._tracker.now.relative_to(before).by_kind.items() if change}
            is_freed = was_kept and not self._tracker.is_allocated(address)
            if is_freed:
                kept["working memory"] -= size
            yield RehearsedGradient(number, kept, is_freed, tuple(gather), tuple(multiply), tuple(write))

    @contextmanager
    def _logged_main_grads(self, log: PassLog) -> Iterator[None]:
        """Log gradients instead of accumulating them."""
        parameters = list(self._unit.parameters())
        main_grads = list(map(main_grad_of, parameters))
        for number, (parameter, main_grad) in enumerate(zip(parameters, main_grads)):
            if main_grad is not None:
                buffer = torch.empty(parameter.shape, dtype=self._setting.gradient_dtype, device=parameter.device)
                attach_main_grad(parameter, _LoggedMainGrad(buffer, log, number, main_grad.allocate is not None))
        yield
        for parameter, main_grad in zip(parameters, main_grads):
            if main_grad is not None:
                attach_main_grad(parameter, main_grad)

    @contextmanager
    def _logged_hooks(self, log: PassLog) -> Iterator[None]:
        """Log the hooks before the forward passes of modules inside the layer instead of calling them."""
        hooked = [
            (number, module)
            for number, module in enumerate(self._unit.modules())
            if number and forward_pre_hooks(module)
        ]
        originals = [dict(forward_pre_hooks(module)) for _, module in hooked]
        for number, module in hooked:
            hooks = forward_pre_hooks(module)
            first = next(iter(hooks))
            hooks.clear()
            hooks[first] = lambda *_, number=number: log.event("hooks", number)
        yield
        for (_, module), original in zip(hooked, originals):
            forward_pre_hooks(module).clear()
            forward_pre_hooks(module).update(original)
