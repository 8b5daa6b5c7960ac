"""The executor on real ranks: what it keeps in memory and for how long, what it reads and sends, and when gradients
leave. That it computes the right numbers is told by the matrix in ``tests/parallel``."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.activations import ActivationConfig
from megatron.config.training import OptimizerConfig
from megatron.core.communication import CollectiveRecord, Work
from megatron.core.models.parallelize import build_executor, build_model
from megatron.core.pipeline_parallel import ActionRecorder, Chunk, P2PCommunicator, PipelineExecutor, _Pass
from megatron.core.topology import Topology, single_process
from megatron.data.loader import Microbatch
from megatron.schedules.catalog import SCHEDULES, ScheduleName, build_schedule
from megatron.schedules.schedule import Action, Schedule, ScheduleError
from megatron.schedules.simulator import peak_live_activations
from tests.parallel.layout_run import (
    BATCH,
    CPU,
    DEEP_MODEL,
    DEEP_TIED_MODEL,
    SEED,
    SEQUENCE,
    Layout,
    Task,
    build,
    context,
    grid_of,
    microbatches,
    place_in,
)
from tests.rank_pool import RankPool
from tests.storage_watch import StorageWatch
from tests.whole_model import token_losses_of

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SCALE = 1.0 / (BATCH * SEQUENCE)
ITEM = 8
"""Bytes of a number in fp64."""
TASK = Task(OptimizerConfig(), model=DEEP_MODEL)
TIED = Task(OptimizerConfig(), model=DEEP_TIED_MODEL)

every_schedule = pytest.mark.parametrize("name", NAMES)

Pair = tuple[int, int]
"""A microbatch and a chunk."""


def four_stages(name: ScheduleName) -> Layout:
    """More microbatches than stages, so that every schedule reaches its steady state."""
    return Layout(pp=4, schedule=name, microbatches=8)


def batch(layout: Layout, topology: Topology, step: int = 0) -> Iterator[Microbatch]:
    """This rank's microbatches of a step."""
    return microbatches(step, layout, topology.data_parallel.rank)


# --- memory --------------------------------------------------------------------------------------------------


class MemoryWatch(ActionRecorder):
    """In the recorder's place: what every forward pass leaves for its backward pass, and how long it is there."""

    def __init__(self, executor: PipelineExecutor) -> None:
        super().__init__(CPU)
        self.actions: list[Action] = []
        self.live_bytes: list[Counter[Pair]] = []
        """Before every action, and in the end: the bytes that are there of a forward pass, without its output."""
        self.live_outputs: list[set[Pair]] = []
        """Likewise, the passes whose output is there; logits are such."""
        self._kept: dict[Pair, dict[int, tuple[StorageWeakRef, int]]] = {}
        self._outputs: dict[Pair, StorageWeakRef] = {}
        self._current = StorageWatch()
        executor.chunks = [self._watched(chunk) for chunk in executor.chunks]

    def _watched(self, chunk: Chunk) -> Chunk:
        def call(inputs: Tensor, *more: Any, **named: Any) -> Tensor:
            outputs = chunk(inputs, *more, **named)
            if inputs.is_floating_point():
                storage = inputs.untyped_storage()
                self._current.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._outputs[self._pair] = self._current.made.pop(outputs.untyped_storage()._cdata)[0]
            return outputs

        return call

    @property
    def _pair(self) -> Pair:
        return self.actions[-1].microbatch, self.actions[-1].chunk

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """Look at what the actions so far have left, and note what this one makes."""
        # What is under way arrives, so that it does not depend on the time what is there.
        time.sleep(0.005)
        self.look()
        self.actions.append(action)
        if action.kind != "F":
            yield
            return
        with StorageWatch() as self._current:
            yield
        self._kept[self._pair] = self._current.made

    def look(self) -> None:
        """Note what is there now."""
        self.live_bytes.append(
            Counter(
                {
                    pair: sum(size for reference, size in kept.values() if not reference.expired())
                    for pair, kept in self._kept.items()
                }
            )
        )
        self.live_outputs.append({pair for pair, reference in self._outputs.items() if not reference.expired()})

    def seen(self) -> "Watched":
        """Everything, in the end."""
        time.sleep(0.05)  # The thread that waits for a send lets go of it a moment after it has said so.
        self.look()
        return Watched(self.actions, self.live_bytes, self.live_outputs)


