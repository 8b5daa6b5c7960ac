"""The tokenizer's files beside the checkpoints of a run."""

from megatron.checkpoint.remote_path import path_of
from megatron.checkpoint.tokenizer_files import keep_copy
from megatron.errors import UserError
from megatron.training.context import RunContext


def keep_tokenizer(context: RunContext) -> None:
    """Copy the tokenizer's files to ``--save`` and its copies; a failure is a warning."""
    config = context.config.checkpoint
    for place in [config.save, *config.redundant_save] if config.save is not None else []:
        try:
            keep_copy(path_of(place), context.config.tokenizer)
        except UserError as error:
            context.warn_rank0(f"The tokenizer is not copied beside the checkpoints: {error}")
