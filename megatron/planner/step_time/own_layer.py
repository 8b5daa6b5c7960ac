"""The passes of a layer of this project in closed form: one microbatch on one rank.

Shapes, ``[runs]``: ``n`` tokens of the rank, s b / cp; ``h`` hidden size; ``q`` and ``kv`` elements of queries and of
keys on a rank, divided by tp; ``f`` width of the MLP on a rank. ``r`` are elements of the residual stream of a token,
h / tp with sequence parallelism.

The bytes are those that the kernels of :mod:`megatron.core` read and write. The priced rehearsal counts the same from
the code, and a test compares both.
"""

from functools import partial
from typing import Any

import numpy as np

from megatron.planner.step_time.constants import Constants
from megatron.planner.step_time.experts import ExpertPass, ExpertShapes, expert_passes, fp32_rate
from megatron.planner.step_time.prices import (
    BACKWARD_ATTENTION,
    EXPOSED_RING,
    Machines,
    cast_seconds,
    elementwise_seconds,
    exchange_seconds,
    product_seconds,
    product_traffic,
    ring_rate,
)
from megatron.planner.step_time.workload import Array, Workload

Pass = dict[str, Array]
"""Seconds by cause."""


class OwnLayer:
    """The mean layer of runs of this project."""

    def __init__(self, workload: Workload) -> None:
        w = workload
        self.machines = Machines([run.cluster for run in w.runs])
        self.hidden, self.tp, self.cp = w.number("hidden"), w.number("tp"), w.number("cp")
        self.heads, self.head_size = w.number("heads"), w.number("head_size")
        self.query = self.heads * self.head_size / self.tp
        self.key = w.number("kv_heads") * self.head_size / self.tp
        self.ffn, self.vocab = w.number("ffn") / self.tp, w.number("vocab") / self.tp
        self.seq_length = w.number("seq_length")
        self.positions = self.seq_length / self.cp
        self.tokens = w.number("micro_batch_size") * self.positions
        self.sequence_parallel = w.where("sequence_parallel")
        self.residual = np.where(self.sequence_parallel, self.hidden / self.tp, self.hidden)
        self.element, self.main_grad_bytes = w.number("element_bytes"), w.number("main_grad_bytes")
        self.is_cudnn, self.is_unfused = w.where("attention", "cudnn"), w.where("attention", "unfused")
        self.overlaps_tensor_parallel = w.where("overlaps_tensor_parallel")
        self.is_fp8, self.is_tensorwise = w.where("is_fp8"), w.where("fp8_recipe", "tensorwise")
        self.gradient_bytes = w.number("gradient_bytes")
        self.exchange = {name: w.where("cp_exchange", name) for name in ("p2p", "a2a", "allgather", "a2a+p2p")}
        self.cp_heads, self.cp_in_node, self.tp_in_node = (
            w.number("cp_heads"),
            w.number("cp_in_node"),
            w.number("tp_in_node"),
        )
        self.has_qkv_bias = w.where("has_qkv_bias")
        layers = w.number("layers")
        self.rope = w.number("rope_layers") / layers
        """Layers with rotary position embedding among all layers."""
        self.normed = w.where("has_qk_norm") + self.rope * w.where("has_qk_l2_norm")
        """Layers with a norm of queries and keys among all layers."""
        self.scaled = (1 - self.rope) * w.where("tunes_temperature")
        """Layers that scale their queries among all layers."""
        self.micro_batch_size, self.weighs_input = w.number("micro_batch_size"), w.where("weighs_input")
        self.chunked = w.number("chunked_layers") / layers
        self.chunk_length = np.where(self.chunked > 0, w.number("chunk_length"), self.seq_length)
        self.recomputes = {name: w.where(f"recomputes_{name}") for name in ("attention", "norms", "activation", "mlp")}
        self.chunks_loss = w.where("chunks_loss")
        shards = w.number("dp") * self.cp / w.number("replicas")
        # Sharded gradients are reduced in every microbatch, and added to the shard of the main gradient.
        self.writes_gradients = w.where("sharding_strategy", "optim_grads") | w.where(
            "sharding_strategy", "optim_grads_params"
        )
        self.writes_gradients = self.writes_gradients & ~w.where("defers_reduction")
        self.added_shard = np.where(
            self.writes_gradients, 3 * self.gradient_bytes / shards, 0.0
        )  # bytes of a parameter
        self.recomputed_unit = w.number("recomputed_unit")
        self.experts = ExpertShapes(w)
        self.dense = 1 - self.experts.share

    # Operations.

    def _product(
        self,
        c: Constants,
        rows: Any,
        columns: Any,
        depth: Any,
        extra: Any = 0.0,
        count: Any = 1.0,
        in_bf16: bool = False,
    ) -> Array:
        is_fp8 = self.is_fp8 & (not in_bf16)
        traffic = product_traffic(rows, columns, depth, is_fp8, extra, self.element)
        return product_seconds(self.machines, c, rows, columns, depth, traffic, is_fp8, count)

    def _expert_product(
        self, c: Constants, rows: Array, columns: Array, depth: Array, extra: Array | float, count: Array | float
    ) -> Array:
        """Products of experts are one launch; their weight gradients, which have ``extra`` bytes, one for each."""
        if isinstance(extra, float):
            return self._product(c, rows, columns, depth, extra, count)
        return count * self._product(c, rows, columns, depth, extra)

    def _weight_gradient(self, c: Constants, inputs: Any, outputs: Any, in_bf16: bool = False) -> Array:
        """It is added to the main gradient in the product; from FP8 after it, in the main gradient's dtype."""
        written = np.where(self.writes_gradients, self.gradient_bytes - self.element, self.main_grad_bytes)
        written = np.where(self.is_fp8 & (not in_bf16), self.gradient_bytes - self.element, written)
        extra = written * inputs * outputs
        return self._product(c, inputs, outputs, self.tokens, extra, in_bf16=in_bf16)

    def _ring(self, c: Constants, num_bytes: Array, size: Array, in_node: Array) -> Array:
        """A gather or a reduce-scatter."""
        return num_bytes * (size - 1) / size / ring_rate(self.machines, c, in_node, in_node >= size)

    def _linears(self) -> tuple[tuple[Array, Array, Any], ...]:
        """(inputs, outputs, how many in a layer)."""
        qkv = self.query + 2 * self.key
        one = np.ones_like(qkv)
        return (
            (self.hidden, qkv, one),
            (self.query, self.hidden, one),
            (self.hidden, 2 * self.ffn, self.dense),
            (self.ffn, self.hidden, self.dense),
        )

    # Passes of a layer.

    def passes(self, c: Constants) -> tuple[Pass, Pass, Pass]:
        """Forward, backward without weight gradients, and weight gradients."""
        n = self.tokens
        linears = self._linears()
        attention = self._attention(c)
        moved, moved_backward = self._accesses()
        exchanged, exchanged_backward = self._cp_accesses()
        casts, casts_backward, maxima, maxima_backward = self._casts()
        elementwise = elementwise_seconds(self.machines, c, moved + exchanged + maxima)
        backward_elementwise = elementwise_seconds(
            self.machines, c, moved_backward + exchanged_backward + maxima_backward
        )
        cp, cp_backward = self._context_parallel(c)
        tp, tp_backward = self._tensor_parallel(c)
        parameters = sum(share * inputs * outputs for inputs, outputs, share in linears)
        separate = np.where(self.writes_gradients, 2.0, 3.0) * self.gradient_bytes
        added = (np.where(self.is_fp8, separate, 0.0) + self.added_shard) * parameters
        weights = sum(share * self._weight_gradient(c, inputs, outputs) for inputs, outputs, share in linears)
        forward = {
            "products": sum(share * self._product(c, n, outputs, inputs) for inputs, outputs, share in linears),
            "attention": attention,
            "between products": elementwise + cast_seconds(self.machines, c, casts),
            "tensor parallelism": tp,
            "context parallelism": cp,
        }
        backward = {
            "products": sum(share * self._product(c, n, inputs, outputs) for inputs, outputs, share in linears),
            "attention": np.where(self.is_unfused, 2.0, BACKWARD_ATTENTION) * attention,
            "between products": backward_elementwise + cast_seconds(self.machines, c, casts_backward),
            "tensor parallelism": tp_backward,
            "context parallelism": cp_backward,
        }
        gradients = {
            "products": np.asarray(weights),
            "between products": elementwise_seconds(self.machines, c, added),
        }
        return self._with_experts(c, forward, backward, gradients)

    def _with_experts(self, c: Constants, *passes: Pass) -> tuple[Pass, Pass, Pass]:
        first, second, third = passes
        if self.experts.is_moe.any():
            link, network = c["link"] * self.machines.link, c["network"] * self.machines.network
            product = partial(self._expert_product, c)
            found = expert_passes(self.experts, product, fp32_rate(self.machines.bf16_flops), link, network)
            moved = (*self._accesses_of_experts(), np.zeros_like(self.tokens))
            first, second, third = (self._add(c, one, also, each) for one, also, each in zip(passes, found, moved))
        return first, second, third

    def _accesses_of_experts(self) -> tuple[Array, Array]:
        """Bytes of a MoE layer with its norm and residual connection, between the products.

        The router reads the tokens in fp32. Rows are copied from their tokens, and after the exchange sorted by expert
        and back. The weighted sum of a token's rows is in fp32, row by row; so is the sum of their gradients.
        """
        experts, e, k = self.experts, self.element, self.experts.topk
        is_weighed = self.weighs_input
        tokens = e * experts.tokens * experts.hidden
        wide = (e + 4) / e  # reads and writes of a cast to fp32, relative to a read in the model's dtype
        more = (e + 8) / e  # of an addition in fp32
        rows = experts.rows * experts.ffn / experts.etp + experts.tokens * experts.shared_ffn
        is_sorted = (experts.local_experts > 1) & (experts.ep > 1) & ~experts.gathers
        received = e * experts.rows * experts.hidden
        copies = np.where(
            is_sorted, 4 * received, np.where(experts.gathers & (experts.ep * experts.etp > 1), 2 * received, 0.0)
        )
        sent = np.where(experts.gathers, received, k * tokens)
        # Tokens whose rows are summed here: with the all-gather dispatcher those of all ranks.
        summed = np.where(experts.gathers, experts.ep * experts.etp, 1.0) * tokens
        # Weighted tokens have one choice, whose row is only copied; the weights' gradient is that of a product in fp32.
        weighted = np.where(is_weighed, 0.0, 2 * wide)
        weighing = np.where(is_weighed, 2 * wide * tokens, 0.0)
        weighing_backward = np.where(is_weighed, (2 * wide + (e + 20) / e) * tokens, 0.0)
        summed_wide = np.where(k > 1, 2 * wide, 0.0)
        forward = (5 + wide) * tokens + 2 * sent + (weighted + 2 * k + more * (k - 1)) * summed + weighing
        backward = (9 + 2 * wide) * tokens + np.where(is_weighed, 2.0, 8.0) * sent + weighing_backward
        backward = backward + (2 + summed_wide + (2 + more) * (k - 1)) * summed
        # The shared expert's output is added, and the gradient of its input.
        shared = np.where(experts.shared_ffn > 0, 3 * tokens, 0.0)
        forward, backward = forward + shared, backward + shared
        return forward + copies + 3 * e * rows, backward + copies + 5 * e * rows

    def _add(self, c: Constants, one: Pass, of_experts: ExpertPass, moved: Array) -> Pass:
        share = self.experts.share
        between = elementwise_seconds(self.machines, c, moved)
        between = between + cast_seconds(self.machines, c, 4 * of_experts.casts)
        return one | {
            "products": one["products"] + share * of_experts.products,
            "between products": one.get("between products", 0.0) + share * between,
            "expert parallelism": share * of_experts.dispatch,
        }

    def _attention(self, c: Constants) -> Array:
        inside = self._attention_over(c, self.chunk_length)
        return np.asarray(self.chunked * inside + (1 - self.chunked) * self._attention_over(c, self.seq_length))

    def _attention_over(self, c: Constants, length: Array) -> Array:
        """The forward pass of a layer whose attention stays inside ``length`` tokens."""
        flops = 2 * self.tokens * length * self.query
        # Context-parallel ranks compute tiles of the sequence.
        is_packed = (self.cp == 1) | self.exchange["a2a"]
        rate = self.machines.attention_flops(c, self.is_cudnn, np.where(is_packed, length, self.seq_length))
        fused = flops / rate
        unfused = 2 * flops / (c["batched_product"] * self.machines.bf16_flops)
        scores = self.element * self.tokens * length * self.heads / self.tp
        return np.where(self.is_unfused, unfused + 6 * c["softmax"] * scores / self.machines.hbm, fused)

    def _rotation(self) -> Array:
        """Bytes of the rotation of queries and keys, with its table of complex numbers in fp32."""
        table = 4 * self.head_size * self.positions
        return np.asarray(self.rope * (2 * self.element * self.tokens * (self.query + self.key) + table))

    def _accesses(self) -> tuple[Array, Array]:
        """Bytes between the products. A residual connection reads two tensors and writes one; a norm reads and writes
        one, backward it reads two; SwiGLU reads gate and up. Attention's gradients are copied into one tensor."""
        n, e, qkv = self.tokens, self.element, self.query + 2 * self.key
        residual, inner = e * n * self.residual, e * n * self.ffn * self.dense
        norms = 1 + self.dense  # MoE layers have theirs among the experts
        optional = np.where(self.has_qkv_bias, 2 * e * n * qkv, 0.0)
        optional = optional + self.normed * e * n * (2 * (self.query + self.key) + 2 * qkv)
        optional_backward = np.where(self.has_qkv_bias, e * n * qkv, 0.0)
        optional_backward = optional_backward + self.normed * e * n * (3 * (self.query + self.key) + 2 * qkv)
        scaled = self.scaled * 2 * e * n * self.query
        packed, packed_backward = self._packing()
        optional, optional_backward = optional + scaled + packed, optional_backward + scaled + packed_backward
        forward = (3 + 2) * norms * residual + 3 * inner + self._rotation() + optional
        # Under delayed scaling the norm writes FP8, by rows or also transposed.
        is_delayed = self.is_fp8 & ~self.is_tensorwise
        saved = np.where(self.sequence_parallel, -1.0, 2.0) * norms * n * self.residual
        forward = forward + np.where(is_delayed, saved, 0.0)
        copies = np.where(self.cp > 1, 0.0, 2 * e * n * qkv)
        backward = (3 + 3) * norms * residual + 5 * inner + self._rotation() + copies + optional_backward
        return forward, backward

    def _packing(self) -> tuple[Array, Array]:
        """Bytes of copies of several sequences into one, and back, for attention inside chunks."""
        copied = np.where((self.micro_batch_size > 1) & ((self.cp == 1) | self.exchange["a2a"]), self.chunked, 0.0)
        unit = 2 * self.element * self.tokens * copied
        qkv = self.query + 2 * self.key
        return unit * (qkv + self.query), unit * (qkv + 2 * self.query)

    def _casts(self) -> tuple[Array, Array, Array, Array]:
        """Bytes of casts to FP8 forward and backward, and of the maxima that tensorwise scaling reads before. A cast
        reads 2 bytes, and writes rows, the transpose, or both. Under delayed scaling norms and SwiGLU cast."""
        n, r, f, d = self.tokens, self.residual, self.ffn * self.dense, self.dense
        qkv = self.query + 2 * self.key
        inputs = (1 + d) * n * r  # of the column-parallel layers
        cast_inputs = np.where(self.sequence_parallel, 3.0, 4.0) * inputs
        forward = 4 * n * self.query + np.where(self.is_tensorwise, cast_inputs + 4 * n * f, 0.0)
        # Gathered rows are transposed for the weight gradients.
        gathered = np.where(self.sequence_parallel, 2 * 2 * (1 + d) * n * self.hidden, 0.0)
        backward = cast_inputs + gathered + 4 * n * (qkv + 2 * f)
        maxima = 2 * (inputs + n * self.query + n * f)
        maxima_backward = 2 * (inputs + n * (qkv + 2 * f))
        read = self.is_fp8 & self.is_tensorwise
        return (
            np.where(self.is_fp8, forward, 0.0),
            np.where(self.is_fp8, backward, 0.0),
            np.where(read, maxima, 0.0),
            np.where(read, maxima_backward, 0.0),
        )

    # Tensor parallelism.

    def _tensor_parallel(self, c: Constants) -> tuple[Array, Array]:
        """Forward and backward: an all-gather before and a reduce-scatter after each of attention and MLP, or an
        all-reduce. The second gather of the inputs, for the weight gradients, hides behind a product. Gathers in FP8
        move half."""
        unit = self._ring(c, self.element * self.tokens * self.hidden, self.tp, self.tp_in_node)
        gather = np.where(self.sequence_parallel & self.is_fp8, 0.5, 1.0) * unit
        shared = np.where(self.experts.shared_ffn > 0, self.experts.share, 0.0)
        count = 1 + self.dense + shared
        exposed = np.where(self.overlaps_tensor_parallel, c["exposed_tensor_parallel"], 1.0)
        seconds = count * (gather + unit) * exposed
        return seconds, seconds

    # Context parallelism.

    def _ring_size(self) -> Array:
        """Ranks of the ring or of the gather: all, or under a2a+p2p those that are not exchanged."""
        return np.where(self.exchange["a2a"], 1.0, self.cp / np.where(self.exchange["a2a+p2p"], self.cp_heads, 1.0))

    def _cp_accesses(self) -> tuple[Array, Array]:
        """Bytes that the last of the context-parallel ranks moves on top: stacking keys and values, merging tiles and
        adding up gradients in fp32, exchanging positions for heads."""
        n, e, q, k = self.tokens, self.element, self.query, self.key
        qkv, lse = q + 2 * k, 70 * n * self.heads / self.tp
        ranks = self._ring_size()
        later = ranks - 1
        fp32 = 4.0
        last = (e + fp32) * q + 2 * e * q  # the result in the dtype of the queries, and its copy in order of tokens
        merge = (2 * fp32 + 2 * fp32 + e) * n * q + lse
        ring = 2 * e * 2 * k * n + (e + fp32) * n * q + later * merge + n * last
        adds = (2 * fp32 + e) * n * (q + 2 * k)
        later_adds = (2 * fp32 + e) * n * (q + k)
        copies = (e + fp32) * n * qkv
        zeros = 2 * fp32 * n * k
        ring_backward = fp32 * n * q + 4 * e * n * k + ranks * zeros + adds + copies
        ring_backward = ring_backward + later * (later_adds + 3 * 2 * fp32 * n * k)
        gather = 2 * 4 * e * n * k + 4 * e * ranks * n * k + (e + fp32) * n * q + merge + n * last
        whole = (4 * e + 2 * fp32 + 4 * fp32) * ranks * n * k  # gathered, summed and sorted by rank
        gather_backward = fp32 * n * q + 8 * e * n * k + zeros + adds + whole + copies + 3 * 2 * fp32 * n * k
        gather_backward = gather_backward + (2 * fp32 + e) * n * (q + (2 * ranks - 1) * k)
        heads = 4 * e * n * qkv + 8 * e * n * q
        heads_backward = 4 * e * n * q + (6 + 2) * e * n * qkv
        forward = np.where(self.exchange["p2p"] | self.exchange["a2a+p2p"], ring, 0.0)
        forward = forward + np.where(self.exchange["allgather"], gather, 0.0)
        forward = forward + np.where(self.exchange["a2a"] | self.exchange["a2a+p2p"], heads, 0.0)
        backward = np.where(self.exchange["p2p"] | self.exchange["a2a+p2p"], ring_backward, 0.0)
        backward = backward + np.where(self.exchange["allgather"], gather_backward, 0.0)
        backward = backward + np.where(self.exchange["a2a"] | self.exchange["a2a+p2p"], heads_backward, 0.0)
        return np.where(self.cp > 1, forward, 0.0), np.where(self.cp > 1, backward, 0.0)

    def _context_parallel(self, c: Constants) -> tuple[Array, Array]:
        """Exposed seconds forward and backward. A ring hides behind attention; its gradients are in fp32."""
        n, e, key_value = self.tokens, self.element, 2 * self.key
        is_ring = self.exchange["p2p"] | self.exchange["a2a+p2p"]
        ranks = self._ring_size()
        rate = ring_rate(self.machines, c, 1.0, self.cp_in_node >= self.cp)
        keys = e * n * key_value * (ranks - 1) / rate
        gradients = 4 * n * key_value * ranks / rate
        gathered = self._ring(c, e * n * key_value * self.cp, self.cp, self.cp_in_node)
        summed = self._ring(c, 4 * n * key_value * self.cp, self.cp, self.cp_in_node)
        heads = np.where(self.exchange["a2a+p2p"], self.cp_heads, self.cp)
        link, network = c["link"] * self.machines.link, c["network"] * self.machines.network
        sent = e * n * (2 * self.query + key_value) * (heads - 1) / heads
        in_node = np.minimum(heads, self.cp_in_node)
        to_heads = exchange_seconds(sent, heads, in_node, link, network)
        forward = np.where(is_ring, EXPOSED_RING * keys, 0.0) + np.where(
            self.exchange["allgather"], EXPOSED_RING * gathered, 0.0
        )
        backward = np.where(is_ring, EXPOSED_RING * (keys + gradients), 0.0) + np.where(
            self.exchange["allgather"], EXPOSED_RING * gathered + summed, 0.0
        )
        uses_heads = self.exchange["a2a"] | self.exchange["a2a+p2p"]
        both = np.where(uses_heads, to_heads, 0.0)
        is_parallel = self.cp > 1
        return np.where(is_parallel, forward + both, 0.0), np.where(is_parallel, backward + both, 0.0)

    # Recompute.

    def recomputed(self, c: Constants, forward: Pass) -> tuple[Array, Array]:
        """What runs again of every layer, and of layers that are recomputed completely; the last product and its
        reduction have no reader."""
        n, e = self.tokens, self.element
        norm = elementwise_seconds(self.machines, c, 2 * e * n * self.residual)
        activation = elementwise_seconds(self.machines, c, 3 * e * n * self.ffn) * self.dense
        unit = self._ring(c, e * n * self.hidden, self.tp, self.tp_in_node)
        gather = np.where(self.sequence_parallel, unit, 0.0)
        up = self.dense * (self._product(c, n, 2 * self.ffn, self.hidden) + gather + norm) + activation
        exchanged, _ = self._cp_accesses()
        attention = forward["attention"] + forward["context parallelism"]
        attention = attention + elementwise_seconds(self.machines, c, exchanged)
        recomputes = self.recomputes
        each = np.where(recomputes["attention"], attention, 0.0) + np.where(recomputes["norms"], norm, 0.0)
        each = each + np.where(recomputes["norms"] & ~recomputes["mlp"], self.dense * norm, 0.0)
        each = each + np.where(recomputes["mlp"], up, np.where(recomputes["activation"], activation, 0.0))
        down = self.dense * self._product(c, n, self.hidden, self.ffn) + self.dense * np.where(self.tp > 1, unit, 0.0)
        down = down + elementwise_seconds(self.machines, c, e * n * self.residual)
        whole = sum(seconds for name, seconds in forward.items() if name != "gaps") - down / self.recomputed_unit
        return np.asarray(each), np.asarray(whole)

    # The ends of the model.

    def head(self, c: Constants) -> tuple[Array, Array]:
        """Final norm, output layer and loss, forward and backward with the weight gradient; in bf16."""
        n, e, v, h = self.tokens, self.element, self.vocab, self.hidden
        unit = self._ring(c, e * n * h, self.tp, self.tp_in_node)
        logits = self._product(c, n, v, h, in_bf16=True)
        forward = elementwise_seconds(self.machines, c, e * n * (2 * self.residual + v))
        forward = forward + logits + np.where(self.sequence_parallel, unit, 0.0)
        backward = elementwise_seconds(self.machines, c, e * n * (3 * self.residual + 2 * v) + self.added_shard * v * h)
        backward = backward + self._product(c, n, h, v, in_bf16=True) + self._weight_gradient(c, h, v, in_bf16=True)
        backward = backward + np.where(self.sequence_parallel, 1.0, 2.0) * unit
        backward = backward + np.where(self.chunks_loss, logits, 0.0)
        return forward, backward

    def embedding(self, c: Constants) -> tuple[Pass, Pass]:
        """A lookup, and the addition of rows to the main gradient; each rank masks the ids of the others."""
        n, e, h = self.tokens, self.element, self.hidden
        is_parallel = self.tp > 1
        unit = self._ring(c, e * n * h, self.tp, self.tp_in_node)
        mask = np.where(is_parallel, 2 * e * n * h, 0.0)
        wide = self.gradient_bytes
        cast = np.where(wide > e, (e + wide) * n * h, 0.0)
        forward = elementwise_seconds(self.machines, c, 2 * e * n * h + mask)
        table = self.vocab * h * (self.added_shard + np.where(self.writes_gradients, wide, 0.0))
        backward = elementwise_seconds(self.machines, c, mask + cast + 3 * wide * n * h + table)
        return (
            {"between products": forward, "tensor parallelism": np.where(self.sequence_parallel, 1.0, 2.0) * unit},
            {"between products": backward, "tensor parallelism": np.where(self.sequence_parallel, unit, 0.0)},
        )
