"""Which operation of a step differs first between two recordings, and by how many times the expected error."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.comparison.finding import Difference
from megatron.features.record_tensors.recording import Fingerprint, Recording, TensorName, split_layer, step_order

FP64_ERROR = 1e-12
"""The expected error in fp64. Runs that compute the same differ by 1.5e-13 at most, of 125 pairs and four seeds
(test_legitimate_pairs.py); the planted causes by 2e-4 at least (test_planted_causes.py)."""
MARGIN = 8.0
"""A difference of so many times the expected error is none of rounding. Runs that compute the same reach 2.5 times in
fp32 and 1.6 times in bf16, fp16 and FP8; a stale FP8 scale reaches 16 times."""
UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-11, "fp8": 2.0**-4}

TOUCHED_BY: Mapping[str, tuple[str, ...]] = {
    "tokens": ("--seed", "--split", "--data-path", "--sample-order", "--seq-length"),
    "labels": ("--seq-length",),
    "loss_mask": ("--eod-mask-loss",),
    "embedding": ("--vocab-size", "--use-mup"),
    "input_layernorm": ("--norm-epsilon", "--apply-layernorm-1p", "rms_norm"),
    "pre_mlp_layernorm": ("--norm-epsilon", "--apply-layernorm-1p", "rms_norm"),
    "final_layernorm": ("--norm-epsilon", "--apply-layernorm-1p", "rms_norm"),
    "query": ("--add-qkv-bias", "linear"),
    "key": ("--add-qkv-bias", "linear"),
    "value": ("--add-qkv-bias", "linear"),
    "rotated_query": ("--rotary-base", "--use-rope-scaling", "--qk-layernorm", "--no-rope-freq",
                      "--reset-position-ids", "rope"),
    "rotated_key": ("--rotary-base", "--use-rope-scaling", "--qk-layernorm", "--no-rope-freq",
                    "--reset-position-ids", "rope"),
    "core_attention": ("--reset-attention-mask", "--window-size", "--attn-logit-softcapping", "--softmax-type",
                       "--context-parallel-size", "attention"),
    "linear_proj": ("--tensor-model-parallel-size", "linear"),
    "router": ("--moe-router-topk", "--moe-router-score-function", "--moe-router-pre-softmax"),
    "gate": ("linear",),
    "up": ("linear",),
    "activation": ("swiglu",),
    "mlp": ("--tensor-model-parallel-size", "--moe-token-dispatcher-type", "linear"),
    "logits": ("--untie-embeddings-and-output-weights", "--use-mup", "--z-loss-multiplier", "linear"),
    "loss": ("--z-loss-multiplier", "cross_entropy"),
}  # fmt: skip
"""The flags and kernels of an operation, by its last word."""
_READ_BY = {
    "embedding": "input_layernorm", "output": "input_layernorm", "input_layernorm": "query", "query": "rotated_query",
    "key": "rotated_key", "value": "core_attention", "rotated_query": "core_attention",
    "rotated_key": "core_attention", "core_attention": "linear_proj", "attention_residual": "pre_mlp_layernorm",
    "pre_mlp_layernorm": "gate", "gate": "activation", "up": "activation", "activation": "mlp",
    "final_layernorm": "logits", "logits": "loss",
}  # fmt: skip
"""The operation whose backward pass computes the gradient of a result: the one that reads it."""
_OF_UPDATE = ("--lr", "--lr-warmup-iters", "--lr-decay-iters", "--lr-decay-style", "--weight-decay", "--clip-grad",
              "--adam-beta1", "--adam-beta2", "--adam-eps", "--optimizer")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The difference of one tensor at one recorded step."""

    step: int
    tensor: TensorName
    distance: float
    expected: float
    a: Fingerprint
    b: Fingerprint

    @property
    def ratio(self) -> float:
        """By how many times the expected error the sides differ."""
        return self.distance / self.expected if not math.isnan(self.distance) else math.inf

    @property
    def is_beyond(self) -> bool:
        return self.ratio > MARGIN


Expected = Callable[[int, TensorName], float]
"""The expected error of a tensor at the step of an index."""


def in_fp64(step: int, tensor: TensorName) -> float:
    return FP64_ERROR


def rows(a: Sequence[Recording], b: Sequence[Recording], expected: Expected = in_fp64) -> Iterator[Row]:
    """The tensors that both sides recorded, in the order in which they are computed."""
    for step, (one, other) in enumerate(zip(a, b)):
        for name in one.ordered():
            if name in other.tensors:
                left, right = one.tensors[name], other.tensors[name]
                yield Row(step, name, left.distance(right), expected(step, name), left, right)


def first_beyond(found: Iterable[Row]) -> Row | None:
    return next((row for row in found if row.is_beyond), None)


