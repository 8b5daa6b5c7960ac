"""The units of a chunk on a rank, rehearsed: embedding, layers, output layer.

A unit is built as a run builds it, and runs forward and backward apart from the step, on tensors without memory. What
it allocates and launches depends on few flags (kind of layer, recompute, tensor, context and expert parallelism, the
microbatch), so that a search of thousands of layouts rehearses some hundred units, 20 ms each. Their records are the
only account of memory and time: of the search, of its prices, and of the pages.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.run import RunConfig
from megatron.core.activations import LayerGroup, Recomputed, recompute_modules
from megatron.core.gradient import MainGrad, attach_main_grad
from megatron.core.models.layer import BuildContext
from megatron.core.models.parallelize import apply_to_output_layer, build_context, build_executor
from megatron.core.models.transformer import PositionTables, TransformerModel
from megatron.core.ops.documents import Documents
from megatron.core.parameter import ParameterInfo, info_of
from megatron.core.precision import number_formats
from megatron.core.topology import RankGrid
from megatron.planner.launches import DEVICE, Launch, LaunchRecorder
from megatron.planner.memory import CUDA_BLOCK
from megatron.planner.rehearsal.layer import (
    MAX_ATTEMPTS,
    LayerRehearsal,
    Pass,
    PassLog,
    RehearsalSetting,
    RehearsedLayer,
)
from megatron.planner.simulated_rank import SimulatedTopology, simulated_future, simulated_kernels
from megatron.schedules.catalog import build_schedule
from megatron.schedules.schedule import Action
from megatron.schedules.stages import VirtualStage
from megatron.torch_compat import FakeTensor, FakeTensorMode

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class UnitRecorder(LaunchRecorder):
    """A :class:`LaunchRecorder` that also tracks storages, with ``rounds_up`` as torch's allocator on GPUs does.

    Tensors are on the meta device. With ``is_fake`` they are fake ones on a CPU, which takes three times as long and
    has an attention kernel for fp32 and fp64.
    """

    def __init__(self, is_fake: bool, rounds_up: bool) -> None:
        super().__init__(CPU if is_fake else DEVICE, CUDA_BLOCK if rounds_up else 1)

    @property
    def tensors(self) -> AbstractContextManager[object]:
        """The mode in which tensors are made."""
        return FakeTensorMode(allow_non_fake_inputs=True) if self.device == CPU else nullcontext()

    def empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the recorded device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def counts(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) if self.device == CPU else tensor.is_meta


@dataclass(frozen=True)
class UnitMemory:
    """Memory of a unit of a chunk: a layer, recomputed layers, the embedding or the output layer. In bytes."""

    kept: int
    """What is allocated from the forward to the backward pass, with the unit's input and without its output."""
    forward: int
    """Most during the forward pass beyond the input."""
    backward: int
    """Most during the backward pass, with ``kept`` and the output's gradient, until that gradient is freed."""
    late_backward: int = 0
    """Most during the backward pass after the output's gradient is freed, with ``kept``."""
    deferred: int = 0
    """What is allocated from the backward pass to the pass of the weight gradients, where that is one of its own."""
    experts_end: int = 0
    """What is allocated in the backward pass when the last weight gradient of its experts is accumulated."""
    end: int = 0
    """What is allocated in the backward pass when the last weight gradient is accumulated."""
    lasting: int = 0
    """Allocated by the first pass for all later ones: quantised weights."""


Launches = tuple[Launch, ...]


@dataclass(frozen=True)
class UnitRecord:
    """What a unit needs and launches."""

    memory: UnitMemory
    parameters: tuple[ParameterInfo, ...]
    """The parameters of the rank before sharding."""
    launches: tuple[Launches, Launches, Launches]
    """Launches of the forward pass, of the backward pass, and of the weight gradients that it defers, for a microbatch
    that is neither the first nor the last. Gradients are added to those of earlier ones; nothing is reduced."""
    num_layers: int = 0

    def with_gradients_in_bf16(self) -> "UnitRecord":
        """This record, which has main gradients in fp32, with those of linear layers in bf16."""
        forward, backward, deferred = (tuple(map(_accumulated_in_bf16, of_pass)) for of_pass in self.launches)
        return replace(self, launches=(forward, backward, deferred))

    @cached_property
    def num_parameters(self) -> tuple[int, int]:
        """Elements of the parameters outside of experts, and of experts."""
        sizes = [(prod(info.local_shape), info.is_expert) for info in self.parameters]
        of_experts = sum(size for size, is_expert in sizes if is_expert)
        return sum(size for size, _ in sizes) - of_experts, of_experts


