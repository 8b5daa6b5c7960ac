"""The listeners of a run."""

from collections.abc import Sequence

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.lock import RunLock
from megatron.core.device import device_name
from megatron.data.evaluation_data import TokenBytes
from megatron.features.faults.listener import FaultInjection
from megatron.features.known_product.listener import KnownAnswer
from megatron.features.replay.listener import ReplayCheck
from megatron.features.replicas.listener import build_state_check
from megatron.features.spikes.listener import Spikes
from megatron.features.stragglers.listener import build_stragglers
from megatron.training.build.plan import RunPlan
from megatron.training.checkpoints.saver import Saver
from megatron.training.context import RunContext
from megatron.training.flops import resolve_peak
from megatron.training.loop.data import Data
from megatron.training.loop.listeners import (
    Checkpoints,
    Conclusion,
    DataComparison,
    Evaluation,
    GarbageCollection,
    MemoryRelease,
    MemoryReport,
    Metrics,
)
from megatron.training.loop.trainer import Listener
from megatron.training.profiles import MemoryHistory, PipelineProfile, build_profile
from megatron.training.run_files import effective_time_meter


def build_listeners(
    context: RunContext,
    plan: RunPlan,
    architecture: TransformerConfig,
    token_bytes: TokenBytes | None,
    data: Data,
    locks: Sequence[RunLock],
    known_answer: KnownAnswer,
    replay: ReplayCheck | None,
    memory_history: MemoryHistory | None,
) -> list[Listener]:
    """The listeners of a run, features among them, in the order in which they receive an event."""
    config, is_on_gpu = context.config, context.topology.device.type != "cpu"
    logging, validation, training = config.logging, config.validation, config.training
    saves, release_level = config.checkpoint.save_schedule, training.empty_unused_memory_level
    device = device_name(context.topology.device)
    peak, source_of_peak = resolve_peak(device, config.precision.product_name, logging.peak_tflops)
    context.log_rank0(source_of_peak)
    effective_time = effective_time_meter(context)
    listeners = (
        # First: no other listener sees an iteration after which the run stops or rolls back.
        Spikes(),
        # Before whatever reads the state, and before a save begins.
        FaultInjection(context.faults, config.checkpoint) if context.faults.faults else None,
        # Before evaluation, which also uses the pipeline: the profiles record only the iteration.
        PipelineProfile(logging.profile_pipeline, logging.profile_pipeline_iteration, context.log_rank0)
        if logging.profile_pipeline is not None
        else None,
        build_profile(config, context.topology.rank, context.topology.device, context.log_rank0),
        memory_history,
        MemoryReport() if is_on_gpu else None,
        MemoryRelease(release_level) if is_on_gpu and release_level else None,
        # Before the metrics, to which it adds one.
        build_stragglers(context),
        Metrics(logging, plan.train_iters, architecture.flops_per_token(config.seq_length), peak, effective_time),
        Evaluation(validation.eval_interval, data.evaluated, token_bytes),
        DataComparison(data.check),
        # Replicas before the replay, which cannot tell wrong weights from wrong products.
        known_answer,
        build_state_check(context, known_answer),
        replay,
        # After evaluation, which may take long, so that no save is under way when a signal arrives in it.
        Checkpoints(Saver(context, locks), saves) if config.checkpoint.save is not None else None,
        GarbageCollection(training.manual_gc_interval, validation.eval_interval, saves) if training.manual_gc else None,
        # Last, because it names the last checkpoint.
        Conclusion(config, effective_time),
    )
    return [listener for listener in listeners if listener is not None]
