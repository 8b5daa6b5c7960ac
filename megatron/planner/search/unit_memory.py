"""The units of a chunk on a rank, embedding, layers and output layer: their weights and the memory of their passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.context_parallel import CONTEXT_PARALLEL_TYPES
from megatron.config.run import RunConfig
from megatron.planner.layer_kinds import LayerKind
from megatron.planner.search.attention_memory import (
    AttentionMemory,
    AttentionSizes,
    WholeAttention,
    build_attention_memory,
)
from megatron.planner.search.layer_memory import AttentionPart, DensePart, Layer, LayerSizes, UnitMemory, recomputed
from megatron.planner.search.ledger import Ledger, block
from megatron.planner.search.moe_memory import MoEPart, MoESizes
from megatron.planner.search.state_memory import Formats, Weight

_WIDE = 4
_INDEX = 8


@dataclass(frozen=True)
class UnitRules:
    """Weights and memory of the units of a run: ``config`` has the layout, ``splits_backward`` its schedule."""

    model: TransformerConfig
    """Resolved for the tensor-parallel size of ``config``."""
    config: RunConfig
    formats: Formats
    splits_backward: bool

    @property
    def _tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @cached_property
    def tokens(self) -> int:
        """Of a microbatch on a context-parallel rank."""
        return self.config.micro_batch_size * self.config.seq_length // self.config.parallel.context_parallel_size

    @cached_property
    def _own_tokens(self) -> int:
        return self.tokens // self._tp if self.config.parallel.sequence_parallel else self.tokens

    @cached_property
    def shard(self) -> int:
        """Bytes of a tensor of the residual stream."""
        return block(self._own_tokens * self.model.hidden_size * self.formats.weight)

    @cached_property
    def _whole(self) -> int:
        return block(self.tokens * self.model.hidden_size * self.formats.weight)

    @property
    def position_tables(self) -> int:
        """Bytes of the rotations, complex numbers, and of the scales of queries."""
        length = self.config.seq_length // self.config.parallel.context_parallel_size
        scales = block(length * _WIDE) if self.model.attention_temperature_tuning else 0
        return block(length * self.model.kv_channels // 2 * 2 * _WIDE) + scales

    # Memory

    def layers(self, kinds: Sequence[LayerKind], is_recomputed: bool) -> UnitMemory:
        """Of one layer, or of layers that are recomputed together."""
        built = [self._layer(one) for one in kinds]
        if is_recomputed:
            return recomputed(built)
        found = built[0].memory()
        return found if self.config.precision.fp8_format is None else self._in_fp8(found)

    def _in_fp8(self, layer: UnitMemory) -> UnitMemory:
        kept = layer.kept - self._saved_by_fp8
        sizes = self._sizes(self.model.ffn_hidden_size)
        # The weight gradient of gate and up, in fp32, reads their gradient in FP8, by rows and by columns, and all rows
        # of the input; the gradient in bf16 and the gradient of the input are there, too.
        product = 2 * self.model.ffn_hidden_size // self._tp * self.model.hidden_size * _WIDE
        activation = sizes.activated // 2
        moment = kept - activation + 2 * sizes.activated + product + self._whole + 2 * self.shard
        return replace(layer, kept=kept, backward=max(layer.backward - self._saved_by_fp8, moment))

    @property
    def _saved_by_fp8(self) -> int:
        """What a layer keeps less because it keeps the inputs of its linear layers in FP8: those that are norms and
        SwiGLU instead of bf16, and attention's output as well."""
        modules, activated = self.config.activations.modules, self._sizes(self.model.ffn_hidden_size).activated
        norms = 0 if "layernorm" in modules else self.shard
        activation = 0 if {"mlp", "mlp_act"} & modules else activated // 2
        return norms + activation - (0 if "core_attn" in modules else self._attention.output // 2)

    def fp8_copies(self, num_layers: int) -> int:
        """Bytes of the FP8 weights of layers, by rows and by columns, which last between the passes."""
        precision = self.config.precision
        if precision.fp8_format is None or self.config.parallel.sharding_strategy == "optim_grads_params":
            return 0
        return 2 * num_layers * sum(weight.size for weight in self.layer_weights(False) if weight.width > 1)

    def embedding(self) -> UnitMemory:
        tokens, shard, whole = self.tokens, self.shard, self._whole
        kept = block(tokens * _INDEX) + block(tokens)
        forward = kept + whole + (shard if whole > shard else 0)
        gathered = whole if whole > shard else 0
        ledger = Ledger(kept + shard)
        ledger.add(gathered)
        ledger.add(whole if self._tp > 1 else 0)
        ledger.drop(gathered if self._tp > 1 else 0)
        values = tokens * self.model.hidden_size * _WIDE
        if self.formats.gradient < _WIDE:
            # Sums by row in fp32, the values in order and in fp32; then the sums in the gradient's format.
            ledger.pulse(values, whole, values)
            ledger.pulse(values, tokens * self.model.hidden_size * self.formats.gradient)
        elif self.formats.weight < _WIDE:
            ledger.pulse(values)
        return UnitMemory(kept, forward, ledger.peak, end=shard)

    def output(self) -> UnitMemory:
        shard, whole = self.shard, self._whole
        gathered = whole if whole > shard else 0
        logits = block(self.tokens * (self.model.padded_vocab_size // self._tp) * self.formats.weight)
        statistics = block(self._own_tokens * _WIDE)
        # For each token: log-sum-exp, loss, mask and label.
        of_tokens = 3 * block(self.tokens * _WIDE) + block(self.tokens * _INDEX) + block(self.tokens)
        kept = 2 * shard + statistics + logits + of_tokens
        ledger = Ledger(shard + statistics)
        ledger.add(gathered, logits)
        ledger.drop(gathered)
        ledger.add(2 * of_tokens)
        forward = ledger.peak
        ledger = Ledger(kept)
        ledger.add(gathered, whole)
        if gathered:
            ledger.add(shard)
            ledger.drop(whole, gathered)
        ledger.drop(logits, shard)
        ledger.add(shard)
        return UnitMemory(kept, forward, ledger.peak, end=3 * shard)

    def _layer(self, kind: LayerKind) -> Layer:
        modules = self.config.activations.modules
        sizes = self._sizes(self.model.ffn_hidden_size, kind.has_rope)
        second = DensePart(sizes, modules, self.splits_backward)
        if not kind.is_moe:
            return Layer(AttentionPart(sizes, modules, self.splits_backward), second)
        with_experts = MoEPart(sizes, self._expert_sizes(), modules, self.splits_backward)
        return Layer(AttentionPart(sizes, modules, self.splits_backward), with_experts)

    def _sizes(self, width: int, has_rope: bool = True) -> LayerSizes:
        """Of a layer with an MLP of this ``width``."""
        model, tokens, itemsize = self.model, self.tokens, self.formats.weight
        heads = (model.num_attention_heads + model.num_query_groups) // self._tp
        has_norm = model.qk_layernorm or (model.qk_l2_norm and has_rope)
        return LayerSizes(
            shard=self.shard,
            whole=self._whole,
            statistics=block(self._own_tokens * _WIDE),
            fused=block(tokens * model.qkv_size // self._tp * itemsize),
            attention=self._attention if has_rope else self._attention_without_rope,
            activated=block(tokens * width // self._tp * itemsize),
            head_norm=block(tokens * heads * _WIDE) if has_norm else 0,
            query_and_key=block(tokens * heads * model.kv_channels * itemsize) if has_norm else 0,
        )

    @cached_property
    def _attention(self) -> AttentionMemory:
        """Of layers with rotary position embedding, inside chunks if the model has them."""
        chunk = self.model.attention_chunk_size
        return self._build_attention(chunk is not None and chunk < self.config.seq_length)

    @cached_property
    def _attention_without_rope(self) -> AttentionMemory:
        return self._build_attention(has_chunks=False)

    def _build_attention(self, has_chunks: bool) -> AttentionMemory:
        model, config, itemsize = self.model, self.config, self.formats.weight
        parallel = config.parallel
        sizes = AttentionSizes(
            output=block(self.tokens * model.query_size // self._tp * itemsize),
            pair=2 * block(self.tokens * model.key_value_size // self._tp * itemsize),
            log_sum_exp=block(self.tokens * model.num_attention_heads // self._tp * _WIDE),
            wide=_WIDE // itemsize or 1,
        )
        packs = (config.data.masks_documents or has_chunks) and config.micro_batch_size > 1
        repeats = itemsize >= _WIDE and model.num_query_groups < model.num_attention_heads
        whole = WholeAttention(sizes, packs, repeats)
        if parallel.context_parallel_size == 1:
            return whole
        # Of several types the first: the others keep as much, but for all-to-all.
        spec = CONTEXT_PARALLEL_TYPES[parallel.cp_comm_type[0]]
        ranks = spec.level_sizes(parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes)
        return build_attention_memory(list(zip(spec.levels, ranks)), whole)

    def _expert_sizes(self) -> MoESizes:
        model, parallel, itemsize = self.model, self.config.parallel, self.formats.weight
        assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
        choices = self._own_tokens * model.moe_router_topk
        rows = round(choices * etp * self.config.dry_run.dry_run_expert_load)
        shared = model.moe_shared_expert_intermediate_size
        return MoESizes(
            tokens=self._own_tokens,
            choices=choices,
            rows=rows,
            num_experts=model.num_experts,
            hidden=model.hidden_size * itemsize,
            width=model.moe_ffn_hidden_size // etp * itemsize,
            wide=_WIDE // itemsize or 1,
            is_summed=model.moe_router_topk > 1,
            weighs_input=model.moe_apply_probs_on_input,
            dispatcher=self.config.moe.moe_token_dispatcher_type if ep * etp > 1 else "local",
            etp=etp,
            ranks=ep * etp,
            sorts_again=model.num_experts // ep > 1 and ep * etp > 1,
            shared=None if shared is None else self._sizes(shared),
        )

    # Weights

    def embedding_weights(self, is_tied: bool) -> list[Weight]:
        return [Weight(self.model.padded_vocab_size // self._tp, self.model.hidden_size, is_tied=is_tied)]

    def output_weights(self, is_tied: bool, has_weight: bool) -> list[Weight]:
        """The final norm, and the output layer unless it is the embedding of the same rank."""
        return [Weight(self.model.hidden_size), *(self.embedding_weights(is_tied) if has_weight else ())]

    def layer_weights(self, is_moe: bool) -> list[Weight]:
        """In the order of the forward pass."""
        model, tp = self.model, self._tp
        hidden = model.hidden_size
        attention = [Weight(hidden), Weight(model.qkv_size // tp, hidden)]
        if model.add_qkv_bias:
            attention.append(Weight(model.qkv_size // tp))
        if model.qk_layernorm:
            attention += [Weight(model.kv_channels)] * 2
        attention.append(Weight(hidden, model.query_size // tp))
        if not is_moe:
            width = model.ffn_hidden_size // tp
            return [*attention, Weight(hidden), Weight(2 * width, hidden), Weight(hidden, width)]
        assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
        experts = model.num_experts // self.config.parallel.expert_model_parallel_size
        width = model.moe_ffn_hidden_size // self.config.parallel.expert_tensor_size
        weights = [
            *attention,
            Weight(hidden),
            Weight(model.num_experts, hidden),
            Weight(experts * 2 * width, hidden, is_expert=True),
            Weight(experts * hidden, width, is_expert=True),
        ]
        if model.moe_shared_expert_intermediate_size is not None:
            width = model.moe_shared_expert_intermediate_size // tp
            weights += [Weight(2 * width, hidden), Weight(hidden, width)]
        return weights