def _accumulated_in_bf16(launch: Launch) -> Launch:
    product = launch.product
    if product is None or not product.is_accumulated:
        return launch
    # The main gradient is read and written.
    saved = 2 * (torch.float32.itemsize - torch.bfloat16.itemsize) * product.rows * product.columns * product.count
    return replace(launch, num_bytes=launch.num_bytes - saved)


@dataclass(frozen=True)
class Ends:
    """The units at the ends of the model, and sizes that all units share."""

    embedding: UnitRecord
    output: UnitRecord
    position_tables: int
    """Bytes of the rotations of all positions, which last."""
    shard: int
    """Bytes of a tensor of the residual stream."""


class UnitRehearsals:
    """Rehearses the units of one layout: of ``config`` on the ranks of ``grid``, which are on ``device``.

    The rehearsed rank is the last one of its context-parallel ranks: its queries see the most keys of others.
    """

    def __init__(
        self, config: RunConfig, grid: RankGrid, vocab_size: int, defers_gradients: bool, device: torch.device = GPU
    ) -> None:
        self._config, self._grid, self._vocab_size, self._defers = config, grid, vocab_size, defers_gradients
        self._rank, self._device = grid.group(0, ("cp",))[-1], device

    def layers(self, numbers: Sequence[int], is_recomputed: bool) -> UnitRecord:
        """The record of a layer, or of layers that are recomputed together, by their numbers in the model."""
        recorder = self._recorder()
        with recorder.tensors, recorder:
            context, architecture = self._context(recorder)
            with recorder.allocating("weights"):
                built = [
                    context.build_layer(number, architecture, context.of_layer(number, architecture.num_layers))
                    for number in numbers
                ]
            activations = self._config.activations
            if is_recomputed:
                shards = context.parallel.communicator if activations.distribute_saved_activations else None
                unit: nn.Module = Recomputed(LayerGroup(built), shards)
            else:
                (unit,) = built
                recompute_modules(unit, activations.modules)
            record = self._rehearse(recorder, context, architecture, unit)
        return replace(record, num_layers=len(numbers))

    def ends(self) -> "Ends":
        """The records of the embedding, and of the output layer with the loss, in a model without layers."""
        config, recorder = self._config, self._recorder()
        with recorder.tensors, recorder:
            context, architecture = self._context(recorder)
            with recorder.allocating("weights"):
                whole = VirtualStage(range(0), has_embedding=True, has_output_layer=True)
                model = TransformerModel(architecture, context, [whole])
            assert model.output_layer is not None
            apply_to_output_layer(model, config.activations)
            self._attach_main_grads(recorder, model)
            # The whole model is one stage, whose chunk has no layers: the executor of a run trains it.
            one_stage = replace(self._grid, pp=1)
            executor = build_executor(
                model,
                self._topology(recorder, one_stage, one_stage.group(0, ("cp",))[-1]),
                partial(build_schedule, "1f1b", 1),
                config.seq_length,
                config.micro_batch_size,
                z_loss_multiplier=config.training.z_loss_multiplier,
            )
            (chunk,) = model.transformer_chunks
            assert chunk.embedding is not None and chunk.output_layer is not None
            # The rotations of all positions are made once; the chunk keeps them.
            before = recorder.now.total
            length = config.seq_length // self._grid.cp
            tables = chunk.positions(length, config.micro_batch_size)
            of_tables = recorder.now.total - before
            passes = _PassesOfEnds(recorder, chunk.embedding)
            executor.recorder = passes
            recorder.launches.clear()
            executor.train(self._microbatches(), 1, 1.0)
            memory, launches = passes.memory(), passes.launches()
            del tables
        ends = chunk.embedding, nn.ModuleList([chunk.output_layer, *([] if chunk.future is None else [chunk.future])])
        infos = [tuple(map(info_of, end.parameters())) for end in ends]
        embedding, output = (UnitRecord(*one) for one in zip(memory, infos, launches))
        return Ends(embedding, output, of_tables, passes.shard)

    def _recorder(self) -> UnitRecorder:
        precision = self._config.precision
        is_half = precision.bf16 or precision.fp16
        return UnitRecorder(is_fake=not is_half or self._device.type == "cpu", rounds_up=self._device.type != "cpu")

    def _microbatches(self) -> Iterator[dict[str, Tensor]]:
        # A generator, so that the executor alone refers to the tensors.
        shape = self._config.micro_batch_size, self._config.seq_length // self._grid.cp
        tokens = torch.zeros(shape, dtype=torch.int64)
        yield {"tokens": tokens, "labels": tokens.clone(), "loss_mask": torch.ones(shape)} | simulated_future(
            self._config, shape
        )

    def _topology(self, recorder: UnitRecorder, grid: RankGrid, rank: int) -> SimulatedTopology:
        return SimulatedTopology(
            grid, rank, self._device, recorder, recorder.observer, recorder.device, recorder.start_work
        )

    def _attach_main_grads(self, recorder: UnitRecorder, unit: nn.Module) -> None:
        """Main gradients that have those of an earlier microbatch."""
        gradient = number_formats(self._config.precision, self._config.optimizer).gradient
        for parameter in unit.parameters():
            main_grad = MainGrad(recorder.empty(parameter.shape, gradient))
            main_grad.is_filled = True
            attach_main_grad(parameter, main_grad)

    def _context(self, recorder: UnitRecorder) -> tuple[BuildContext, TransformerConfig]:
        config, size = self._config, self._vocab_size
        topology = self._topology(recorder, self._grid, self._rank)
        architecture = config.model.resolve(size, self._grid.tp, config.seq_length)
        kernels = simulated_kernels(config, topology, self._device, size, recorder)
        return build_context(config, architecture, topology, kernels), architecture

    def _rehearse(
        self, recorder: UnitRecorder, context: BuildContext, architecture: TransformerConfig, unit: nn.Module
    ) -> UnitRecord:
        config, data = self._config, self._config.data
        gradient = number_formats(config.precision, config.optimizer).gradient
        self._attach_main_grads(recorder, unit)
        recorder.label_recompute(unit)
        # The input is [s/cp/tp, b, h] with sequence parallelism, else [s/cp, b, h].
        length = config.seq_length // self._grid.cp
        rows = config.micro_batch_size
        documents = None
        if data.marks_documents:
            starts = torch.zeros(rows, config.seq_length, dtype=torch.bool)
            documents = Documents(starts, data.masks_documents, data.reset_position_ids, recorder.device)
        positions = PositionTables(architecture, context)(length, rows, documents)
        inputs = recorder.empty(
            (length // context.parallel.sequence_parts, rows, architecture.hidden_size), context.dtype
        )
        setting = RehearsalSetting(recorder, gradient, context.weight_gradients, self._defers)
        rehearsal = LayerRehearsal(setting, unit, unit.forward, is_first=False, is_last=False)
        before, recorded = recorder.now.total, None
        if context.fp8 is not None:
            context.fp8.load(context.fp8.state())  # delayed scaling has scales from the second step on
        for _ in range(MAX_ATTEMPTS):
            log = _LaunchLog(recorder)
            with nullcontext() if context.fp8 is None else context.fp8.forward_pass():
                recorded = rehearsal.run(log, inputs, positions)
            if recorded is not None:
                break
        assert recorded is not None, "the unit keeps memory after every pass"
        infos = tuple(map(info_of, unit.parameters()))
        size = recorder.size_of(inputs)
        lasting = recorder.now.total - before
        return UnitRecord(_memory(recorded, size, lasting, infos), infos, log.launches())


class _LaunchLog(PassLog):
    """A :class:`PassLog` that also splits the launches of a rehearsal by pass."""

    _PASSES = ("forward", "backward", "weight gradients")

    def __init__(self, recorder: UnitRecorder) -> None:
        super().__init__(recorder)
        self._recorder = recorder
        self._starts: list[int] = []
        recorder.launches.clear()

    def open(self) -> None:
        """Begin a pass. The first one is forward, the second backward, all others are parts of weight gradients."""
        self._starts.append(len(self._recorder.launches))
        self._recorder.during = f"{self._PASSES[min(len(self._starts), 3) - 1]} pass"
        super().open()

    def launches(self) -> tuple[Launches, Launches, Launches]:
        found = self._recorder.launches
        first, second, third, *_ = (*self._starts, len(found))
        return tuple(found[first:second]), tuple(found[second:third]), tuple(found[third:])


@dataclass(frozen=True)
class _Mark:
    """A moment in the passes of a chunk."""

    peak: int
    """Most bytes since the last mark."""
    now: int
    num_launches: int
    """Launches until now."""


class _PassesOfEnds:
    """Splits the passes of a chunk without layers where the embedding's output, or its gradient, is there.

    Marks are set at the bars::

        forward   | embedding | output layer |
        backward  | output layer | embedding |
    """

    def __init__(self, recorder: UnitRecorder, embedding: nn.Module) -> None:
        self._recorder = recorder
        self._marks: list[_Mark] = []
        self._hook = embedding.register_forward_hook(self._after_embedding)

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        self._recorder.during = f"{'forward' if action.kind == 'F' else 'backward'} pass"
        self._mark()
        yield
        self._mark()

    def _mark(self) -> None:
        recorder = self._recorder
        self._marks.append(_Mark(recorder.peak.total, recorder.now.total, len(recorder.launches)))
        recorder.peak = recorder.now

    def _after_embedding(self, module: object, inputs: object, output: Tensor) -> None:
        self._hook.remove()  # the lookups of multi-token prediction are the output layer's
        self._mark()
        self.shard = self._recorder.size_of(output)
        output.register_hook(lambda gradient: self._mark())

    def launches(self) -> Iterator[tuple[Launches, Launches, Launches]]:
        """The launches of the embedding, and of the output layer. Both compute their weight gradients in the backward
        pass."""
        found, places = tuple(self._recorder.launches), [mark.num_launches for mark in self._marks]
        first, second, third, fourth, fifth, sixth = (
            found[start:end] for start, end in pairwise((*places, len(found)))
        )
        del third, sixth  # between the passes, and after them
        yield first, fifth, ()
        yield second, fourth, ()

    def memory(self) -> tuple[UnitMemory, UnitMemory]:
        """The memory of the embedding, and of the output layer."""
        shard = self.shard
        start, embedded, ended, _, with_gradient, last = self._marks
        embedding = UnitMemory(
            kept=embedded.now - start.now - shard,
            forward=embedded.peak - start.now,
            backward=last.peak - start.now,
            end=shard,  # the gradient of its output
        )
        output = UnitMemory(
            kept=ended.now - embedded.now + shard,
            forward=ended.peak - embedded.now,
            backward=with_gradient.peak - embedded.now + shard,
            end=3 * shard,
        )
        return embedding, output


def _memory(unit: RehearsedLayer, shard: int, lasting: int, infos: Sequence[ParameterInfo]) -> UnitMemory:
    """``shard`` are the bytes of the unit's input, and of its output's gradient."""
    # The rehearsal has the unit's input and its output's gradient apart; a chunk holds them.
    kept = unit.saved + shard * unit.saves_input
    forward, _ = _peaks(unit.forward)
    early, late = _peaks(unit.backward)
    base = kept + shard
    ends = {}
    now = base
    for stretch in unit.backward:
        now += sum(stretch.change.values())
        if stretch.event is not None and stretch.event.kind == "accumulated":
            ends[infos[stretch.event.number].is_expert] = now
    deferred = sum(sum(one.kept.values()) + shard * one.keeps_output_gradient for one in unit.deferred)
    return UnitMemory(
        kept=kept,
        forward=forward,
        backward=base + early,
        late_backward=0 if late is None else base + late,
        deferred=deferred,
        experts_end=ends.get(True, 0),
        end=ends.get(False, 0),
        lasting=lasting,
    )


def _peaks(stretches: Pass) -> tuple[int, int | None]:
    """Most bytes beyond the start of a pass, until the output's gradient is freed, and after it."""
    now, peaks = 0, [0]
    for stretch in stretches:
        peaks[-1] = max(peaks[-1], now + stretch.peak.total)
        now += sum(stretch.change.values())
        if stretch.event is not None and stretch.event.kind == "output gradient freed":
            peaks.append(now)
    return peaks[0], peaks[1] if len(peaks) > 1 else None
