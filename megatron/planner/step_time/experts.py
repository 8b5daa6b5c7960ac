"""The time of the experts of a MoE layer in closed form: one microbatch on one rank, with an even load.

Shapes, ``[runs]``: ``n`` tokens of the rank, s b / (cp tp); ``k`` choices of a token; ``h`` hidden size; ``E`` experts
of width ``f``. A rank has E / ep experts and f / etp of their width, and ``m = n k etp`` rows for them. The tensor-,
context- and data-parallel ranks of a stage are the etp x ep x edp ranks of its experts (folding, arXiv 2504.14960), in
an order that keeps them in as few nodes as possible.

No GPU has measured these terms: +-30 %.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.planner.step_time.prices import exchange_seconds
from megatron.planner.step_time.workload import Array, Mask, Workload

_FP32_SHARE = 1 / 16  # of the bf16 peak: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100 (NVIDIA data sheets)
_ELEMENT = 2  # bytes of a token's or row's element


@dataclass(frozen=True)
class ExpertPass:
    """Seconds of the experts of one layer and microbatch in one pass, by cause."""

    products: Array
    """The router's, the experts' and the shared expert's."""
    accesses: Array
    """Elements of 2 bytes that are read or written between the products."""
    casts: Array
    """Elements that are cast to FP8 if the experts compute in FP8."""
    dispatch: Array
    """Seconds of messages between the ranks of experts."""


class ExpertShapes:
    """What the MoE layers of runs have. For a dense model every number of rows is 0."""

    def __init__(self, workload: Workload) -> None:
        w = workload
        self.is_moe: Mask = (w.number("num_experts") > 0) & (w.number("moe_layers") > 0)
        self.share = np.where(self.is_moe, w.number("moe_layers") / w.number("layers"), 0.0)
        """MoE layers among all layers."""
        self.hidden, self.tp = w.number("hidden"), w.number("tp")
        self.num_experts, self.topk = np.maximum(w.number("num_experts"), 1.0), w.number("moe_topk")
        self.ffn, self.shared_ffn = w.number("moe_ffn"), w.number("shared_ffn")
        self.ep = w.number("ep")
        self.edp = self.tp * w.number("cp") * w.number("dp") / self.ep
        tokens = w.number("micro_batch_size") * w.number("seq_length") / w.number("cp")
        self.tokens = np.where(self.is_moe, tokens / self.tp, 0.0)  # n
        self.main_grad_bytes, self.layers, self.pp = w.number("main_grad_bytes"), w.number("layers"), w.number("pp")
        self.is_fp8 = w.where("is_fp8")
        self.node_size, self.is_one_node = w.number("node_size"), w.number("gpus") <= w.number("node_size")

    @property
    def local_experts(self) -> Array:
        return self.num_experts / self.ep

    @property
    def rows(self) -> Array:
        """m: of all experts of the rank."""
        return self.tokens * self.topk

    @property
    def parameters(self) -> Array:
        """Of the experts of a rank, before sharding."""
        per_layer = self.local_experts * 3 * self.hidden * self.ffn
        return self.share * self.layers / self.pp * per_layer

    @property
    def dense_parameters(self) -> Array:
        """Of the routers and shared experts of a rank: they are sharded like attention."""
        router = self.hidden * np.where(self.is_moe, self.num_experts, 0.0)
        return self.share * self.layers / self.pp * (router + 3 * self.hidden * self.shared_ffn / self.tp)


GroupedProduct = Callable[[Array, Array, Array, Array | float, Array | float], Array]
"""Seconds of ``count`` products ``[rows, depth] x [depth, columns]`` in one launch, with extra bytes of traffic:
``(rows, columns, depth, extra_bytes, count)``."""


def expert_passes(
    shapes: ExpertShapes, product: GroupedProduct, fp32_flops: Array, link: Array, network: Array
) -> tuple[ExpertPass, ExpertPass, ExpertPass]:
    """The forward pass, the backward pass without the weight gradients, and the weight gradients of a MoE layer's
    router, experts and shared expert.

    ``fp32_flops`` is the rate of the router's product; ``link`` and ``network`` are the bytes per second that
    collectives reach within and between nodes.
    """
    forward, backward, weights = _products(shapes, product)
    router = 2 * shapes.tokens * shapes.hidden * shapes.num_experts / fp32_flops  # in fp32, three times
    accesses, accesses_backward = accesses_between(shapes)
    casts, casts_backward = _casts(shapes)
    messages = dispatch_seconds(shapes, link, network) / 2  # half of it in each direction
    none = np.zeros_like(router)
    return (
        ExpertPass(forward + router, accesses, casts, messages),
        ExpertPass(backward + router, accesses_backward, casts_backward, messages),
        ExpertPass(weights + router, none, none, none),
    )


