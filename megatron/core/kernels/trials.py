"""Trials of kernels on the device: of GEMMs in small fixed sizes, of other kernels on few tokens, in the sizes and the
memory layout of the run.

A trial compares forward and backward pass with the reference or the eager kernel, and raises :class:`Unavailable` with
the reason.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.device import Unavailable, device_is_broken
from megatron.core.ops.attention import (
    CAUSAL,
    AttentionInputs,
    AttentionKernel,
    AttentionMask,
    AttentionShape,
    LocalAttention,
    fused_attention,
)
from megatron.core.ops.attention_kernels import ReferenceAttention
from megatron.core.ops.documents import AttentionSpans, Documents
from megatron.core.ops.fp8 import (
    E4M3,
    E5M2,
    BlockQuantization,
    DelayedQuantization,
    EagerQuantization,
    Fp8Format,
    Fp8WeightGradientKernel,
    Quantization,
    ScaledGemm,
    amax_of,
    largest_value,
    scale_from_amax,
    scaled_gemm_reference,
    widened_gemm,
)
from megatron.core.ops.grouped import GroupedGemm, LoopGroupedGemm, RowCounts
from megatron.core.ops.matmul import WeightGradientKernel
from megatron.core.ops.norm import EagerRMSNorm, RMSNormKernel, normalise
from megatron.core.ops.rope import Rotation, rotary_frequencies, rotary_table, rotate_
from megatron.core.ops.swiglu import EagerSwiGLU, SwiGLUKernel, swiglu_reference
from megatron.core.precision import Layout, QuantizedTensor
from megatron.core.tensor_parallel.cross_entropy import CrossEntropyKernel, EagerCrossEntropy

LENGTH = 192
"""Positions of a sequence in the trials of attention."""
FEW = 24
"""Positions of a sequence in the trials of elementwise kernels."""


@dataclass(frozen=True)
class TrialSizes:
    """The sizes of the tensors that the kernels of a rank receive, apart from the length of a sequence."""

    rows: int
    """Sequences of a microbatch."""
    attention: AttentionShape
    hidden_size: int
    mlp_width: int
    """``f / tp``."""
    vocabulary: int
    """Ids of a rank's logits, padding included."""
    vocabularies: tuple[int, ...]
    """Ids without padding of the ranks that have some: the last rank may have fewer."""
    norms_heads: bool = False
    """Whether heads of queries and keys are normalised."""

    @classmethod
    def of(cls, model: TransformerConfig, tensor_parallel_size: int, rows: int) -> "TrialSizes":
        size = tensor_parallel_size
        vocabulary = model.padded_vocab_size // size
        own = {min(vocabulary, model.vocab_size - rank * vocabulary) for rank in range(size)}
        return cls(
            rows,
            AttentionShape(model.num_attention_heads // size, model.num_query_groups // size, model.kv_channels),
            model.hidden_size,
            model.ffn_hidden_size // size,
            vocabulary,
            tuple(sorted(width for width in own if width > 0)),
            model.qk_layernorm,
        )


class BrokenDevice(Exception):
    """An error after which this process cannot use its GPU, by its first line: another kernel would fail as well."""


def run_trial(trial: Callable[[], None], is_broken: Callable[[], bool] = device_is_broken) -> None:
    """Run the trial of a kernel. An error is a reason not to use the kernel (:class:`Unavailable`), unless it is one
    after which no other kernel can run either (:class:`BrokenDevice`)."""
    try:
        trial()
    except Unavailable:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n", maxsplit=1)[0]
        if is_broken():
            raise BrokenDevice(first_line) from error
        raise Unavailable(f"a trial failed ({first_line})") from error


def compare(found: Tensor, expected: Tensor) -> None:
    """Raise :class:`Unavailable` if the largest error exceeds 5 % of the largest element of ``expected``. A wrong mask
    or head exceeds it; rounding does not."""
    if found.shape != expected.shape:
        raise Unavailable(f"a trial returned shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    if not error < 0.05:
        raise Unavailable(f"a trial had a relative error of {error:.0%}")


def random(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


# Attention


def try_attention(
    kernel: AttentionKernel,
    sizes: TrialSizes,
    device: torch.device,
    dtype: torch.dtype,
    in_documents: bool = False,
    mask: AttentionMask = CAUSAL,
) -> None:
    """Attend to short sequences as a layer of the model does, with ``in_documents`` also within documents."""
    shape = sizes.attention
    width = shape.rotated_size + shape.key_value_heads * shape.head_size
    qkv = random(LENGTH, sizes.rows, width, device=device, dtype=dtype)
    grad = random(LENGTH, sizes.rows, shape.query_heads * shape.head_size, device=device, dtype=dtype, seed=1)
    # A mask that is ignored, or heads of another group, change most elements by more than the tolerance.
    for spans in (None, _documents(sizes.rows, device).attention)[: 2 if in_documents else 1]:
        passes = (_attend(one, qkv, grad, shape, spans, mask) for one in (kernel, ReferenceAttention()))
        for found, expected in zip(*passes, strict=True):
            compare(found, expected)
    inputs = AttentionInputs(*shape.split(qkv), mask=mask)
    found, expected = (one.forward(inputs) for one in (kernel, ReferenceAttention()))
    if found.log_sum_exp is not None and expected.log_sum_exp is not None:
        compare(found.log_sum_exp, expected.log_sum_exp)


def _documents(rows: int, device: torch.device) -> Documents:
    """Long and short documents, in every row others."""
    starts = torch.zeros(rows, LENGTH, dtype=torch.bool)
    for row in range(rows):
        for start in (0, 70, 71, 135 + row % 20):
            starts[row, start] = True
    return Documents(starts, masks_attention=True, resets_positions=False, device=device)


def _attend(
    kernel: AttentionKernel,
    qkv: Tensor,
    grad: Tensor,
    shape: AttentionShape,
    spans: AttentionSpans | None,
    mask: AttentionMask,
) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key and value."""
    leaf = qkv.clone().requires_grad_()
    with torch.enable_grad():
        output = fused_attention(leaf, shape, LocalAttention(kernel), spans, mask)
    (gradient,) = torch.autograd.grad(output, leaf, grad)
    return output.detach(), *shape.split(gradient)


# GEMMs


def try_weight_gradient(
    kernel: WeightGradientKernel, device: torch.device, dtype: torch.dtype, buffer_dtype: torch.dtype
) -> None:
    """Compare two GEMMs into one buffer with the sum of both products, in aligned and in odd widths."""
    for n, k in ((32, 48), (41, 27)):
        grad_outputs, inputs = (random(64, width, device=device, dtype=dtype, seed=width) for width in (n, k))
        buffer = torch.full((n, k), torch.nan, dtype=buffer_dtype, device=device)
        # The first overwrites the NaNs, the second adds.
        for accumulate in (False, True):
            kernel.write(buffer, grad_outputs, inputs, accumulate)
        compare(buffer, 2 * (grad_outputs.double().t() @ inputs.double()))


def try_scaled_gemm(gemm: ScaledGemm, device: torch.device, dtype: torch.dtype) -> None:
    """The FP8 GEMMs of a linear layer: output, input gradient and weight gradient, with gradients in both formats."""
    tokens, n, k = 64, 32, 48

    def quantized(rows: int, columns: int, fp8: torch.dtype) -> QuantizedTensor:
        tensor = random(rows, columns, device=device, dtype=dtype, seed=rows + columns)
        amax = amax_of(tensor)
        scale = scale_from_amax(amax, largest_value(fp8), 1.0)
        return EagerQuantization().quantize(tensor, Fp8Format(scale, fp8, Layout.BOTH), amax)

    inputs, weight = quantized(tokens, k, E4M3), quantized(n, k, E4M3)
    for fp8 in (E4M3, E5M2):
        grad = quantized(tokens, n, fp8)
        for a, b, result, fast in (
            (inputs, weight, dtype, True),
            (grad, _transposed(weight), dtype, False),
            (_transposed(grad), _transposed(inputs), torch.float32, False),
        ):
            out = torch.full((a.data.shape[0], b.data.shape[0]), torch.nan, dtype=result, device=device)
            for found in (gemm(a, b, result, fast), gemm(a, b, result, fast, out)):
                compare(found, scaled_gemm_reference(a, b, torch.float64))


def try_block_scaled_gemm(gemm: ScaledGemm, device: torch.device, dtype: torch.dtype) -> None:
    """The same three GEMMs of blocks, whose magnitudes differ: a scale at another block's place has a large error. Two
    of them sum three or two blocks, so that a row of the weight's scales ends between multiples of four."""
    blocks, tokens, n, k = BlockQuantization(), 384, 256, 384
    x, weight, dy = (_in_blocks(*shape, device, dtype) for shape in ((tokens, k), (n, k), (tokens, n)))
    inputs, grad = (blocks.quantize(one, E4M3, Layout.BOTH) for one in (x, dy))
    w = blocks.quantize_weight(weight, E4M3, Layout.BOTH)
    for a, b, result in (
        (_rows(inputs), _rows(w), dtype),
        (_rows(grad), _transposed(w), dtype),
        (_transposed(grad), _transposed(inputs), torch.float32),
    ):
        compare(gemm(a, b, result), scaled_gemm_reference(a, b, torch.float64))


def _in_blocks(m: int, k: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[m, k]`` in blocks of 64 x 64 of other magnitudes."""
    magnitudes = torch.exp2(random(m // 64, k // 64, device=device, dtype=torch.float32, seed=1).mul_(2).round_())
    spread_out = magnitudes.repeat_interleave(64, dim=0).repeat_interleave(64, dim=1)
    return random(m, k, device=device, dtype=dtype, seed=m + k) * spread_out.to(dtype)


def _rows(operand: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(operand.data, operand.inverse_scale)


def _transposed(operand: QuantizedTensor) -> QuantizedTensor:
    assert operand.transposed is not None
    scale = operand.inverse_scale if operand.transposed_scale is None else operand.transposed_scale
    return QuantizedTensor(operand.transposed, scale)


# Elementwise work


def try_rms_norm(kernel: RMSNormKernel, sizes: TrialSizes, device: torch.device, dtype: torch.dtype) -> None:
    """Normalise the residual stream, and heads of the fused projection if the model does."""
    inputs = [random(FEW, sizes.rows, sizes.hidden_size, device=device, dtype=dtype)]
    if sizes.norms_heads:
        shape = sizes.attention
        width = shape.query_heads + 2 * shape.key_value_heads
        heads = random(FEW, sizes.rows, width, shape.head_size, device=device, dtype=dtype)
        inputs.append(heads[:, :, : shape.query_heads])  # not contiguous, [s, b, n, d]
    for one in inputs:
        gradient = random(*one.shape, device=device, dtype=dtype, seed=1)
        weight = 1 + random(one.shape[-1], device=device, dtype=dtype, seed=2)
        results = []
        for norm in (kernel, EagerRMSNorm()):
            output, inverse_rms = norm.forward(one, weight, 1e-5)
            results.append((output, *norm.backward(gradient, one, inverse_rms, weight)))
        for found, expected in zip(*results, strict=True):
            compare(found, expected)


def try_swiglu(kernel: SwiGLUKernel, sizes: TrialSizes, device: torch.device, dtype: torch.dtype) -> None:
    inputs = random(FEW, sizes.rows, 2 * sizes.mlp_width, device=device, dtype=dtype)
    gradient = random(FEW, sizes.rows, sizes.mlp_width, device=device, dtype=dtype, seed=1)
    eager = EagerSwiGLU()
    compare(kernel.forward(inputs), eager.forward(inputs))
    found, expected = kernel.backward(gradient, inputs), eager.backward(gradient, inputs)
    for one, other in zip(found.chunk(2, dim=-1), expected.chunk(2, dim=-1)):
        compare(one, other)


def try_quantized_swiglu(kernel: SwiGLUKernel, sizes: TrialSizes, device: torch.device, dtype: torch.dtype) -> None:
    """:func:`try_swiglu`, and quantised outputs in sizes that are no multiples of a tile."""
    try_swiglu(kernel, sizes, device, dtype)
    inputs, quantization = random(40, 2, 416, device=device, dtype=dtype), _with_known_scale(device)
    _compare_quantized(kernel.quantized(inputs, quantization), quantization, swiglu_reference(inputs.float()))


def try_quantized_rms_norm(kernel: RMSNormKernel, sizes: TrialSizes, device: torch.device, dtype: torch.dtype) -> None:
    """:func:`try_rms_norm`, and quantised outputs and what backward computes after them, with gains also in fp32 as
    under ``--apply-layernorm-1p``."""
    try_rms_norm(kernel, sizes, device, dtype)
    inputs, gradient = (random(40, 2, sizes.hidden_size, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    for wide in (dtype, torch.float32):
        gain, quantization = (
            1 + random(sizes.hidden_size, device=device, dtype=wide, seed=2),
            _with_known_scale(device),
        )
        wanted, wanted_rms = normalise(inputs.float(), gain.float(), 1e-5)
        output, inverse_rms = kernel.quantized(inputs, gain, 1e-5, quantization)
        _compare_quantized(output, quantization, wanted)
        results = kernel.backward(gradient, inputs, inverse_rms, gain)
        for found, expected in zip(results, EagerRMSNorm().backward(gradient, inputs, wanted_rms, gain), strict=True):
            compare(found, expected)


def _with_known_scale(device: torch.device) -> DelayedQuantization:
    scale, step_amax = torch.tensor([8.0, 0.0], device=device)
    return DelayedQuantization(EagerQuantization(), Fp8Format(scale, E4M3, Layout.BOTH), step_amax)


def _compare_quantized(output: QuantizedTensor, quantization: DelayedQuantization, wanted: Tensor) -> None:
    """Compare both layouts of ``output`` and the amax with the ``quantization`` of ``wanted`` in fp32."""
    expected = replace(quantization, step_amax=torch.zeros_like(quantization.step_amax))
    rows = expected.quantize(wanted).data
    # Exponentials and sums that differ in the last bit decide a few ties.
    share = float((output.data.view(torch.uint8) != rows.view(torch.uint8)).double().mean())
    if not share < 0.01:
        raise Unavailable(f"a trial quantised {share:.0%} of the numbers to others")
    if output.transposed is None or not torch.equal(output.transposed.float(), output.data.flatten(0, 1).t().float()):
        raise Unavailable("a trial returned a transpose with other numbers than the rows")
    compare(quantization.step_amax, expected.step_amax)


def try_rotation(
    rotate: Rotation, sizes: TrialSizes, device: torch.device, dtype: torch.dtype, resets_positions: bool = False
) -> None:
    """Rotate queries and keys of the fused projection in both directions, with ``resets_positions`` every sequence by
    positions of its own."""
    shape = sizes.attention
    width = shape.rotated_size + shape.key_value_heads * shape.head_size
    fused = random(FEW, sizes.rows, width, device=device, dtype=dtype)
    positions = torch.arange(FEW * sizes.rows, device=device).view(FEW, sizes.rows)
    if not resets_positions:
        positions = positions[:, 0]
    table = rotary_table(rotary_frequencies(shape.head_size, 10000.0), positions, dtype)
    for angles in (table, table.conj()):
        found, expected = fused.clone(), fused.clone()
        for one, result in ((rotate, found), (rotate_, expected)):
            one(result[..., : shape.rotated_size], angles)
        compare(found, expected)


def try_cross_entropy(kernel: CrossEntropyKernel, sizes: TrialSizes, device: torch.device, dtype: torch.dtype) -> None:
    """Both passes over the logits of every rank. All ids have nearly the same probability but the last one, which has
    half of it, so that a kernel that leaves ids out has a large error."""
    eager, wide, tokens = EagerCrossEntropy(), torch.promote_types(dtype, torch.float32), FEW * sizes.rows
    for width in sizes.vocabularies:
        logits = 0.1 * random(tokens, sizes.vocabulary, device=device, dtype=dtype)
        logits[:, width - 1] += math.log(width)
        expected_lse = eager.log_sum_exp(logits[:, :width], wide)
        difference = kernel.log_sum_exp(logits[:, :width], wide) - expected_lse
        compare(difference.exp(), torch.ones_like(difference))
        # Labels at both ends of the vocabulary.
        columns = torch.arange(tokens, device=device) % 2 * (width - 1)
        gradient, at_label = (random(tokens, device=device, dtype=wide, seed=seed) for seed in (1, 2))
        found, expected = logits.clone(), logits.clone()
        for one, result in ((kernel, found), (eager, expected)):
            one.write_gradient(result[:, :width], expected_lse, columns, gradient, at_label)
        for ids in (slice(0, 1), slice(1, width - 1), slice(width - 1, width), slice(width, None)):
            if found[:, ids].numel():
                compare(found[:, ids], expected[:, ids])


def try_quantization(kernel: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Compare every bit of results with the definition's; raises :class:`Unavailable`."""
    generator, eager = torch.Generator().manual_seed(0), EagerQuantization()
    # Magnitudes over the whole range of FP8; sizes are multiples of 16, as in every run.
    tensor = torch.exp(4 * torch.randn(144, 272, generator=generator)).mul_(torch.randn(144, 272, generator=generator))
    tensor = tensor.to(device, dtype)
    overflowing = tensor.clone()
    overflowing[100, 200] = torch.inf
    scale = torch.tensor(1.7, device=device)
    for operand in (tensor, overflowing):
        amax = amax_of(operand)
        for fp8 in (E4M3, E5M2):
            target, step_amax = Fp8Format(scale, fp8, Layout.BOTH), torch.ones((), device=device)
            expected = eager.quantize(operand, target, amax)
            _require_equal(kernel.quantize(operand, target, amax), expected)
            _require_equal(kernel.quantize_and_record(operand, target, step_amax), expected)
            _require(torch.equal(step_amax, amax), "another amax")
            assert expected.transposed is not None
            transpose = kernel.transpose(expected.data)
            _require(torch.equal(_bytes(transpose), _bytes(expected.transposed)), "another transpose")
            scales = (one.current_scale(amax, fp8, margin=2) for one in (kernel, eager))
            _require(torch.equal(*scales), "another scale")


def try_block_quantization(kernel: BlockQuantization, device: torch.device, dtype: torch.dtype) -> None:
    """Compare every bit of inputs, weights and shards of weights with the definition's; raises :class:`Unavailable`."""
    eager, tensor = BlockQuantization(), _in_blocks(256, 384, device, dtype)
    overflowing = tensor.clone()
    overflowing[:, 256:].zero_()[100, 30] = torch.inf
    for operand in (tensor, overflowing):
        for layout in (Layout.BOTH, Layout.ROWS | Layout.COLUMNS):
            found, expected = (one.quantize(operand, E4M3, layout) for one in (kernel, eager))
            _require_same(found.row_tensors, expected.row_tensors, "other rows")
            _require_same(found.kept_tensors, expected.kept_tensors, "other columns")
        found, expected = (one.quantize_weight(operand, E4M3, Layout.ROWS) for one in (kernel, eager))
        _require_same(found.row_tensors, expected.row_tensors, "another weight")
    scale, pieces = torch.exp2(random(1536, device=device, dtype=torch.float32).round_()), tensor.float().view(-1, 64)
    outs = [torch.zeros_like(pieces, dtype=E4M3) for _ in range(2)]
    for one, out in zip((kernel, eager), outs):
        one.quantize_pieces(pieces, scale, E4M3, out)
    _require(torch.equal(*map(_bytes, outs)), "other numbers")


def _require_same(found: Sequence[Tensor], expected: Sequence[Tensor], otherwise: str) -> None:
    """Compare numbers and their scales, of which some are NaN."""
    for one, other in zip(found, expected, strict=True):
        _require(torch.equal(one.float().nan_to_num(), other.float().nan_to_num()), otherwise)


def _require_equal(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert found.transposed is not None and expected.transposed is not None
    assert found.inverse_scale is not None and expected.inverse_scale is not None
    _require(torch.equal(_bytes(found.data), _bytes(expected.data)), "other numbers")
    _require(torch.equal(_bytes(found.transposed), _bytes(expected.transposed)), "another transpose")
    _require(
        torch.equal(found.inverse_scale.nan_to_num(), expected.inverse_scale.nan_to_num()), "another inverse scale"
    )


def try_fp8_weight_gradient(kernel: Fp8WeightGradientKernel, device: torch.device, buffer_dtype: torch.dtype) -> None:
    """Compare two GEMMs into one buffer with the sum of both products, which is exact; raises :class:`Unavailable`."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(0.5, device=device)

    def operand(rows: int, dtype: torch.dtype) -> QuantizedTensor:
        numbers = torch.randint(-2, 3, (rows, 272), generator=generator)
        return QuantizedTensor(numbers.float().to(dtype).to(device), scale)

    for fp8 in (E4M3, E5M2):
        grad_outputs, inputs = operand(144, fp8), operand(208, E4M3)
        buffer = torch.full((144, 208), torch.nan, dtype=buffer_dtype, device=device)
        for accumulate in (False, True):
            kernel.write(buffer, grad_outputs, inputs, accumulate)
        expected = 2 * widened_gemm(grad_outputs, inputs, torch.float32)
        _require(torch.equal(buffer, expected.to(buffer_dtype)), "another gradient")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _require(is_equal: bool, otherwise: str) -> None:
    if not is_equal:
        raise Unavailable(f"a trial returned {otherwise} than the reference")


def try_grouped_gemm(kernel: GroupedGemm, device: torch.device, dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    """Compare all three GEMMs with the reference, two weight gradients in one buffer, for few and many rows of a group
    and for none; raises :class:`Unavailable`."""
    n, k, reference = 48, 32, LoopGroupedGemm()
    for rows in ((5, 0, 77, 16), (0, 130, 1, 0), (0, 0, 0, 0)):
        counts = RowCounts.of(rows, device)
        x, dy, weight = (
            random(*shape, device=device, dtype=dtype, seed=seed)
            for seed, shape in enumerate(((counts.total, k), (counts.total, n), (len(rows) * n, k)))
        )
        wide_x, wide_dy, wide_weight = x.double(), dy.double(), weight.double()
        buffer = torch.full(weight.shape, torch.nan, dtype=buffer_dtype, device=device)
        for accumulate in (False, True):
            kernel.weight_gradient(dy, x, counts).write_to(buffer, accumulate)
        pairs = (
            (kernel.output(x, weight, counts), reference.output(wide_x, wide_weight, counts)),
            (kernel.input_gradient(dy, weight, counts), reference.input_gradient(wide_dy, wide_weight, counts)),
            (buffer, 2 * reference.weight_gradient(wide_dy, wide_x, counts).value()),
        )
        for found, expected in pairs:
            if counts.total:
                compare(found, expected)
            elif found.shape != expected.shape or not torch.equal(found.double(), expected):
                raise Unavailable("a trial without rows returned another result than zeros")


def try_compiler(
    device: torch.device, compile_function: Callable[..., Callable[[Tensor], Tensor]] = torch.compile
) -> str | None:
    """Why a small function does not compile, or gives a wrong result; None if it compiles."""

    # A function that nothing else compiles: called with a second shape, it would be compiled for all shapes.
    def gated(numbers: Tensor) -> Tensor:
        return numbers * torch.sigmoid(numbers)

    numbers = torch.linspace(-2.0, 2.0, 48, device=device)
    try:
        run_trial(lambda: compare(compile_function(gated, fullgraph=True)(numbers), gated(numbers)))
    except Unavailable as error:
        return f"torch.compile does not work: {error}"
    return None


@dataclass(frozen=True)
class Trials:
    """The trial of each operation. Each raises :class:`Unavailable`."""

    attention: Callable[..., None] = try_attention
    weight_gradient: Callable[..., None] = try_weight_gradient
    scaled_gemm: Callable[..., None] = try_scaled_gemm
    block_scaled_gemm: Callable[..., None] = try_block_scaled_gemm
    rms_norm: Callable[..., None] = try_rms_norm
    quantized_rms_norm: Callable[..., None] = try_quantized_rms_norm
    swiglu: Callable[..., None] = try_swiglu
    quantized_swiglu: Callable[..., None] = try_quantized_swiglu
    rotation: Callable[..., None] = try_rotation
    cross_entropy: Callable[..., None] = try_cross_entropy
    fp8_quantization: Callable[..., None] = try_quantization
    block_quantization: Callable[..., None] = try_block_quantization
    fp8_weight_gradient: Callable[..., None] = try_fp8_weight_gradient
    grouped_gemm: Callable[..., None] = try_grouped_gemm
    compiler: Callable[[torch.device], str | None] = try_compiler
    """Why ``torch.compile`` fails; None if it works."""
    forget: Callable[[], None] = torch.compiler.reset
    """Drops what the trials have compiled."""
