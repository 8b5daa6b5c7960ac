"""Modules, and the context that makes them compute in FP8."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ..common.recipe import DelayedScaling

FORMATS = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}


@dataclass
class _State:
    """That of the real package's ``FP8GlobalStateManager``, which is one for the process."""

    recipe: Any = None
    group: Any = None
    is_first_module: bool = False
    depth: int = 0
    modules: dict[Any, list[Any]] = field(default_factory=dict)
    """Those whose magnitudes are reduced, by recipe and group."""
    autocasts: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    buffers: tuple[int, list["UserBufferQuantizationMode"]] | None = None
    """Numbers in a buffer that ranks share, and for which layers there are some."""
    events: list[tuple[str, Any]] = field(default_factory=list)
    """What was said about such buffers."""

    def update_scales(self, forward: bool) -> None:
        """Turn the magnitudes of one pass into scales, in all modules."""
        for key, modules in self.modules.items():
            recipe, group = self.autocasts[key]
            metas = [module.fp8_meta["scaling_fwd" if forward else "scaling_bwd"] for module in modules]
            amax = torch.cat([meta.amax_history[0] for meta in metas])
            if recipe.reduce_amax and dist.is_initialized():
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
            for meta, newest in zip(metas, amax.split([meta.scale.numel() for meta in metas])):
                meta.update(newest, recipe, recipe.fp8_format.value[0 if forward else 1])


STATE = _State()


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Compute in FP8, or not, inside."""
    before = STATE.recipe, STATE.group, STATE.is_first_module
    STATE.recipe, STATE.group = recipe if enabled else None, amax_reduction_group
    STATE.autocasts[repr(recipe), id(amax_reduction_group)] = recipe, amax_reduction_group
    if STATE.depth == 0:
        STATE.is_first_module = True
    STATE.depth += 1
    try:
        yield
    finally:
        STATE.recipe, STATE.group, STATE.is_first_module = before
        STATE.depth -= 1
        if enabled and STATE.depth == 0 and torch.is_grad_enabled():
            STATE.update_scales(forward=True)


def is_fp8_available(return_reason: bool = False) -> Any:
    """As if on Hopper."""
    return (True, "") if return_reason else True


is_fp8_block_scaling_available = is_fp8_available


def is_mxfp8_available(return_reason: bool = False) -> Any:
    """As if on Hopper."""
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


class UserBufferQuantizationMode(Enum):
    """For which layers a buffer is."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: str | None = None,
) -> None:
    """Make the buffers, and groups of ranks as the real package does."""
    assert STATE.buffers is None and quantization_modes and dist.is_initialized() and dtype == torch.bfloat16
    dist.new_group(backend=bootstrap_backend)
    firsts = range(0, dist.get_world_size(), tp_size)
    dist.new_subgroups_by_enumeration([[*range(first, first + tp_size)] for first in firsts], backend=bootstrap_backend)
    STATE.buffers = shape[0] * shape[1], quantization_modes
    STATE.events.append(("initialize_ub", [shape, tp_size, [mode.name for mode in quantization_modes]]))


def destroy_ub() -> None:
    """Let go of the buffers."""
    STATE.buffers = None
    STATE.events.append(("destroy_ub", None))


class _Delayed:
    """Scales and magnitudes of a module's tensors in one pass; row 0 of the history collects."""

    def __init__(self, length: int, tensors: int) -> None:
        self.scale, self.amax_history = torch.ones(tensors), torch.zeros(length, tensors)

    def update(self, newest: Tensor, recipe: DelayedScaling, largest: float) -> None:
        self.amax_history[0] = newest
        amax = self.amax_history.amax(0) if recipe.amax_compute_algo == "max" else newest
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0.0
        is_usable = (amax > 0.0) & amax.isfinite()
        self.scale.copy_(torch.where(is_usable, torch.tensor(largest) / amax / 2.0**recipe.margin, self.scale))


