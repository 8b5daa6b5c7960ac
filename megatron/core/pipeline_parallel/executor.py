"""The pipeline executor: it runs any schedule.

The output of a chunk is freed as soon as it is sent: the backward pass starts at the output's gradient edge and does
not need its values.
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

from megatron.core.gradient import DeferredWeightGrad, WeightGradStore, compute_deferred
from megatron.core.ops.documents import Documents
from megatron.core.pipeline_parallel.executor import Channels, P2PCommunicator, Recorder, open_channels
from megatron.schedules.launch_queue import needs_receives_ahead
from megatron.schedules.schedule import Action, Schedule, Step
from megatron.schedules.simulator import verify

Microbatch = Mapping[str, Tensor]
"""``tokens``, ``labels`` and ``loss_mask``, each ``[b, s]``, and ``document_starts`` where these matter."""

ReadDocuments = Callable[[Tensor], Documents]
"""``document_starts`` to documents."""


class Chunk(Protocol):
    """A virtual stage: token ids or activations to activations, or at the end to logits, or with ``labels`` to what
    :data:`TokenLosses` returns."""

    def __call__(self, inputs: Tensor, documents: Documents | None = None, labels: Tensor | None = None) -> Tensor: ...


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels ``[b, s]`` to the loss of every token ``[b, s]``; under a z-loss to ``[2, b, s]``, the cross
entropy and the squared log-sum-exp."""