@dataclass
class Watched:
    """What a rank saw of one batch."""

    actions: list[Action]
    live_bytes: list[Counter[Pair]]
    live_outputs: list[set[Pair]]

    @property
    def live(self) -> list[set[Pair]]:
        """Passes of which anything is there, before every action and in the end."""
        return [{pair for pair, size in sizes.items() if size} for sizes in self.live_bytes]


def watch_training(layout: Layout) -> Watched:
    """Watch the second of two batches: the first makes what stays."""
    topology = place_in(layout)
    executor, data_parallel, _ = build(TASK, layout, topology)
    watch = None
    for step in range(2):
        data_parallel.start_grad_accumulation(layout.microbatches)
        executor.train(batch(layout, topology, step), layout.microbatches, SCALE)
        data_parallel.finish_grad_sync()
        if step == 0:
            watch = executor.recorder = MemoryWatch(executor)
    assert watch is not None
    return watch.seen()


@dataclass
class Evaluated:
    """What a rank saw of an evaluation."""

    sums: list[float]
    trained_sums: list[float]
    """Those of training on the same."""
    has_graph: bool
    """Whether any output has one."""
    kept: int
    """Bytes that were there before a chunk ran, of all that chunks before it made beside their outputs."""
    most_outputs: int
    """Most outputs that were there at once."""


