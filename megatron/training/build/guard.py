"""The checks of numbers of a run (megatron/training/guard)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.features.known_product.listener import KnownAnswer, KnownProduct
from megatron.features.replay.listener import Replay, ReplayCheck
from megatron.features.replicas.listener import StateCheck
from megatron.training.context import RunContext
from megatron.training.loop.trainer import Listener
from megatron.training.train_module import TrainModule

REPLAY_INTERVAL = 1000
"""Iterations between two replays by default: a replay is three microbatches."""


@dataclass(frozen=True)
class Guard:
    """The checks."""

    known_answer: KnownAnswer
    listeners: Sequence[Listener]
    """In the order in which they receive an event, before checkpoints are saved."""


def build_guard(context: RunContext, module: TrainModule) -> Guard:
    """The checks of the flags; a collective. Raises :class:`SilentCorruptionError` on all ranks if a device computes
    wrong results, and :class:`ConfigError` for a replay that cannot be compared."""
    operation, checkpoint = context.config.operation, context.config.checkpoint
    topology, formats = context.topology, module.data_parallel.formats
    products = [KnownProduct(topology.device, dtype) for dtype in dict.fromkeys((formats.weight, formats.master))]
    known_answer = KnownAnswer(context.control, products, operation.known_answer_interval_s)
    is_saving = checkpoint.save is not None
    state_check = StateCheck(
        topology, operation.check_replicas_interval, checkpoint.save_schedule, is_saving, known_answer
    )
    # Replicas first: a replay cannot tell wrong weights from wrong products.
    listeners: list[Listener] = [known_answer, state_check]
    reason = why_not_replayed(context, module)
    if reason is not None and operation.replay_interval is not None:
        raise ConfigError(f"--replay-interval {operation.replay_interval} needs {reason}, or remove it.")
    if reason is None:
        interval = operation.replay_interval
        if interval is None:
            interval = REPLAY_INTERVAL if topology.grid.dp > 1 else 0
        listeners.append(ReplayCheck(Replay(topology, context.heartbeat), interval, known_answer))
    return Guard(known_answer, listeners)


def why_not_replayed(context: RunContext, module: TrainModule) -> str | None:
    """What is missing for two passes over a microbatch to give the same bits; None if they do."""
    if context.topology.device.type != "cpu" and not context.config.training.deterministic_mode:
        return "kernels that give the same bits in every run: add --deterministic-mode"
    is_engine = context.config.model.transformer_impl == "transformer_engine"
    if is_engine and module.fp8 is not None and module.fp8.is_delayed:
        return "scales that a replay does not change: use another --fp8-recipe than delayed"
    return None