def fp32_rate(bf16_flops: Array) -> Array:
    """FLOP/s of a product in fp32, without tensor cores."""
    return bf16_flops * _FP32_SHARE


def _products(shapes: ExpertShapes, product: GroupedProduct) -> tuple[Array, Array, Array]:
    """Of the experts, which are one grouped product for each linear layer, and of the shared expert."""
    h, count = shapes.hidden, shapes.local_experts
    rows = np.maximum(shapes.rows / count, 1e-9)  # of an expert
    width = np.maximum(shapes.ffn, 1e-9)
    shared_rows = np.maximum(shapes.tokens * shapes.tp, 1e-9)  # gathered, as for an MLP
    shared_width = np.maximum(shapes.shared_ffn / shapes.tp, 1e-9)
    linears = (
        (h, 2 * width, rows, count, shapes.is_moe),
        (width, h, rows, count, shapes.is_moe),
        (h, 2 * shared_width, shared_rows, 1.0, shapes.shared_ffn > 0),
        (shared_width, h, shared_rows, 1.0, shapes.shared_ffn > 0),
    )  # inputs, outputs, rows, products in a launch, whether there is one
    forward, backward, weights = (np.zeros_like(h) for _ in range(3))
    for inputs, outputs, of_each, products, exists in linears:
        main_grad = shapes.main_grad_bytes * inputs * outputs
        forward += np.where(exists, product(of_each, outputs, inputs, 0.0, products), 0.0)
        backward += np.where(exists, product(of_each, inputs, outputs, 0.0, products), 0.0)
        weights += np.where(exists, product(inputs, outputs, of_each, main_grad, products), 0.0)
    return forward, backward, weights


def accesses_between(shapes: ExpertShapes) -> tuple[Array, Array]:
    """Elements of 2 bytes that the forward and the backward pass read or write between the products.

    Router: the tokens in fp32, and the softmax and choice of ``[n, E]`` fp32. Rows: each is taken from its token, after
    an exchange sorted by expert, sorted back, and added to its token's sum. Activation: SwiGLU. The backward pass of
    the sum multiplies the gradients by the weights, and adds up the gradients of the weights.
    """
    n, h, k = shapes.tokens, shapes.hidden, shapes.topk
    sent, received = n * k * h, shapes.rows * h  # elements of rows
    inner = shapes.rows * shapes.ffn + n * shapes.shared_ffn
    router = 8 * n * np.where(shapes.is_moe, shapes.num_experts, 0.0)
    sorts = np.where(shapes.ep > 1, 4 * received, 0.0)  # twice, read and written
    forward = router + 3 * n * h + 2 * sent + sorts + 3 * inner + (sent + n * h)
    backward = router + 5 * n * h + 6 * sent + sorts + 5 * inner + (sent + n * h)
    return forward, backward


def _casts(shapes: ExpertShapes) -> tuple[Array, Array]:
    """Inputs of the linear layers forward, and the gradients of their outputs backward."""
    width, shared = shapes.ffn, shapes.shared_ffn / shapes.tp
    forward = shapes.rows * (shapes.hidden + width) + shapes.tokens * shapes.tp * shared
    backward = shapes.rows * (shapes.hidden + 2 * width) + shapes.tokens * shapes.tp * 2 * shared
    return np.where(shapes.is_fp8, forward, 0.0), np.where(shapes.is_fp8, backward, 0.0)


def dispatch_seconds(shapes: ExpertShapes, link: Array, network: Array) -> Array:
    """Seconds of the all-to-alls of one layer and microbatch, forward and backward.

    Rows go to their experts and come back, forward and backward: 4 n k h (ep - 1) / ep elements.
    """
    ep = shapes.ep
    rows = 4 * _ELEMENT * shapes.tokens * shapes.topk * shapes.hidden
    in_node = np.where(shapes.is_one_node, ep, np.minimum(ep, shapes.node_size))
    return np.asarray(exchange_seconds(rows * (ep - 1) / ep, ep, in_node, link, network))
