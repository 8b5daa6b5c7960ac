"""The global batch size as a function of the consumed samples.

A constant batch, ``--rampup-batch-size`` and ``--step-batch-size-schedule`` are lists of steps (first sample, batch
size). The size depends only on consumed samples, so a resumed run has the same schedule on any number of devices.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes in steps over consumed samples; :func:`build_batches` builds and checks it."""

    steps: tuple[tuple[int, int], ...]
    """(first sample, global batch size); the first samples start at 0 and increase strictly."""
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool = False
    """Round a size down to a multiple of the unit, instead of raising."""

    @property
    def unit(self) -> int:
        """Sequences in one microbatch of every replica; divides each global batch size."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def final_batch_size(self) -> int:
        return self._running(self.steps[-1][1])

    def scheduled_batch_size(self, consumed_samples: int) -> int:
        """Global batch size of the flags, before rounding."""
        return self.steps[self._step(consumed_samples)][1]

    def global_batch_size(self, consumed_samples: int) -> int:
        """Sequences of the iteration that starts after ``consumed_samples``."""
        return self._running(self.scheduled_batch_size(consumed_samples))

    def skipped_samples(self, consumed_samples: int) -> int:
        """Sequences by which the iteration after ``consumed_samples`` is rounded down."""
        return self.scheduled_batch_size(consumed_samples) - self.global_batch_size(consumed_samples)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches per replica of the iteration that starts after ``consumed_samples``."""
        return self.global_batch_size(consumed_samples) // self.unit

    def total_samples(self, train_iters: int, consumed_samples: int = 0) -> int:
        """Samples consumed after ``train_iters`` more iterations, including ``consumed_samples``."""
        for start, size, iterations in self._stretches(consumed_samples):
            if iterations is None or train_iters <= iterations:
                return start + train_iters * size
            train_iters -= iterations
        raise AssertionError("the last stretch has no end")

    def iterations_for_samples(self, train_samples: int, consumed_samples: int = 0) -> int:
        """Whole iterations until at most ``train_samples`` are consumed, including ``consumed_samples``."""
        done = 0
        for start, size, iterations in self._stretches(consumed_samples):
            affordable = max(0, train_samples - start) // size
            if iterations is None or affordable < iterations:
                return done + affordable
            done += iterations
        raise AssertionError("the last stretch has no end")

    def _running(self, size: int) -> int:
        return size // self.unit * self.unit if self.decrease_if_needed else size

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int, int | None]]:
        """Iterations with the same batch size: (first sample, batch size, number; None for the infinite last one).

        If the last batch of a stretch crosses the next steps, they begin with the following batch.
        """
        for step in range(self._step(consumed_samples), len(self.steps)):
            size = self._running(self.steps[step][1])
            if step + 1 == len(self.steps):
                yield consumed_samples, size, None
                return
            remaining = self.steps[step + 1][0] - consumed_samples
            if remaining > 0:
                iterations = -(-remaining // size)
                yield consumed_samples, size, iterations
                consumed_samples += iterations * size

    def _step(self, consumed_samples: int) -> int:
        return bisect.bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1


def build_batches(
    config: RunConfig,
    data_parallel_size: int,
    consumed_samples: int = 0,
    earlier_lengths: Sequence[tuple[int, int]] = (),
) -> BatchSchedule:
    """The schedule of the flags; the default of ``--global-batch-size`` is one microbatch per replica.

    ``earlier_lengths`` are (samples, tokens per sample) of the data stages before the current one. Batch sizes before
    ``consumed_samples`` are not checked against this number of devices. Raises :class:`ConfigError` for flags that
    exclude each other, and for a size that is not divisible into microbatches.
    """
    training, micro_batch_size = config.training, config.micro_batch_size
    target, rampup = training.global_batch_size, training.rampup_batch_size
    if training.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule"
        for other, value in (("--global-batch-size", target), ("--rampup-batch-size", rampup)):
            if value is not None:
                raise ConfigError(f"{flag} and {other} exclude each other: remove one of them.")
        steps = parse_step_schedule(training.step_batch_size_schedule, config.seq_length, earlier_lengths)
    else:
        target = micro_batch_size * data_parallel_size if target is None else target
        flag = "--global-batch-size" if rampup is None else "--rampup-batch-size"
        steps = ((0, target),) if rampup is None else rampup_steps(target, rampup)
    decreases = training.decrease_batch_size_if_needed
    schedule = BatchSchedule(steps, micro_batch_size, data_parallel_size, decreases)
    unit, sizes = schedule.unit, [schedule.scheduled_batch_size(consumed_samples)]
    sizes += [size for first, size in steps if first > consumed_samples]
    for size in sizes:
        if size < unit or (size % unit and not decreases):
            way_out = "sizes of at least" if decreases else "multiples of"
            raise ConfigError(
                f"{flag} gives a global batch size of {size}, which is not divisible by --micro-batch-size "
                f"{micro_batch_size} x data-parallel size {data_parallel_size}: use {way_out} {unit}."
            )
    return schedule


def check_batches(config: RunConfig, data_parallel_size: int) -> None:
    """Raise :class:`ConfigError` if ``data_parallel_size`` does not divide every global batch size of the run."""
    exact = replace(config.training, decrease_batch_size_if_needed=False)
    build_batches(replace(config, training=exact), data_parallel_size)


def rampup_steps(global_batch_size: int, rampup: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """Steps of ``--rampup-batch-size START INCREMENT SAMPLES``.

    The n increments from START to ``global_batch_size`` are spread evenly over SAMPLES: the k-th applies once k/n of
    SAMPLES are consumed. Raises :class:`ConfigError` if the increments do not lead to the global batch size.
    """
    start, increment, samples = rampup
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start < 1 or increment < 1 or samples < 0:
        raise ConfigError(f"{given}: START and INCREMENT must be at least 1, and SAMPLES must not be negative.")
    growth = global_batch_size - start
    if growth < 0:
        raise ConfigError(f"{given} starts above --global-batch-size {global_batch_size}: lower START.")
    if growth % increment:
        raise ConfigError(
            f"{given} never reaches --global-batch-size {global_batch_size}: use an INCREMENT that "
            f"divides {growth}, the difference between the two sizes."
        )
    increments = growth // increment
    if increments == 0 or samples == 0:
        return ((0, global_batch_size),)
    #     8 |          ______     START 2, INCREMENT 2, SAMPLES 30, --global-batch-size 8
    #     6 |       __|
    #     4 |    __|
    #     2 | __|
    #       0  10 20 30  consumed samples
    #
    # Keyed by threshold, because a ramp with fewer samples than increments applies several at once.
    sizes = {-(-k * samples // increments): start + k * increment for k in range(increments + 1)}
    return tuple(sizes.items())


def samples_of_tokens(tokens: int, seq_length: int, earlier_lengths: Sequence[tuple[int, int]] = ()) -> int:
    """Whole samples in the first ``tokens`` tokens of a run.

    ``earlier_lengths`` are (samples, tokens per sample) of earlier data stages; samples of the current stage have
    ``seq_length`` tokens.
    """
    before = 0
    for samples, length in earlier_lengths:
        if tokens < samples * length:
            return before + tokens // length
        tokens -= samples * length
        before += samples
    return before + tokens // seq_length


def parse_step_schedule(
    schedule: str, seq_length: int, earlier_lengths: Sequence[tuple[int, int]] = ()
) -> tuple[tuple[int, int], ...]:
    """Steps of ``--step-batch-size-schedule "THRESHOLD:SIZE THRESHOLD:SIZE ..."``.

    Thresholds are tokens, as in Megatron-LM, with suffixes K, M, B and T for powers of a thousand. They are rounded
    down to whole sequences (:func:`samples_of_tokens`). Raises :class:`ConfigError` for an invalid entry, and for
    thresholds that do not increase from 0.
    """
    steps = []
    for entry in schedule.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        numbers = [_NUMBER.fullmatch(text) for text in (tokens, size)]
        values = [round(float(match[1]) * _SUFFIXES[match[2].upper()]) for match in numbers if match is not None]
        if not colon or len(values) != 2 or values[1] < 1:
            raise ConfigError(
                f"--step-batch-size-schedule {schedule!r}: {entry!r} is not TOKENS:BATCH_SIZE, for example 250B:1536."
            )
        steps.append((samples_of_tokens(values[0], seq_length, earlier_lengths), values[1]))
    steps.sort()
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] != 0 or len(set(thresholds)) != len(thresholds):
        raise ConfigError(
            f"--step-batch-size-schedule {schedule!r}: the first threshold must be 0, and the others must "
            f"differ by at least one sequence of --seq-length {seq_length} tokens."
        )
    return tuple(steps)
