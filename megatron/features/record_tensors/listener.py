"""Records the tensors of a step: hooks on the modules of this rank's chunks, which exist during such a step alone, and
the sum of all ranks' fingerprints in one file.

The result of a module is recorded when it returns, and its gradient when the backward pass has computed it. Recomputed
segments run twice: the first run gives the values, the second one the gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.config.operation import LoggingConfig
from megatron.core.activations import Recomputed
from megatron.core.control import run_on_rank0
from megatron.core.kernels.choice import Choice
from megatron.core.models.layer import MLP, AttentionProjection, NormLinear, SelfAttention, TransformerLayer
from megatron.core.models.transformer import OutputLayer, TransformerModel
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.routing import Routing
from megatron.core.optimizer import UpdatedShard
from megatron.core.parameter import flat_range_boxes
from megatron.core.pipeline_parallel import Recorder
from megatron.core.tensor_parallel.layers import SwiGLULinear, VocabParallelWeight
from megatron.data.loader import Microbatch
from megatron.features.record_tensors.recording import (
    Direction,
    Recording,
    Rectangle,
    TensorName,
    fingerprint,
    save_recording,
    sum_of,
)
from megatron.schedules.schedule import Action
from megatron.training.loop.step import StepOutcome
from megatron.training.loop.trainer import Listener, Trainer

Kind = Literal["stream", "parallel", "tokens"]
"""``stream``: ``[s/(cp tp), b, h]``, on the residual stream; ``parallel``: ``[s/cp, b, f/tp]``, in a parallel region;
``tokens``: ``[s/cp, b, f]``, the same on tensor-parallel ranks."""


def build_tensor_recorder(
    config: LoggingConfig, model: TransformerModel, kernels: Sequence[Choice], iteration: int
) -> "TensorRecorder | None":
    """The listener for the flags; ``iteration`` is the first one of this process."""
    if config.record_tensors is None:
        return None
    chosen = {choice.operation: choice.implementation for choice in kernels}
    return TensorRecorder(Path(config.record_tensors), config.record_tensors_iterations or (iteration,), model, chosen)


class TensorRecorder(Listener):
    """Writes ``DIR/iter_0000001.safetensors`` and, with the samples, ``DIR/iter_0000001.batch.safetensors``."""

    def __init__(
        self, directory: Path, iterations: Sequence[int], model: TransformerModel, kernels: Mapping[str, str]
    ) -> None:
        self.directory, self.iterations, self.model, self.kernels = directory, iterations, model, kernels
        self._end = ExitStack()
        self._step: _Step | None = None
        self._weights: list[Tensor] = []

    def on_iteration_start(self, trainer: Trainer) -> None:
        if trainer.state.progress.iteration + 1 not in self.iterations:
            return
        consumed = trainer.state.progress.consumed_samples
        place = _Place.of(self.model, trainer, trainer.batches.num_microbatches(consumed))
        self._step = self._end.enter_context(hooked(self.model, trainer, place))
        trainer.data.train.kept = []  # the replay's list, if there is one, takes its place

    def before_update(self, trainer: Trainer, gradient_factor: float) -> None:
        if self._step is None:
            return
        self._step.finish_gradients(gradient_factor)
        shards = self._counted(trainer)
        self._step.add_shards("weight_gradient", shards, [one.gradient * gradient_factor for one in shards])
        self._weights = [one.weight.clone() for one in shards]
        self._step.add_shards("weight", shards, self._weights)

    def after_step(self, trainer: Trainer, outcome: StepOutcome) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._end.close()
        weights, self._weights = self._weights, []
        shards = self._counted(trainer) if weights else []
        step.add_shards("update", shards, [one.weight - before for one, before in zip(shards, weights)])
        batch = step.add_batch(trainer.data.train.kept or [])
        trainer.data.train.kept = None
        gathered = trainer.context.control.all_gather_object((step.recording, batch))
        run_on_rank0(trainer.context.control, lambda: self._write(trainer, outcome, step.place, gathered))

    def close(self) -> None:
        self._end.close()

    def _write(
        self, trainer: Trainer, outcome: StepOutcome, place: "_Place", gathered: list[tuple[Recording, "_Batch"]]
    ) -> None:
        recording, config = sum_of(one for one, _ in gathered), trainer.context.config
        iteration, model = trainer.state.progress.iteration + 1, self.model.config
        recording.facts = {
            "iteration": iteration,
            "samples": place.samples,
            "length": place.length,
            "head_size": model.kv_channels,
            "vocab_size": model.vocab_size,
            "precision": config.precision.product_name,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": trainer.state.hyperparameters().learning_rate,
            "world_size": trainer.context.topology.grid.world_size,
            "kernels": dict(self.kernels),
        }
        file = self.directory / f"iter_{iteration:07d}.safetensors"
        save_recording(file, recording)
        tensors: dict[str, Tensor] = {}
        for name, rows, values in (part for _, parts in gathered for part in parts):
            whole = tensors.setdefault(name, values.new_zeros(place.samples, place.length))
            whole.view(-1)[rows] = values
        save_file(tensors, file.with_suffix(".batch.safetensors"))

    def _counted(self, trainer: Trainer) -> list[UpdatedShard]:
        """The shards that this rank records: one of the ranks that hold a shard does."""
        module = trainer.module
        sharing = module.data_parallel.sharing
        return [one for one in module.optimizer.shards if sharing.is_counted(one.info, over_all_ranks=True)]


_INPUTS = ("tokens", "labels", "loss_mask")
_Batch = list[tuple[str, Tensor, Tensor]]
"""Parts of the batch: name, places in the flattened tensor ``[samples * length]``, and the values there."""


class _Part(NamedTuple):
    """A rank's part of a tensor of a microbatch, ``[s, b, f]``."""

    name: str
    kind: Kind
    values: Tensor
    columns: tuple[Tensor, int] | None = None
    """Its columns, and the number of those of the whole, if the ranks have not equal parts."""


