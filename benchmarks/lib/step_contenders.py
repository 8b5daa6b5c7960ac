"""Whose steps are measured: this codebase's, Hugging Face's, and the bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.rank_slice import SliceConfig
from benchmarks.lib.step_bound import BareAttention, BareFp8Products, BareProducts, linear_shapes
from megatron.core.hyperparameters import Hyperparameters
from megatron.core.kernels.selection import Kernels
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention_kernels import TorchAttention
from megatron.core.ops.matmul import linear
from megatron.core.optimizer import Optimizer
from megatron.errors import ConfigError

_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Action:
    """A part of a step, whose time counts for ``phase``."""

    phase: str
    run: Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """A step: the actions of all its microbatches, in order."""

    name: str
    actions: Sequence[Action]
    held_bytes: Callable[[], int] | None = None
    """Bytes that stay between steps: weights, gradients if they stay, optimizer state."""
    moved_by_stand_ins: Callable[[], int] = lambda: 0
    """Bytes that the stand-ins for collectives have read and written since the last call."""

    @property
    def phases(self) -> list[str]:
        """Names of the phases in their order."""
        return list(dict.fromkeys(action.phase for action in self.actions))

    def step(self) -> None:
        """All actions."""
        for action in self.actions:
            action.run()


def actions_of(
    microbatches: int,
    passes: "Passes",
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> list[Action]:
    """``before`` (forward), forward and backward pass of every microbatch, ``after`` (backward)."""
    first = [] if before is None else [Action("forward", before)]
    last = [] if after is None else [Action("backward", after)]
    return [*first, *[Action("forward", passes.forward), Action("backward", passes.backward)] * microbatches, *last]


@dataclass(frozen=True)
class Samples:
    """The inputs of a slice: ids if it has the embedding, otherwise activations; and the gradient of its output."""

    tokens: Tensor
    """``[b, s]``."""
    labels: Tensor
    """``[b, s]``."""
    inputs: Tensor
    """``[s, b, h]``."""
    grad: Tensor
    """``[s, b, h]``."""

    @staticmethod
    def random(config: SliceConfig, device: torch.device) -> "Samples":
        """Random samples, equal for all contenders."""
        batch, length = config.micro_batch_size, config.seq_length
        # Ids that every tensor-parallel rank's part of the vocabulary has.
        ids = max(1, config.vocab_size // config.tensor_model_parallel_size)
        text = torch.randint(0, ids, (batch, length + 1), device=device)
        shape = (length, batch, config.architecture.hidden_size)
        inputs, grad = (torch.randn(shape, dtype=config.dtype, device=device) for _ in range(2))
        return Samples(text[:, :-1].contiguous(), text[:, 1:].contiguous(), inputs, grad)


class Passes(Protocol):
    """The passes of a microbatch."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


class ModelPasses:
    """Forward and backward pass through a model; the backward pass frees ``output`` and what autograd saved."""

    def __init__(self, forward: Callable[[Tensor], Tensor], inputs: Tensor, grad: Tensor | None = None) -> None:
        self._forward, self._inputs, self._grad = forward, inputs, grad
        if inputs.is_floating_point():
            inputs.requires_grad_()
        self.output: Tensor | None = None

    def forward(self) -> None:
        """From the inputs to the output."""
        self._inputs.grad = None
        self.output = self._forward(self._inputs)

    def backward(self) -> None:
        """Gradients of weights, and of the inputs unless these are token ids."""
        assert self.output is not None
        output, self.output = self.output, None
        output.backward(self._grad)


def our_slice(
    config: SliceConfig,
    samples: Samples,
    device: torch.device,
    with_optimizer: bool,
    kernels: Kernels,
    name: str = "megatron-llama",
) -> Contender:
    """The slice as :func:`megatron.training.loop.step.train_step` runs it, with the ``kernels`` of ``config``."""
    run, topology = config.run_config(), config.topology(device)
    model = config.build(topology, kernels)
    data_parallel = config.data_parallel(topology, model)
    memory, fp8 = data_parallel.memory(), model.context.fp8

    def start_step() -> None:
        if fp8 is not None:
            fp8.start_step()
        data_parallel.start_grad_accumulation(config.microbatches)

    def finish_step() -> None:
        data_parallel.finish_grad_sync()
        if fp8 is not None:
            fp8.finish_step()

    actions = actions_of(config.microbatches, our_passes(config, samples, model), start_step, finish_step)
    if with_optimizer:
        optimizer = Optimizer(run.optimizer, data_parallel, topology, kernels.optimizer)
        memory |= optimizer.memory()
        actions.append(Action("optimizer", lambda: _update(optimizer)))
    return Contender(name, actions, lambda: sum(memory.values()), topology.take_moved_bytes)


def _update(optimizer: Optimizer) -> None:
    optimizer.step(Hyperparameters(_LEARNING_RATE), 1.0)


