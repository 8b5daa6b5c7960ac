"""Exercise 5: a pipeline schedule as lists of actions. The page is docs/course/5_pipelines.md.

Fill the hole, then: megatron-llama course check 5
"""

from megatron.schedules.schedule import Action


def forward(microbatch: int) -> Action:
    """The forward pass of a microbatch, on the stage whose list it is in."""
    return Action("F", microbatch, chunk=0)


def backward(microbatch: int) -> Action:
    """The backward pass of a microbatch, on the stage whose list it is in."""
    return Action("B", microbatch, chunk=0)


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forward passes, then all backward passes. Given, as an example; every stage has the same list."""
    microbatches = range(num_microbatches)
    return [forward(microbatch) for microbatch in microbatches] + [backward(microbatch) for microbatch in microbatches]


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """The actions of ``stage`` in the schedule 1F1B, in order.

    1. Warm-up: as few forward passes as keep the later stages busy until the first gradient returns. The last stage
       (``num_stages - 1``) needs none. There may be fewer microbatches than stages.
    2. One forward pass and one backward pass in turn.
    3. Cooldown: the backward passes that are left.

    The bubble must be that of ``gpipe``, and ``stage`` may hold the activations of ``num_stages - stage`` microbatches.
    """
    raise NotImplementedError("fill this hole")