def measured_error(exact: Sequence[Sequence[Recording]], own: Sequence[Sequence[Recording]]) -> Expected:
    """The error of each side's own precision, from its steps in fp64 and in its precision.

    If both have the same precision, a side with much larger errors than the other one is at fault, so the smaller error
    counts; otherwise the larger one. The larger one counts also for what chance decides: updates of Adam, the weights
    after them, and the choice of experts.
    """
    precisions = [side[0].facts.get("precision", "fp32") for side in own]
    least = max(UNIT_ROUNDOFF.get(one, 0.0) for one in precisions)
    choose: Callable[..., float] = min if len(set(precisions)) == 1 else max

    def errors(step: int, tensor: TensorName) -> list[float]:
        found = [
            right[step].tensors[tensor].distance(left[step].tensors[tensor])
            for left, right in zip(exact, own)
            if tensor in left[step].tensors and tensor in right[step].tensors
        ]
        return [error for error in found if not math.isnan(error)]

    def largest(step: int, direction: str) -> float:
        names = [name for name in own[0][step].tensors if name.direction == direction]
        return max((error for name in names for error in errors(step, name)), default=0.0)

    steps = range(len(own[0]))
    # Adam's update of an element whose gradient is about zero has either sign, so few elements make large errors in
    # some tensors: the largest one of all counts.
    of_updates = max(largest(step, "update") for step in steps)
    # What a step computes from the weights has their errors, which the updates before it made by chance.
    of_weights = [largest(step, "weight") for step in steps]
    # A token whose second and third expert are about equally good gets either one, and what follows has its error.
    of_routers = [
        [
            (step_order(name), max(errors(step, name), default=0.0))
            for name in own[0][step].ordered()
            if _is_router(name)
        ]
        for step in steps
    ]

    def expected(step: int, tensor: TensorName) -> float:
        if tensor.direction == "update" or (tensor.direction == "weight" and step):
            return max(least, of_updates)
        place = step_order(tensor)
        chances = [error for router, error in of_routers[step] if router <= place]
        return max(least, of_weights[step], *chances, choose(errors(step, tensor), default=least))

    return expected


def _is_router(tensor: TensorName) -> bool:
    return tensor.direction == "forward" and tensor.name.endswith(".router")


def described(row: Row, facts: Mapping[str, object]) -> Difference:
    """The difference as a finding: what, where, by how much, and what touches it."""
    words = split_layer(row.tensor.name)[1].split(".")
    if row.tensor.direction == "gradient":
        words = [_READ_BY.get(words[-1], words[-1])]
    word = next((one for one in reversed(words) if one in TOUCHED_BY), "")
    touching = _OF_UPDATE if row.tensor.direction == "update" else TOUCHED_BY.get(word, ())
    raw = facts.get("kernels")
    kernels: Mapping[str, str] = raw if isinstance(raw, dict) else {}
    named = [one if one.startswith("--") else f"kernel {one} ({kernels.get(one, 'unknown')})" for one in touching]
    times = f"{row.ratio:.0f}" if row.ratio < 1e4 else f"{row.ratio:.0e}"
    where = place_of(row, facts)
    step = int(str(facts.get("iteration", 1))) + row.step
    remark = f"step {step}, {where}: {row.distance:.1e} of its norm, {times} times the expected error"
    if named:
        remark += f"; touched by {', '.join(named)}"
    direction = row.tensor.direction.removeprefix("weight_")
    what = f"{direction} of {row.tensor.name}" if direction in ("gradient", "update") else row.tensor.name
    return Difference("operations", what, f"norm {row.a.norm:.6g}", f"norm {row.b.norm:.6g}", remark)


def place_of(row: Row, facts: Mapping[str, object]) -> str:
    """Where a tensor differs most, in words."""
    if row.a.shape != row.b.shape:
        return f"shapes {row.a.shape} and {row.b.shape}"
    where_rows, where_columns = row.a.largest_cell(row.b)
    if row.tensor.direction not in ("input", "forward", "gradient"):
        return f"rows {span(where_rows)}, columns {span(where_columns)}"
    length, head = (int(str(facts.get(name) or 1)) for name in ("length", "head_size"))
    sample, position = divmod(where_rows.start, length)
    text = f"sample {sample}, positions {span(range(position, min(position + len(where_rows), length)))}"
    if row.a.shape[1] == 1:
        return text
    word = row.tensor.name.rpartition(".")[2]
    if word.removeprefix("rotated_") in ("query", "key", "value", "core_attention"):
        return f"{text}, head {where_columns.start // head}"
    return f"{text}, columns {span(where_columns)}"


def span(numbers: range) -> str:
    """A range in words: 3, or 3 to 5."""
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start} to {numbers.stop - 1}"
