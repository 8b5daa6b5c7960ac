"""Comparison of the architecture of the flags with that of a checkpoint, or of a Hugging Face model.

Imports no torch: the flags must be complete before it is imported.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from megatron.architectures.transformer_config import YARN_FIELDS, TransformerConfig
from megatron.config.model import ModelConfig
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
    """The values of flags of the architecture, for :func:`check_architecture`."""
    # A flag without a value follows from others, and is compared when the weights are loaded.
    known = {field.name for field in fields(TransformerConfig)}
    given = {name: value for name, value in asdict(model).items() if name in known and value is not None}
    given["no_rope_freq"] = model.canonical_nope_pattern
    if model.num_experts:
        given["moe_layer_freq"] = model.canonical_layer_pattern
    else:
        given["num_experts"] = None
    return given
