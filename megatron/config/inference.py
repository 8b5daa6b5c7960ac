"""Flags of tools that use a trained model: where it is, text generation, evaluation of texts."""

from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, values_of
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
        require_flag("--load", self.load is not None, changed_flags(self, "ckpt_step"))
        require_flag("--load-hf", self.load_hf is not None, changed_flags(self, "load_hf_text_only"))
        require_at_least(1, values_of(self, "pipeline_model_parallel_size", "expert_model_parallel_size"))


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


@dataclass(frozen=True)
class EvaluateConfig:
    """Texts to evaluate, and windows over them."""

    input: tuple[str, ...] = ()
    """Texts: files (.jsonl, .txt, .md, .parquet, also .gz and .zst), directories, globs, or prefixes of tokenized
    corpora (P for P.bin and P.idx). Every input has results of its own."""
    json_key: str = "text"
    """Key of the text in .jsonl files, or column of .parquet files."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """Documents of plain text: the whole file, paragraphs between blank lines, or lines."""
    stride: int | None = None
    """Tokens between the beginnings of two windows of --seq-length tokens (default: --seq-length). A smaller stride
    evaluates more windows: after the first window every token has at least --seq-length minus --stride tokens of
    context."""
    json: str | None = None
    """File for the results."""
