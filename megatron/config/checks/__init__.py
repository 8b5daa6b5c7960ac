"""Checks that cross flag groups, by topic, and the order in which a run has them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial

from megatron.config.checks import layout, model, training
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


def check_run(run: RunConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` for every invalid flag or combination in a run of ``world_size`` processes.

    With ``--use-checkpoint-args`` the architecture is not known yet: call :func:`check_resolved_architecture` later.
    """
    stages = [[getattr(run, group.name).check for group in fields(run)]]
    stages.append([partial(check, run, world_size) for check in CROSS_GROUP_CHECKS])
    if not run.checkpoint.use_checkpoint_args:
        stages.append([partial(check, run, world_size) for check in ARCHITECTURE_CHECKS])
    run_all(stages)


def check_resolved_architecture(run: RunConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` for every model size that is missing or incompatible with the layout."""
    run_all([[partial(check, run, world_size) for check in ARCHITECTURE_CHECKS]])


# Checks that need no architecture.
CROSS_GROUP_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    training.check_required,
    training.check_data_source,
    training.check_loader_timeout,
    layout.check_tensor_parallel_overlap,
    model.check_transformer_engine_overlap,
    layout.check_data_parallel,
    model.check_formats,
    model.check_transformer_engine,
    training.check_length,
    training.check_profile,
    training.check_data_stage,
    training.check_validation_sets,
    training.check_evaluation_batch,
    training.check_evaluation_of_average,
    training.check_spikes,
    model.check_kernels,
    training.check_dry_run,
    training.check_faults,
)
# Checks of sizes; checkpoints and Hugging Face models have them, too.
ARCHITECTURE_CHECKS: tuple[Callable[[RunConfig, int], None], ...] = (
    layout.check_tensor_parallel,
    model.check_attention,
    model.check_mup,
    model.check_multi_token_prediction,
    model.check_experts,
    layout.check_expert_layout,
    layout.check_context_parallel,
    layout.check_pipeline,
    layout.check_activations,
    model.check_recomputed_modules,
    layout.check_fully_sharded,
    model.check_expert_precision,
    model.check_expert_optimizer,
    model.check_fp8,
    model.check_transformer_engine_buffers,
)


def flags_in(text: str) -> list[str]:
    """The flags that a text names, in order."""
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)


def run_all(stages: Iterable[Iterable[Callable[[], None]]]) -> None:
    """Run every check; raises one :class:`ConfigError` with all their sentences.

    A check of a later stage may rely on earlier ones. So its sentence is left out if it names the flag with which an
    earlier sentence begins, and another exception of it if there is any sentence.
    """
    found: list[ConfigError] = []
    # A stage relies on those before it: a wrong flag would make it raise a second sentence, or any exception.
    for stage in stages:
        wrong = {flag for error in found for sentence in error.sentences for flag in flags_in(sentence)[:1]}
        for check in stage:
            try:
                check()
            except ConfigError as error:
                found += without_sentences_on(error, wrong)
            except Exception:
                if not found:
                    raise
    if found:
        raise ConfigError.of(found)


def without_sentences_on(error: ConfigError, flags: set[str]) -> list[ConfigError]:
    """``error`` without the sentences that name one of ``flags``; empty if none is left."""
    kept = [sentence for sentence in error.sentences if not flags & set(flags_in(sentence))]
    if len(kept) == len(error.sentences):
        return [error]
    return [ConfigError(*kept)] if kept else []
