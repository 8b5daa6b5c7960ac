"""The time of a training step of other people's software in closed form.

One microbatch on one rank: products, attention, the operations between them, and the communication that is not
overlapped; then the pipeline over the microbatches, the reduction of gradients, and the optimizer. FLOPs of attention
are causal. Every formula works on arrays with one element per run; times are seconds.

Experts, with an even load (no GPU has measured these terms: +-30 %). Shapes, ``[runs]``: ``n`` tokens of the rank,
s b / (cp tp); ``k`` choices of a token; ``h`` hidden size; ``E`` experts of width ``f``. A rank has E / ep experts and
f / etp of their width, and ``m = n k etp`` rows for them. The tensor-, context- and data-parallel ranks of a stage are
the etp x ep x edp ranks of its experts (folding, arXiv 2504.14960), in an order that keeps them in as few nodes as
possible.

Sources: ring collectives move 2 (n - 1) / n bytes per byte (Patarasuk and Yuan 2009); the bubble of 1F1B is (p - 1) / v
passes (arXiv 2104.04473, section 2.2), of ZB-H1 that without the weight gradients (arXiv 2401.10241, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron.planner.step_time import prices
from megatron.planner.step_time.prices import Constants
from megatron.planner.step_time.workload import Array, Mask, StepTime, Workload

_ELEMENT = 2  # bytes of a token's or row's element


@dataclass(frozen=True)
class ExpertPass:
    """Seconds of the experts of one layer and microbatch in one pass, by cause."""

    products: Array
    """Products of the router, the experts and the shared expert."""
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
        """The share of MoE layers among all layers."""
        self.hidden, self.tp = w.number("hidden"), w.number("tp")
        self.num_experts, self.topk = np.maximum(w.number("num_experts"), 1.0), w.number("moe_topk")
        self.ffn, self.shared_ffn = w.number("moe_ffn"), w.number("shared_ffn")
        self.ep = w.number("ep")
        self.edp = self.tp * w.number("cp") * w.number("dp") / self.ep
        tokens = w.number("micro_batch_size") * w.number("seq_length") / w.number("cp")
        self.tokens = np.where(self.is_moe, tokens / self.tp, 0.0)  # n
        self.main_grad_bytes = w.number("main_grad_bytes")
        self.is_fp8 = w.where("is_fp8")
        self.node_size, self.is_one_node = w.number("node_size"), w.number("gpus") <= w.number("node_size")
        self.local_experts = self.num_experts / self.ep
        self.rows = self.tokens * self.topk  # m
        layers = self.share * w.number("layers") / w.number("pp")  # MoE layers of a rank
        self.parameters = layers * (self.local_experts * 3 * self.hidden * self.ffn)
        """Parameters of the experts of a rank, before sharding."""
        router = self.hidden * np.where(self.is_moe, self.num_experts, 0.0)
        self.dense_parameters = layers * (router + 3 * self.hidden * self.shared_ffn / self.tp)
        """Parameters of the routers and shared experts of a rank, which are sharded like attention."""


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
    # The inputs of the linear layers are cast forward, the gradients of their outputs backward.
    shared = np.where(shapes.is_fp8, shapes.tokens * shapes.shared_ffn, 0.0)
    rows = np.where(shapes.is_fp8, shapes.rows, 0.0)
    casts = rows * (shapes.hidden + shapes.ffn) + shared
    casts_backward = rows * (shapes.hidden + 2 * shapes.ffn) + 2 * shared
    messages = dispatch_seconds(shapes, link, network) / 2  # half of it in each direction
    none = np.zeros_like(router)
    return (
        ExpertPass(forward + router, accesses, casts, messages),
        ExpertPass(backward + router, accesses_backward, casts_backward, messages),
        ExpertPass(weights + router, none, none, none),
    )


def _products(shapes: ExpertShapes, product: GroupedProduct) -> tuple[Array, Array, Array]:
    """Products of the experts, which are one grouped product for each linear layer, and of the shared expert."""
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


def dispatch_seconds(shapes: ExpertShapes, link: Array, network: Array) -> Array:
    """Seconds of the all-to-alls of one layer and microbatch, forward and backward.

    Rows go to their experts and come back, forward and backward: 4 n k h (ep - 1) / ep elements.
    """
    ep = shapes.ep
    rows = 4 * _ELEMENT * shapes.tokens * shapes.topk * shapes.hidden
    in_node = np.where(shapes.is_one_node, ep, np.minimum(ep, shapes.node_size))
    return np.asarray(prices.exchange_seconds(rows * (ep - 1) / ep, ep, in_node, link, network))


_OPTIMIZER_BYTES = 30  # per parameter: gradient, main weight and two moments, read and written, and the weight
_ODD_HEAD_SOFTMAX = 6.0  # factor on unfused attention's accesses of scores if the head size is no multiple of 8


@dataclass(frozen=True)
class _Pass:
    """Seconds of one layer and microbatch by cause: of the forward pass, of the backward pass without the weight
    gradients, or of the weight gradients."""

    products: Array
    attention: Array
    elementwise: Array
    tensor_parallel: Array
    context_parallel: Array
    expert_parallel: Array

    @property
    def total(self) -> Array:
        communication = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return self.products + self.attention + self.elementwise + communication


class StepTimeModel:
    """Prices the runs of a :class:`Workload` with the given constants."""

    def __init__(self, workload: Workload) -> None:
        w = workload
        self.layers, self.hidden, self.seq_length = w.number("layers"), w.number("hidden"), w.number("seq_length")
        self.tp, self.pp, self.vp = w.number("tp"), w.number("pp"), w.number("vp")
        self.cp, self.dp, self.gpus = w.number("cp"), w.number("dp"), w.number("gpus")
        self.vocab, self.ffn, self.heads = w.number("vocab"), w.number("ffn"), w.number("heads")
        stated = w.number("head_size")
        self.head_size = np.where(stated > 0, stated, self.hidden / self.heads)
        self.query_hidden = self.heads * self.head_size
        self.kv_hidden = w.number("kv_heads") * self.head_size
        self.gates = 1.0 + w.where("is_gated")
        self.tokens = w.number("micro_batch_size") * self.seq_length / self.cp  # of a microbatch on a rank
        self.microbatches = w.number("global_batch_size") / (w.number("micro_batch_size") * self.dp)
        self.is_fp8, self.sequence_parallel = w.where("is_fp8"), w.where("sequence_parallel")
        self.machines = prices.Machines([run.cluster for run in w.runs])
        self.bf16_flops, self.hbm = self.machines.bf16_flops, self.machines.hbm
        self.node_size, self.link = self.machines.node_size, self.machines.link
        self.main_grad_bytes = w.number("main_grad_bytes")
        self.experts = ExpertShapes(w)
        self._is = {(name, value): w.where(name, value) for name, values in _CHOICES.items() for value in values}
        # If the number of layers + 2 divides, the first and the last stage have one layer less.
        short_ends = (self.pp > 1) & (self.layers % self.pp != 0) & ((self.layers + 2) % self.pp == 0)
        self.middle_layers = np.where(short_ends, (self.layers + 2) / self.pp, self.layers / self.pp)
        self.last_layers = self.middle_layers - short_ends
        # Parameters of a rank, before sharding, without experts.
        mlp = (1 - self.experts.share) * (self.gates + 1) * self.hidden * self.ffn
        layer = 2 * self.hidden * self.query_hidden + 2 * self.hidden * self.kv_hidden + mlp
        # With a pipeline a rank has at most one of embedding and output layer.
        tables = np.where(self.pp > 1, 1.0, 2.0) * self.hidden * self.vocab
        self.parameters = (self.layers / self.pp * layer + tables) / self.tp + self.experts.dense_parameters

    def price(self, constants: Constants) -> StepTime:
        c = constants
        forward, backward, weights = self._layer(c)
        again = self._recomputed(forward)
        gap = c["layer_gap"] * np.where(self._is["recompute", "full"], 4 / 3, 1.0)
        gap = gap + np.where(self._is["has_deepspeed_pipeline", True], c["deepspeed_layer"], 0.0)
        layer = forward.total + backward.total + weights.total + again + gap
        head = self._head(c)
        messages = self._messages(c)
        # The pipeline: the slowest stage sets the pace of the microbatches, all stages make the bubble.
        last, middle = self.last_layers * layer + head, self.middle_layers * layer
        is_head_slowest = (self.pp == 1) | (last >= middle)
        slowest = np.where(is_head_slowest, last, middle) + messages  # [runs], of a microbatch
        whole = self.layers * layer + head + self.pp * messages  # one stage after the other
        # ZB-H1 fills the bubble of 1F1B with two weight gradients of a microbatch for each other stage. ZB-2p, which is
        # searched with twice the memory of 1F1B, has next to none.
        bubble, filled = (whole - slowest) / self.vp, 2 * (self.pp - 1) * self.middle_layers * weights.total
        bubble = np.where(self._is["schedule", "zb-h1"], np.maximum(bubble - filled, 0.0), bubble)
        bubble = np.where(self._is["schedule", "zb-2p"], 0.0, bubble)
        optimizer, data_parallel = self._optimizer(c), self._data_parallel(c, slowest)
        larger = prices.growth(c, self.gpus)
        slowest_head = np.where(is_head_slowest, head, 0.0)
        # Terms of layers are those of the slowest stage.
        per_layer = self.microbatches * (slowest - slowest_head - messages) / layer
        passes = (forward, backward, weights)
        terms = {
            "products": per_layer * sum(one.products for one in passes),
            "attention": per_layer * sum(one.attention for one in passes),
            "between products": per_layer * sum(one.elementwise for one in passes),
            "recompute": per_layer * again,
            "tensor parallelism": per_layer * sum(one.tensor_parallel for one in passes),
            "context parallelism": per_layer * sum(one.context_parallel for one in passes),
            "expert parallelism": per_layer * sum(one.expert_parallel for one in passes),
            "gaps": per_layer * gap + c["step"],
            "output layer": self.microbatches * slowest_head,
            "pipeline messages": self.microbatches * messages,
            "bubble": bubble,
            "data parallelism": data_parallel,
            "optimizer": optimizer,
        }
        terms = {name: seconds * larger for name, seconds in terms.items()}
        return StepTime(np.asarray(sum(terms.values())), terms)

    # One layer.

    def _product(
        self,
        c: Constants,
        rows: Array,
        columns: Array,
        depth: Array,
        extra_bytes: Array | float = 0.0,
        count: Array | float = 1.0,
        in_bf16: bool = False,
    ) -> Array:
        """``count`` products ``[rows, depth] x [depth, columns]`` in one launch, each with ``extra_bytes`` of memory
        traffic."""
        is_fp8 = self.is_fp8 & (not in_bf16)
        traffic = prices.product_traffic(rows, columns, depth, is_fp8, extra_bytes, _ELEMENT)
        return prices.product_seconds(self.machines, c, rows, columns, depth, traffic, is_fp8, count)

    def _layer(self, c: Constants) -> tuple[_Pass, _Pass, _Pass]:
        """The forward pass, the backward pass without the weight gradients, and the weight gradients of the mean
        layer."""
        h, t, n = self.hidden, self.tp, self.tokens
        qkv, up = (self.query_hidden + 2 * self.kv_hidden) / t, self.gates * self.ffn / t
        dense = 1 - self.experts.share  # layers with an MLP
        # (inputs, outputs, how many of them in a layer)
        linears = ((h, qkv, 1.0), (self.query_hidden / t, h, 1.0), (h, up, dense), (self.ffn / t, h, dense))
        forward = sum(share * self._product(c, n, outputs, inputs) for inputs, outputs, share in linears)
        backward = sum(share * self._product(c, n, inputs, outputs) for inputs, outputs, share in linears)
        weights = sum(
            share * self._product(c, inputs, outputs, n, self.main_grad_bytes * inputs * outputs)
            for inputs, outputs, share in linears
        )
        attention, attention_backward = self._attention(c)
        # With sequence parallelism norms and residuals are divided among the tensor-parallel ranks.
        # Elements that are read or written: norms, residuals, rotary embedding, activation.
        residual = np.where(self.sequence_parallel, h / t, h)
        inner = dense * (self.gates + 1) * self.ffn / t
        accesses = n * (10 * residual + inner + 2 * qkv)
        accesses_backward = n * (16 * residual + 2 * inner + 2 * qkv)
        # Casts to FP8 move 4 bytes for each element.
        casts = np.where(self.is_fp8, c["fp8_cast"] * 4 * n / self.hbm, 0.0)
        between = _ELEMENT * self._elementwise(c) / self.hbm
        collective = self._tensor_parallel(c)
        ring = prices.EXPOSED_RING * 2 * _ELEMENT * (self.cp - 1) * self.kv_hidden / t * n / (c["link"] * self.link)
        none = np.zeros_like(h)
        passes = (
            _Pass(
                np.asarray(forward),
                attention,
                between * accesses + casts * (h + dense * h + (self.query_hidden + dense * self.ffn) / t),
                collective,
                ring,
                none,
            ),
            _Pass(
                np.asarray(backward),
                attention_backward,
                between * accesses_backward + casts * (h + dense * h + qkv + dense * up),
                collective,
                2 * ring,
                none,
            ),
            _Pass(np.asarray(weights), none, none, none, none, none),
        )
        if not self.experts.is_moe.any():
            return passes
        of_experts = expert_passes(
            self.experts, partial(self._product, c), self.bf16_flops * prices.FP32_SHARE, c["link"] * self.link,
            c["network"] * self.machines.network,
        )  # fmt: skip
        share, cast = self.experts.share, c["fp8_cast"] * 4 / self.hbm
        first, second, third = (
            replace(
                one,
                products=one.products + share * moe.products,
                elementwise=one.elementwise + share * (between * moe.accesses + cast * moe.casts),
                expert_parallel=share * moe.dispatch,
            )
            for one, moe in zip(passes, of_experts)
        )
        return first, second, third

    def _attention(self, c: Constants) -> tuple[Array, Array]:
        """Seconds of the forward and of the backward pass."""
        length = self.seq_length
        flops = 2 * self.tokens * length * self.query_hidden / self.tp
        fused = flops / self.machines.attention_flops(c, self._is["attention", "cudnn"], length)
        # Unfused attention computes the masked half, too, and reads and writes the scores 6 + 8 times.
        is_odd = self.head_size % 8 != 0
        products = 2 * flops / (c["batched_product"] * self.bf16_flops) * np.where(is_odd, 2.0, 1.0)
        score_bytes = _ELEMENT * self.tokens * length * self.heads / self.tp
        access = c["softmax"] * score_bytes / self.hbm * np.where(is_odd, _ODD_HEAD_SOFTMAX, 1.0)
        is_unfused = self._is["attention", "unfused"]
        return (
            np.where(is_unfused, products + 6 * access, fused),
            np.where(is_unfused, 2 * products + 8 * access, prices.BACKWARD_ATTENTION * fused),
        )

    def _elementwise(self, c: Constants) -> Array:
        # An unfused RMSNorm, SwiGLU and rotary embedding: half as many accesses again.
        is_unfused_llama = self._is["elementwise", "eager"] & (self.gates > 1)
        return c["elementwise"] * np.where(is_unfused_llama, 1.5, 1.0)

    def _tensor_parallel(self, c: Constants) -> Array:
        """Seconds of the two all-reduces of a pass, or of the collectives of sequence parallelism."""
        activation = _ELEMENT * self.tokens * self.hidden
        seconds = 2 * 2 * (self.tp - 1) / self.tp * activation / (c["link"] * self.link)
        # Experts have no such communication, unless every token uses a shared expert.
        seconds = seconds * (1 - self.experts.share * np.where(self.experts.shared_ffn > 0, 0.0, 0.5))
        return seconds * np.where(self._is["overlaps_tensor_parallel", True], c["exposed_tensor_parallel"], 1.0)

    def _recomputed(self, forward: _Pass) -> Array:
        """What runs a second time."""
        half = 0.5 * (forward.products + forward.elementwise + forward.tensor_parallel)
        attention = np.where(self._is["attention", "unfused"], forward.attention, 0.0)
        selective = np.where(self._is["recomputes_products", True], half, attention)
        selective = np.where(self._is["recompute", "selective"], selective, 0.0)
        return np.where(self._is["recompute", "full"], forward.total, selective)

    # The ends of the model, and the pipeline.

    def _head(self, c: Constants) -> Array:
        """The output layer and the loss of a microbatch; always in bf16."""
        n, columns = self.tokens, self.vocab / self.tp
        shapes = ((n, columns, self.hidden), (n, self.hidden, columns), (self.hidden, columns, n))
        products = sum(self._product(c, *shape, in_bf16=True) for shape in shapes)
        return products + self._elementwise(c) * 6 * _ELEMENT * n * columns / self.hbm

    def _messages(self, c: Constants) -> Array:
        """The exposed messages of a microbatch: one activation and one gradient per chunk."""
        between_pods = prices.pod_share(self.machines, self.pp, self.gpus / self.pp)
        rate = prices.message_rate(self.machines, c, self.gpus <= self.node_size, between_pods)
        # Tensor-parallel ranks each send a part.
        activation = _ELEMENT * self.tokens * self.hidden / self.tp
        share = np.where(self.vp > 1, c["exposed_interleaved_messages"], c["exposed_messages"])
        return np.where(self.pp > 1, 2 * self.vp * activation / rate * share, 0.0)

    # Data parallelism and the optimizer.

    def _ring_seconds(self, c: Constants, ranks: Array, distance: Array) -> Array:
        """Seconds to reduce-scatter or all-gather a byte over ``ranks``, which are ``distance`` apart: several of them
        in a node share its adapters."""
        # Ranks that are a node's size apart are all on different nodes.
        in_node = np.maximum(1.0, np.minimum(self.node_size / distance, ranks))
        share = prices.pod_share(self.machines, ranks, distance)
        return (ranks - 1) / ranks / prices.ring_rate(self.machines, c, in_node, self.gpus <= self.node_size, share)

    def _data_parallel(self, c: Constants, slowest: Array) -> Array:
        """The exposed part of the reduction of gradients and of the gathers of weights."""
        # Seconds per byte of a parameter.
        moved = self.parameters * self._ring_seconds(c, self.dp * self.cp, self.tp)
        experts = self.experts
        moved = moved + experts.parameters * self._ring_seconds(c, experts.edp, experts.ep)
        is_fsdp = self._is["sharding", "fsdp1"] | self._is["sharding", "fsdp2"]
        # Gradients of the replicas are reduced once, and weights gathered once; with the interleaved schedule behind
        # several microbatches.
        once = 2 * _ELEMENT * moved
        window = prices.reduction_window(slowest, self.microbatches, self.pp, self.vp > 1)
        replicated = prices.exposed_reduction(c, once, window, self._is["overlaps_data_parallel", True])
        # Two gathers of weights and one reduction of gradients for each microbatch.
        each = np.where(self._is["keeps_weights_gathered", True], 2.0, 3.0) * _ELEMENT * moved
        contention = np.where(self._is["sharding", "fsdp1"], 1.0, c["fsdp2_contention"])
        return np.where(is_fsdp, self.microbatches * prices.exposed_sharding(c, each, slowest, contention), replicated)

    def _optimizer(self, c: Constants) -> Array:
        is_sharded = ~self._is["sharding", "none"]
        parameters = self.parameters / np.where(is_sharded, self.dp * self.cp, 1.0)
        parameters = parameters + self.experts.parameters / np.where(is_sharded, self.experts.edp, 1.0)
        return prices.optimizer_seconds(self.machines, c, _OPTIMIZER_BYTES * parameters)


_CHOICES: dict[str, tuple[object, ...]] = {
    "attention": ("unfused", "cudnn"),
    "elementwise": ("eager",),
    "sharding": ("none", "fsdp1", "fsdp2"),
    "recompute": ("selective", "full"),
    "schedule": ("zb-h1", "zb-2p"),
    "overlaps_tensor_parallel": (True,),
    "overlaps_data_parallel": (True,),
    "keeps_weights_gathered": (True,),
    "recomputes_products": (True,),
    "has_deepspeed_pipeline": (True,),
}
"""The values of fields that the formulas distinguish."""
