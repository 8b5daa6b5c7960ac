"""Flags of text generation."""

from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.flags import require_at_least, values_of


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling, and the length of a text."""

    max_new_tokens: int = 64
    """Maximum number of new tokens. A text also ends at end-of-document (also at eos_token_id of the
    model's generation_config.json), and when it has --max-position-embeddings
    tokens."""
    max_position_embeddings: int | None = None
    """Maximum number of tokens of a text with its prompt (default: that of the model). With more than that, positions
    occur that the training has not seen."""
    temperature: float = 0.8
    """Temperature that divides the logits; 0 is greedy."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: all."""
    top_p: float = 0.95
    """Sample from the most likely tokens with this total probability."""
    seed: int = 1234
    """Seed of the sampling: text number i of --prompts, counted from 0, is drawn with seed + i."""

    def check(self) -> None:
        require_at_least(1, values_of(self, "max_new_tokens", "max_position_embeddings"))
        require_at_least(0, values_of(self, "temperature", "top_k", "seed"))
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} must be above 0 and at most 1.")
