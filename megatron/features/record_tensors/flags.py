"""The flags that record the tensors of training steps."""

from dataclasses import dataclass

from megatron.flags import changed_flags, require_at_least, require_flag, values_of
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class RecordTensorsFlags:
    """Recordings of the tensors of a step, for megatron-llama diff."""

    record_tensors: str | None = None
    """Directory that receives, for each iteration of --record-tensors-iterations, digests, norms, sketches and sampled
    elements of the result of every operation, of its gradient, and of every parameter, its gradient and its update, in
    global coordinates, and the batch (docs/why_does_my_loss_differ.md has the format). Such an iteration takes several
    times as long, and the memory of a copy of the master weights; the others are as without it."""
    record_tensors_iterations: tuple[int, ...] = ()
    """Iterations that --record-tensors records (default: the first one of this process)."""

    def check(self) -> None:
        refuse_urls(values_of(self, "record_tensors"), "use a local directory, and copy it afterwards")
        given = changed_flags(self, "record_tensors_iterations")
        require_flag("--record-tensors DIR", self.record_tensors is not None, given)
        for iteration in self.record_tensors_iterations:
            require_at_least(1, {"--record-tensors-iterations": iteration})
