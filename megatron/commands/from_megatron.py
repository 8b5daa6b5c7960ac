"""The conversion of a checkpoint of Megatron-LM to a checkpoint of weights."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands.weight_checkpoints import (
    Progress,
    check_unused,
    flags_of_weights,
    model_flags,
    tokenizer_size,
    torch_dtype,
)
from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError
from megatron.flags import changed_words

DEFAULT_FACTOR = 8.0
"""The rotary scaling factor of Megatron-LM's model without an argument."""

if TYPE_CHECKING:
    from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint, MegatronImport
    from megatron.commands.convert_checkpoint import FromMegatron


def from_megatron(config: "FromMegatron", progress: Progress) -> str:
    """Convert; what to tell the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint, MegatronImport
    from megatron.checkpoint.megatron_lm.torch_dist import find_iteration
    from megatron.checkpoint.streaming import save_streaming
    from megatron.training.checkpoints.saved_run import state_of_weights

    root, directory = Path(config.save), find_iteration(Path(config.load), config.ckpt_step)
    check_unused(root)
    source = MegatronCheckpoint(directory)
    saved_tokenizer, ids = tokenizer_here(source, config.tokenizer_model)
    model = MegatronImport(source, config.vocab_size or ids, torch_dtype(config.dtype), progress.advance)
    rows = model.architecture.vocab_size
    tokenizer = TokenizerConfig() if ids is None else sized(saved_tokenizer, ids, rows)
    progress.expect(model.nbytes)
    save_streaming(
        root,
        config.iteration,
        model.tensors,
        model.read,
        state_of_weights(
            config.iteration, model.architecture, flags_of_weights(model.architecture, model.dtype, tokenizer)
        ).to_json(),
    )
    flags = ["--load", config.save, "--finetune", *model_flags(model.architecture), *changed_words(tokenizer)]
    return "\n".join(
        [
            f"wrote {model.architecture.num_parameters():,} parameters of {directory} to "
            f"{iteration_directory(root, config.iteration)}, without the state of the optimizer",
            vocabulary_note(model, is_known=(config.vocab_size or ids) is not None),
            *rotary_notes(model.architecture),
            f"train on with: pretrain_llama.py {shlex.join(flags)}",
        ]
    )


def tokenizer_here(source: "MegatronCheckpoint", place: str | None) -> tuple[TokenizerConfig, int | None]:
    """The flags of the model's tokenizer, at ``place`` if it is given, and its number of ids; None if its files are
    not here. Raises :class:`UserError` for a tokenizer at ``place`` that cannot be used."""
    from megatron.data.tokenizers import build_tokenizer

    flags = source.tokenizer
    if place is None:
        return flags, tokenizer_size(flags)
    if flags.tokenizer_type is None:
        raise ConfigError(
            f"--tokenizer-model {place} is of the type in {source.where}, {source.tokenizer_type}, which is not "
            "supported: use --vocab-size instead."
        )
    flags = replace(flags, tokenizer_model=place)
    return flags, build_tokenizer(flags).vocab_size


def rotary_notes(architecture: TransformerConfig) -> list[str]:
    """A note on an argument that the model of the checkpoint may not have had."""
    if not architecture.use_rope_scaling or architecture.rope_scaling_factor == DEFAULT_FACTOR:
        return []
    return [
        f"the rotary scaling factor is {architecture.rope_scaling_factor:g}, as in the arguments; Megatron-LM's "
        f"pretrain_gpt.py computes with {DEFAULT_FACTOR:g}, whatever --rope-scaling-factor says"
    ]


def sized(tokenizer: TokenizerConfig, ids: int, rows: int) -> TokenizerConfig:
    """The flags of a tokenizer of ``ids`` ids in a model whose embedding has ``rows`` rows."""
    if ids == rows:
        return tokenizer
    # NullTokenizer has one id more than its --vocab-size.
    return replace(tokenizer, vocab_size=rows - (tokenizer.tokenizer_type == "NullTokenizer"))


def vocabulary_note(model: "MegatronImport", is_known: bool) -> str:
    """What became of the rows of the vocabulary."""
    if is_known:
        return (
            f"the vocabulary has {model.architecture.vocab_size} ids; left out {model.num_padding_rows} rows of padding"
        )
    return (
        f"kept all {model.architecture.vocab_size} rows of the vocabulary, since the tokenizer is not at hand: give "
        "--tokenizer-model or --vocab-size to leave out padding"
    )
