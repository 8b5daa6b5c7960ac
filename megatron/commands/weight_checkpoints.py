"""What the commands that write checkpoints of weights have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron.architectures.registry import PRESETS
from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig, preset
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, UserError
from megatron.flags import changed_words

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.streaming import SavedTensors

DtypeName = Literal["keep", "bf16", "fp16", "fp32"]


class Progress:
    """A bar on standard error that counts bytes."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit="B", unit_scale=True, desc="converting", disable=None)

    def expect(self, total: int) -> None:
        """Say how many bytes there will be."""
        self._bar.reset(total)

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._bar.update(count)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for the time of a conversion."""
    progress = Progress()
    try:
        yield progress
    finally:
        progress.close()


def flags_of_weights(
    architecture: TransformerConfig, dtype: "torch.dtype", tokenizer: TokenizerConfig
) -> dict[str, object]:
    """The groups of flags that weights and their tokenizer determine."""
    import torch

    precision = PrecisionConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    return {
        "model": asdict(ModelConfig.of(architecture)),
        "tokenizer": asdict(tokenizer),
        "precision": asdict(precision),
    }


def torch_dtype(name: DtypeName) -> "torch.dtype | None":
    """The number format; None keeps the source's format."""
    import torch

    return {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def check_unused(root: Path) -> None:
    """Raise :class:`CheckpointError` where ``root`` holds checkpoints, which the new one would supersede."""
    from megatron.checkpoint.finding import find_checkpoint

    if find_checkpoint(root) is not None:
        raise CheckpointError(f"--save {root} holds checkpoints already: choose an empty directory.")


def model_flags(architecture: TransformerConfig) -> list[str]:
    """The shortest flags that give the architecture: a preset's name, or every size."""
    wanted = ModelConfig.of(architecture)
    in_preset = replace(wanted, apply_layernorm_1p=False)
    for name in PRESETS:
        resolved = preset(name).resolve(architecture.vocab_size, 1, 1)
        if ModelConfig.of(resolved) == in_preset:
            return ["--model", name, *changed_words(ModelConfig(apply_layernorm_1p=wanted.apply_layernorm_1p))]
    return changed_words(wanted)


def tokenizer_size(flags: TokenizerConfig) -> int | None:
    """The number of ids of the tokenizer; None without a tokenizer that can be used."""
    from megatron.data.tokenizers import build_tokenizer

    try:
        return None if flags.tokenizer_type is None else build_tokenizer(flags).vocab_size
    except UserError:
        return None


def verified_checkpoint(load: str, ckpt_step: int | None) -> "SavedTensors":
    """The checkpoint of ``--load``, compared with its digests; raises :class:`CheckpointError`."""
    from megatron.checkpoint.finding import find_checkpoint, missing_checkpoint, verify_share
    from megatron.checkpoint.remote_path import path_of
    from megatron.checkpoint.streaming import SavedTensors

    root = path_of(load)
    iteration = find_checkpoint(root, ckpt_step)
    if iteration is None:
        raise missing_checkpoint(root)
    verify_share(root, iteration, rank=0, size=1)
    return SavedTensors(root, iteration)