def watch_evaluation(layout: Layout, num_microbatches: int) -> Evaluated:
    """Watch an evaluation."""
    topology = place_in(layout)
    executor, data_parallel, _ = build(TASK, layout, topology)
    steps = [list(batch(layout, topology, step)) for step in range(num_microbatches // layout.microbatches)]
    trained = torch.zeros(2, dtype=torch.float64)
    for step in steps:
        data_parallel.start_grad_accumulation(layout.microbatches)
        trained += executor.train(iter(step), layout.microbatches, SCALE)
        data_parallel.finish_grad_sync()
    outputs: list[StorageWeakRef] = []
    made: list[tuple[StorageWeakRef, int]] = []
    seen = Evaluated([], trained.tolist(), has_graph=False, kept=0, most_outputs=0)

    def watched(chunk: Chunk) -> Chunk:
        def call(inputs: Tensor, *more: Any, **named: Any) -> Tensor:
            # Others could run far ahead of the slowest stage.
            time.sleep(0.005 * (topology.rank == 3))
            seen.kept += sum(size for reference, size in made if not reference.expired())
            with StorageWatch() as watch:
                output = chunk(inputs, *more, **named)
            seen.has_graph |= output.requires_grad
            outputs.append(watch.made.pop(output.untyped_storage()._cdata)[0])
            made.extend(watch.made.values())
            seen.most_outputs = max(seen.most_outputs, sum(not reference.expired() for reference in outputs))
            return output

        return call

    executor.chunks = [watched(chunk) for chunk in executor.chunks]
    seen.sums = executor.evaluate(itertools.chain(*steps), num_microbatches).tolist()
    assert len(outputs) == num_microbatches * len(executor.chunks)
    return seen


def schedule_of(layout: Layout) -> Schedule:
    """What the ranks of a layout run."""
    return build_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)


@every_schedule
def test_activations_live_from_f_to_the_end_of_their_backward_pass(four_ranks: RankPool, name: ScheduleName) -> None:
    """Exactly those: what is claimed of a schedule's memory is what its ranks really hold."""
    layout = four_stages(name)
    schedule = schedule_of(layout)
    last = "W" if schedule.splits_backward else "B"
    peaks = peak_live_activations(schedule)
    for stage, seen in enumerate(four_ranks.run(watch_training, layout)):
        assert seen.actions == list(schedule.actions[stage])
        claimed: set[Pair] = set()
        for number, action in enumerate(seen.actions):
            assert seen.live[number] == claimed, f"stage {stage}, before {action}"
            pair = action.microbatch, action.chunk
            if action.kind == "F":
                claimed.add(pair)
            elif action.kind == last:
                claimed.remove(pair)
        assert seen.live[-1] == set(), f"stage {stage}, in the end"
        assert max(map(len, seen.live)) == peaks[stage]


@pytest.mark.parametrize("name", [name for name, traits in SCHEDULES.items() if traits.splits_backward])
def test_between_b_and_w_only_the_inputs_of_linear_layers_are_kept(four_ranks: RankPool, name: ScheduleName) -> None:
    layout = four_stages(name)
    layers = DEEP_MODEL.num_layers // schedule_of(layout).placement.num_virtual_stages
    width = 2 * DEEP_MODEL.hidden_size + DEEP_MODEL.query_size + DEEP_MODEL.ffn_hidden_size
    tokens = SEQUENCE * BATCH // layout.microbatches
    for stage, seen in enumerate(four_ranks.run(watch_training, layout)):
        for action, before, after in zip(seen.actions, seen.live_bytes, seen.live_bytes[1:]):
            if action.kind == "B":
                pair = action.microbatch, action.chunk
                kept = tokens * ITEM * layers * width
                assert after[pair] == kept < before[pair] / 2, f"stage {stage}, after {action}"


@pytest.mark.parametrize("tp", [1, 2])
def test_with_recompute_only_inputs_of_units_are_kept(four_ranks: RankPool, tp: int) -> None:
    """What was received is one; divided over tensor-parallel ranks, it is not kept whole beside its part."""
    layout = Layout(
        tp,
        pp=2,
        schedule="interleaved",
        microbatches=4,
        activations=ActivationConfig(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            distribute_saved_activations=tp > 1,
        ),
    )
    layers = DEEP_MODEL.num_layers // 4
    kept = layers * SEQUENCE * BATCH // layout.microbatches * DEEP_MODEL.hidden_size * ITEM // tp
    for rank, seen in enumerate(four_ranks.run(watch_training, layout, world_size=2 * tp)):
        for action, after in zip(seen.actions, seen.live_bytes[1:]):
            # Neither of the model's ends, which keep more.
            if action.kind == "F" and (rank // tp, action.chunk) in ((1, 0), (0, 1)):
                assert after[action.microbatch, action.chunk] == kept, f"rank {rank}, after {action}"
        assert not any(seen.live_bytes[-1].values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_an_output_goes_once_the_next_stage_has_told_of_it(four_ranks: RankPool, name: ScheduleName) -> None:
    """A gradient that comes back proves that the activations before it have arrived; their graphs live on.

    An action later the thread that waits for the send has noticed, too.
    """
    layout = four_stages(name)
    schedule = schedule_of(layout)
    outlived = 0
    for stage, seen in enumerate(four_ranks.run(watch_training, layout)[:-1]):
        sent: set[Pair] = set()
        previous: set[Pair] = set()
        for number, action in enumerate(seen.actions):
            assert seen.live_outputs[number] <= sent | previous, f"stage {stage}, before {action}"
            previous = set(sent)
            outlived += len(seen.live[number] - seen.live_outputs[number])
            if action.kind == "F":
                sent.add((action.microbatch, action.chunk))
            elif action.kind == "B":
                theirs = schedule.actions[stage + 1]
                taken = theirs[: theirs.index(action)]
                sent -= {(other.microbatch, other.chunk) for other in taken if other.kind == "F"}
        assert not seen.live_outputs[-1]
    assert outlived, "no output has gone before its graph"


def test_the_logits_go_with_their_backward_pass(four_ranks: RankPool) -> None:
    """They are the largest activations of all; the loss keeps nothing beside them and writes over them."""
    seen = four_ranks.run(watch_training, four_stages("1f1b"))[-1]
    of_one_microbatch = [{(number // 2, 0)} if number % 2 else set() for number in range(17)]
    assert seen.live_outputs == of_one_microbatch
    assert seen.live == of_one_microbatch


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_an_evaluation_keeps_no_graph_and_does_not_run_away(four_ranks: RankPool, name: ScheduleName) -> None:
    """Nothing is kept for a backward pass, and a stage holds a few outputs at most, however many there are."""
    layout = Layout(pp=4, schedule=name, microbatches=16)
    outcomes: list[Evaluated] = four_ranks.run(watch_evaluation, layout, 48)
    for seen in outcomes:
        assert seen.sums == pytest.approx(seen.trained_sums, rel=1e-12)
        assert not seen.has_graph
        assert seen.kept == 0
        assert seen.most_outputs <= 2 * layout.pp
    assert sum(seen.sums[1] for seen in outcomes) > 0


# --- data and messages ---------------------------------------------------------------------------------------


Messages = Counter[tuple[str, str, int]]
"""Messages by kind, channel, and bytes."""


@contextmanager
def observed(communicators: Sequence[Any], observer: Callable[[CollectiveRecord], None]) -> Iterator[None]:
    """Tell ``observer`` of every collective of ``communicators`` meanwhile."""
    for communicator in communicators:
        communicator.observer = observer
    try:
        yield
    finally:
        for communicator in communicators:
            communicator.observer = None


def count(layout: Layout) -> tuple[int, Messages]:
    """Microbatches that this rank asks for in a batch, and its messages."""
    topology = place_in(layout)
    executor, data_parallel, _ = build(TASK, layout, topology)
    channels = [topology.pipeline_channel(kind, *ends) for kind in "FB" for ends in ((0, 1), (1, 0))]
    reads, counted = 0, Messages()

    def source() -> Iterator[Microbatch]:
        nonlocal reads
        for microbatch in batch(layout, topology):
            reads += 1
            yield microbatch

    def note(record: CollectiveRecord) -> None:
        counted[record.kind, record.axes, record.num_bytes] += 1

    data_parallel.start_grad_accumulation(layout.microbatches)
    with observed(channels, note):
        executor.train(source(), layout.microbatches, SCALE)
    data_parallel.finish_grad_sync()
    return reads, counted


@every_schedule
def test_only_the_ends_of_the_model_read_data_and_only_once(four_ranks: RankPool, name: ScheduleName) -> None:
    reads = [8, 0, 0, 0] if SCHEDULES[name].placement == "v" else [8, 0, 0, 8]
    assert [found for found, _ in four_ranks.run(count, four_stages(name))] == reads


MESSAGES: dict[str, tuple[Layout, int]] = {
    "1f1b": (Layout(pp=4, schedule="1f1b", microbatches=8), 1),
    "interleaved": (Layout(pp=2, tp=2, schedule="interleaved", microbatches=4), 1),
    "zb-v with sequence parallelism": (Layout(pp=2, tp=2, schedule="zb-v", microbatches=4, sequence_parallel=True), 2),
}
"""Layouts, and by how many ranks the sequence of a message is divided."""


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_those_of_the_schedule_and_no_larger_than_needed(four_ranks: RankPool, case: str) -> None:
    layout, parts = MESSAGES[case]
    schedule = schedule_of(layout)
    placement, number = schedule.placement, layout.microbatches
    size = SEQUENCE // parts * (BATCH // number) * DEEP_MODEL.hidden_size * ITEM
    for rank, (_, counted) in enumerate(four_ranks.run(count, layout)):
        stage = topology_of_rank(layout, rank)
        wanted = Messages()
        for virtual_stage in range(placement.num_virtual_stages - 1):
            below, above = (placement.location(one)[0] for one in (virtual_stage, virtual_stage + 1))
            if below == above:
                continue
            down, up = ("down", "up") if below < above else ("up", "down")
            if stage == below:
                wanted["send", f"pp F {down}", size] += number
                wanted["receive", f"pp B {up}", size] += number
            if stage == above:
                wanted["receive", f"pp F {down}", size] += number
                wanted["send", f"pp B {up}", size] += number
        assert counted == wanted, f"rank {rank}"


class EventRecorder(ActionRecorder):
    """Notes in one list when actions begin and end, and what else is told."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.events: list[str] = []

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """Note begin and end."""
        self.events.append(f"begin {action}")
        yield
        self.events.append(f"end {action}")


def record_reductions(layout: Layout) -> list[str]:
    """Actions of the executor, and reductions of buckets that began in between."""
    topology = place_in(layout)
    executor, data_parallel, _ = build(TASK, layout, topology)
    executor.recorder = recorder = EventRecorder()
    data_parallel.start_grad_accumulation(layout.microbatches)
    with observed([data_parallel.sharing.dense.shards], lambda record: recorder.events.append(record.kind)):
        executor.train(batch(layout, topology), layout.microbatches, SCALE)
        recorder.events.append("batch ended")
        data_parallel.finish_grad_sync()
    return recorder.events


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_buckets_leave_within_the_last_backward_passes(four_ranks: RankPool, name: ScheduleName) -> None:
    """The first before the last action has ended, none before the last microbatch, all before the batch has."""
    layout = Layout(dp=2, pp=2, schedule=name, microbatches=4, bucket_size=3000, strategy="optim")
    layout = replace(layout, overlap_grad_reduce=True)
    for rank, events in enumerate(four_ranks.run(record_reductions, layout)):
        actions = schedule_of(layout).actions[topology_of_rank(layout, rank)]
        places = [place for place, event in enumerate(events) if event == "reduce_scatter"]
        first_of_last_microbatch = next(a for a in actions if a.microbatch == 3 and a.kind == "B")
        assert len(places) >= 8
        assert places[0] > events.index(f"begin {first_of_last_microbatch}")
        # Several chunks: one has all its gradients long before the other.
        several = SCHEDULES[name].chunks != "one chunk"
        assert places[0] < events.index(f"{'begin' if several else 'end'} {actions[-1]}"), f"rank {rank}"
        assert places[-1] < events.index("batch ended"), f"rank {rank}"


def count_zeros(layout: Layout) -> int:
    """Zeros that the optimizer counts in a gradient of zeros."""
    _, data_parallel, optimizer = build(TIED, layout, place_in(layout))
    for shard in data_parallel.param_shards:
        shard.gradient.zero_()
    return optimizer.count_zeros()


def test_zeros_of_all_stages_are_counted_and_those_of_a_tied_weight_once(four_ranks: RankPool) -> None:
    assert four_ranks.run(count_zeros, four_stages("1f1b")) == [DEEP_TIED_MODEL.num_parameters()] * 4


def topology_of_rank(layout: Layout, rank: int) -> int:
    """The stage of ``rank``."""
    return grid_of(layout).coordinates(rank)["pp"]


# --- what is not as it should be -----------------------------------------------------------------------------


def test_a_weight_gradient_without_a_buffer_cannot_wait() -> None:
    """Autograd wants it at once."""
    model = build_model(DEEP_MODEL, context(single_process(), Layout()), SEED)
    (microbatch,) = microbatches(0, Layout(), 0)
    loss = token_losses_of(model, microbatch["tokens"], microbatch["labels"]).sum()
    with model.context.weight_gradients.deferring() as deferred:
        with pytest.raises(AssertionError, match="only for a gradient buffer"):
            loss.backward()
    assert not deferred
    assert not model.context.weight_gradients.is_deferring


def test_a_schedule_that_is_not_sound_is_refused_before_anything_runs() -> None:
    """Its last backward pass is missing."""
    model = build_model(DEEP_MODEL, context(single_process(), Layout()), SEED)

    def cut_short(num_microbatches: int) -> Schedule:
        schedule = build_schedule("1f1b", 1, num_microbatches)
        return replace(schedule, actions=(schedule.actions[0][:-1],)) if num_microbatches == 2 else schedule

    executor = build_executor(model, single_process(), cut_short, SEQUENCE, BATCH // 2)
    with pytest.raises(ScheduleError, match=r"missing B1\.0"):
        executor.train(iter(()), 2, SCALE)


@pytest.mark.parametrize(
    ("overlap", "num_microbatches", "ahead"), [(True, 8, 1), (False, 8, 0), (True, 9, 1), (False, 9, 1)]
)
def test_without_overlap_only_groups_longer_than_the_pipeline_receive_ahead(
    overlap: bool, num_microbatches: int, ahead: int
) -> None:
    """Nine microbatches on four stages, interleaved, deadlock in one hardware queue otherwise."""
    schedule = build_schedule("interleaved", 4, num_microbatches, num_chunks=2)
    activations = SimpleNamespace(empty=lambda: torch.empty(0), device=CPU)
    executor = SimpleNamespace(stage=1, activations=activations, readers=set(), channels=None, overlap=overlap)
    run = _Pass(cast(PipelineExecutor, executor), schedule, iter(()))
    p2p = mock.create_autospec(P2PCommunicator, instance=True)
    run.p2p = p2p
    next(run.steps())
    assert p2p.start_receive.call_count == 1 + ahead


def test_the_error_of_a_send_is_raised_when_its_tensor_is_freed() -> None:
    """gloo reports it to a thread. Without it, the stage waits for an answer that cannot come."""

    class Failed:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    p2p = P2PCommunicator(cast(Any, None), lambda: torch.empty(0))
    p2p._sends = [Work([Failed()], lambda: torch.empty(0))]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        p2p.free_sent()