_PartsOf = Callable[[Tensor], Iterable[_Part]]
"""The parts of a value, or of its gradient."""


@dataclass(frozen=True)
class _Place:
    """Where this rank's tensors are in the global batch."""

    samples: int
    length: int
    micro_batch_size: int
    data_parallel: tuple[int, int]  # rank and size
    tensor_parallel: tuple[int, int]
    sequence_parallel: bool
    positions: Tensor  # [s/cp], of this rank
    has_embedding: bool

    @classmethod
    def of(cls, model: TransformerModel, trainer: Trainer, num_microbatches: int) -> "_Place":
        config, parallel, ranks = trainer.context.config, model.context.parallel, trainer.context.topology.data_parallel
        return cls(
            samples=num_microbatches * config.micro_batch_size * ranks.size,
            length=config.seq_length,
            micro_batch_size=config.micro_batch_size,
            data_parallel=(ranks.rank, ranks.size),
            tensor_parallel=(parallel.rank, parallel.size),
            sequence_parallel=parallel.sequence_parallel,
            positions=model.context.context_parallel.split.positions(config.seq_length),
            has_embedding=any(stage.has_embedding for stage in model.virtual_stages),
        )

    def rows(self, microbatch: int, kind: Kind) -> Tensor:
        """The rows of a tensor ``[positions, b, ...]`` of a microbatch, in its order."""
        positions = self.positions
        if kind == "stream" and self.sequence_parallel:
            positions = positions.chunk(self.tensor_parallel[1])[self.tensor_parallel[0]]
        rank, size = self.data_parallel
        first = (microbatch * size + rank) * self.micro_batch_size
        samples = torch.arange(first, first + self.micro_batch_size)
        return (positions.unsqueeze(1) + samples * self.length).flatten()

    def is_counted(self, kind: Kind) -> bool:
        """Whether this rank records its part, which tensor-parallel ranks may have in common."""
        is_divided = kind == "parallel" or (kind == "stream" and self.sequence_parallel)
        return is_divided or self.tensor_parallel[0] == 0

    def rectangle(self, microbatch: int, kind: Kind, width: int) -> Rectangle:
        rank, size = self.tensor_parallel if kind == "parallel" else (0, 1)
        columns = torch.arange(rank * width, (rank + 1) * width)
        return Rectangle(self.rows(microbatch, kind), columns, (self.samples * self.length, width * size))


