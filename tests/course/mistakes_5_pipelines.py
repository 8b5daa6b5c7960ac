"""Mistakes in the answer to exercise 5: a text of it, what stands there instead, and words of the sentence about it."""

WARM_UP = "min(num_stages - stage - 1, num_microbatches)"
COOLDOWN = "range(num_microbatches - warm_up, num_microbatches)"

MISTAKES = (
    (WARM_UP, "num_microbatches", "is GPipe: it is right"),
    (WARM_UP, "min(max(num_stages - stage - 2, 0), num_microbatches)", "run dry"),
    (WARM_UP, "min(num_stages - stage, num_microbatches)", "holds activations of 5 passes, not 4"),
    (WARM_UP, "min(num_stages - 1, num_microbatches)", "the same warm-up everywhere, so that all stages hold 4"),
    (WARM_UP, "min(stage, num_microbatches)", "deadlocks: stage 0 before B0.0"),
    (WARM_UP, "0", "one microbatch at a time"),
    (WARM_UP, "num_stages - stage - 1", "has F3, and the batch ends at 2"),
    (COOLDOWN, "range(num_microbatches - warm_up, num_microbatches - 1)", "missing B7.0; too many nothing"),
    (COOLDOWN, "range(max(num_microbatches - warm_up - 1, 0), num_microbatches)", "a pass that runs twice"),
    (COOLDOWN, "reversed(range(num_microbatches - warm_up, num_microbatches))", "first in, first out"),
    (
        "actions.append(forward(warm_up + microbatch))\n        actions.append(backward(microbatch))",
        "actions.append(backward(microbatch))\n        actions.append(forward(warm_up + microbatch))",
        "has B0 before its own F0",
    ),
    ("actions.append(forward(warm_up + microbatch))", "actions.append(forward(microbatch))", "the number of another"),
)
