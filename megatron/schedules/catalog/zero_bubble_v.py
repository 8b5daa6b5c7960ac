"""ZB-V: V-shaped, with the memory of 1F1B and no bubble when F = B = W.

Qi et al., arXiv 2401.10241, section 6 and appendix.
"""

from collections.abc import Iterator

from megatron.schedules.schedule import B0, B1, F0, F1, W0, W1, Action, PassCounter, ScheduleSpec, Shape


def zero_bubble_v(stage: int, shape: Shape) -> Iterator[Action]:
    after = shape.stages - stage
    do = PassCounter(shape.microbatches)
    for _ in range(2 * after - 1):
        yield from do(F0)
    for _ in range(stage):
        yield from do(F1, F0)
    for _ in range(after):
        yield from do(F1, B1, W1)
    for _ in range(shape.microbatches - shape.stages):
        yield from do(F0, B0, W0, F1, B1, W1)
    for _ in range(stage):
        yield from do(B0, B1)
    for _ in range(after):
        yield from do(B0, W0)
    for _ in range(stage):
        yield from do(W1)
    for _ in range(stage):
        yield from do(W0)


SCHEDULE = ScheduleSpec(
    "zb-v",
    "two chunks in a V, so that the first rank has both ends of the model; weight gradients fill idle time",
    zero_bubble_v,
    live_activations=lambda stage, shape: 2 * min(shape.stages, shape.microbatches),
    chunks="two chunks",
    placement="v",
    splits_backward=True,
)