class _Step:
    """The fingerprints of one step on this rank; also observes the executor, to know the microbatch."""

    def __init__(self, place: _Place, observed: Recorder | None) -> None:
        self.place, self.recording, self.observed = place, Recording(), observed
        self._microbatch = 0
        self._seen: set[tuple[TensorName, int]] = set()

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        """An action of the executor."""
        self._microbatch = action.microbatch
        observed: AbstractContextManager[None] = nullcontext()
        if self.observed is not None:
            observed = self.observed.span(stage, action)
        with observed:
            yield

    def record(self, found: object, parts: "_PartsOf") -> None:
        """Record the parts of what a module returned and, when it is there, of its gradient."""
        if isinstance(found, Tensor):  # an FP8 tensor has no values of its own
            self._add("forward", parts(found.detach()))
            if found.requires_grad:
                found.register_hook(lambda gradient: self._add("gradient", parts(gradient)))

    def result(self, name: str, found: object, kind: Kind = "stream") -> None:
        """Record a tensor ``[s, b, f]``."""
        self.record(found, lambda tensor: [_Part(name, kind, tensor)])

    def losses(self, found: Tensor) -> None:
        """Record the losses of tokens ``[b, s/cp]``, with a z-loss the first of ``[2, b, s/cp]``."""
        self.record(found, lambda all: [_Part("loss", "tokens", all.view(-1, *all.shape[-2:])[0].t().unsqueeze(2))])

    def logits(self, weight: VocabParallelWeight, found: Tensor) -> None:
        """Record this rank's logits ``[s/cp, b, v/tp]`` without the padding."""
        count = weight.num_ids
        columns = torch.arange(weight.first_id, weight.first_id + count), weight.config.vocab_size
        self.record(found, lambda tensor: [_Part("logits", "parallel", tensor[..., :count], columns)])

    def routing(self, name: str, num_experts: int, found: Routing) -> None:
        """Record the weight of every expert for every token, from those of the chosen ones ``[n, k]``."""

        def dense(weights: Tensor) -> list[_Part]:  # [n, k] -> [n, E]
            whole = weights.new_zeros(len(weights), num_experts).scatter(1, found.experts, weights)
            return [_Part(name, "stream", whole)]

        self.record(found.weights, dense)

    def _add(self, direction: Direction, parts: Iterable["_Part"]) -> None:
        """Record this rank's parts of tensors, once a microbatch."""
        for part in parts:
            name = TensorName(direction, part.name)
            if (name, self._microbatch) in self._seen or not self.place.is_counted(part.kind):
                continue
            if not part.values.numel():
                continue  # this rank has padding alone
            self._seen.add((name, self._microbatch))
            matrix = part.values.flatten(0, -2)  # [rows, width]
            rectangle = self.place.rectangle(self._microbatch, part.kind, matrix.shape[1])
            if part.columns is not None:
                rectangle = Rectangle(rectangle.rows, part.columns[0], (rectangle.shape[0], part.columns[1]))
            self.recording.add(name, fingerprint(matrix, rectangle))

    def finish_gradients(self, factor: float) -> None:
        """Make the gradients those of the mean loss."""
        for name, part in self.recording.tensors.items():
            if name.direction == "gradient":
                self.recording.tensors[name] = part.scaled(factor)

    def add_shards(self, direction: Direction, shards: Sequence[UpdatedShard], values: Sequence[Tensor]) -> None:
        """Record this rank's shards of parameters."""
        for shard, flat in zip(shards, values):
            stop = shard.start + flat.numel()
            for box, begin, end in flat_range_boxes(shard.info, shard.start, stop):
                matrix = flat[begin - shard.start : end - shard.start].reshape(box.shape[0], -1)
                first, size = (*box.global_offset, 0)[:2], (*shard.info.global_shape, 1)[:2]
                rows, columns = (torch.arange(start, start + n) for start, n in zip(first, matrix.shape))
                part = fingerprint(matrix, Rectangle(rows, columns, (size[0], size[1])))
                self.recording.add(TensorName(direction, shard.info.name), part)

    def add_batch(self, microbatches: Sequence[Microbatch]) -> _Batch:
        """Record the samples, on the ranks of the first stage; returns this rank's part of them."""
        parts: _Batch = []
        if not (self.place.has_embedding and self.place.is_counted("tokens")):
            return parts
        for number, microbatch in enumerate(microbatches):
            self._microbatch = number
            for name in _INPUTS:
                values = microbatch[name].t().unsqueeze(2)  # [s/cp, b, 1]
                self._add("input", [_Part(name, "tokens", values)])
                parts.append((name, self.place.rows(number, "tokens"), values.flatten().cpu()))
            if "document_starts" in microbatch:  # of the whole sequence on every rank
                starts = microbatch["document_starts"][:, self.place.positions].t().flatten()
                parts.append(("document_starts", self.place.rows(number, "tokens"), starts.cpu()))
        return parts


# --- hooks ---------------------------------------------------------------------------------------------------


