"""A side of a comparison: what a path that the user names holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.config.run import RunConfig
from megatron.metrics.jsonl import History

Kind = Literal["run", "checkpoint", "hugging-face", "megatron-lm"]


@dataclass(frozen=True)
class Side:
    """A run or a checkpoint of this code, a model of Hugging Face, or a run of Megatron-LM."""

    label: Literal["A", "B"]
    path: Path
    kind: Kind
    config: RunConfig | None = None
    """The flags of a run of this code, or of the run that saved the checkpoint; None if they are not known."""
    foreign: Mapping[str, Any] | None = None
    """Megatron-LM's arguments by name, or the fields of ``config.json``."""
    environment: Mapping[str, Any] | None = None
    """``environment.json`` of the run directory."""
    kernels: Mapping[str, str] | None = None
    """The implementation of each operation, from the log."""
    checkpoints: Mapping[int, Path] = field(default_factory=dict)
    """By iteration, the directories of the checkpoints; a model of Hugging Face is one of iteration 0."""
    curve: History | None = None
    """Losses and gradient norms of iterations."""
