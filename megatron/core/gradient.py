"""Main gradients: weight gradients accumulate in the gradient buffer, in its precision, without a ``.grad``.

The operations of this project with a parameter call :func:`accumulate_main_grad`. The gradients of plain torch
operations are put into ``.grad`` by autograd, from where a hook moves them to the main gradient at once. The first
microbatch overwrites the buffer, so that it needs no zeroing. A parameter without a :class:`MainGrad` returns its
gradient to autograd, and a frozen one has none. :class:`WeightGradStore` defers the weight-gradient GEMMs of linear
layers for zero-bubble schedules.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.communication import Work
from megatron.core.precision import QuantizedTensor

_ATTRIBUTE = "megatron_main_grad"


class GradientProduct(Protocol):
    """A weight gradient that is not computed yet, so that its GEMM can accumulate into a buffer."""

    def value(self) -> Tensor:
        """The gradient."""

    def write_to(self, buffer: Tensor, accumulate: bool) -> None:
        """Compute it into ``buffer``: add, or overwrite."""


Gradient = Tensor | GradientProduct


def add_or_overwrite(buffer: Tensor, gradient: Tensor, accumulate: bool) -> None:
    """Add ``gradient`` to ``buffer``, whose dtype may be another, or overwrite it."""
    if accumulate:
        buffer.add_(gradient)
    else:
        buffer.copy_(gradient)


class MainGrad:
    """A parameter's view of a gradient buffer: permanent (ZeRO-1), or allocated by the first gradient of a microbatch
    (ZeRO-2 and 3)."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self.storage = buffer
        """The buffer, if it is allocated."""
        self.allocate: Callable[[], None] | None = None
        """Sets :attr:`storage` for the first gradient without a buffer."""
        self.is_filled = False
        """Whether the buffer holds a gradient of this step; if not, its values are stale."""
        self.on_accumulated: Callable[[], None] | None = None
        """Called after every gradient, if set."""

    @property
    def buffer(self) -> Tensor:
        if self.storage is None:
            assert self.allocate is not None
            self.allocate()
        assert self.storage is not None
        return self.storage

    def add(self, gradient: Gradient) -> None:
        if isinstance(gradient, Tensor):
            add_or_overwrite(self.buffer, gradient, self.is_filled)
        else:
            gradient.write_to(self.buffer, accumulate=self.is_filled)
        self._accumulated()

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Accumulate ``values`` ``[n, width]`` into the rows numbered ``rows`` ``[n]``."""
        if not self.is_filled:
            self.buffer.zero_()
        if self.buffer.itemsize < 4:
            # A bf16 sum of many small values stops growing, so the values of a row are summed in fp32 first.
            rows, values = _sum_by_row(rows, values)
        self.buffer.index_add_(0, rows, values.to(self.buffer.dtype))
        self._accumulated()

    @contextmanager
    def accumulating(self) -> Iterator[Tensor]:
        """The buffer, for a kernel that adds to it; the gradient counts as accumulated at the end."""
        if not self.is_filled:
            self.buffer.zero_()
        yield self.buffer
        self._accumulated()

    def _accumulated(self) -> None:
        self.is_filled = True
        if self.on_accumulated is not None:
            self.on_accumulated()

    def complete(self) -> None:
        """End the step: the gradient of an unused parameter is zero."""
        if not self.is_filled:
            self.buffer.zero_()
        self.is_filled = False


def _sum_by_row(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum duplicate rows in fp32 without changing shapes: after the first occurrence of a row the value is zero. So the
    host does not wait for the device."""
    rows, order = rows.sort()
    number = torch.cat((rows.new_zeros(1), (rows[1:] != rows[:-1]).long().cumsum(0)))  # [n], of distinct rows
    sums = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    sums.index_add_(0, number, values[order].float())
    return torch.zeros_like(rows).index_copy_(0, number, rows), sums


def attach_main_grad(parameter: nn.Parameter, main_grad: MainGrad) -> None:
    """Accumulate the gradients of ``parameter`` in ``main_grad``, those of our operations and those of autograd."""
    setattr(parameter, _ATTRIBUTE, main_grad)
    parameter.register_post_accumulate_grad_hook(_move_to_main_grad)


def _move_to_main_grad(parameter: Tensor) -> None:
    main_grad, gradient = main_grad_of(parameter), parameter.grad
    # Our operations return no gradient to autograd, which calls the hook all the same.
    if gradient is not None:
        assert main_grad is not None
        parameter.grad = None
        main_grad.add(gradient)


def main_grad_of(parameter: Tensor) -> MainGrad | None:
    """The main gradient of ``parameter``, if data parallelism attached one."""
    main_grad: MainGrad | None = getattr(parameter, _ATTRIBUTE, None)
    return main_grad


def accumulate_main_grad(parameter: Tensor, gradient: Gradient) -> Tensor | None:
    """Accumulate a gradient, whose dtype may be wider than the parameter's; returns the gradient that the autograd
    function must return for ``parameter``. Nothing is computed for a frozen parameter."""
    if not parameter.requires_grad:
        return None
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        whole = gradient if isinstance(gradient, Tensor) else gradient.value()
        return whole.to(parameter.dtype)
    main_grad.add(gradient)
    return None


@dataclass(frozen=True)
class DeferredWeightGrad:
    """A weight gradient to be computed later: gather the input, then multiply."""

    main_grad: MainGrad
    gather: Callable[[], Work[QuantizedTensor]]
    product: Callable[[QuantizedTensor], Gradient]


class WeightGradStore:
    """Collects the weight-gradient GEMMs of linear layers while :meth:`deferring` is open (zero-bubble schedules, Qi et
    al., arXiv 2401.10241). A deferred GEMM keeps this rank's part of the layer's input and output gradient alive."""

    def __init__(self) -> None:
        self._deferred: list[DeferredWeightGrad] | None = None

    @contextmanager
    def deferring(self) -> Iterator[list[DeferredWeightGrad]]:
        """Collect the weight gradients of a backward pass in the list, for :func:`compute_deferred`."""
        deferred = self._deferred = []
        try:
            yield deferred
        finally:
            self._deferred = None

    @property
    def is_deferring(self) -> bool:
        """Whether weight gradients are to be :meth:`put` here."""
        return self._deferred is not None

    def put(
        self,
        parameter: Tensor,
        gather: Callable[[], Work[QuantizedTensor]],
        product: Callable[[QuantizedTensor], Gradient],
    ) -> None:
        """Defer: the gradient of ``parameter`` is ``product`` of the gathered input."""
        main_grad = main_grad_of(parameter)
        assert self._deferred is not None
        assert main_grad is not None, "weight gradients can wait only for a gradient buffer"
        self._deferred.append(DeferredWeightGrad(main_grad, gather, product))


def compute_deferred(deferred: list[DeferredWeightGrad]) -> None:
    """Compute the weight gradients of a backward pass in its order, gathering one ahead. Empties the list, which frees
    the activations one by one."""
    deferred.reverse()
    gathering = deferred[-1].gather() if deferred else None
    while deferred:
        current, gathered = deferred.pop(), gathering
        gathering = deferred[-1].gather() if deferred else None
        assert gathered is not None
        current.main_grad.add(current.product(gathered.wait()))
