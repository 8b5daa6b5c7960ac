"""Flags for the architecture, and the concrete architecture they resolve to."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_positive

ModelName = Literal[
    "tiny",
    "llama2-7b",
    "llama2-13b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.1-405b",
    "llama3.2-1b",
    "llama3.2-3b",
]


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama architecture with every size settled; what the core builds from."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    """Vocabulary with ids that no token has, so that tensor-parallel ranks divide it; no result depends on it."""
    max_position_embeddings: int
    rotary_base: float = 500000.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_scaling_original_length: int = 8192
    norm_epsilon: float = 1e-5
    untie_embeddings_and_output_weights: bool = True
    init_method_std: float = 0.02

    @property
    def query_size(self) -> int:
        """Total width of the queries, ``heads * head size``."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Total width of the keys (and of the values)."""
        return self.num_query_groups * self.kv_channels

    def num_parameters(self) -> int:
        """Parameters of the whole model, without the vocabulary's padding."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_value_size)
        layer = attention + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        tables = 2 if self.untie_embeddings_and_output_weights else 1
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: a preset, single sizes, or a preset with some sizes changed."""

    model: ModelName | None = None
    """Preset that sets the flags of this group; explicit flags override it."""
    num_layers: int | None = None
    """Transformer layers (required without --model)."""
    hidden_size: int | None = None
    """Model width (required without --model)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP (default: 8/3 of the hidden size, rounded down to a multiple of 64)."""
    num_attention_heads: int | None = None
    """Query heads (required without --model)."""
    group_query_attention: bool = True
    """Accepted for Megatron-LM recipes, where it turns --num-query-groups on; here that flag alone decides. The
    negative form insists on one key-value head for each query head."""
    num_query_groups: int | None = None
    """Key-value heads (default: one for each query head)."""
    kv_channels: int | None = None
    """Size of a head (default: hidden size / query heads)."""
    max_position_embeddings: int | None = None
    """Longest sequence the model is meant for; at least --seq-length (default: --seq-length)."""
    rotary_base: float = 500000.0
    """Base of the rotary position embedding (Llama 2: 10000)."""
    use_rope_scaling: bool = False
    """Llama 3.1's scaling of the rotary frequencies."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling (Llama 3.1: 8, Llama 3.2: 32)."""
    rope_scaling_original_length: int = 8192
    """Longest sequence before --use-rope-scaling; positions that turn slower than this are stretched."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    untie_embeddings_and_output_weights: bool = True
    """Separate weights for the output head; the negative form shares the embedding's, as the small
    Llama 3.2 models do."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times --tensor-model-parallel-size."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * layers) for the projections back into the
    residual stream."""

    position_embedding_type: Literal["rope"] = "rope"
    """States what Llama is."""
    use_rotary_position_embeddings: bool = True
    """States what Llama is; the older spelling."""
    position_embedding: bool = False
    """--no-position-embedding states what Llama is: positions are not learned."""
    rotary_percent: float = 1.0
    """States what Llama is: the whole head is rotated."""
    normalization: Literal["RMSNorm"] = "RMSNorm"
    """States what Llama is."""
    swiglu: bool = True
    """States what Llama is."""
    disable_bias_linear: bool = True
    """States what Llama is: no linear layer has a bias."""
    hidden_dropout: float = 0.0
    """States what Llama is."""
    attention_dropout: float = 0.0
    """States what Llama is."""
    use_flash_attn: bool = True
    """States what is so: --attention-backend chooses the kernel, by default one that never holds all scores."""
    use_mcore_models: bool = True
    """States what is so: there is one model implementation."""
    cross_entropy_loss_fusion: bool = True
    """States what is so: the loss never makes fp32 logits of a whole microbatch, and writes its gradient over the
    logits."""
    attention_softmax_in_fp32: bool = True
    """States what is so: every attention kernel computes its softmax in fp32 (in fp64 under --fp64)."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Attention kernel: auto takes the fastest there (docs/kernels.md), flash a FlashAttention, fused cuDNN's, unfused
    and local the plain reference."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Who computes the linear layers of the transformer layers and the norms before them: this code, or Transformer
    Engine's modules, which need that package and a GPU. Checkpoints are the same; see docs/precision.md."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that a Llama cannot honour."""
        for flag, value, required in (
            ("--swiglu", self.swiglu, True),
            ("--disable-bias-linear", self.disable_bias_linear, True),
            ("--hidden-dropout", self.hidden_dropout, 0.0),
            ("--attention-dropout", self.attention_dropout, 0.0),
            ("--rotary-percent", self.rotary_percent, 1.0),
        ):
            if value != required:
                spelling = f"--no-{flag[2:]}" if value is False else f"{flag} {value}"
                raise ConfigError(f"{spelling} is not a Llama, which has {flag} {required}: remove the flag.")
        for flag, is_so in (
            ("--position-embedding", not self.position_embedding),
            ("--no-use-rotary-position-embeddings", self.use_rotary_position_embeddings),
        ):
            if not is_so:
                raise ConfigError(f"{flag} is not a Llama, whose queries and keys are rotated instead: remove it.")
        self._check_implementation()
        require_at_least(
            1,
            {
                "--num-layers": self.num_layers,
                "--hidden-size": self.hidden_size,
                "--ffn-hidden-size": self.ffn_hidden_size,
                "--num-attention-heads": self.num_attention_heads,
                "--num-query-groups": self.num_query_groups,
                "--kv-channels": self.kv_channels,
                "--max-position-embeddings": self.max_position_embeddings,
                "--rope-scaling-original-length": self.rope_scaling_original_length,
                "--make-vocab-size-divisible-by": self.make_vocab_size_divisible_by,
            },
        )
        require_positive({"--rotary-base": self.rotary_base, "--rope-scaling-factor": self.rope_scaling_factor})
        require_at_least(0, {"--norm-epsilon": self.norm_epsilon, "--init-method-std": self.init_method_std})

    def _check_implementation(self) -> None:
        if not self.use_flash_attn:
            raise ConfigError("--no-use-flash-attn has no effect: choose the kernel with --attention-backend local.")
        if not self.cross_entropy_loss_fusion:
            raise ConfigError("--no-cross-entropy-loss-fusion asks for a second loss: remove it, there is one.")
        if not self.attention_softmax_in_fp32:
            raise ConfigError("--no-attention-softmax-in-fp32 asks for what no kernel does: remove it.")
        if not self.use_mcore_models:
            raise ConfigError("--no-use-mcore-models asks for a second model implementation: remove it, there is one.")

    def resolve(self, vocab_size: int, tensor_parallel_size: int, seq_length: int) -> LlamaConfig:
        """The concrete architecture for a tokenizer of ``vocab_size`` ids.

        Raises :class:`ConfigError` where sizes are missing or do not divide.
        """
        layers = _required("--num-layers", self.num_layers)
        hidden = _required("--hidden-size", self.hidden_size)
        heads = _required("--num-attention-heads", self.num_attention_heads)
        if self.kv_channels is None and hidden % heads:
            raise ConfigError(
                f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: change one of them, or "
                "give the head size with --kv-channels."
            )
        if (self.kv_channels or hidden // heads) % 2:
            raise ConfigError(
                f"The head size {self.kv_channels or hidden // heads} is odd, but the rotary embedding turns pairs: "
                "change --kv-channels, or --hidden-size / --num-attention-heads."
            )
        groups = self._key_value_heads(heads)
        unit = self.make_vocab_size_divisible_by * tensor_parallel_size
        return LlamaConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=self.ffn_hidden_size or int(hidden * 8 / 3) // 64 * 64 or 64,
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=self.kv_channels or hidden // heads,
            vocab_size=vocab_size,
            padded_vocab_size=-(-vocab_size // unit) * unit,
            max_position_embeddings=self._positions(seq_length),
            rotary_base=self.rotary_base,
            use_rope_scaling=self.use_rope_scaling,
            rope_scaling_factor=self.rope_scaling_factor,
            rope_scaling_original_length=self.rope_scaling_original_length,
            norm_epsilon=self.norm_epsilon,
            untie_embeddings_and_output_weights=self.untie_embeddings_and_output_weights,
            init_method_std=self.init_method_std,
        )

    @classmethod
    def of(cls, architecture: LlamaConfig) -> "ModelConfig":
        """The flags that resolve to ``architecture`` (but for the vocabulary, which is the tokenizer's)."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in asdict(architecture).items() if name in known})

    def _key_value_heads(self, heads: int) -> int:
        groups = heads if self.num_query_groups is None else self.num_query_groups
        if not self.group_query_attention and groups != heads:
            raise ConfigError(
                f"--no-group-query-attention contradicts --num-query-groups {groups}: remove one of them."
            )
        if heads % groups:
            raise ConfigError(
                f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: change one of them."
            )
        return groups

    def _positions(self, seq_length: int) -> int:
        positions = self.max_position_embeddings or seq_length
        if positions < seq_length:
            raise ConfigError(
                f"--max-position-embeddings {positions} is below --seq-length {seq_length}: raise the first or "
                "lower the second."
            )
        return positions


def _required(flag: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{flag} is missing: give it, or choose a preset such as --model llama3-8b.")
    return value


def _llama3(layers: int, hidden: int, ffn: int, heads: int, groups: int = 8, **more: Any) -> dict[str, Any]:
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "max_position_embeddings": 8192,
        "make_vocab_size_divisible_by": 1,
    }
    return sizes | more


def _long(factor: float = 8.0) -> dict[str, Any]:
    return {"max_position_embeddings": 131072, "use_rope_scaling": True, "rope_scaling_factor": factor}


def _llama2(*sizes: int) -> dict[str, Any]:
    return _llama3(*sizes, rotary_base=10000.0, max_position_embeddings=4096)


# Sizes: Llama 2 (arXiv 2307.09288), The Llama 3 Herd of Models (arXiv 2407.21783, table 3), and the published
# configurations of Llama 3.2. `tiny` is ours, for tests and first runs.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama3(4, 128, 384, 8, 4, make_vocab_size_divisible_by=128),
    "llama2-7b": _llama2(32, 4096, 11008, 32, 32),
    "llama2-13b": _llama2(40, 5120, 13824, 40, 40),
    "llama2-70b": _llama2(80, 8192, 28672, 64, 8),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3-70b": _llama3(80, 8192, 28672, 64),
    "llama3.1-8b": _llama3(32, 4096, 14336, 32, **_long()),
    "llama3.1-70b": _llama3(80, 8192, 28672, 64, **_long()),
    "llama3.1-405b": _llama3(126, 16384, 53248, 128, **_long()),
    "llama3.2-1b": _llama3(16, 2048, 8192, 32, untie_embeddings_and_output_weights=False, **_long(32.0)),
    "llama3.2-3b": _llama3(28, 3072, 8192, 24, untie_embeddings_and_output_weights=False, **_long(32.0)),
}


def preset(name: str) -> ModelConfig:
    """The flags that ``--model name`` stands for."""
    known = {field.name for field in fields(ModelConfig)}
    assert known >= set(PRESETS[name]), name
    return ModelConfig(model=name, **PRESETS[name])  # type: ignore[arg-type]
