"""The one executor: it runs whatever schedule it is given.

An activation lives as its chunk's graph needs it: the output of a chunk is let go of as soon as it is sent, because
the backward pass starts at the output's place in the graph and does not need its values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.gradient import WeightGradientQueue
from megatron.core.pipeline_parallel.mailbox import Channels, Mailbox
from megatron.core.pipeline_parallel.messages import MessagePlan, plan_messages
from megatron.core.pipeline_parallel.recorder import ActionRecorder
from megatron.core.pipeline_parallel.schedule import Action, Placement, Schedule
from megatron.core.pipeline_parallel.verifier import verify

Microbatch = Mapping[str, Tensor]
"""``tokens``, ``labels`` and ``loss_mask``, each ``[b, s]``."""


class Chunk(Protocol):
    """A virtual stage: token ids or activations to activations, or at the end to logits."""

    def __call__(self, inputs: Tensor) -> Tensor: ...


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits, which it may overwrite, and labels ``[b, s]`` to the loss of every token ``[b, s]``."""


@dataclass(frozen=True)
class ActivationFormat:
    """What stages send each other."""

    shape: tuple[int, ...]
    """``[s(/tp), b, h]``."""
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A place to receive one."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class PipelineExecutor:
    """Runs this rank's part of a schedule over the microbatches of a global batch.

    ``chunks`` are this stage's; ``token_losses`` belongs to the stage that has the head.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        token_losses: TokenLosses | None,
        stage: int,
        schedule: Callable[[int], Schedule],
        channels: Channels,
        activations: ActivationFormat,
        weight_gradients: WeightGradientQueue,
        overlap: bool = True,
    ) -> None:
        self.chunks, self.token_losses, self.stage = chunks, token_losses, stage
        self.channels, self.activations, self.overlap = channels, activations, overlap
        self.weight_gradients = weight_gradients
        self.recorder: ActionRecorder | None = None
        """Notes when each action runs, if set."""
        self._plan = cache(partial(_plan, schedule, stage))
        self.placement = self.schedule(1).placement
        open_channels(self.placement, channels)

    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of a batch of ``num_microbatches``, proved sound."""
        return self._plan(num_microbatches)[0]

    def train(self, microbatches: Iterator[Microbatch], num_microbatches: int, scale: float) -> Tensor:
        """Forward and backward over ``num_microbatches``, of which only the stages at the ends of the model read any.

        Adds the gradients of ``scale`` times the summed loss to the buffers; returns the sum of the losses of the
        unmasked tokens and their number, ``[2]`` in fp64, zero on stages without the head.
        """
        run = _Training(self, self._plan(num_microbatches), microbatches, scale)
        run.run()
        return run.sums

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch], num_microbatches: int) -> Tensor:
        """As :meth:`train`, without gradients.

        A few microbatches at a time, because no backward pass keeps a stage from running far ahead of the next.
        """
        at_once = 2 * self.placement.num_stages
        sums = torch.zeros(2, dtype=torch.float64, device=self.activations.device)
        for first in range(0, num_microbatches, at_once):
            run = _Evaluation(self, self._plan(min(at_once, num_microbatches - first), True), microbatches)
            run.run()
            sums += run.sums
        return sums

    @torch.no_grad()
    def logits(self, tokens: Tensor, activations: ActivationFormat) -> Tensor | None:
        """This rank's part of the logits of ``tokens`` ``[b, s]``; None on stages without the head."""
        run = _Logits(self, self._plan(1, True), iter([{"tokens": tokens}]), activations)
        run.run()
        return run.logits


def _plan(
    build: Callable[[int], Schedule], stage: int, num_microbatches: int, forward_only: bool = False
) -> tuple[Schedule, MessagePlan]:
    schedule = build(num_microbatches)
    verify(schedule)
    schedule = schedule.forward_only() if forward_only else schedule
    return schedule, plan_messages(schedule, stage)


def open_channels(placement: Placement, channels: Channels) -> None:
    """Make the process groups of all channels that messages of ``placement`` take, on every rank in one order."""
    for virtual_stage in range(placement.num_virtual_stages - 1):
        source, _ = placement.location(virtual_stage)
        target, _ = placement.location(virtual_stage + 1)
        if source != target:
            for communicator in (channels("F", source, target), channels("B", target, source)):
                communicator.process_group  # noqa: B018


class _Feed:
    """Microbatches in the order of the iterator; one is dropped once it has been asked for ``uses`` times."""

    def __init__(self, microbatches: Iterator[Microbatch], uses: int, device: torch.device) -> None:
        self._microbatches, self._uses, self._device = microbatches, uses, device
        self._waiting: dict[int, list[Microbatch]] = {}
        self._next = 0

    def __call__(self, number: int) -> Microbatch:
        while self._next <= number:
            microbatch = next(self._microbatches)
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in microbatch.items()}
            self._waiting[self._next] = [moved] * self._uses
            self._next += 1
        uses = self._waiting[number]
        microbatch = uses.pop()
        if not uses:
            del self._waiting[number]
        return microbatch


