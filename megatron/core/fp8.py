"""FP8 training: the scales of this rank's linear layers, how they follow from step to step, and the products.

Every linear layer has three quantised tensors, each with one scale: input, weight and gradient of the output. All
microbatches of a step use the same scales (delayed scaling), so that neither their number nor the layout matters;
at the end of the step the magnitudes that were seen, of all ranks that compute with the same layers, set those of the
next. Or a tensor's scale is that of its own magnitude (current scaling, ``tensorwise``).

What is recorded is a maximum, so that a forward pass that is repeated in the backward pass changes nothing.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.communication import Communicator
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    ScaledProduct,
    amax_of,
    amax_of_history,
    largest_value,
    product_for,
    push_amax,
    quantize,
    scale_from_amax,
    scaled_product,
    transposed,
)
from megatron.core.ops.quantized import QuantizedTensor

Fp8Role = Literal["input", "weight", "output_gradient"]
ROLES: tuple[Fp8Role, ...] = get_args(Fp8Role)


@dataclass(frozen=True)
class _Numbers:
    """What delayed scaling remembers, in fp32; one row for each linear layer, in it one column for each role."""

    scale: Tensor
    """``[layers, roles]``; zero until a step has told one."""
    amax_history: Tensor
    """``[layers, roles, length]``, the newest first."""
    step_amax: Tensor
    """``[layers, roles]``: the largest magnitudes of this step so far, on this rank."""


class Fp8Layers:
    """A rank's FP8 linear layers, whoever multiplies in them: here what does not depend on that."""

    multiplier: str
    """Whose products these are."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.config = config

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from the past."""
        return self.config.fp8_recipe == "delayed"

    def includes(self, layer: int, num_layers: int) -> bool:
        """Whether ``layer`` of ``num_layers`` multiplies in FP8."""
        config = self.config
        if not config.first_last_layers_bf16:
            return True
        return config.num_layers_at_start_in_bf16 <= layer < num_layers - config.num_layers_at_end_in_bf16

    def forward_pass(self) -> AbstractContextManager[object]:
        """Stands around what a chunk of the model computes forward for one microbatch."""
        return nullcontext()

    def start_step(self) -> None:
        """Before the first microbatch of a step."""

    def finish_step(self) -> None:
        """After the last one, before the weights are updated."""

    def state(self) -> dict[str, Tensor]:
        """What a run that goes on must know, by names that do not depend on the layout; the same on all ranks that have
        a layer: ``<layer>/scale`` ``[roles]``, zero until there is one, and ``<layer>/amax_history``
        ``[roles, length]``, the newest first."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the state of those layers that ``saved`` has; of a history of another length the newest."""


class Fp8Scaling(Fp8Layers):
    """The scales of a rank's linear layers, between :meth:`start_step` and :meth:`finish_step` the same.

    ``ranks`` are those that compute with the same layers, whatever part of them or of the batch. Without
    ``keeps_weights`` a quantised weight is made for every product, for weights that are not kept themselves.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        ranks: Communicator,
        device: torch.device,
        keeps_weights: bool = True,
        multiply: ScaledProduct | None = None,
    ) -> None:
        super().__init__(config)
        self.keeps_weights = keeps_weights
        self.multiply = product_for(device) if multiply is None else multiply
        self.multiplier = "torch._scaled_mm" if self.multiply is scaled_product else "fp32 products of the FP8 numbers"
        self._ranks, self._device = ranks, device
        self._layers: list[Fp8Gemm] = []
        gradient = E5M2 if config.fp8_format == "hybrid" else E4M3
        self.formats: dict[Fp8Role, torch.dtype] = {"input": E4M3, "weight": E4M3, "output_gradient": gradient}

    def gemm(
        self, name: str, dtype: torch.dtype, tensor_parallel: Communicator, sharded: Collection[Fp8Role]
    ) -> "Fp8Gemm":
        """The GEMMs of the linear layer ``name``, with results in ``dtype``; all are made before the first step.

        The tensors in ``sharded`` are divided over the ``tensor_parallel`` ranks, which reduce their amax.
        """
        self._layers.append(Fp8Gemm(self, len(self._layers), name, dtype, tensor_parallel, sharded))
        return self._layers[-1]

    @cached_property
    def numbers(self) -> _Numbers:
        """The memory of all linear layers, in few tensors so that a step takes few operations."""
        shape = len(self._layers), len(ROLES)

        def zeros(*more: int) -> Tensor:
            return torch.zeros(*shape, *more, dtype=torch.float32, device=self._device)

        return _Numbers(zeros(), zeros(self.config.fp8_amax_history_len), zeros())

    @cached_property
    def _largest(self) -> Tensor:
        """The largest value of each role, ``[roles]``."""
        return torch.tensor([largest_value(self.formats[role]) for role in ROLES], device=self._device)

    def start_step(self) -> None:
        """Begin to record; what an evaluation saw in between counts for nothing."""
        self._forget_weights()
        if self.is_delayed:
            self.numbers.step_amax.zero_()

    def finish_step(self) -> None:
        """Set the scales of the next step; before the weights are updated.

        One collective for all layers. A step whose numbers were not finite leaves the scales as they were.
        """
        self._forget_weights()
        if not self.is_delayed or not self._layers:
            return
        numbers = self.numbers
        # The maximum of a NaN and a number is either, depending on the backend.
        amax = self._ranks.all_reduce(numbers.step_amax.nan_to_num(nan=torch.inf, posinf=torch.inf), "max")
        push_amax(numbers.amax_history, amax)
        amax = amax_of_history(numbers.amax_history, self.config.fp8_amax_compute_algo)
        numbers.scale.copy_(scale_from_amax(amax, self._largest, numbers.scale, self.config.fp8_margin))
        self._note_scales()

    def _forget_weights(self) -> None:
        for layer in self._layers:
            layer.forget_weight()

    def _note_scales(self) -> None:
        """Let the layers know which of them have scales by now. Once all have, nobody waits for the device any more."""
        if all(layer.has_scales for layer in self._layers):
            return
        for layer, has_scales in zip(self._layers, (self.numbers.scale > 0.0).all(dim=1).tolist()):
            layer.has_scales = has_scales

    def state(self) -> dict[str, Tensor]:
        """As of all; current scaling remembers nothing."""
        if not self.is_delayed:
            return {}
        state: dict[str, Tensor] = {}
        for layer, scale, history in zip(self._layers, self.numbers.scale, self.numbers.amax_history):
            state |= {f"{layer.name}/scale": scale, f"{layer.name}/amax_history": history}
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the state of those layers that ``saved`` has; of a history of another length the newest."""
        for name, tensor in self.state().items():
            if name not in saved:
                continue
            tensor.zero_()
            length = min(tensor.shape[-1], saved[name].shape[-1])
            tensor[..., :length] = saved[name][..., :length]
        if self.is_delayed and self._layers:
            self._note_scales()


