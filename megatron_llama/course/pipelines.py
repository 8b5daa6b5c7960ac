"""Checks exercise 5: the lists of actions of 1F1B, by the verifier and the simulator of ``megatron/schedules``."""

from fractions import Fraction
from itertools import pairwise
from types import ModuleType

from megatron.schedules.catalog.one_f_one_b import ONE_F_ONE_B, gpipe
from megatron.schedules.schedule import Action, Placement, Schedule, ScheduleError, Shape
from megatron.schedules.simulator import Durations, peak_live_activations, simulate, verify
from megatron_llama.course.lesson import Wrong

SIZES = ((4, 8), (2, 5), (3, 3), (8, 3), (1, 2), (16, 64))
"""Stages and microbatches; there may be fewer microbatches than stages."""


def check(answer: ModuleType) -> str:
    """Verify and simulate the schedule of each of :data:`SIZES`; raises :class:`Wrong`."""
    for stages, microbatches in SIZES:
        schedule = schedule_of(answer, stages, microbatches)
        check_completeness(schedule)
        check_memory(schedule)
        check_bubble(schedule)
    live, bubble = peak_live_activations(schedule), Fraction(stages - 1, microbatches + stages - 1)
    return (
        f"The schedules are complete, in order and free of deadlock; with {stages} stages and {microbatches} "
        f"microbatches the bubble is {bubble} of the time, {float(bubble):.1%}, as with GPipe, and the first stage "
        f"holds {live[0]} activations instead of {microbatches}."
    )


def schedule_of(answer: ModuleType, stages: int, microbatches: int) -> Schedule:
    """The schedule whose actions the answer returns."""
    name = f"The schedule of {stages} stages and {microbatches} microbatches"
    actions = []
    for stage in range(stages):
        of_stage = answer.one_forward_one_backward(stage, stages, microbatches)
        if not isinstance(of_stage, list) or not all(isinstance(action, Action) for action in of_stage):
            raise Wrong(f"one_forward_one_backward{(stage, stages, microbatches)} is no list of actions: return one.")
        beyond = [action for action in of_stage if not 0 <= action.microbatch < microbatches]
        if beyond:
            raise Wrong(
                f"{name}, stage {stage}, has {words(beyond[0])}, and the batch ends at {microbatches - 1}: a pipeline "
                "that is longer than the batch is never full, so limit the warm-up to the microbatches that exist."
            )
        actions.append(tuple(of_stage))
    return Schedule(name, Placement(stages), microbatches, ("F", "B"), tuple(actions))


def check_completeness(schedule: Schedule) -> None:
    """Every action once, an order in which all stages can run, and microbatches in order."""
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            before = actions[: actions.index(action)]
            if action.kind == "B" and action._replace(kind="F") in actions and action._replace(kind="F") not in before:
                raise Wrong(
                    f"{schedule.name}, stage {stage}, has {words(action)} before its own F{action.microbatch}: the "
                    "backward pass needs the activations of the forward pass, so the forward pass comes first in every "
                    "pair."
                )
    try:
        verify(schedule)
    except ScheduleError as error:
        raise Wrong(f"{error}{why(str(error))}") from None
    for stage, actions in enumerate(schedule.actions):
        for first, second in pairwise(actions):
            if first.kind == second.kind and first.microbatch > second.microbatch:
                raise Wrong(
                    f"{schedule.name}, stage {stage}, runs {words(first)} before {words(second)}: keep the order of "
                    "the microbatches, in which the loader yields them and in which gradients are added."
                )


def why(error: str) -> str:
    """What the verifier's ``error`` means, to be added to it."""
    if "deadlocks" in error:
        return (
            ": each of these stages waits for what another would compute only after its own wait, because the next "
            "stage wants more forward passes before its first backward pass than this one gives it; the first stage "
            "needs the longest warm-up, the last stage none."
        )
    if "in the order" in error:
        return ": two stages disagree about the order of microbatches; first in, first out, also in the cooldown."
    if "too many nothing" in error:
        return ": passes of the warm-up have no backward pass; the cooldown must run all that are left."
    if "missing nothing" in error:
        return ": a pass that runs twice adds its gradients twice; the cooldown begins where the alternation has ended."
    return ": every stage runs F and B of every microbatch exactly once, so a pass has the number of another."


def check_memory(schedule: Schedule) -> None:
    """At most as many live activations on a stage as stages are left."""
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    shape, live = Shape(stages, microbatches), peak_live_activations(schedule)
    try:
        verify(schedule, tuple(ONE_F_ONE_B.live_activations(stage, shape) for stage in range(stages)))
    except ScheduleError as error:
        if schedule.actions == tuple(tuple(gpipe(stage, shape)) for stage in range(stages)):
            raise Wrong(
                f"{schedule.name} is GPipe: it is right and has the bubble of 1F1B, but every stage holds the "
                f"activations of all {microbatches} microbatches; start the first backward pass as soon as its "
                "gradient can arrive."
            ) from None
        if len(set(live)) == 1:
            raise Wrong(
                f"{schedule.name} has the same warm-up everywhere, so that all stages hold {live[0]} activations: only "
                f"the first stage waits {stages} forward passes for a gradient; a stage needs one pass for each stage "
                "behind it."
            ) from None
        raise Wrong(
            f"{error}: one forward pass too early makes nothing faster and keeps its activations; the alternation "
            "itself begins with a forward pass, so the warm-up has one pass for each later stage, and not one for the "
            "stage itself."
        ) from None


def check_bubble(schedule: Schedule) -> None:
    """Exactly ``(p - 1) / (m + p - 1)`` of the time is idle, with a backward pass as long as two forward passes."""
    stages, microbatches = schedule.placement.num_stages, schedule.num_microbatches
    time = simulate(schedule, Durations.uniform(schedule.placement, 1, 1, 1)).makespan
    bubble, wanted = 1 - Fraction(3 * microbatches) / Fraction(time), Fraction(stages - 1, microbatches + stages - 1)
    if bubble == wanted:
        return
    idle = f"{schedule.name} idles for {bubble} of the time instead of (p - 1) / (m + p - 1) = {wanted}"
    if set(peak_live_activations(schedule)) == {1}:
        raise Wrong(
            f"{idle}: without a warm-up one microbatch at a time crosses the stages, and all but one stage wait; send "
            "further forward passes before the first gradient returns."
        )
    raise Wrong(
        f"{idle}: stages behind a stage run dry while it waits for its first gradient; lengthen the warm-up by one "
        "forward pass on the stages where it is too short."
    )


def words(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"
