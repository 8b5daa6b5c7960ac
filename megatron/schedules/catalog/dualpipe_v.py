"""DualPipe-V: V-shaped, forward passes of one microbatch beside backward passes of another.

DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) cut in half. DeepSeek runs each pair at the same time to hide
expert communication; here the two passes run one after the other. With few microbatches it is the schedule of 2P
microbatches without the missing ones.
"""

from collections import deque
from collections.abc import Iterator

from megatron.schedules.schedule import Action
from megatron.schedules.spec import B0, B1, F0, F1, W0, W1, ChunkPass, PassCounter, ScheduleSpec, Shape


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
    # In the second half of the last backward passes, and in all that follow, the weight gradients wait.
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