def our_passes(config: SliceConfig, samples: Samples, model: TransformerModel) -> ModelPasses:
    """Through the rank's only chunk, with the head to the mean loss. Every microbatch has other documents."""
    chunk, head = model.chunks[0], model.output_layer
    documents = config.random_documents(model.context.device)
    if head is not None:

        def mean_loss(tokens: Tensor) -> Tensor:
            return head.token_losses(chunk(tokens, next(documents)), samples.labels).sum() / config.tokens

        return ModelPasses(mean_loss, samples.tokens)
    parallel = model.context.parallel
    parts = parallel.size if parallel.sequence_parallel else 1
    inputs, grad = (tensor.chunk(parts)[0].clone() for tensor in (samples.inputs, samples.grad))
    return ModelPasses(lambda hidden: chunk(hidden, next(documents)), inputs, grad)


class BarePasses:
    """GEMMs and attention alone."""

    def __init__(self, products: BareProducts | BareFp8Products, attention: BareAttention) -> None:
        self._products, self._attention = products, attention

    def forward(self) -> None:
        self._products.forward()
        self._attention.forward()

    def backward(self) -> None:
        self._attention.backward()
        self._products.backward()


def bound(
    config: SliceConfig, device: torch.device, kind: Literal["our", "torch", "FP8"], kernels: Kernels
) -> Contender:
    """The slice's GEMMs and attention over whole sequences alone: by torch's functions, by the operators of our layers,
    or by these with FP8 GEMMs of operands that are quantised already (without the head's). ``kernels`` are those for
    whole sequences."""
    model, size = config.architecture, config.tensor_model_parallel_size
    attention = BareAttention(
        model,
        config.micro_batch_size,
        config.seq_length,
        config.dtype,
        device,
        size,
        kernel=TorchAttention() if kind == "torch" else kernels.attention,
    )
    layers = linear_shapes(model, size, config.with_head)
    products: BareProducts | BareFp8Products
    if kind == "FP8":
        has_blocks = config.precision.fp8_recipe == "blockwise"
        products = BareFp8Products(
            linear_shapes(model, size, False), config.tokens, kernels.fp8.gemm, config.dtype, device, has_blocks
        )
    else:
        products = BareProducts(layers, config.tokens, config.dtype, device, F.linear if kind == "torch" else linear)
    return Contender(f"bound, {kind} kernels", actions_of(config.microbatches, BarePasses(products, attention)))


def transformers_slice(
    config: SliceConfig, samples: Samples, device: torch.device, with_optimizer: bool, is_compiled: bool = False
) -> Contender:
    """Hugging Face's Llama of the slice's shape, eager or compiled, with torch's AdamW in the model's format."""
    # Built on the device: on the host, initial weights of 8B's layers take 10 seconds.
    with device:
        model = _transformers_model(config).to(config.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01, fused=True)
    passes = _transformers_passes(config, samples, model, is_compiled)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    after = None if with_optimizer else optimizer.zero_grad
    actions = actions_of(config.microbatches, passes, after=after)
    if with_optimizer:
        actions.append(Action("optimizer", update))

    def held_bytes() -> int:
        moments = (state for states in optimizer.state.values() for state in states.values())
        return sum(tensor.nbytes for tensor in (*model.parameters(), *moments))

    return Contender(f"transformers {'compiled' if is_compiled else 'eager'}", actions, held_bytes)


def _transformers_model(config: SliceConfig) -> Any:
    """Heads, MLP and vocabulary divided by the tensor-parallel size; without the head, layers alone."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "--compare transformers needs the package transformers, which is not installed: pip install transformers."
        ) from error
    model, size = config.architecture, config.tensor_model_parallel_size
    whole = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=model.padded_vocab_size // size if config.with_head else 1,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size // size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads // size,
            num_key_value_heads=model.num_query_groups // size,
            head_dim=model.kv_channels,
            max_position_embeddings=config.seq_length,
            tie_word_embeddings=not model.untie_embeddings_and_output_weights,
            attn_implementation="sdpa",
            use_cache=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if config.with_head:
        return whole
    whole.model.norm, whole.model.embed_tokens = nn.Identity(), None
    return whole.model


def _transformers_passes(config: SliceConfig, samples: Samples, model: Any, is_compiled: bool) -> ModelPasses:
    run: Any = torch.compile(model) if is_compiled else model
    if config.with_head:

        def mean_loss(tokens: Tensor) -> Tensor:
            logits: Tensor = run(input_ids=tokens).logits
            # Widened as transformers' own loss does.
            return F.cross_entropy(logits.flatten(0, 1).float(), samples.labels.flatten())

        return ModelPasses(mean_loss, samples.tokens)

    def through_layers(inputs: Tensor) -> Tensor:
        hidden: Tensor = run(inputs_embeds=inputs).last_hidden_state
        return hidden

    inputs, grad = (tensor.transpose(0, 1).contiguous() for tensor in (samples.inputs, samples.grad))
    return ModelPasses(through_layers, inputs, grad)
