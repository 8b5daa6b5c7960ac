"""The numbers of tensors: dtypes of weights and gradients, fp16's loss scale, and tensors that are quantised with
scales."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.config.training import OptimizerConfig
from megatron.core.communication import Communicator, Work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class NumberFormats:
    weight: torch.dtype
    """Dtype of the model's weights and activations."""
    gradient: torch.dtype
    """Dtype in which main gradients are accumulated and reduced over ranks."""
    master: torch.dtype
    """Dtype of the master weights."""

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "NumberFormats":
        return cls(dtype, dtype, dtype)


def number_formats(precision: PrecisionConfig, optimizer: OptimizerConfig) -> NumberFormats:
    if precision.fp64:
        return NumberFormats.uniform(torch.float64)
    gradient = torch.bfloat16 if precision.grad_reduce_in_bf16 else DTYPES[optimizer.main_grads_dtype]
    return NumberFormats(weight=DTYPES[precision.name], gradient=gradient, master=torch.float32)


# The loss scale, which keeps gradients within fp16's range: Mixed Precision Training (arXiv 1710.03740, section 3.2).
# The dynamic scale follows Megatron-LM's rules.


@dataclass
class LossScaler:
    """A constant scale."""

    scale: float = 1.0
    """Factor of the loss in the next backward pass; the optimizer divides the gradients by it."""

    @property
    def is_dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return False

    def update(self, overflowed: bool) -> bool:
        """Record whether gradients ``overflowed`` in a step, the same on all ranks; returns whether that is normal."""
        return not overflowed

    def to_json(self) -> dict[str, float] | None:
        """The state for a checkpoint; None for a constant scale."""
        return None

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Restore the state of a checkpoint if there is one; a constant scale does not change."""


@dataclass
class DynamicLossScaler(LossScaler):
    """Halves at overflows and doubles after ``window`` steps without an overflow or a doubling.

    The first ``hysteresis - 1`` overflows after a doubling (or the start) only skip their steps.
    """

    minimum: float = field(kw_only=True)
    window: int = field(kw_only=True)
    hysteresis: int = field(kw_only=True)
    _good_steps: int = field(default=0, init=False)
    _overflows: int = field(default=0, init=False)
    """Since the last doubling."""

    @property
    def is_dynamic(self) -> bool:
        return True

    def update(self, overflowed: bool) -> bool:
        """Only an overflow at the minimum of the scale is not normal."""
        if not overflowed:
            self._good_steps += 1
            if self._good_steps >= self.window:
                self.scale *= 2
                self._good_steps = self._overflows = 0
            return True
        self._good_steps = 0
        self._overflows += 1
        if self._overflows < self.hysteresis:
            return True
        before = self.scale
        self.scale = max(self.scale / 2, self.minimum)
        return self.scale < before

    def to_json(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def restore(self, saved: Mapping[str, float] | None) -> None:
        if saved is None:
            return
        self.scale = max(saved["scale"], self.minimum)
        self._good_steps, self._overflows = int(saved["good_steps"]), int(saved["overflows"])


def build_loss_scaler(config: PrecisionConfig) -> LossScaler:
    if not config.has_dynamic_loss_scale:
        return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)
    return DynamicLossScaler(
        config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


# Quantised tensors


class Layout(enum.Flag):
    """The layouts in which a tensor is quantised."""

    ROWS = enum.auto()
    """``[..., k]``: for the output and the input gradient, whose rows are independent and may be communicated."""
    TRANSPOSED = enum.auto()
    """``[k, m]`` with all ``m`` rows: for the weight gradient, because FP8 units read both operands along the summed
    dim."""
    COLUMNS = enum.auto()
    """``[..., k]`` of this rank's rows, which are all-gathered and then transposed for the weight gradient. Block
    scaling quantises them in blocks along the rows; otherwise they are ``ROWS``."""
    BOTH = ROWS | TRANSPOSED


@dataclass(frozen=True)
class QuantizedTensor:
    """``data`` ``[s, b, k]`` times ``inverse_scale``. Rows are communicated together with their scales."""

    data: Tensor
    """``[0]`` if there is only the transpose."""
    inverse_scale: Tensor | None = None
    """None: not quantised. ``[]``: one scale per tensor, equal on all ranks that share it. ``[s, b, blocks]``: one
    scale per row, or per block of a row."""
    transposed: Tensor | None = None
    """The transpose ``[k, s b]`` of ``data``, contiguous; None if it was not made."""
    transposed_scale: Tensor | None = None
    """``[k, blocks]``: one inverse scale per block of a row of ``transposed``, which was quantised on its own. None:
    its scale is ``inverse_scale``."""
    columns: "QuantizedTensor | None" = field(default=None, kw_only=True)
    """The rows in the layout ``COLUMNS``, with scales ``[s b / block, k]``; None: they are ``data``."""

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """The tensors with one entry per row: ``data``, and ``inverse_scale`` unless it is one scale per tensor."""
        if self.inverse_scale is None or self.inverse_scale.dim() == 0:
            return (self.data,)
        return self.data, self.inverse_scale

    def with_rows(self, row_tensors: Sequence[Tensor]) -> "QuantizedTensor":
        """A tensor with other ``row_tensors`` and the scale of this one, without a transpose."""
        data, *scales = row_tensors
        return QuantizedTensor(data, *scales) if scales else QuantizedTensor(data, self.inverse_scale)

    def chunk(self, parts: int) -> list["QuantizedTensor"]:
        return [self.with_rows(rows) for rows in zip(*(tensor.chunk(parts) for tensor in self.row_tensors))]

    def start_all_gather(self, ranks: Communicator) -> Work["QuantizedTensor"]:
        assert self.transposed is None, "the transpose of all rows is made after the all-gather"
        return Work.all_of([ranks.start_all_gather(tensor) for tensor in self.row_tensors], self.with_rows)

    # What backward keeps

    @property
    def kept(self) -> "QuantizedTensor":
        """The operand of the weight gradient: the transpose if there is one, otherwise the columns or the rows."""
        if self.transposed is None:
            return self.columns or self
        scale = self.inverse_scale if self.transposed_scale is None else None
        return replace(self, data=self.data.new_empty(0), inverse_scale=scale)

    @property
    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of :attr:`kept`, without a scale of the whole tensor."""
        if self.transposed is None:
            return self.kept.row_tensors
        return (self.transposed,) if self.transposed_scale is None else (self.transposed, self.transposed_scale)

    @property
    def scaling(self) -> "QuantizedTensor":
        """An empty tensor that carries only the scale of the whole tensor; restored by :meth:`with_kept`."""
        empty, is_whole = self.data.new_empty(0), len(self.row_tensors) == 1
        return QuantizedTensor(
            empty, self.inverse_scale if is_whole else None, None if self.transposed is None else empty
        )

    def with_kept(self, kept_tensors: Sequence[Tensor]) -> "QuantizedTensor":
        """:attr:`kept` of the tensor that has this :attr:`scaling` and these ``kept_tensors``."""
        if self.transposed is None:
            return self.with_rows(kept_tensors)
        return QuantizedTensor(self.data, self.inverse_scale, *kept_tensors)


@dataclass(frozen=True)
class QuantizedActivation:
    """A quantised tensor in autograd's graph."""

    edge: Tensor
    """``[..., k]`` without memory; its gradient is the gradient of the unquantised tensor."""
    value: QuantizedTensor
