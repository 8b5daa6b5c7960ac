"""The pipeline executor, which runs any schedule, and the messages between stages."""

# The life of a microbatch on two stages of one chunk each:
#
#     stage 0                                               stage 1, the last
#     F  tokens -> chunk -> outputs, send  - - - - - - - ->    receive
#        keep the graph and the gradient edge of outputs    F  a new graph begins at the received activations
#        free the outputs once they are sent                   chunk -> loss * scale; keep the graph
#                                                           B  backward from the loss: the weight gradients,
#        receive  <- - - - - - - - - - - - - - - - - - - -     and the gradient of the received activations, send
#     B  backward from the gradient edge; free the graph
#     W  only if the schedule splits backward passes: the weight gradients that B deferred
#
# The backward pass starts at the gradient edge and does not need the values of the outputs.

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.auxiliary_losses import AuxiliaryLosses
from megatron.core.communication import Communicator, Work
from megatron.core.gradient import DeferredWeightGrad, WeightGradStore, compute_deferred
from megatron.core.ops.documents import Documents
from megatron.schedules.schedule import Action, Kind, Placement, Result, Schedule, Step
from megatron.schedules.simulator import Span, needs_receives_ahead, verify

Microbatch = Mapping[str, Tensor]
"""``tokens``, ``labels`` and ``loss_mask``, each ``[b, s]``, and ``document_starts`` where these matter; for ``D``
depths of multi-token prediction ``future_labels`` and ``future_mask``, each ``[b, D, s]``."""

ReadDocuments = Callable[[Tensor], Documents]
"""``document_starts`` to documents."""

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels ``[b, s]`` to the loss of every token ``[b, s]``; under a z-loss to ``[2, b, s]``, the cross
entropy and the squared log-sum-exp."""

Channels = Callable[[Kind, int, int], Communicator]
"""(kind, source stage, target stage) to the communicator that carries such messages."""


class Chunk(Protocol):
    """A virtual stage: token ids or activations to activations, or at the end to logits, or with ``labels`` to what
    :data:`TokenLosses` returns. With the microbatch ``future`` the losses of multi-token prediction are added."""

    def __call__(
        self,
        inputs: Tensor,
        documents: Documents | None = None,
        labels: Tensor | None = None,
        future: Microbatch | None = None,
    ) -> Tensor: ...


class FutureLosses(Protocol):
    """Multi-token prediction, whose losses have weights that depend on the tokens of the whole step."""

    def start_step(self, microbatches: Sequence[Microbatch]) -> None: ...


@dataclass(frozen=True)
class ActivationFormat:
    """The activations that stages send each other."""

    shape: tuple[int, ...]
    """``[s(/tp), b, h]``."""
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Recorder(Protocol):
    """Observer of pipeline actions."""

    def span(self, stage: int, action: Action) -> AbstractContextManager[None]: ...


class NamedActions:
    """Names the actions in traces of torch's profiler and of nsys: ``F`` or ``B`` or ``W``, microbatch, chunk."""

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        with torch.profiler.record_function(str(action)):
            yield


class ActionRecorder:
    """Records start and end of actions, in seconds since its construction; on a GPU by events, without a host sync."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type != "cpu"
        self._origin = self._mark()
        self._marks: list[tuple[int, Action, Any, Any]] = []

    def _mark(self) -> Any:
        """The time of the host, or on a GPU an event."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, stage: int, action: Action) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((stage, action, start, self._mark()))

    def spans(self) -> tuple[Span, ...]:
        """Everything recorded; waits for the device."""
        origin = self._origin

        def seconds(mark: Any) -> float:
            return origin.elapsed_time(mark) / 1e3 if self._on_gpu else mark - origin

        if self._on_gpu:
            torch.cuda.synchronize()
        return tuple(Span(stage, action, seconds(start), seconds(end)) for stage, action, start, end in self._marks)


