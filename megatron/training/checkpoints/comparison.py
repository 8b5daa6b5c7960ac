"""Comparison of the architecture and the learning-rate schedule of the flags with a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from megatron.architectures.transformer_config import YARN_FIELDS, TransformerConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import LearningRateConfig
from megatron.core.optimizer.hyperparameters import LearningRateSchedule
from megatron.errors import CheckpointError
from megatron.flags import flag_of


def check_architecture(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    remedy: str = "use the flags of the run that saved it",
    *,
    weights_only: bool = False,
) -> None:
    """Raise :class:`CheckpointError` with every flag whose value differs from ``saved``, found at ``where``.

    ``weights_only``: a new run begins with the weights, and may begin YaRN.
    """
    here, there = wanted.get("num_experts"), saved["num_experts"]
    if here and not there:
        raise CheckpointError(
            f"{where} is a dense model, but --num-experts is {here}: give it experts first "
            "(tools/convert_checkpoint.py upcycle), or load another."
        )
    if there and not here and "num_experts" in wanted:
        raise CheckpointError(
            f"{where} has {there} experts, but the flags describe a dense model: {remedy}, or load another."
        )
    # The padding depends on the layout; no weight depends on the longest sequence, the initialisation, or the
    # temperature, which a stage with longer sequences may turn on.
    free = {"padded_vocab_size", "max_position_embeddings", "init_method_std"}
    free |= {f"attention_temperature_{name}" for name in ("tuning", "floor", "scale")}
    if weights_only and wanted.get("position_embedding_type") == "yarn":
        free |= {"position_embedding_type", *YARN_FIELDS}
    different = [
        f"{flag_of(name)} is {value} here and {saved[name]} there"
        for name, value in wanted.items()
        if name not in free and saved[name] != value
    ]
    if different:
        raise CheckpointError(f"{where} has another architecture ({'; '.join(different)}): {remedy}, or load another.")


def given_architecture(model: ModelConfig) -> dict[str, Any]:
    """The values of flags of the architecture, for :func:`check_architecture`. A flag without a value (None) follows
    from others, and is compared when the weights are loaded."""
    known = {field.name for field in fields(TransformerConfig)}
    given = {name: value for name, value in asdict(model).items() if name in known and value is not None}
    given["no_rope_freq"] = model.canonical_nope_pattern
    if model.num_experts:
        given["moe_layer_freq"] = model.canonical_layer_pattern
    else:
        given["num_experts"] = None
    return given


def resolve_lr_schedule(
    wanted: LearningRateSchedule, saved: LearningRateSchedule | None, config: LearningRateConfig
) -> LearningRateSchedule:
    """The schedule to resume with; raises :class:`CheckpointError` if flags and checkpoint differ.

    ``saved`` is None for a checkpoint of weights alone (:func:`state_of_weights`).
    """
    if saved is None:
        if config.use_checkpoint_opt_param_scheduler:
            raise CheckpointError(
                "The checkpoint has no learning-rate schedule: remove --use-checkpoint-opt-param-scheduler."
            )
        return wanted
    if wanted == saved or config.override_opt_param_scheduler:
        return wanted
    if config.use_checkpoint_opt_param_scheduler:
        return saved
    if replace(wanted, warmup=int(wanted.warmup)) == saved:
        return saved  # earlier versions ended --lr-warmup-fraction at a whole sample
    there = asdict(saved)
    different = [
        f"{name} {value} (checkpoint: {there[name]})" for name, value in asdict(wanted).items() if there[name] != value
    ]
    raise CheckpointError(
        "The learning-rate schedule of the command line differs from the checkpoint, in samples: "
        f"{', '.join(different)}. Add --override-opt-param-scheduler to use the command line, or "
        "--use-checkpoint-opt-param-scheduler."
    )
