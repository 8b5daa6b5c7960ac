"""Schedules of two chunks per stage in a V: the first stage holds both ends of the model."""

#     stage       0   1   2   3
#     chunk 0     0 > 1 > 2 > 3      the numbers are virtual stages; the step from 3 to 4 needs no message
#                             v
#     chunk 1     7 < 6 < 5 < 4

from collections import deque
from collections.abc import Iterator

from megatron.schedules.schedule import B0, B1, F0, F1, W0, W1, Action, ChunkPass, PassCounter, ScheduleSpec, Shape


def zero_bubble_v(stage: int, shape: Shape) -> Iterator[Action]:
    """ZB-V: the memory of 1F1B and no bubble when F = B = W (Qi et al., arXiv 2401.10241, section 6 and appendix)."""
    after = shape.stages - stage
    do = PassCounter(shape.microbatches)
    # Fill the pipeline.
    for _ in range(2 * after - 1):
        yield from do(F0)
    for _ in range(stage):
        yield from do(F1, F0)
    for _ in range(after):
        yield from do(F1, B1, W1)
    # The steady state.
    for _ in range(shape.microbatches - shape.stages):
        yield from do(F0, B0, W0, F1, B1, W1)
    # Drain it; the delayed weight gradients are last.
    for _ in range(stage):
        yield from do(B0, B1)
    for _ in range(after):
        yield from do(B0, W0)
    for _ in range(stage):
        yield from do(W1)
    for _ in range(stage):
        yield from do(W0)


def dualpipe_v(stage: int, shape: Shape) -> Iterator[Action]:
    """DualPipe-V: forward passes of one microbatch paired with backward passes of another.

    Half of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). DeepSeek runs the two passes of a pair at the same
    time to hide expert communication; here they run one after the other. Fewer than 2P microbatches use the schedule of
    2P without the missing ones.
    """
    after = shape.stages - stage - 1
    microbatches = max(shape.microbatches, 2 * shape.stages)
    do = PassCounter(shape.microbatches)
    late: deque[ChunkPass] = deque()
    # Fill the pipeline.
    for _ in range(2 * after):
        yield from do(F0)
    for _ in range(stage + 1):
        yield from do(F0, F1)
    for _ in range(after):
        yield from do(B1, W1, F1)
    # The steady state.
    for _ in range(microbatches - 2 * shape.stages + stage + 1):
        yield from do(F0, B1, W1, F1, B0, W0)
    for _ in range(after):
        yield from do(B1, W1, F1, B0, W0)
    # From the second half of the last backward passes on, weight gradients are delayed.
    for number in range(2 * (stage + 1)):
        backward, weight = (B1, W1) if number % 2 == 0 else (B0, W0)
        yield from do(backward)
        if number <= stage:
            yield from do(weight)
        else:
            late.append(weight)
    for _ in range(after):
        yield from do(late.popleft(), B0)
        late.append(W0)
    yield from do(*late)


ZERO_BUBBLE_V = ScheduleSpec(
    "zb-v",
    "two chunks in a V, so that the first rank has both ends of the model; weight gradients fill idle time",
    zero_bubble_v,
    live_activations=lambda stage, shape: 2 * min(shape.stages, shape.microbatches),
    chunks="two chunks",
    placement="v",
    splits_backward=True,
)
DUALPIPE_V = ScheduleSpec(
    "dualpipe-v",
    "two chunks in a V, forward passes beside backward passes",
    dualpipe_v,
    live_activations=lambda stage, shape: min(2 * shape.stages + 1, 2 * shape.microbatches),
    chunks="two chunks",
    placement="v",
    splits_backward=True,
)
