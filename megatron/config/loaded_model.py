"""Flags of tools that use a trained model: where it is, and its layout."""

from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.flags import require_at_least, values_of
from megatron.urls import check_place, refuse_urls


@dataclass(frozen=True)
class LoadedModelConfig:
    """The model, its tokenizer, and the ranks that divide it."""

    load: str | None = None
    """Directory or URL of checkpoints."""
    load_hf: str | None = None
    """Directory of a Hugging Face model, in place of --load."""
    load_hf_text_only: bool = False
    """Use the text model of a multimodal model in --load-hf."""
    ckpt_step: int | None = None
    """Iteration to load instead of the latest."""
    tokenizer_model: str | None = None
    """Tokenizer file, if it is not the one that the checkpoint names, or not in the directory of --load-hf."""
    add_bos: bool = False
    """Begin every text with the tokenizer's beginning-of-text token, for models that were trained with it."""
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size; the tensor-parallel size is the number of processes divided by it."""
    expert_model_parallel_size: int = 1
    """Expert-parallel size, a divisor of the tensor-parallel size."""

    def check(self) -> None:
        if (self.load is None) == (self.load_hf is None):
            which = "none of them is" if self.load is None else "both are"
            raise ConfigError(f"Exactly one of --load and --load-hf is needed, and {which} given: correct it.")
        if self.load is not None:
            check_place("--load", self.load)
        refuse_urls({"--load-hf": self.load_hf}, "copy the model to a local directory, whose files can be mapped")
        refuse_urls({"--tokenizer-model": self.tokenizer_model}, "copy the tokenizer to a local path")
        if self.ckpt_step is not None and self.load is None:
            raise ConfigError("--ckpt-step needs --load: add it, or remove --ckpt-step.")
        if self.load_hf_text_only and self.load_hf is None:
            raise ConfigError("--load-hf-text-only needs --load-hf: add it, or remove --load-hf-text-only.")
        require_at_least(1, values_of(self, "pipeline_model_parallel_size", "expert_model_parallel_size"))
