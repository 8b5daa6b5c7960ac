"""Where weight gradients go: straight into a parameter's slot of the gradient buffer.

Every operation that owns a parameter hands its gradient to :func:`deliver_gradient`. With a
:class:`GradientSlot` on the parameter the gradient is accumulated in the buffer's precision, without an
intermediate ``.grad``, and the first microbatch overwrites, so that buffers need no zeroing; without a slot it
goes to autograd as usual. A :class:`WeightGradientQueue` holds back the products of linear layers, for pipeline
schedules that compute weight gradients later.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megatron.core.communication import Pending
from megatron.core.ops.quantized import QuantizedTensor

_ATTRIBUTE = "gradient_slot"


class GradientProduct(Protocol):
    """A gradient that is yet to be multiplied, so that the product can add to a buffer what it finds."""

    def value(self) -> Tensor:
        """The gradient."""

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        """Add it to ``buffer``, or overwrite what is there."""


Gradient = Tensor | GradientProduct


class GradientSlot:
    """One parameter's place in a gradient buffer, which it has for good, or which is lent to it when a gradient comes
    (:meth:`provide_with`)."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = buffer
        self._provide: Callable[[], None] | None = None
        self.is_filled = False
        """Whether the buffer holds a gradient of this step; if not, what it holds is older."""
        self.on_delivery: Callable[[], None] | None = None
        """Called after every delivery, if set."""

    @property
    def buffer(self) -> Tensor:
        """View of the gradient buffer with the parameter's local shape."""
        if self._buffer is None:
            assert self._provide is not None
            self._provide()
        assert self._buffer is not None
        return self._buffer

    def lend(self, buffer: Tensor) -> None:
        """Use ``buffer`` until :meth:`reclaim`."""
        self._buffer = buffer

    def reclaim(self) -> None:
        """Let go of the buffer."""
        self._buffer = None

    def provide_with(self, provide: Callable[[], None]) -> None:
        """Call ``provide``, which must :meth:`lend` one, when a gradient comes and there is no buffer."""
        self._provide = provide

    def add(self, gradient: Gradient) -> None:
        """Accumulate ``gradient``."""
        if not isinstance(gradient, Tensor):
            gradient.write_to(self.buffer, accumulate=self.is_filled)
        elif self.is_filled:
            self.buffer.add_(gradient)
        else:
            self.buffer.copy_(gradient)
        self._delivered()

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Accumulate ``values`` ``[n, width]`` into the rows numbered ``rows`` ``[n]``."""
        if not self.is_filled:
            self.buffer.zero_()
        self.buffer.index_add_(0, rows, values.to(self.buffer.dtype))
        self._delivered()

    @contextmanager
    def accumulating(self) -> Iterator[Tensor]:
        """The buffer, for an operation that itself adds to what is in it; the end is a delivery."""
        if not self.is_filled:
            self.buffer.zero_()
        yield self.buffer
        self._delivered()

    def _delivered(self) -> None:
        self.is_filled = True
        if self.on_delivery is not None:
            self.on_delivery()

    def complete(self) -> None:
        """No more will come: a parameter that took no part has a zero gradient."""
        if not self.is_filled:
            self.buffer.zero_()
        self.is_filled = False


def attach_slot(parameter: nn.Parameter, slot: GradientSlot) -> None:
    """Send the gradients of ``parameter`` to ``slot`` from now on."""
    setattr(parameter, _ATTRIBUTE, slot)


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """The slot of ``parameter``, if data parallelism gave it one."""
    slot: GradientSlot | None = getattr(parameter, _ATTRIBUTE, None)
    return slot


def deliver_gradient(parameter: Tensor, gradient: Gradient) -> Tensor | None:
    """Deliver a gradient, which may be wider than the parameter.

    Returns what the autograd function must return for ``parameter``.
    """
    slot = slot_of(parameter)
    if slot is None:
        whole = gradient if isinstance(gradient, Tensor) else gradient.value()
        return whole.to(parameter.dtype)
    slot.add(gradient)
    return None


@dataclass(frozen=True)
class HeldGradient:
    """A weight gradient yet to be computed: gather what is missing, then multiply."""

    slot: GradientSlot
    gather: Callable[[], Pending[QuantizedTensor]]
    product: Callable[[QuantizedTensor], Gradient]


class WeightGradientQueue:
    """Computes the weight gradients of linear layers at once, or holds them back while :meth:`hold` is open.

    What is held back keeps the layer's input and output gradient alive, as this rank's part of the sequence.
    """

    def __init__(self) -> None:
        self._held: list[HeldGradient] | None = None

    @contextmanager
    def hold(self) -> Iterator[list[HeldGradient]]:
        """Collect the products of a backward pass in the list that it yields; :func:`compute_held` computes them."""
        held = self._held = []
        try:
            yield held
        finally:
            self._held = None

    @property
    def is_holding(self) -> bool:
        """Whether products wait."""
        return self._held is not None

    def hold_back(
        self,
        parameter: Tensor,
        gather: Callable[[], Pending[QuantizedTensor]],
        product: Callable[[QuantizedTensor], Gradient],
    ) -> None:
        """Compute later: ``product`` of what ``gather`` brings is the gradient of ``parameter``."""
        slot = slot_of(parameter)
        assert self._held is not None
        assert slot is not None, "weight gradients can wait only for a gradient buffer"
        self._held.append(HeldGradient(slot, gather, product))


def compute_held(held: list[HeldGradient]) -> None:
    """Compute and deliver what a backward pass held back, in its order, gathering one ahead; empties the list, so
    that each lets go of its activations."""
    held.reverse()
    gathering = held[-1].gather() if held else None
    while held:
        current, gathered = held.pop(), gathering
        gathering = held[-1].gather() if held else None
        assert gathered is not None
        current.slot.add(current.product(gathered.wait()))