class _Quantizer:
    """Rounds one tensor of a module to the numbers that FP8 has."""

    def __init__(self, module: "_Module", key: str, column: int) -> None:
        self.recipe = STATE.recipe
        self.meta = module.fp8_meta.get(key)
        self.column, self.largest = column, self.recipe.fp8_format.value[0 if key == "scaling_fwd" else 1]

    def __call__(self, tensor: Tensor) -> Tensor:
        amax = tensor.abs().amax().float()
        if isinstance(self.recipe, DelayedScaling):
            assert self.meta is not None
            seen = self.meta.amax_history[0]
            seen[self.column] = torch.maximum(seen[self.column], amax)
            scale = self.meta.scale[self.column].clone()
        else:
            scale = torch.where(amax > 0.0, self.largest / amax, 1.0)
        rounded = (tensor * scale).clamp(-self.largest, self.largest).to(FORMATS[self.largest])
        return rounded.to(tensor.dtype) * scale.reciprocal().to(tensor.dtype)


class _Module(nn.Module):
    """What the modules have in common."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        bias: bool,
        params_dtype: torch.dtype | None,
        parallel_mode: str | None,
        device: Any,
        overlap: dict[str, Any],
    ) -> None:
        super().__init__()
        assert not bias and parallel_mode in ("column", "row")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        told = {name: value for name, value in overlap.items() if value}
        self.overlaps = bool(told)
        if told:
            assert STATE.buffers is not None, "initialize_ub() must be called before layer construction."
            assert sequence_parallel and told["ub_name"] in ("qkv", "proj", "fc1", "fc2")
            STATE.events.append((type(self).__name__, told))
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=params_dtype))
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces: dict[str, Tensor] = {}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Room for scales."""
        if isinstance(STATE.recipe, DelayedScaling) and "recipe" not in self.fp8_meta:
            length = STATE.recipe.amax_history_len
            self.fp8_meta |= {"scaling_fwd": _Delayed(length, 3), "scaling_bwd": _Delayed(length, 2)}
        self.fp8_meta["recipe"] = STATE.recipe

    def multiply(self, inputs: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """The product, in FP8 where that is on."""
        self.init_fp8_metadata()
        is_fp8 = STATE.recipe is not None
        updates_scales = False
        if isinstance(STATE.recipe, DelayedScaling):
            key = repr(STATE.recipe), id(STATE.group)
            modules = STATE.modules.setdefault(key, [])
            if not any(module is self for module in modules):
                modules.append(self)
        if is_fp8 and torch.is_grad_enabled():
            updates_scales, STATE.is_first_module = STATE.is_first_module, False
        quantizers = None
        if is_fp8:
            places = (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))
            quantizers = SimpleNamespace(**dict(zip("iwg", (_Quantizer(self, *place) for place in places))))
        output: Tensor = _Multiply.apply(self.weight, inputs, self, is_first_microbatch, quantizers, updates_scales)
        return output

    def quantized_weight(self, quantize: Callable[[Tensor], Tensor], is_first_microbatch: bool | None) -> Tensor:
        """The weight, kept from the first microbatch on, unless that is None."""
        if is_first_microbatch is None:
            return quantize(self.weight.detach())
        if is_first_microbatch or "weight" not in self._fp8_workspaces:
            self._fp8_workspaces["weight"] = quantize(self.weight.detach())
        return self._fp8_workspaces["weight"]

    def through_buffer(self, whole: Tensor, is_fp8: bool) -> Tensor:
        """Which it must fit."""
        if self.overlaps:
            assert STATE.buffers is not None and whole.numel() == STATE.buffers[0]
            assert UserBufferQuantizationMode["FP8" if is_fp8 else "NONE"] in STATE.buffers[1]
        return whole

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that is divided along the sequence."""
        if not self.sequence_parallel:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.tp_group)
        return torch.cat(parts)

    def reduced(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks; this rank's part of the sequence."""
        if self.tp_size == 1:
            return tensor
        dist.all_reduce(tensor, group=self.tp_group)
        if not self.sequence_parallel:
            return tensor
        return tensor.chunk(self.tp_size)[dist.get_rank(self.tp_group)].clone()