@dataclass(eq=False)
class PipelineExecutor:
    """Runs this rank's part of a schedule over the microbatches of a global batch."""

    chunks: Sequence[Chunk]
    """The chunks of this stage."""
    token_losses: TokenLosses | None
    """None on stages without the output layer."""
    stage: int
    build_schedule: InitVar[Callable[[int], Schedule]]
    """The schedule of a number of microbatches."""
    channels: Channels
    activations: ActivationFormat
    weight_gradients: WeightGradStore
    overlap: bool = True
    """Whether the input of the next action is received while an action runs."""
    documents: ReadDocuments | None = None
    """If set, every stage reads microbatches, else only the stages at the ends of the model."""
    chunks_loss: bool = False
    """Whether the last chunk of the model computes the losses itself."""
    z_loss_multiplier: float | None = None
    """Factor of the squared log-sum-exp that is added to the loss of every token (PaLM, arXiv 2204.02311, section
    5)."""
    auxiliary_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)
    """Losses inside the chunks, and the z-loss."""
    future: FutureLosses | None = None
    """Multi-token prediction, on the rank with the output layer."""
    recorder: Recorder | None = field(default=None, init=False)

    def __post_init__(self, build_schedule: Callable[[int], Schedule]) -> None:
        @lru_cache(maxsize=8)
        def verified(num_microbatches: int, forward_only: bool) -> Schedule:
            schedule = build_schedule(num_microbatches)
            schedule = schedule.forward_only() if forward_only else schedule
            verify(schedule)
            return schedule

        self._verified = verified
        self.placement = self.schedule(1).placement
        open_channels(self.placement, self.stage, self.channels, self.activations.device)

    @property
    def readers(self) -> set[int]:
        """The virtual stages of this rank that read microbatches."""
        chunks = range(self.placement.num_chunks)
        mine = {self.placement.virtual_stage(self.stage, chunk) for chunk in chunks}
        return mine if self.documents is not None else mine & {0, self.placement.num_virtual_stages - 1}

    def schedule(self, num_microbatches: int, forward_only: bool = False) -> Schedule:
        return self._verified(num_microbatches, forward_only)

    def train(self, microbatches: Iterator[Microbatch], num_microbatches: int, scale: float) -> Tensor:
        """Forward and backward over ``num_microbatches``; stages with neither embedding nor output layer read none.

        Adds the gradients of ``scale`` times the summed loss to the buffers; returns the sum of the cross entropy of
        the unmasked tokens and their number, ``[2]`` in fp64, zero on stages without the output layer.
        """
        self.auxiliary_losses.start_step(scale)
        if self.future is not None:
            batch = list(islice(microbatches, num_microbatches))
            self.future.start_step(batch)
            microbatches = iter(batch)
        run = _Training(self, self.schedule(num_microbatches), microbatches, scale)
        perform = {"F": run.forward, "B": run.backward, "W": run.weight}
        for step in run.steps():
            perform[step.action.kind](step)
        return run.sums

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch], num_microbatches: int) -> Tensor:
        """The sums of :meth:`train` from forward passes alone.

        A few microbatches at a time, because no backward pass keeps a stage from running far ahead of the next.
        """
        at_once = max(1, 2 * self.placement.num_stages // self.placement.num_chunks)
        sums = torch.zeros(2, dtype=torch.float64, device=self.activations.device)
        for first in range(0, num_microbatches, at_once):
            schedule = self.schedule(min(at_once, num_microbatches - first), forward_only=True)
            run = _Pass(self, schedule, microbatches)
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


def open_channels(placement: Placement, stage: int, channels: Channels, device: torch.device) -> None:
    """Connect the stages; all of them call it.

    The first message between two ranks makes their connection, for which NCCL blocks both until both are there. So
    every channel carries one message, in one order on all ranks, before messages that overlap.
    """
    message = torch.zeros(1, device=device)
    for virtual_stage in range(placement.num_virtual_stages - 1):
        here, _ = placement.location(virtual_stage)
        there, _ = placement.location(virtual_stage + 1)
        directions: tuple[tuple[Kind, int, int], ...] = (("F", here, there), ("B", there, here))
        for kind, source, target in directions if here != there else ():
            communicator = channels(kind, source, target)
            # Opened on all stages, also on those without this channel: torch counts process groups.
            communicator.open()
            if stage == source:
                communicator.start_send(message, target).wait()
            elif stage == target:
                communicator.start_receive(message, source).wait()


class P2PCommunicator:
    """Sends and receives of one stage during one pass over a schedule; a result for the stage itself is kept.

    Sends are asynchronous, and each keeps its tensor until it is complete. Every message is received in a new tensor
    from ``empty``.
    """

    def __init__(self, channels: Channels, empty: Callable[[], Tensor]) -> None:
        self._channels, self._empty = channels, empty
        self._local: dict[Result, Tensor] = {}
        self._sends: list[Work[Tensor]] = []
        self._receives: dict[Result, Work[Tensor]] = {}

    def start_receive(self, step: Step) -> None:
        """Start to receive the input of ``step``, if it is a message; call it in the order of the steps."""
        if step.incoming is not None and step.incoming.result not in self._receives:
            communicator = self._channels(*step.incoming.channel)
            self._receives[step.incoming.result] = communicator.start_receive(self._empty(), step.incoming.source)

    def free_sent(self) -> None:
        """Free the tensors whose send is complete; raises the error of a send that failed."""
        complete = [work for work in self._sends if work.is_complete]
        self._sends = [work for work in self._sends if work not in complete]
        for work in complete:
            work.wait()

    def receive(self, step: Step) -> Tensor | None:
        """The input of ``step``, received or from this stage itself; None without input."""
        if step.incoming is not None:
            return self._receives.pop(step.incoming.result).wait()
        return None if step.source is None else self._local.pop(step.source)

    def send(self, step: Step, tensor: Tensor) -> None:
        """Send the result of ``step`` to another stage or keep it for this one; it must not be modified afterwards."""
        if step.outgoing is None:
            self._local[step.result] = tensor
        else:
            communicator = self._channels(*step.outgoing.channel)
            self._sends.append(communicator.start_send(tensor.contiguous(), step.outgoing.target))

    def close(self) -> None:
        """Wait until everything is sent."""
        assert not self._local and not self._receives
        for work in self._sends:
            work.wait()
        self._sends.clear()


class MicrobatchQueue:
    """Microbatches in the order of the iterator; one is dropped once it has been read ``uses`` times."""

    def __init__(self, microbatches: Iterator[Microbatch], uses: int, device: torch.device) -> None:
        self._microbatches, self._uses, self._device = microbatches, uses, device
        self._waiting: dict[int, list[Microbatch]] = {}
        self._next = 0

    def read(self, number: int) -> Microbatch:
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
    """One pass over the forward actions of a stage, which keeps no autograd graph and sums the losses."""

    computes_losses, trains = True, False

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        microbatches: Iterator[Microbatch],
        activations: ActivationFormat | None = None,
    ) -> None:
        self.executor, self.schedule, self.stage = executor, schedule, executor.stage
        activations = activations or executor.activations
        self.last = schedule.placement.num_virtual_stages - 1
        self.readers = executor.readers
        self.microbatches = MicrobatchQueue(microbatches, len(self.readers), activations.device)
        self.p2p = P2PCommunicator(executor.channels, activations.empty)
        self.sums = torch.zeros(2, dtype=torch.float64, device=activations.device)

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
        microbatch = self.microbatches.read(action.microbatch) if virtual_stage in self.readers else {}
        received = self.p2p.receive(step)
        read = self.executor.documents
        is_last = virtual_stage == self.last
        with self.recording(action):
            documents = None if read is None else read(microbatch["document_starts"])
            inputs = microbatch["tokens"] if received is None else self.enter(action, received)
            # [b, s/cp] or [s/(cp tp), b, h] -> [s/(cp tp), b, h], or at the end of the model logits [s/cp, b, v/tp] or
            # losses [b, s/cp].
            chunk_computes_losses = is_last and self.computes_losses and self.executor.chunks_loss
            labels = microbatch["labels"] if chunk_computes_losses else None
            future = microbatch if is_last and self.trains and self.executor.future is not None else None
            outputs = self.executor.chunks[action.chunk](inputs, documents, labels, future)
            if is_last:
                self.finish(action, outputs, microbatch)
            else:
                outputs = self.leave(action, outputs)
        if not is_last:
            self.p2p.send(step, outputs)

    def enter(self, action: Action, received: Tensor) -> Tensor:
        return received

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        return outputs

    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        """Use the logits; with ``chunks_loss`` they are the losses of tokens."""
        self.masked_loss(logits, microbatch)

    def masked_loss(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        """The summed loss of the unmasked tokens, which it adds to the sums together with their number."""
        executor = self.executor
        assert executor.token_losses is not None
        losses = logits if executor.chunks_loss else executor.token_losses(logits, microbatch["labels"])
        mask, multiplier = microbatch["loss_mask"].to(losses.dtype), executor.z_loss_multiplier
        count = mask.sum()
        if multiplier is None:
            cross_entropy = total = (losses * mask).sum()
        else:
            cross_entropy, squares = (losses * mask).sum(dim=(1, 2))  # [2, b, s] -> [2]
            total = cross_entropy + multiplier * squares
            executor.auxiliary_losses.record("lm_z_loss", squares, count)
        self.sums += torch.stack((cross_entropy.detach(), count)).double()
        return total


class _Logits(_Pass):
    computes_losses = False
    logits: Tensor | None = None

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


class _Training(_Pass):
    trains = True

    def __init__(
        self, executor: PipelineExecutor, schedule: Schedule, microbatches: Iterator[Microbatch], scale: float
    ) -> None:
        super().__init__(executor, schedule, microbatches)
        self.scale = scale
        # By microbatch and chunk: the root of the graph (the loss, or the output's gradient edge); the list that gets
        # the gradient of the received activations, which tokens do not have; and what waits for the action W.
        self.roots: dict[tuple[int, int], Tensor | GradientEdge] = {}
        self.input_gradients: dict[tuple[int, int], list[Tensor]] = {}
        self.deferred: dict[tuple[int, int], list[DeferredWeightGrad]] = {}
        self.anchor = torch.empty(0, requires_grad=True)
        """Makes autograd record functions of the received activations, which do not require gradients."""

    def enter(self, action: Action, received: Tensor) -> Tensor:
        gradients = self.input_gradients[action.microbatch, action.chunk] = []
        entered: Tensor = _ReceivedActivation.apply(received, self.anchor, gradients)
        return entered

    def finish(self, action: Action, logits: Tensor, microbatch: Microbatch) -> None:
        self.roots[action.microbatch, action.chunk] = self.masked_loss(logits, microbatch) * self.scale

    def leave(self, action: Action, outputs: Tensor) -> Tensor:
        self.roots[action.microbatch, action.chunk] = get_gradient_edge(outputs)
        return outputs.detach()

    def backward(self, step: Step) -> None:
        """Run the backward pass of a chunk, send its input's gradient and perhaps defer its weight gradients."""
        action, key = step.action, (step.action.microbatch, step.action.chunk)
        root, input_gradients = self.roots.pop(key), self.input_gradients.pop(key, None)
        gradient = self.p2p.receive(step)
        with self.recording(action):
            if self.schedule.splits_backward:
                with self.executor.weight_gradients.deferring() as self.deferred[key]:
                    torch.autograd.backward(root, gradient)
            else:
                torch.autograd.backward(root, gradient)
        if input_gradients is not None:
            (input_gradient,) = input_gradients
            self.p2p.send(step, input_gradient)

    @torch.no_grad()
    def weight(self, step: Step) -> None:
        """Compute the weight gradients that a backward pass deferred."""
        action = step.action
        with self.recording(action):
            compute_deferred(self.deferred.pop((action.microbatch, action.chunk)))
