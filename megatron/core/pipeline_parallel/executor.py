"""The one executor: it runs whatever schedule it is given.

An activation lives as its chunk's graph needs it: the output of a chunk is let go of as soon as it is sent, because
the backward pass starts at the output's place in the graph and does not need its values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.gradient import HeldGradient, WeightGradientQueue, compute_held
from megatron.core.ops.documents import Documents
from megatron.core.pipeline_parallel.mailbox import Channels, Mailbox, open_channels
from megatron.core.pipeline_parallel.recorder import ActionRecorder
from megatron.schedules.schedule import Action, Schedule, Step
from megatron.schedules.verifier import verify

Microbatch = Mapping[str, Tensor]
"""``tokens``, ``labels`` and ``loss_mask``, each ``[b, s]``, and ``document_starts`` where these matter."""

ReadDocuments = Callable[[Tensor], Documents]
"""``document_starts`` to documents."""


class Chunk(Protocol):
    """A virtual stage: token ids or activations to activations, or at the end to logits."""

    def __call__(self, inputs: Tensor, documents: Documents | None = None) -> Tensor: ...


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels ``[b, s]`` to the loss of every token ``[b, s]``."""


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

    ``chunks`` are this stage's; ``token_losses`` belongs to the stage that has the head. With ``documents`` every stage
    reads microbatches, else only those at the ends of the model.
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
        documents: ReadDocuments | None = None,
    ) -> None:
        self.documents = documents
        self.chunks, self.token_losses, self.stage = chunks, token_losses, stage
        self.channels, self.activations, self.overlap = channels, activations, overlap
        self.weight_gradients = weight_gradients
        self.recorder: ActionRecorder | None = None
        """Notes when each action runs, if set."""
        self._schedule = lru_cache(maxsize=8)(partial(_verified, schedule))
        self.placement = self.schedule(1).placement
        open_channels(self.placement, stage, channels, activations.device)

    @property
    def readers(self) -> set[int]:
        """The virtual stages of this rank that read microbatches."""
        chunks = range(self.placement.num_chunks)
        mine = {self.placement.virtual_stage(self.stage, chunk) for chunk in chunks}
        return mine if self.documents is not None else mine & {0, self.placement.num_virtual_stages - 1}

    def schedule(self, num_microbatches: int, forward_only: bool = False) -> Schedule:
        """The schedule of a batch of ``num_microbatches``, proved sound."""
        return self._schedule(num_microbatches, forward_only)

    def train(self, microbatches: Iterator[Microbatch], num_microbatches: int, scale: float) -> Tensor:
        """Forward and backward over ``num_microbatches``, of which only the stages at the ends of the model read any.

        Adds the gradients of ``scale`` times the summed loss to the buffers; returns the sum of the losses of the
        unmasked tokens and their number, ``[2]`` in fp64, zero on stages without the head.
        """
        run = _Training(self, self.schedule(num_microbatches), microbatches, scale)
        run.run()
        return run.sums

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch], num_microbatches: int) -> Tensor:
        """As :meth:`train`, without gradients.

        A few microbatches at a time, because no backward pass keeps a stage from running far ahead of the next.
        """
        at_once = max(1, 2 * self.placement.num_stages // self.placement.num_chunks)
        sums = torch.zeros(2, dtype=torch.float64, device=self.activations.device)
        for first in range(0, num_microbatches, at_once):
            schedule = self.schedule(min(at_once, num_microbatches - first), forward_only=True)
            run = _Evaluation(self, schedule, microbatches)
            run.run()
            sums += run.sums
        return sums

    @torch.no_grad()
    def logits(self, tokens: Tensor, activations: ActivationFormat) -> Tensor | None:
        """This rank's part of the logits of ``tokens`` ``[b, s]``; None on stages without the head."""
        run = _Logits(self, self.schedule(1, forward_only=True), iter([{"tokens": tokens}]), activations)
        run.run()
        return run.logits


def _verified(build: Callable[[int], Schedule], num_microbatches: int, forward_only: bool) -> Schedule:
    schedule = build(num_microbatches)
    schedule = schedule.forward_only() if forward_only else schedule
    verify(schedule)
    return schedule


class _Feed:
    """Microbatches in the order of the iterator; one is dropped once it has been asked for ``uses`` times."""

    def __init__(self, microbatches: Iterator[Microbatch], uses: int, device: torch.device) -> None:
        self._microbatches, self._uses, self._device = microbatches, uses, device
        self._waiting: dict[int, list[Microbatch]] = {}
        self._next = 0

    def __call__(self, number: int) -> Microbatch:
        while self._next <= number:
            microbatch = next(self._microbatches)
            # Where documents begin is needed on the host.
            moved = {
                name: tensor if name == "document_starts" else tensor.to(self._device, non_blocking=True)
                for name, tensor in microbatch.items()
            }
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
        schedule: Schedule,
        microbatches: Iterator[Microbatch],
        activations: ActivationFormat | None = None,
    ) -> None:
        self.executor, self.schedule, self.stage = executor, schedule, executor.stage
        activations = activations or executor.activations
        placement = schedule.placement
        self.last = placement.num_virtual_stages - 1
        self.readers = executor.readers
        self.feed = _Feed(microbatches, len(self.readers), activations.device)
        self.mailbox = Mailbox(executor.channels, activations.empty)
        self.sums = torch.zeros(2, dtype=torch.float64, device=activations.device)

    def run(self) -> None:
        """Run the stage's actions; with overlap, the next action's message is received meanwhile."""
        perform = {"F": self.forward, "B": self.backward, "W": self.weight}
        steps = self.schedule.steps(self.stage)
        for step, following in zip(steps, (*steps[1:], None)):
            self.mailbox.let_go()
            self.mailbox.expect(step)
            if following is not None and self.executor.overlap:
                self.mailbox.expect(following)
            perform[step.action.kind](step)
        self.mailbox.close()

    def recording(self, action: Action) -> AbstractContextManager[None]:
        """Note how long ``action`` takes, without the wait for its input."""
        recorder = self.executor.recorder
        return nullcontext() if recorder is None else recorder.span(self.stage, action)

    def forward(self, step: Step) -> None:
        """Run a chunk and send its output."""
        action, virtual_stage = step.action, step.result.virtual_stage
        microbatch = self.feed(action.microbatch) if virtual_stage in self.readers else {}
        received = self.mailbox.take(step)
        read = self.executor.documents
        is_last = virtual_stage == self.last
        with self.recording(action):
            documents = None if read is None else read(microbatch["document_starts"])
            inputs = microbatch["tokens"] if received is None else self.enter(action, received)
            # [b, s/cp] or [s/(cp tp), b, h] -> [s/(cp tp), b, h], or logits [s/cp, b, v/tp] at the end of the model.
            outputs = self.executor.chunks[action.chunk](inputs, documents)
            outputs = self.leave(action, self.finish(outputs, microbatch) if is_last else outputs)
        if not is_last:
            self.mailbox.give(step, outputs)

    def backward(self, step: Step) -> None:
        """Run the backward pass of a chunk and send the gradient of its input."""
        raise NotImplementedError

    def weight(self, step: Step) -> None:
        """Compute the weight gradients that a backward pass deferred."""
        raise NotImplementedError

    def enter(self, action: Action, received: Tensor) -> Tensor:
        """The input of the chunk, from the activations received."""
        return received

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        """The activations to send, from the output of the chunk."""
        return outputs

    def finish(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        """What the pass computes at the end of the model: the loss, or the logits."""
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
    def finish(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        return self.masked_loss(logits, microbatch)


class _Logits(_Pass):
    logits: Tensor | None = None

    def finish(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        self.logits = logits
        return logits


class _Entrance(Function):
    """Where activations that were received enter the graph. It takes their gradient, so that nobody holds what the
    chunk itself does not keep."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        # It is sent next, as it is.
        ctx.gradients.append(gradients[0].contiguous())
        return None, None, None


@dataclass(frozen=True)
class _Graph:
    """What a backward pass needs of a forward pass: where it went out, and where its gradient comes out."""

    input_gradients: list[Tensor] | None
    """Takes the gradient of the activations received; None for tokens."""
    root: Tensor | GradientEdge
    """The loss, or the place in the graph where the output was."""


class _Training(_Pass):
    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        microbatches: Iterator[Microbatch],
        scale: float,
    ) -> None:
        super().__init__(executor, schedule, microbatches)
        self.scale = scale
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.input_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self.held: dict[tuple[int, int], list[HeldGradient]] = {}
        self.anchor = torch.empty(0, requires_grad=True)
        """Makes autograd follow what was received."""

    def enter(self, action: Action, received: Tensor) -> Tensor:
        gradients = self.input_gradients[action.microbatch, action.chunk] = []
        entered: Tensor = _Entrance.apply(received, self.anchor, gradients)
        return entered

    def finish(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        return self.masked_loss(logits, microbatch) * self.scale

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        key = action.microbatch, action.chunk
        # A loss is kept; of activations only the place in the graph.
        root = outputs if outputs.dim() == 0 else get_gradient_edge(outputs)
        self.graphs[key] = _Graph(self.input_gradients.pop(key, None), root)
        return outputs.detach()

    def backward(self, step: Step) -> None:
        """Go back through a chunk and hand on its input's gradient; weight gradients may wait."""
        action = step.action
        graph = self.graphs.pop((action.microbatch, action.chunk))
        gradient = self.mailbox.take(step)
        with self.recording(action):
            if self.schedule.splits_backward:
                with self.executor.weight_gradients.hold() as held:
                    torch.autograd.backward(graph.root, gradient)
                self.held[action.microbatch, action.chunk] = held
            else:
                torch.autograd.backward(graph.root, gradient)
        if graph.input_gradients is not None:
            (input_gradient,) = graph.input_gradients
            self.mailbox.give(step, input_gradient)

    @torch.no_grad()
    def weight(self, step: Step) -> None:
        action = step.action
        with self.recording(action):
            compute_held(self.held.pop((action.microbatch, action.chunk)))