class _Multiply(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        inputs: Tensor,
        module: _Module,
        is_first_microbatch: bool | None,
        quantizers: Any,
        updates_scales: bool,
    ) -> Tensor:
        multiplied = weight
        if quantizers is not None:
            inputs = quantizers.i(inputs)
            multiplied = module.quantized_weight(quantizers.w, is_first_microbatch)
        is_column = module.parallel_mode == "column"
        ctx.save_for_backward(inputs, multiplied)
        ctx.module, ctx.quantizers, ctx.updates_scales = module, quantizers, updates_scales
        ctx.accumulates = not is_first_microbatch
        ctx.main_grad_func = lambda: weight.main_grad if module.fuse_wgrad_accumulation else None  # type: ignore[attr-defined]
        is_fp8 = quantizers is not None
        whole = module.through_buffer(module.gathered(inputs), is_fp8) if is_column else inputs
        product = whole @ multiplied.t()
        return product if is_column else module.reduced(module.through_buffer(product, is_fp8))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None, None, None]:
        inputs, weight = ctx.saved_tensors
        module: _Module = ctx.module
        main_grad = ctx.main_grad_func()
        is_column = module.parallel_mode == "column"
        gradient = gradients[0] if ctx.quantizers is None else ctx.quantizers.g(gradients[0])
        gradient = gradient if is_column else module.gathered(gradient)
        grad_inputs = gradient @ weight
        whole = module.gathered(inputs) if is_column else inputs
        product = gradient.flatten(0, -2).t() @ whole.flatten(0, -2)
        if main_grad is not None and ctx.accumulates:
            main_grad.add_(product)
        elif main_grad is not None:
            main_grad.copy_(product)
        if ctx.updates_scales:
            STATE.update_scales(forward=False)
        grad_weight = product if main_grad is None else None
        return grad_weight, module.reduced(grad_inputs) if is_column else grad_inputs, None, None, None, None


class Linear(_Module):
    """A product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_name: str | None = None,
    ) -> None:
        common = sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, bias, params_dtype, parallel_mode
        overlap = {"ub_overlap_ag": ub_overlap_ag, "ub_overlap_rs": ub_overlap_rs, "ub_name": ub_name}
        super().__init__(in_features, out_features, *common, device, overlap)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``[..., in] -> [..., out]``"""
        return self.multiply(inp, is_first_microbatch)


class LayerNormLinear(_Module):
    """A norm and a product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        assert normalization == "RMSNorm"
        common = sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, bias, params_dtype, parallel_mode
        overlap = {"ub_overlap_ag": ub_overlap_ag, "ub_bulk_wgrad": ub_bulk_wgrad, "ub_bulk_dgrad": ub_bulk_dgrad}
        super().__init__(in_features, out_features, *common, device, overlap | {"ub_name": ub_name})
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, device=device, dtype=params_dtype))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``[..., in] -> [..., out]``"""
        gain = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        normed = F.rms_norm(inp, inp.shape[-1:], gain, self.eps)
        return self.multiply(normed, is_first_microbatch)


class DotProductAttention(nn.Module):
    """Attention with grouped queries."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
    ) -> None:
        super().__init__()
        assert qkv_format == "sbhd" and attention_dropout == 0.0

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
    ) -> Tensor:
        """``[s, b, n, d]`` each, to ``[s, b, n d]``."""
        assert STATE.recipe is None, "attention is not in FP8"
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_layer, key_layer, value_layer))
        is_causal = {"causal": True, "no_mask": False}[attn_mask_type]
        visible = None
        if window_size is not None:
            assert is_causal and window_size[1] == 0
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            visible, is_causal = visible.triu(-window_size[0]), False
        attended = F.scaled_dot_product_attention(query, key, value, visible, is_causal=is_causal, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)
