"""FP8 training: the scales of this rank's linear layers, their updates, and the GEMMs.

    start_step    forward, backward of all microbatches          finish_step
    amax = 0      x * scale -> FP8;  amax = max(amax, |x|)       amax = max over ranks -> history -> next scale

Every linear layer has three quantised tensors, each with one scale: input, weight and output gradient. Under delayed
scaling all microbatches of a step use the same scales, so results depend neither on their number nor on the layout; at
the end of the step the amaxes of all ranks with the same layers set the next scales. Under current scaling
(``tensorwise``) each tensor is scaled by its own amax, under block scaling (``blockwise``) each block by the block's.

Amaxes of a step are recorded as maxima, so a recomputed forward pass does not change them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.core.communication import Communicator
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    DelayedQuantization,
    FlatPieces,
    Fp8Format,
    Fp8Kernels,
    Fp8Role,
    Fp8WeightGradientProduct,
    ScaledGemm,
    amax_of,
    block_scaled_gemm,
    gemm_for,
    inverse_of,
    largest_value,
    power_of_two_scale,
    push_amax,
    scale_from_amax,
    scaled_gemm,
)
from megatron.core.precision import Layout, QuantizedTensor

ROLES: tuple[Fp8Role, ...] = get_args(Fp8Role)
_WEIGHT = ROLES.index("weight")


@dataclass(frozen=True)
class _DelayedState:
    """The state of delayed scaling in fp32: one row for each linear layer, one column for each role."""

    scale: Tensor
    """``[layers, roles]``; zero until the first step has set it."""
    amax_history: Tensor
    """``[layers, roles, length]``, the newest first."""
    step_amax: Tensor
    """``[layers, roles]``: the amaxes of this step so far, on this rank."""


@dataclass(frozen=True)
class _WeightState:
    """The scales of weights that are gathered in FP8, in fp32."""

    amax: Tensor
    """``[layers]``, of whole weights."""
    inverse_scale: Tensor
    """``[layers]``"""


class Fp8Layers:
    """The FP8 linear layers of a rank: base of our own implementation and of Transformer Engine's."""

    gemm_name: str
    """The implementation of the GEMMs, for the log."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.config = config

    @property
    def is_delayed(self) -> bool:
        """Whether scales depend on the steps before."""
        return self.config.fp8_recipe == "delayed"

    @property
    def has_blocks(self) -> bool:
        """Whether each block of a tensor has a scale."""
        return self.config.fp8_recipe == "blockwise"

    def includes(self, layer: int, num_layers: int) -> bool:
        """Whether ``layer`` of ``num_layers`` multiplies in FP8."""
        config = self.config
        if not config.first_last_layers_bf16:
            return True
        return config.num_layers_at_start_in_bf16 <= layer < num_layers - config.num_layers_at_end_in_bf16

    def forward_pass(self) -> AbstractContextManager[object]:
        """The context of the forward pass of a chunk for one microbatch."""
        return nullcontext()

    def start_step(self) -> None:
        """Call before the first microbatch of a step."""

    def finish_step(self) -> None:
        """Call after the last one, before the weights are updated."""

    def kept_weights(self) -> Iterator[Tensor]:
        """The FP8 copies of weights that are stored now."""
        yield from ()

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint, by names that do not depend on the layout and equal on all ranks of a layer:
        ``<layer>/scale`` ``[roles]``, zero until it is set, and ``<layer>/amax_history`` ``[roles, length]``, newest
        first. Empty under current scaling."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load the state of the layers in ``saved``; of a history of another length the newest amaxes."""


