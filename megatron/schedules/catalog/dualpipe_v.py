"""DualPipe-V: V-shaped, forward passes of one microbatch paired with backward passes of another.

Half of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). DeepSeek runs the two passes of a pair at the same time
to hide expert communication; here they run one after the other. Fewer than 2P microbatches use the schedule of 2P
without the missing ones.
"""

from collections import deque
from collections.abc import Iterator

from megatron.schedules.schedule import B0, B1, F0, F1, W0, W1, Action, ChunkPass, PassCounter, ScheduleSpec, Shape


def dualpipe_v(stage: int, shape: Shape) -> Iterator[Action]:
    after = shape.stages - stage - 1
    microbatches = max(shape.microbatches, 2 * shape.stages)
    do = PassCounter(shape.microbatches)
    late: deque[ChunkPass] = deque()
    for _ in range(2 * after):
        yield from do(F0)
    for _ in range(stage + 1):
        yield from do(F0, F1)
    for _ in range(after):
        yield from do(B1, W1, F1)
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


SCHEDULE = ScheduleSpec(
    "dualpipe-v",
    "two chunks in a V, forward passes beside backward passes",
    dualpipe_v,
    live_activations=lambda stage, shape: min(2 * shape.stages + 1, 2 * shape.microbatches),
    chunks="two chunks",
    placement="v",
    splits_backward=True,
)