@contextmanager
def hooked(model: TransformerModel, trainer: Trainer, place: _Place) -> Iterator["_Step"]:
    """Hooks on every operation of this rank's chunks."""
    executor = trainer.module.executor
    step, losses = _Step(place, executor.recorder), executor.token_losses

    def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
        assert losses is not None
        found = losses(logits, labels)
        step.losses(found)
        return found

    with ExitStack() as end:
        executor.recorder = step
        end.callback(setattr, executor, "recorder", step.observed)
        if losses is not None:
            executor.token_losses = token_losses
            end.callback(setattr, executor, "token_losses", losses)
        hooks = _Hooks(step, end)
        for chunk, stage in zip(model.transformer_chunks, model.virtual_stages):
            if stage.has_embedding and chunk.embedding is not None:
                hooks.after(chunk.embedding, "embedding")
            layers = [module for module in chunk.layers.modules() if isinstance(module, TransformerLayer)]
            for number, layer in zip(stage.layers, layers) if len(layers) == len(stage.layers) else ():
                hooks.on_layer(layer, f"layers.{number}")
            if chunk.output_layer is not None:
                hooks.on_output_layer(chunk.output_layer, executor.chunks_loss)
        yield step


@dataclass(frozen=True)
class _Hooks:
    """Hooks on modules, which ``end`` removes."""

    step: _Step
    end: ExitStack

    def call(self, module: nn.Module, record: Callable[[Any], None], *, before: bool = False) -> None:
        """Call ``record`` with what ``module`` returns, or ``before`` it runs with its first argument."""
        module = _segment(module)
        if before:
            handle = module.register_forward_pre_hook(lambda module, inputs: record(inputs[0]))
        else:
            handle = module.register_forward_hook(lambda module, inputs, output: record(output))
        self.end.callback(handle.remove)

    def after(self, module: nn.Module, name: str) -> None:
        self.call(module, partial(self.step.result, name))

    def on_layer(self, layer: TransformerLayer, name: str) -> None:
        self.after(layer, f"{name}.output")
        for part in layer.modules():
            if isinstance(part, SelfAttention):
                self.on_attention(part, name)
            elif isinstance(part, MLP | MoELayer):
                self.call(part, partial(self.step.result, f"{name}.attention_residual"), before=True)
                self.after(part, f"{name}.mlp")
                if isinstance(part, MLP):
                    self.on_mlp(part, name)
                else:
                    self.on_experts(part, name)

    def on_attention(self, part: SelfAttention, name: str) -> None:
        shape, attention = part.shape, f"{name}.self_attention"
        self.on_norm(part.norm_qkv, f"{name}.input_layernorm")

        def heads(prefix: str, count: int, qkv: Tensor) -> list[_Part]:
            sizes = [shape.query_heads, shape.key_value_heads, shape.key_value_heads]
            parts = qkv.split([heads * shape.head_size for heads in sizes], dim=-1)
            named = zip(("query", "key", "value")[:count], parts)
            return [_Part(f"{attention}.{prefix}{which}", "parallel", values) for which, values in named]

        self.call(part.qkv_bias, partial(self.step.record, parts=partial(heads, "", 3)))
        self.call(part.embed_positions, partial(self.step.record, parts=partial(heads, "rotated_", 2)))
        projection = cast(AttentionProjection, _segment(part.attend_proj)).linear
        self.call(projection, partial(self.step.result, f"{attention}.core_attention", kind="parallel"), before=True)
        self.after(projection, f"{attention}.linear_proj")

    def on_norm(self, part: nn.Module, name: str) -> None:
        """The norm before a column-parallel layer, if it is a module of its own."""
        part = _segment(part)
        if isinstance(part, NormLinear):
            self.after(part.norm, name)

    def on_mlp(self, part: MLP, name: str) -> None:
        self.on_norm(part.norm_fc1, f"{name}.pre_mlp_layernorm")

        def gate_up(both: Tensor) -> list[_Part]:
            named = zip(("gate", "up"), both.chunk(2, dim=-1))
            return [_Part(f"{name}.mlp.{which}", "parallel", values) for which, values in named]

        self.call(part.norm_fc1, partial(self.step.record, parts=gate_up))
        fc2 = cast(SwiGLULinear, _segment(part.swiglu_fc2)).linear
        self.call(fc2, partial(self.step.result, f"{name}.mlp.activation", kind="parallel"), before=True)

    def on_experts(self, part: MoELayer, name: str) -> None:
        self.after(part.norm, f"{name}.pre_mlp_layernorm")
        num_experts = part.router.rule.num_experts
        self.call(part.router, partial(self.step.routing, f"{name}.mlp.router", num_experts))
        if part.shared_experts is not None:
            self.after(part.shared_experts, f"{name}.mlp.shared_experts")

    def on_output_layer(self, part: OutputLayer, chunks_loss: bool) -> None:
        self.after(part.final_layernorm, "final_layernorm")
        self.call(part, self.step.losses if chunks_loss else partial(self.step.logits, part.vocab_weight))


def _segment(module: nn.Module) -> nn.Module:
    """The module without its wrapper for recomputation."""
    while isinstance(module, Recomputed):
        module = module.segment
    return module