class Fp8Scaling(Fp8Layers):
    """Our own FP8: under delayed scaling, scales are constant from :meth:`start_step` to :meth:`finish_step`.

    ``ranks`` compute with the same layers. Without ``keeps_weights`` weights are quantised for every GEMM (FSDP). With
    ``--fp8-param-gather`` the parameters themselves are FP8, and :meth:`quantize_weights` writes them.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        ranks: Communicator,
        device: torch.device,
        keeps_weights: bool = True,
        kernels: Fp8Kernels | None = None,
    ) -> None:
        super().__init__(config)
        self.keeps_weights = keeps_weights
        self.kernels = kernels or Fp8Kernels.eager(gemm_for(device, self.has_blocks))
        names: dict[ScaledGemm, str] = {scaled_gemm: "torch._scaled_mm", block_scaled_gemm: "torch._scaled_mm_v2"}
        self.gemm_name = names.get(self.kernels.gemm, "fp32 products of the FP8 numbers")
        self._ranks, self._device = ranks, device
        self._layers: list[Fp8Gemm] = []
        gradient = E5M2 if config.fp8_format == "hybrid" else E4M3
        self.formats: dict[Fp8Role, torch.dtype] = {"input": E4M3, "weight": E4M3, "output_gradient": gradient}

    def gemm(
        self,
        name: str,
        dtype: torch.dtype,
        tensor_parallel: Communicator,
        sharded: Collection[Fp8Role],
        weight_shape: Sequence[int],
    ) -> "Fp8Gemm":
        """The GEMMs of the linear layer ``name``, with results in ``dtype``; to be called before the first step.

        The tensors in ``sharded`` are sharded over the ``tensor_parallel`` ranks, which reduce their amax; blocks are
        whole on a rank. ``weight_shape`` is this rank's ``[n, k]``.
        """
        number = len(self._layers)
        self._layers.append(Fp8Gemm(self, number, name, dtype, tensor_parallel, sharded, weight_shape))
        return self._layers[-1]

    @cached_property
    def delayed_state(self) -> _DelayedState:
        """The state of all linear layers, in few tensors so that a step takes few operations."""
        shape = len(self._layers), len(ROLES)

        def zeros(*more: int) -> Tensor:
            return torch.zeros(*shape, *more, dtype=torch.float32, device=self._device)

        return _DelayedState(zeros(), zeros(self.config.fp8_amax_history_len), zeros())

    @cached_property
    def weight_state(self) -> _WeightState:
        shape = (2, len(self._layers))
        return _WeightState(*torch.zeros(shape, dtype=torch.float32, device=self._device))

    def quantize_weights(self, shards: Mapping[str, tuple[Tensor, Tensor, int]], ranks: Communicator) -> None:
        """Quantise this rank's shards of weights by the names of their layers: ``(master weights, FP8 numbers,
        start)``, 1-D each from element ``start`` of the flattened weight, of which the second are overwritten.
        Collective over ``ranks``, which divide the weights, and over the tensor-parallel ranks: all shards of a weight
        get one scale, under delayed scaling the scale of the step; under block scaling all shards of a block."""
        self._drop_weights()
        if not self._layers:
            return
        if self.has_blocks:
            self._quantize_weight_blocks(shards, ranks)
            return
        nothing = torch.zeros((), dtype=torch.float32, device=self._device)
        masters = (shards.get(layer.name) for layer in self._layers)
        amax = torch.stack([nothing if shard is None else amax_of(shard[0]) for shard in masters])  # [layers]
        amax = ranks.all_reduce(amax.nan_to_num(nan=torch.inf, posinf=torch.inf), "max")
        amax = self._layers[0].tensor_parallel.all_reduce(amax, "max")
        scale = scale_from_amax(amax, largest_value(E4M3), 1.0, self.config.fp8_margin)
        if self.is_delayed:
            # All roles have a scale from the second step on; before, weights have their own.
            past = self.delayed_state.scale
            scale = torch.where((past > 0.0).all(dim=1), past[:, _WEIGHT], scale)
        self.weight_state.amax.copy_(amax)
        # Not finite if the amax is not, so that every GEMM with the weight is NaN.
        self.weight_state.inverse_scale.copy_(scale.reciprocal() + (amax - amax))
        for number, layer in enumerate(self._layers):
            if layer.name in shards:
                # As rows of 64, because kernels quantise matrices and a narrow one would leave threads idle.
                master, numbers = (one.view(-1, math.gcd(one.numel(), 64)) for one in shards[layer.name][:2])
                target = Fp8Format(scale[number], E4M3, Layout.ROWS)
                self.kernels.quantization.quantize(master, target, amax[number], out=numbers)

    def _quantize_weight_blocks(self, shards: Mapping[str, tuple[Tensor, Tensor, int]], ranks: Communicator) -> None:
        """:meth:`quantize_weights` with one all-reduce of the amaxes of all blocks of this rank's weights."""
        blocks = self.kernels.blocks
        grids = [[side // blocks.size for side in layer.weight_shape] for layer in self._layers]
        counts = [math.prod(grid) for grid in grids]
        amax = torch.zeros(sum(counts), dtype=torch.float32, device=self._device)
        pieces: dict[str, FlatPieces] = {}
        for layer, own in zip(self._layers, amax.split(counts)):
            if layer.name in shards:
                master, _, start = shards[layer.name]
                pieces[layer.name] = FlatPieces.of(master, start, layer.weight_shape, blocks.size)
                own.copy_(pieces[layer.name].amax(master, own.numel()))
        # Each tensor-parallel rank has blocks of its own.
        amax = ranks.all_reduce(amax, "max")
        scales = power_of_two_scale(amax, E4M3)
        inverse_scales = inverse_of(scales, amax).split(counts)
        for layer, grid, scale, inverse_scale in zip(self._layers, grids, scales.split(counts), inverse_scales):
            layer.block_scales = inverse_scale.view(*grid)
            if layer.name in pieces:
                of_layer = pieces[layer.name]
                master, numbers = (one.view(-1, of_layer.width) for one in shards[layer.name][:2])
                blocks.quantize_pieces(master, scale[of_layer.block], E4M3, numbers)

    @cached_property
    def _largest(self) -> Tensor:
        """The largest value of each role, ``[roles]``."""
        return torch.tensor([largest_value(self.formats[role]) for role in ROLES], device=self._device)

    def start_step(self) -> None:
        # An evaluation may have recorded amaxes and quantised other weights.
        self._drop_weights()
        if self.is_delayed:
            self.delayed_state.step_amax.zero_()
            if self.config.fp8_param_gather:
                self.delayed_state.step_amax[:, _WEIGHT] = self.weight_state.amax

    def finish_step(self) -> None:
        """Set the scales of the next step, in one collective for all layers. If an amax of this step is not finite,
        the scale does not change."""
        self._drop_weights()
        if not self.is_delayed or not self._layers:
            return
        state = self.delayed_state
        # The maximum of a NaN and a number depends on the backend.
        amax = self._ranks.all_reduce(state.step_amax.nan_to_num(nan=torch.inf, posinf=torch.inf), "max")
        push_amax(state.amax_history, amax)
        history, is_newest = state.amax_history, self.config.fp8_amax_compute_algo == "most_recent"
        amax = history[..., 0] if is_newest else history.amax(dim=-1)  # [layers, roles]
        state.scale.copy_(scale_from_amax(amax, self._largest, state.scale, self.config.fp8_margin))
        self._update_has_scales()

    def _drop_weights(self) -> None:
        for layer in self._layers:
            layer.weight = None

    def kept_weights(self) -> Iterator[Tensor]:
        for layer in self._layers:
            if layer.weight is not None:
                yield layer.weight.data
                if layer.weight.transposed is not None:
                    yield layer.weight.transposed

    def _update_has_scales(self) -> None:
        """Update ``has_scales`` of the layers. Once all have scales, this no longer waits for the device."""
        if all(layer.has_scales for layer in self._layers):
            return
        for layer, has_scales in zip(self._layers, (self.delayed_state.scale > 0.0).all(dim=1).tolist()):
            layer.has_scales = has_scales

    def state(self) -> dict[str, Tensor]:
        if not self.is_delayed:
            return {}
        state: dict[str, Tensor] = {}
        for layer, scale, history in zip(self._layers, self.delayed_state.scale, self.delayed_state.amax_history):
            state |= {f"{layer.name}/scale": scale, f"{layer.name}/amax_history": history}
        return state

    def load(self, saved: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            if name not in saved:
                continue
            tensor.zero_()
            length = min(tensor.shape[-1], saved[name].shape[-1])
            tensor[..., :length] = saved[name][..., :length]
        if self.is_delayed and self._layers:
            self._update_has_scales()


class Fp8Gemm:
    """The GEMMs of one linear layer (:class:`~megatron.core.ops.matmul.Gemm`) in FP8.

    In the first step of delayed scaling a layer has no scales and uses current scaling: with a fixed scale the
    gradients, which are small, would be quantised to zero.
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
        weight_shape: Sequence[int],
    ) -> None:
        self.name, self.has_scales, self.weight_shape = name, False, weight_shape
        self._scaling, self._number, self._dtype = scaling, number, dtype
        self.tensor_parallel, self._sharded = tensor_parallel, frozenset(sharded)
        self.weight: QuantizedTensor | None = None
        """The quantised weight of this step, with ``keeps_weights``; in both layouts, or if it is gathered in FP8 in
        those that were needed."""
        self.block_scales: Tensor | None = None
        """The inverse scales ``[n / 128, k / 128]`` of a weight that is gathered in FP8, under block scaling."""

    @property
    def needs_weight_memory(self) -> bool:
        """Whether a GEMM has yet to allocate a quantised weight that is kept for the step."""
        if not (self._scaling.keeps_weights or self._scaling.config.fp8_param_gather):
            return False
        return self.weight is None or self.weight.transposed is None

    def quantize(self, role: Fp8Role, tensor: Tensor, layout: Layout) -> QuantizedTensor:
        if self.has_scales:
            return self._with_known_scale(role, layout).quantize(tensor)
        scaling = self._scaling
        if scaling.has_blocks:
            blocks = scaling.kernels.blocks
            quantize = blocks.quantize_weight if role == "weight" else blocks.quantize
            return quantize(tensor, scaling.formats[role], layout)
        amax = amax_of(tensor)
        if scaling.is_delayed:
            step_amax = scaling.delayed_state.step_amax[self._number, ROLES.index(role)]
            torch.maximum(step_amax, amax, out=step_amax)
        # All shards of a tensor have one scale.
        whole_amax = self.tensor_parallel.all_reduce(amax.clone(), "max") if role in self._sharded else amax
        quantization, margin = scaling.kernels.quantization, scaling.config.fp8_margin
        scale = quantization.current_scale(whole_amax, scaling.formats[role], margin)
        target = Fp8Format(scale, scaling.formats[role], layout)
        return quantization.quantize(tensor, target, amax)

    def input_quantization(self, layout: Layout) -> DelayedQuantization | None:
        if not self.has_scales:
            return None
        return self._with_known_scale("input", layout)

    def output(self, inputs: QuantizedTensor, weight: Tensor) -> Tensor:
        # Only this GEMM may accumulate fast, as in Transformer Engine.
        return self._multiply_rows(inputs, self._quantized_weight(weight, Layout.ROWS), fast=True)

    def input_gradient(self, grad_outputs: QuantizedTensor, weight: Tensor) -> Tensor:
        quantized = self._quantized_weight(weight, Layout.TRANSPOSED)
        return self._multiply_rows(grad_outputs, self._transpose(quantized), fast=False)

    def weight_gradient(self, grad_outputs: QuantizedTensor, inputs: QuantizedTensor) -> Fp8WeightGradientProduct:
        wide = torch.promote_types(self._dtype, torch.float32)
        operands = self._transpose(grad_outputs), self._transpose(inputs)  # [n, m], [k, m]
        return Fp8WeightGradientProduct(*operands, self._scaling.kernels, wide)

    def _multiply_rows(self, inputs: QuantizedTensor, weight: QuantizedTensor, fast: bool) -> Tensor:
        scale = inputs.inverse_scale
        if len(inputs.row_tensors) > 1 and scale is not None:
            scale = scale.flatten(0, -2)  # [m, blocks]
        rows = QuantizedTensor(inputs.data.flatten(0, -2), scale)  # [m, k]
        product = self._scaling.kernels.gemm(rows, weight, self._dtype, fast)
        return product.view(*inputs.data.shape[:-1], -1)

    def _transpose(self, operand: QuantizedTensor) -> QuantizedTensor:
        """The transpose ``[k, m]``, made now if the rows were all-gathered after they were quantised."""
        data, scale = operand.transposed, operand.transposed_scale
        if data is None:
            data = self._scaling.kernels.quantization.transpose(operand.data.flatten(0, -2))
            if self._scaling.has_blocks and operand.inverse_scale is not None:
                scale = operand.inverse_scale.t()  # of [m / 128, k] blocks, or of a weight's [n / 128, k / 128]
        return QuantizedTensor(data, operand.inverse_scale if scale is None else scale)

    def _quantized_weight(self, weight: Tensor, layout: Layout) -> QuantizedTensor:
        """``weight`` ``[n, k]`` in ``layout``; with ``keeps_weights`` quantised once a step, in both layouts."""
        if self._scaling.config.fp8_param_gather:
            if self.weight is None:
                inverse_scale = self.block_scales
                if not self._scaling.has_blocks:
                    inverse_scale = self._scaling.weight_state.inverse_scale[self._number]
                self.weight = QuantizedTensor(weight.detach(), inverse_scale)
            if Layout.TRANSPOSED in layout and self.weight.transposed is None:
                transpose = self._transpose(self.weight)
                self.weight = replace(self.weight, transposed=transpose.data, transposed_scale=transpose.inverse_scale)
            return self.weight
        if not self._scaling.keeps_weights:
            return self.quantize("weight", weight, layout)
        if self.weight is None:
            self.weight = self.quantize("weight", weight, Layout.BOTH)
        return self.weight

    def _with_known_scale(self, role: Fp8Role, layout: Layout) -> DelayedQuantization:
        scaling, index = self._scaling, (self._number, ROLES.index(role))
        state = scaling.delayed_state
        target = Fp8Format(state.scale[index], scaling.formats[role], layout)
        return DelayedQuantization(scaling.kernels.quantization, target, state.step_amax[index])
