"""Whose steps are measured: this codebase's, Hugging Face's, and the bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rank_slice import SliceConfig
from benchmarks.step_bound import BareAttention, BareProducts, linear_shapes
from megatron.core.models.transformer import TransformerModel
from megatron.core.ops.attention_kernels import TorchAttention
from megatron.core.ops.matmul import linear
from megatron.core.optimizer.hyperparameters import Hyperparameters
from megatron.core.optimizer.optimizer import Optimizer
from megatron.errors import ConfigError

_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """A step in phases, by name and in their order."""

    name: str
    phases: dict[str, Callable[[], None]]
    held_bytes: Callable[[], int] | None = None
    """What it keeps between steps: weights, and where they stay, gradients and the optimizer's state."""

    def step(self) -> None:
        """All phases."""
        for phase in self.phases.values():
            phase()


@dataclass(frozen=True)
class Samples:
    """What goes through a slice: ids where it has the head, else activations, with the gradient of what comes out."""

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
        """The same for all contenders."""
        batch, length = config.micro_batch_size, config.seq_length
        # Ids that every tensor-parallel rank's part of the vocabulary has.
        ids = max(1, config.vocab_size // config.tensor_model_parallel_size)
        text = torch.randint(0, ids, (batch, length + 1), device=device)
        shape = (length, batch, config.architecture.hidden_size)
        inputs, grad = (torch.randn(shape, dtype=config.dtype, device=device) for _ in range(2))
        return Samples(text[:, :-1].contiguous(), text[:, 1:].contiguous(), inputs, grad)


class Passes:
    """Forward and backward; what the first keeps, ``output`` included, the second lets go."""

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
        """Gradients of inputs, if they can have one, and of weights."""
        assert self.output is not None
        output, self.output = self.output, None
        output.backward(self._grad)


def our_slice(config: SliceConfig, samples: Samples, device: torch.device, with_optimizer: bool) -> Contender:
    """The slice as a training run has it."""
    run, topology = config.run_config(), config.topology(device)
    kernels = config.choose_kernels(topology)
    model = config.build(topology, kernels)
    data_parallel = config.data_parallel(topology, model)
    passes = our_passes(config, samples, model)
    memory = data_parallel.memory()

    def forward() -> None:
        data_parallel.start_grad_accumulation(1)
        passes.forward()

    def backward() -> None:
        passes.backward()
        data_parallel.finish_grad_sync()

    phases = {"forward": forward, "backward": backward}
    if with_optimizer:
        optimizer = Optimizer(run.optimizer, data_parallel, topology, kernels.optimizer)
        memory |= optimizer.memory()

        def update() -> None:
            optimizer.step(Hyperparameters(_LEARNING_RATE), 1.0)

        phases["optimizer"] = update
    return Contender("megatron-llama", phases, lambda: sum(memory.values()))


def our_passes(config: SliceConfig, samples: Samples, model: TransformerModel) -> Passes:
    """Through the rank's only chunk, to the mean loss where it has the head."""
    chunk, head = model.chunks[0], model.head
    if head is not None:

        def mean_loss(tokens: Tensor) -> Tensor:
            return head.token_losses(chunk(tokens), samples.labels).sum() / config.tokens

        return Passes(mean_loss, samples.tokens)
    parallel = model.context.parallel
    parts = parallel.size if parallel.sequence_parallel else 1
    inputs, grad = (tensor.chunk(parts)[0].clone() for tensor in (samples.inputs, samples.grad))
    return Passes(chunk, inputs, grad)


def bound(config: SliceConfig, device: torch.device, is_ours: bool) -> Contender:
    """The slice's matrix products and attention alone, by torch's own functions or by the operators of our layers."""
    model, size = config.architecture, config.tensor_model_parallel_size
    shapes = linear_shapes(model, size, config.with_head)
    kernel = config.choose_kernels(config.topology(device)).attention if is_ours else TorchAttention()
    products = BareProducts(shapes, config.tokens, config.dtype, device, linear if is_ours else F.linear)
    attention = BareAttention(
        model, config.micro_batch_size, config.seq_length, config.dtype, device, size, kernel=kernel
    )

    def forward() -> None:
        products.forward()
        attention.forward()

    def backward() -> None:
        attention.backward()
        products.backward()

    return Contender(f"bound, {'our' if is_ours else 'torch'} kernels", {"forward": forward, "backward": backward})


def transformers_slice(
    config: SliceConfig, samples: Samples, device: torch.device, with_optimizer: bool, is_compiled: bool = False
) -> Contender:
    """Hugging Face's Llama of the slice's shape, eager or compiled, with torch's AdamW in the model's format."""
    model = _transformers_model(config).to(device, config.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01, fused=True)
    passes = _transformers_passes(config, samples, model, is_compiled)

    def backward() -> None:
        passes.backward()
        if not with_optimizer:
            optimizer.zero_grad()

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    phases = {"forward": passes.forward, "backward": backward}
    if with_optimizer:
        phases["optimizer"] = update

    def held_bytes() -> int:
        moments = (state for states in optimizer.state.values() for state in states.values())
        return sum(tensor.nbytes for tensor in (*model.parameters(), *moments))

    return Contender(f"transformers {'compiled' if is_compiled else 'eager'}", phases, held_bytes)


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


def _transformers_passes(config: SliceConfig, samples: Samples, model: Any, is_compiled: bool) -> Passes:
    run: Any = torch.compile(model) if is_compiled else model
    if config.with_head:

        def mean_loss(tokens: Tensor) -> Tensor:
            logits: Tensor = run(input_ids=tokens).logits
            # Widened as transformers' own loss does.
            return F.cross_entropy(logits.flatten(0, 1).float(), samples.labels.flatten())

        return Passes(mean_loss, samples.tokens)

    def through_layers(inputs: Tensor) -> Tensor:
        hidden: Tensor = run(inputs_embeds=inputs).last_hidden_state
        return hidden

    inputs, grad = (tensor.transpose(0, 1).contiguous() for tensor in (samples.inputs, samples.grad))
    return Passes(through_layers, inputs, grad)