@dataclass(frozen=True)
class ActivationFormat:
    """The activations that stages send each other."""

    shape: tuple[int, ...]
    """``[s(/tp), b, h]``."""
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A tensor to receive activations in."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class PipelineExecutor:
    """Runs this rank's part of a schedule over the microbatches of a global batch.

    ``chunks`` are this stage's; ``token_losses`` belongs to the stage that has the output layer. With ``chunks_loss``
    the last chunk of the model computes the losses itself. With ``documents`` every stage reads microbatches, else only
    those at the ends of the model. ``z_loss_multiplier`` times the squared log-sum-exp is added to the loss of every
    token (PaLM, arXiv 2204.02311, section 5).
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        token_losses: TokenLosses | None,
        stage: int,
        schedule: Callable[[int], Schedule],
        channels: Channels,
        activations: ActivationFormat,
        weight_gradients: WeightGradStore,
        overlap: bool = True,
        documents: ReadDocuments | None = None,
        chunks_loss: bool = False,
        z_loss_multiplier: float | None = None,
    ) -> None:
        self.documents, self.chunks_loss, self.z_loss_multiplier = documents, chunks_loss, z_loss_multiplier
        self.chunks, self.token_losses, self.stage = chunks, token_losses, stage
        self.channels, self.activations, self.overlap = channels, activations, overlap
        self.weight_gradients = weight_gradients
        self.recorder: Recorder | None = None
        """Records each action, if set."""
        self._schedule = lru_cache(maxsize=8)(partial(_verified, schedule))
        self.placement = self.schedule(1).placement
        open_channels(self.placement, stage, channels, activations.device)

    @property
    def readers(self) -> set[int]:
        """The virtual stages of this rank that read microbatches."""
        chunks = range(self.placement.num_chunks)
        mine = {self.placement.virtual_stage(self.stage, chunk) for chunk in chunks}
        return mine if self.documents is not None else mine & {0, self.placement.num_virtual_stages - 1}

    @property
    def num_sums(self) -> int:
        """How many sums :meth:`train` returns."""
        return 2 if self.z_loss_multiplier is None else 3

    def schedule(self, num_microbatches: int, forward_only: bool = False) -> Schedule:
        """The verified schedule of ``num_microbatches``."""
        return self._schedule(num_microbatches, forward_only)

    def train(self, microbatches: Iterator[Microbatch], num_microbatches: int, scale: float) -> Tensor:
        """Forward and backward over ``num_microbatches``; stages with neither embedding nor output layer read none.

        Adds the gradients of ``scale`` times the summed loss to the buffers; returns the sum of the cross entropy of
        the unmasked tokens and their number, ``[2]`` in fp64, zero on stages without the output layer. Under a z-loss
        ``[3]``: also the sum of the squared log-sum-exp, without the multiplier.
        """
        run = _Training(self, self.schedule(num_microbatches), microbatches, scale)
        perform = {"F": run.forward, "B": run.backward, "W": run.weight}
        for step in run.steps():
            perform[step.action.kind](step)
        return run.sums

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch], num_microbatches: int) -> Tensor:
        """As :meth:`train`, without gradients.

        A few microbatches at a time, because no backward pass keeps a stage from running far ahead of the next.
        """
        at_once = max(1, 2 * self.placement.num_stages // self.placement.num_chunks)
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=self.activations.device)
        for first in range(0, num_microbatches, at_once):
            schedule = self.schedule(min(at_once, num_microbatches - first), forward_only=True)
            run = _Evaluation(self, schedule, microbatches)
            for step in run.steps():
                run.forward(step)
            sums += run.sums
        return sums

    @torch.no_grad()
    def logits(self, tokens: Tensor, activations: ActivationFormat) -> Tensor | None:
        """This rank's part of the logits of ``tokens`` ``[b, s]``; None on stages without the output layer."""
        run = _Logits(self, self.schedule(1, forward_only=True), iter([{"tokens": tokens}]), activations)
        for step in run.steps():
            run.forward(step)
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
    """One pass over the forward actions of a stage, which keeps no autograd graph."""

    @property
    def chunk_returns_losses(self) -> bool:
        """Whether the last chunk of the model returns losses instead of logits."""
        return self.executor.chunks_loss

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
        self.p2p = P2PCommunicator(executor.channels, activations.empty)
        self.sums = torch.zeros(executor.num_sums, dtype=torch.float64, device=activations.device)

    def steps(self) -> Iterator[Step]:
        """The stage's actions, to be performed in order; with overlap, the next one's input is received meanwhile."""
        steps = self.schedule.steps(self.stage)
        receives_ahead = self.executor.overlap or needs_receives_ahead(self.schedule)
        for step, following in zip(steps, (*steps[1:], None)):
            self.p2p.free_sent()
            self.p2p.start_receive(step)
            if following is not None and receives_ahead:
                self.p2p.start_receive(following)
            yield step
        self.p2p.close()

    def recording(self, action: Action) -> AbstractContextManager[None]:
        """Record how long ``action`` takes, without the wait for its input."""
        recorder = self.executor.recorder
        return nullcontext() if recorder is None else recorder.span(self.stage, action)

    def forward(self, step: Step) -> None:
        """Run a chunk and send its output."""
        action, virtual_stage = step.action, step.result.virtual_stage
        microbatch = self.feed(action.microbatch) if virtual_stage in self.readers else {}
        received = self.p2p.receive(step)
        read = self.executor.documents
        is_last = virtual_stage == self.last
        with self.recording(action):
            documents = None if read is None else read(microbatch["document_starts"])
            inputs = microbatch["tokens"] if received is None else self.enter(action, received)
            # [b, s/cp] or [s/(cp tp), b, h] -> [s/(cp tp), b, h], or at the end of the model logits [s/cp, b, v/tp] or
            # losses [b, s/cp].
            labels = microbatch["labels"] if is_last and self.chunk_returns_losses else None
            outputs = self.executor.chunks[action.chunk](inputs, documents, labels)
            if is_last:
                self.finish(action, outputs, microbatch)
            else:
                outputs = self.leave(action, outputs)
        if not is_last:
            self.p2p.send(step, outputs)

    def enter(self, action: Action, received: Tensor) -> Tensor:
        """The input of the chunk, from the activations received."""
        return received

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        """The activations to send, from the output of the chunk."""
        return outputs

    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        """Use the logits, for example for the loss; with ``chunk_returns_losses`` they are the losses of tokens."""
        raise NotImplementedError

    def masked_loss(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        """The summed loss of the unmasked tokens, which it adds to the sums together with their number."""
        assert self.executor.token_losses is not None
        losses = logits if self.chunk_returns_losses else self.executor.token_losses(logits, microbatch["labels"])
        mask, multiplier = microbatch["loss_mask"].to(losses.dtype), self.executor.z_loss_multiplier
        if multiplier is None:
            total = (losses * mask).sum()
            self.sums += torch.stack((total.detach(), mask.sum())).double()
            return total
        cross_entropy, squares = (losses * mask).sum(dim=(1, 2))  # [2, b, s] -> [2]
        self.sums += torch.stack((cross_entropy.detach(), mask.sum(), squares.detach())).double()
        return cross_entropy + multiplier * squares


class _Evaluation(_Pass):
    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        self.masked_loss(logits, microbatch)


class _Logits(_Pass):
    logits: Tensor | None = None
    chunk_returns_losses = False

    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        self.logits = logits


class _ReceivedActivation(Function):
    """The input of a chunk's graph: it keeps the gradient of the received activations, and not the activations."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        # It is sent next, without a copy.
        ctx.gradients.append(gradients[0].contiguous())
        return None, None, None


@dataclass(frozen=True)
class _Graph:
    """The autograd graph of a chunk and microbatch."""

    input_gradients: list[Tensor] | None
    """Filled with the gradient of the activations received; None for tokens."""
    root: Tensor | GradientEdge
    """The loss, or the output's gradient edge."""


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
        self.deferred: dict[tuple[int, int], list[DeferredWeightGrad]] = {}
        self.anchor = torch.empty(0, requires_grad=True)
        """Makes autograd record functions of the received activations, which do not require gradients."""

    def enter(self, action: Action, received: Tensor) -> Tensor:
        gradients = self.input_gradients[action.microbatch, action.chunk] = []
        entered: Tensor = _ReceivedActivation.apply(received, self.anchor, gradients)
        return entered

    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        self.keep_graph(action, self.masked_loss(logits, microbatch) * self.scale)

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        self.keep_graph(action, get_gradient_edge(outputs))
        return outputs.detach()

    def keep_graph(self, action: Action, root: Tensor | GradientEdge) -> None:
        """Keep the graph of a chunk until its backward pass, which begins at ``root``."""
        key = action.microbatch, action.chunk
        self.graphs[key] = _Graph(self.input_gradients.pop(key, None), root)

    def backward(self, step: Step) -> None:
        """Run the backward pass of a chunk, send its input's gradient and perhaps defer its weight gradients."""
        action = step.action
        graph = self.graphs.pop((action.microbatch, action.chunk))
        gradient = self.p2p.receive(step)
        with self.recording(action):
            if self.schedule.splits_backward:
                with self.executor.weight_gradients.deferring() as deferred:
                    torch.autograd.backward(graph.root, gradient)
                self.deferred[action.microbatch, action.chunk] = deferred
            else:
                torch.autograd.backward(graph.root, gradient)
        if graph.input_gradients is not None:
            (input_gradient,) = graph.input_gradients
            self.p2p.send(step, input_gradient)

    @torch.no_grad()
    def weight(self, step: Step) -> None:
        """Compute the weight gradients that a backward pass deferred."""
        action = step.action
        with self.recording(action):
            compute_deferred(self.deferred.pop((action.microbatch, action.chunk)))