class _Pass:
    """One pass over the forward actions of a stage, which keeps nothing for a backward pass."""

    def __init__(
        self,
        executor: PipelineExecutor,
        plan: tuple[Schedule, MessagePlan],
        microbatches: Iterator[Microbatch],
        activations: ActivationFormat | None = None,
    ) -> None:
        schedule, messages = plan
        self.executor, self.schedule, self.stage = executor, schedule, executor.stage
        activations = activations or executor.activations
        placement = schedule.placement
        self.last = placement.num_virtual_stages - 1
        mine = {placement.virtual_stage(self.stage, chunk) for chunk in range(placement.num_chunks)}
        self.feed = _Feed(microbatches, len(mine & {0, self.last}), activations.device)
        self.mailbox = Mailbox(schedule, self.stage, messages, executor.channels, activations.empty, executor.overlap)
        self.sums = torch.zeros(2, dtype=torch.float64, device=activations.device)

    def run(self) -> None:
        """Run the stage's actions."""
        for action in self.schedule.actions[self.stage]:
            self.perform(action)
        self.mailbox.close()

    def perform(self, action: Action) -> None:
        """Run one action."""
        self.forward(action)

    def recording(self, action: Action) -> AbstractContextManager[None]:
        """Note how long ``action`` takes, without the wait for its input."""
        recorder = self.executor.recorder
        return nullcontext() if recorder is None else recorder.span(self.stage, action)

    def forward(self, action: Action) -> None:
        """Run a chunk and hand on its output."""
        virtual_stage = self.schedule.result(self.stage, action).virtual_stage
        microbatch = self.feed(action.microbatch) if virtual_stage in (0, self.last) else {}
        inputs = self.mailbox.take(action)
        with self.recording(action):
            inputs = microbatch["tokens"] if inputs is None else inputs
            outputs = self.compute(action, inputs, microbatch if virtual_stage == self.last else None)
        if outputs is not None:
            self.mailbox.give(action, outputs)

    def compute(self, action: Action, inputs: Tensor, microbatch: Microbatch | None) -> Tensor | None:
        """The output of a chunk; None at the end of the model, which is given the microbatch."""
        outputs = self.executor.chunks[action.chunk](inputs)
        if microbatch is None:
            return outputs
        self.finish(outputs, microbatch)
        return None

    def finish(self, logits: Tensor, microbatch: Microbatch) -> None:
        """Take what is wanted from the logits."""
        raise NotImplementedError

    def masked_loss(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        """The summed loss of the unmasked tokens, which it adds to the sums together with their number."""
        assert self.executor.token_losses is not None
        losses = self.executor.token_losses(logits, microbatch["labels"])
        mask = microbatch["loss_mask"].to(losses.dtype)
        total = (losses * mask).sum()
        self.sums += torch.stack((total.detach(), mask.sum())).double()
        return total


class _Evaluation(_Pass):
    def finish(self, logits: Tensor, microbatch: Microbatch) -> None:
        self.masked_loss(logits, microbatch)


class _Logits(_Pass):
    logits: Tensor | None = None

    def finish(self, logits: Tensor, microbatch: Microbatch) -> None:
        self.logits = logits


@dataclass(frozen=True)
class _Graph:
    """What a backward pass needs of a forward pass: where it came in, and where it went out."""

    inputs: Tensor | None
    """The activations received; None for tokens."""
    root: Tensor | GradientEdge
    """The loss, or the place in the graph where the output was."""


class _Training(_Pass):
    def __init__(
        self,
        executor: PipelineExecutor,
        plan: tuple[Schedule, MessagePlan],
        microbatches: Iterator[Microbatch],
        scale: float,
    ) -> None:
        super().__init__(executor, plan, microbatches)
        self.scale = scale
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.weight_gradients: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def perform(self, action: Action) -> None:
        {"F": self.forward, "B": self.backward, "W": self.weight}[action.kind](action)

    def compute(self, action: Action, inputs: Tensor, microbatch: Microbatch | None) -> Tensor | None:
        received = inputs.requires_grad_() if inputs.is_floating_point() else None
        outputs = self.executor.chunks[action.chunk](inputs)
        if microbatch is None:
            root: Tensor | GradientEdge = get_gradient_edge(outputs)
        else:
            root = self.masked_loss(outputs, microbatch) * self.scale
        self.graphs[action.microbatch, action.chunk] = _Graph(received, root)
        return outputs.detach() if microbatch is None else None

    def backward(self, action: Action) -> None:
        """Go back through a chunk and hand on its input's gradient; weight gradients may wait."""
        graph = self.graphs.pop((action.microbatch, action.chunk))
        gradient = self.mailbox.take(action)
        with self.recording(action):
            if self.schedule.splits_backward:
                with self.executor.weight_gradients.hold() as products:
                    torch.autograd.backward(graph.root, gradient)
                self.weight_gradients[action.microbatch, action.chunk] = products
            else:
                torch.autograd.backward(graph.root, gradient)
        if graph.inputs is not None:
            assert graph.inputs.grad is not None
            self.mailbox.give(action, graph.inputs.grad)

    @torch.no_grad()
    def weight(self, action: Action) -> None:
        """Compute the weight gradients that a backward pass left."""
        products = self.weight_gradients.pop((action.microbatch, action.chunk))
        with self.recording(action):
            # The last layer's first, as in an undivided backward pass; each lets go of its activations.
            products.reverse()
            while products:
                products.pop()()