class Fp8Gemm:
    """The GEMMs of one linear layer (:class:`~megatron.core.ops.matmul.Gemm`) in FP8.

    Under delayed scaling a layer without scales, that is in its first step, takes those of the tensors themselves:
    gradients are so small that with any fixed scale the step would be lost.
    """

    is_plain = False

    def __init__(
        self,
        scaling: Fp8Scaling,
        number: int,
        name: str,
        dtype: torch.dtype,
        tensor_parallel: Communicator,
        sharded: Collection[Fp8Role],
    ) -> None:
        self.name, self.has_scales = name, False
        self._scaling, self._number, self._dtype = scaling, number, dtype
        self._tensor_parallel, self._sharded = tensor_parallel, frozenset(sharded)
        self._weight: QuantizedTensor | None = None
        self._transposed_weight: QuantizedTensor | None = None

    def forget_weight(self) -> None:
        """The weight, or its scale, will be another."""
        self._weight = self._transposed_weight = None

    def quantize_input(self, inputs: Tensor) -> QuantizedTensor:
        return self._quantize("input", inputs)

    def quantize_gradient(self, grad_outputs: Tensor) -> QuantizedTensor:
        return self._quantize("output_gradient", grad_outputs)

    def output(self, inputs: QuantizedTensor, weight: Tensor) -> Tensor:
        """``inputs @ weight^T``, ``[..., n]``; it alone may be accumulated fast, as in Transformer Engine."""
        return self._multiply_rows(inputs, self._quantized_weight(weight), fast=True)

    def input_gradient(self, grad_outputs: QuantizedTensor, weight: Tensor) -> Tensor:
        """``grad_outputs @ weight``, ``[..., k]``."""
        return self._multiply_rows(grad_outputs, self._quantized_transpose(weight), fast=False)

    def weight_gradient(self, grad_outputs: QuantizedTensor, inputs: QuantizedTensor) -> Tensor:
        """``grad_outputs^T @ inputs``, ``[n, k]`` in fp32."""
        wide = torch.promote_types(self._dtype, torch.float32)
        return self._scaling.multiply(transposed(_rows(grad_outputs)), transposed(_rows(inputs)), wide)

    def _multiply_rows(self, inputs: QuantizedTensor, weight: QuantizedTensor, fast: bool) -> Tensor:
        product = self._scaling.multiply(_rows(inputs), weight, self._dtype, fast)
        return product.view(*inputs.data.shape[:-1], -1)

    def _quantized_weight(self, weight: Tensor) -> QuantizedTensor:
        """``weight`` ``[n, k]``, quantised once a step where it may be kept."""
        if self._weight is not None:
            return self._weight
        quantized = self._quantize("weight", weight)
        if self._scaling.keeps_weights:
            self._weight = quantized
        return quantized

    def _quantized_transpose(self, weight: Tensor) -> QuantizedTensor:
        """``weight^T`` ``[k, n]``, likewise."""
        if self._transposed_weight is not None:
            return self._transposed_weight
        quantized = transposed(self._quantized_weight(weight))
        if self._scaling.keeps_weights:
            self._transposed_weight = quantized
        return quantized

    def _quantize(self, role: Fp8Role, tensor: Tensor) -> QuantizedTensor:
        amax = amax_of(tensor)
        return quantize(tensor, self._scale(role, amax), amax, self._scaling.formats[role])

    def _scale(self, role: Fp8Role, amax: Tensor) -> Tensor:
        """The scale of a tensor, or of this rank's part of it, with the largest magnitude ``amax``."""
        scaling = self._scaling
        if scaling.is_delayed:
            numbers, place = scaling.numbers, (self._number, ROLES.index(role))
            seen = numbers.step_amax[place]
            torch.maximum(seen, amax, out=seen)
            if self.has_scales:
                return numbers.scale[place]
        if role in self._sharded:
            amax = self._tensor_parallel.all_reduce(amax.clone(), "max")
        return scale_from_amax(amax, largest_value(scaling.formats[role]), 1.0, scaling.config.fp8_margin)


def _rows(operand: QuantizedTensor) -> QuantizedTensor:
    """``[..., k]`` as a matrix ``[m, k]``."""
    return QuantizedTensor(operand.data.flatten(0, -2), operand.inverse_scale)
