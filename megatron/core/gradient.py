"""Where weight gradients go: straight into a parameter's slot of the gradient buffer.

Every operation that owns a parameter hands its gradient to :func:`deliver_gradient`. With a
:class:`GradientSlot` on the parameter the gradient is accumulated in the buffer's precision, without an
intermediate ``.grad``, and the first microbatch overwrites, so that buffers need no zeroing; without a slot it
goes to autograd as usual.
"""

from torch import Tensor, nn

_ATTRIBUTE = "gradient_slot"


class GradientSlot:
    """One parameter's place in a gradient buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        """View of the gradient buffer with the parameter's local shape."""
        self.is_filled = False
        """Whether this step has delivered a gradient yet; if not, the buffer holds the last step's."""

    def add(self, gradient: Tensor) -> None:
        """Accumulate ``gradient``."""
        if self.is_filled:
            self.buffer.add_(gradient)
        else:
            self.buffer.copy_(gradient)
        self.is_filled = True

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Accumulate ``values`` ``[n, width]`` into the rows numbered ``rows`` ``[n]``."""
        if not self.is_filled:
            self.buffer.zero_()
        self.buffer.index_add_(0, rows, values.to(self.buffer.dtype))
        self.is_filled = True

    def complete(self) -> None:
        """End the step: a parameter that took no part has a zero gradient."""
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


def deliver_gradient(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Deliver a gradient, which may be wider than the parameter.

    Returns what the autograd function must return for ``parameter``.
    """
    slot = slot_of(parameter)
    if slot is None:
        return gradient.to(parameter.dtype)
    slot.add(gradient)
    return None
