"""The optimizer's hyperparameters in one step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hyperparameters:
    """Values of one step, from the schedules of the run."""

    learning_rate: float
    vocabulary_learning_rate: float | None = None
    """Learning rate of the embedding and the output layer (``--decoupled-lr``); None: ``learning_rate``."""
    weight_decay: float | None = None
    """None: the constant weight decay of the optimizer's flags."""
