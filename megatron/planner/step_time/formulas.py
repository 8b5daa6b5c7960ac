"""The time of a training step in closed form.

One microbatch on one rank: products, attention, the operations between them, and the communication that is not
overlapped; then the pipeline over the microbatches, the reduction of gradients, and the optimizer. FLOPs of attention
are causal. Every formula works on arrays with one element per run; times are seconds.

Sources: ring collectives move 2 (n - 1) / n bytes per byte (Patarasuk and Yuan 2009); the bubble of 1F1B is (p - 1) / v
passes (arXiv 2104.04473, section 2.2), of ZB-H1 that without the weight gradients (arXiv 2401.10241, section 3).
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron.planner.step_time.formulas import ExpertPass, ExpertShapes, expert_passes, fp32_rate
from megatron.planner.step_time.prices import (
    BACKWARD_ATTENTION,
    EXPOSED_RING,
    Constants,
    Machines,
    exposed_reduction,
    exposed_sharding,
    growth,
    message_rate,
    pod_share,
    product_seconds,
    product_traffic,
    reduction_window,
    ring_rate,
)
from megatron.planner.step_time.workload import Array, Mask, StepTime, Workload

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
        self.machines = Machines([run.cluster for run in w.runs])
        self.bf16_flops, self.hbm = self.machines.bf16_flops, self.machines.hbm
        self.node_size, self.link = self.machines.node_size, self.machines.link
        self.main_grad_bytes, self.element_bytes = w.number("main_grad_bytes"), w.number("element_bytes")
        self.experts = ExpertShapes(w)
        self._workload = w
        self._is = {(name, value): w.where(name, value) for name, values in _CHOICES.items() for value in values}

    def price(self, constants: Constants) -> StepTime:
        """The time of every run."""
        c = constants
        forward, backward, weights = self._layer(c)
        again = self._recomputed(forward)
        gap = c["layer_gap"] * np.where(self._is["recompute", "full"], 4 / 3, 1.0)
        gap = gap + np.where(self._is["has_deepspeed_pipeline", True], c["deepspeed_layer"], 0.0)
        layer = forward.total + backward.total + weights.total + again + gap
        head = self._head(c)
        messages = self._messages(c)
        slowest, whole = self._stages(layer, head, messages)
        bubble = self._bubble((whole - slowest) / self.vp, weights.total)
        optimizer, data_parallel = self._optimizer(c), self._data_parallel(c, slowest)
        larger = growth(c, self.gpus)
        slowest_head = np.where(self._is_head_slowest(layer, head), head, 0.0)
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
        traffic = product_traffic(rows, columns, depth, is_fp8, extra_bytes, self.element_bytes)
        return product_seconds(self.machines, c, rows, columns, depth, traffic, is_fp8, count)

    def _layer(self, c: Constants) -> tuple[_Pass, _Pass, _Pass]:
        """The forward pass, the backward pass without the weight gradients, and the weight gradients."""
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
        # Elements that are read or written: norms, residuals, rotary embedding, activation.
        residual = np.where(self.sequence_parallel, h / t, h)
        inner = dense * (self.gates + 1) * self.ffn / t
        accesses = n * (10 * residual + inner + 2 * qkv)
        accesses_backward = n * (16 * residual + 2 * inner + 2 * qkv)
        casts = np.where(self.is_fp8, c["fp8_cast"] * 4 * n / self.hbm, 0.0)
        between = self.element_bytes * self._elementwise(c) / self.hbm
        collective = self._tensor_parallel(c)
        ring = EXPOSED_RING * 2 * self.element_bytes * (self.cp - 1) * self.kv_hidden / t * n / (c["link"] * self.link)
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
            self.experts, partial(self._product, c), fp32_rate(self.bf16_flops), c["link"] * self.link,
            c["network"] * self.machines.network,
        )  # fmt: skip
        first, second, third = (self._with_experts(c, one, also) for one, also in zip(passes, of_experts))
        return first, second, third

    def _with_experts(self, c: Constants, one: _Pass, of_experts: ExpertPass) -> _Pass:
        """A pass of the mean layer: ``one`` has attention, and the MLPs of dense layers."""
        between = 2 * self._elementwise(c) / self.hbm * of_experts.accesses
        casts = c["fp8_cast"] * 4 / self.hbm * of_experts.casts
        share = self.experts.share
        return replace(
            one,
            products=one.products + share * of_experts.products,
            elementwise=one.elementwise + share * (between + casts),
            expert_parallel=share * of_experts.dispatch,
        )

    def _attention(self, c: Constants) -> tuple[Array, Array]:
        """Forward and backward."""
        length = self.seq_length
        flops = 2 * self.tokens * length * self.query_hidden / self.tp
        fused = flops / self.machines.attention_flops(c, self._is["attention", "cudnn"], length)
        # Unfused attention computes the masked half, too, and reads and writes the scores 6 + 8 times.
        is_odd = self.head_size % 8 != 0
        products = 2 * flops / (c["batched_product"] * self.bf16_flops) * np.where(is_odd, 2.0, 1.0)
        score_bytes = self.element_bytes * self.tokens * length * self.heads / self.tp
        access = c["softmax"] * score_bytes / self.hbm * np.where(is_odd, _ODD_HEAD_SOFTMAX, 1.0)
        is_unfused = self._is["attention", "unfused"]
        return (
            np.where(is_unfused, products + 6 * access, fused),
            np.where(is_unfused, 2 * products + 8 * access, BACKWARD_ATTENTION * fused),
        )

    def _elementwise(self, c: Constants) -> Array:
        # An unfused RMSNorm, SwiGLU and rotary embedding: half as many accesses again.
        is_unfused_llama = self._is["elementwise", "eager"] & (self.gates > 1)
        return c["elementwise"] * np.where(is_unfused_llama, 1.5, 1.0)

    def _tensor_parallel(self, c: Constants) -> Array:
        """Two all-reduces of a pass, or the all-gathers and reduce-scatters of sequence parallelism."""
        activation = self.element_bytes * self.tokens * self.hidden
        seconds = 2 * 2 * (self.tp - 1) / self.tp * activation / (c["link"] * self.link)
        # Experts have no such communication, unless every token uses a shared expert.
        seconds = seconds * (1 - self.experts.share * np.where(self.experts.shared_ffn > 0, 0.0, 0.5))
        return seconds * np.where(self._is["overlaps_tensor_parallel", True], c["exposed_tensor_parallel"], 1.0)

    def _recomputed(self, forward: _Pass) -> Array:
        """What runs a second time."""
        half = 0.5 * (forward.products + forward.elementwise + forward.tensor_parallel)
        selective = np.where(
            self._is["recomputes_products", True],
            half,
            np.where(self._is["attention", "unfused"], forward.attention, 0.0),
        )
        return np.where(
            self._is["recompute", "full"], forward.total, np.where(self._is["recompute", "selective"], selective, 0.0)
        )

    # The ends of the model, and the pipeline.

    def _head(self, c: Constants) -> Array:
        """The output layer and the loss of a microbatch; always in bf16."""
        n, columns = self.tokens, self.vocab / self.tp
        shapes = ((n, columns, self.hidden), (n, self.hidden, columns), (self.hidden, columns, n))
        products = sum(self._product(c, *shape, in_bf16=True) for shape in shapes)
        return products + self._elementwise(c) * 6 * self.element_bytes * n * columns / self.hbm

    def _middle_layers(self) -> Array:
        """Layers of an inner stage. If the number of layers + 2 divides, the first and the last stage have one less."""
        has_short_ends = (self.pp > 1) & (self.layers % self.pp != 0) & ((self.layers + 2) % self.pp == 0)
        return np.where(has_short_ends, (self.layers + 2) / self.pp, self.layers / self.pp)

    def _last_layers(self) -> Array:
        """Layers of the last stage."""
        middle = self._middle_layers()
        return np.where(middle > self.layers / self.pp, middle - 1, middle)

    def _is_head_slowest(self, layer: Array, head: Array) -> Mask:
        """Whether the stage with the output layer takes longest."""
        return (self.pp == 1) | (self._last_layers() * layer + head >= self._middle_layers() * layer)

    def _stages(self, layer: Array, head: Array, messages: Array) -> tuple[Array, Array]:
        """A microbatch on the slowest stage, and on all stages after another."""
        last = self._last_layers() * layer + head
        slowest = np.where(self._is_head_slowest(layer, head), last, self._middle_layers() * layer) + messages
        return slowest, self.layers * layer + head + self.pp * messages

    def _bubble(self, bubble: Array, weights: Array) -> Array:
        """The bubble of the schedule, from that of 1F1B. ZB-H1 fills it with two weight gradients of a microbatch for
        each other stage. ZB-2p, which is searched with twice the memory of 1F1B, has next to none."""
        filled = 2 * (self.pp - 1) * self._middle_layers() * weights
        bubble = np.where(self._is["schedule", "zb-h1"], np.maximum(bubble - filled, 0.0), bubble)
        return np.where(self._is["schedule", "zb-2p"], 0.0, bubble)

    def _messages(self, c: Constants) -> Array:
        """The exposed messages of a microbatch: one activation and one gradient per chunk."""
        between_pods = pod_share(self.machines, self.pp, self.gpus / self.pp)
        rate = message_rate(self.machines, c, self.gpus <= self.node_size, between_pods)
        # Tensor-parallel ranks each send a part.
        activation = self.element_bytes * self.tokens * self.hidden / self.tp
        share = np.where(self.vp > 1, c["exposed_interleaved_messages"], c["exposed_messages"])
        return np.where(self.pp > 1, 2 * self.vp * activation / rate * share, 0.0)

    # Data parallelism and the optimizer.

    def _parameters(self) -> Array:
        """Parameters of a rank, before sharding, without experts."""
        h = self.hidden
        mlp = (1 - self.experts.share) * (self.gates + 1) * h * self.ffn
        layer = 2 * h * self.query_hidden + 2 * h * self.kv_hidden + mlp
        tables = np.where(self.pp > 1, 1.0, 2.0) * h * self.vocab
        return (self.layers / self.pp * layer + tables) / self.tp + self.experts.dense_parameters

    def _ring_seconds(self, c: Constants, ranks: Array, distance: Array) -> Array:
        """Seconds to reduce-scatter or all-gather a byte over ``ranks``, which are ``distance`` apart: several of them
        in a node share its adapters."""
        in_node = np.maximum(1.0, np.minimum(self.node_size / distance, ranks))
        share = pod_share(self.machines, ranks, distance)
        return (ranks - 1) / ranks / ring_rate(self.machines, c, in_node, self.gpus <= self.node_size, share)

    def _data_parallel(self, c: Constants, slowest: Array) -> Array:
        """The exposed part of the reduction of gradients and of the gathers of weights."""
        # Seconds per byte of a parameter.
        moved = self._parameters() * self._ring_seconds(c, self.dp * self.cp, self.tp)
        experts = self.experts
        moved = moved + experts.parameters * self._ring_seconds(c, experts.edp, experts.ep)
        is_fsdp = self._is["sharding", "fsdp1"] | self._is["sharding", "fsdp2"]
        # Gradients of the replicas are reduced once, and weights gathered once; with the interleaved schedule behind
        # several microbatches.
        once = 2 * self.element_bytes * moved
        window = reduction_window(slowest, self.microbatches, self.pp, self.vp > 1)
        replicated = exposed_reduction(c, once, window, self._is["overlaps_data_parallel", True])
        # Two gathers of weights and one reduction of gradients for each microbatch.
        each = np.where(self._is["keeps_weights_gathered", True], 2.0, 3.0) * self.element_bytes * moved
        contention = np.where(self._is["sharding", "fsdp1"], 1.0, c["fsdp2_contention"])
        return np.where(is_fsdp, self.microbatches * exposed_sharding(c, each, slowest, contention), replicated)

    def _optimizer(self, c: Constants) -> Array:
        is_sharded = ~self._is["sharding", "none"]
        parameters = self._parameters() / np.where(is_sharded, self.dp * self.cp, 1.0)
        parameters = parameters + self.experts.parameters / np.where(is_sharded, self.experts.edp, 1.0)
        return c["optimizer"] * _OPTIMIZER_BYTES * parameters / self.hbm


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
