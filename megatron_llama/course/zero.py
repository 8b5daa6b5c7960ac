"""Checks exercise 3: the ZeRO-1 update of a rank, beside torch.optim.AdamW in one process."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from megatron.core.communication import CollectiveRecord
from megatron_llama.course.lesson import Wrong, require_tensor
from megatron_llama.course.ranks import ThreadCommunicator, run_ranks

CASES = ((4, 12), (4, 10), (3, 7), (8, 5), (1, 3))
"""Ranks, and parameters, which the ranks need not divide."""
STEPS, UNCLIPPED, CLIPPED = 3, 1e9, 0.5
FIELDS = ("master", "exp_avg", "exp_avg_sq")
FACTS = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Job:
    """What all ranks train: weights, and the gradients of each step and rank."""

    ranks: int
    weights: Tensor
    gradients: Tensor  # [steps, ranks, length]
    adam: Any

    @classmethod
    def of(cls, answer: ModuleType, ranks: int, length: int, max_norm: float) -> "Job":
        draw = torch.Generator().manual_seed(ranks)
        weights = torch.randn(length, dtype=torch.float64, generator=draw)
        gradients = torch.randn(STEPS, ranks, length, dtype=torch.float64, generator=draw)
        return cls(ranks, weights, gradients, answer.Adam(**FACTS, max_norm=max_norm))

    def shards(self, vector: Tensor) -> Sequence[Tensor]:
        """The padded parts of the ranks."""
        return functional.pad(vector, (0, -len(vector) % self.ranks)).chunk(self.ranks)

    def right(self) -> list[tuple[Tensor, float]]:
        """The weights after each step in one process, and the norm of its gradient."""
        parameter = torch.nn.Parameter(self.weights.clone())
        betas, adam = (self.adam.beta1, self.adam.beta2), self.adam
        optimizer = torch.optim.AdamW(
            [parameter], adam.learning_rate, betas, eps=adam.eps, weight_decay=adam.weight_decay, foreach=False
        )
        steps = []
        for gradient in self.gradients.mean(1):
            parameter.grad = gradient.clone()
            norm = clip_grad_norm_([parameter], adam.max_norm)
            optimizer.step()
            steps.append((parameter.detach().clone(), norm.item()))
        return steps


@dataclass(frozen=True)
class Seen:
    """A rank after one of its steps."""

    weights: Tensor
    norm: object
    state: Any
    records: Sequence[CollectiveRecord]


def train(answer: ModuleType, job: Job) -> list[list[Seen]]:
    """What each rank has after the start and after each step."""

    def run(communicator: ThreadCommunicator) -> list[Seen]:
        weights = job.weights.clone()
        state = answer.start(communicator, weights, job.weights.dtype)
        check_state(state, job, communicator.rank)
        seen = [Seen(weights.clone(), 0.0, None, ())]
        for gradients in job.gradients:
            before = len(communicator.records)
            norm = answer.update(communicator, weights, gradients[communicator.rank].clone(), state, job.adam)
            copy = replace(state, **{name: getattr(state, name).clone() for name in FIELDS})
            seen.append(Seen(weights.clone(), norm, copy, communicator.records[before:]))
        return seen

    return run_ranks(job.ranks, run).results


def check_state(state: Any, job: Job, rank: int, dtype: torch.dtype = torch.float64) -> None:
    """The state at the start: sizes, and the rank's own weights."""
    where, shards = f"rank {rank} of {job.ranks}", job.shards(job.weights.to(dtype))
    for name in FIELDS:
        value, wanted = getattr(state, name, None), shards[rank]
        if isinstance(value, Tensor) and value.numel() >= len(job.weights) > len(wanted):
            raise Wrong(
                f"{name} has {value.numel()} numbers on {where}, the whole model: a rank has the state of its shard "
                f"alone, {len(wanted)} numbers, or nothing is saved."
            )
        value = require_tensor(value, f"{name} on {where}", wanted.shape, dtype)
        if name != "master" and value.any():
            raise Wrong(f"{name} on {where} does not start at zero: Adam's moments are means of gradients alone.")
    if not torch.equal(state.master, shards[rank]):
        raise Wrong(
            f"master on {where} is not its part of the weights with zeros after the last: pad, then take own_part."
        )


def check(answer: ModuleType) -> str:
    """Compare three steps with one process in fp64, with clipping and without; raises :class:`Wrong`."""
    for max_norm in (UNCLIPPED, CLIPPED):
        for size, length in CASES:
            job = Job.of(answer, size, length, max_norm)
            ranks = train(answer, job)
            for number, (weights, norm) in enumerate(job.right(), start=1):
                for rank, seen in enumerate(ranks):
                    check_step(job, number, rank, seen, weights, norm)
    check_master_weights(answer)
    return (
        "Weights, norm and clipping are those of one process on 1 to 8 ranks; of 10 parameters on 4 ranks each keeps "
        "the state of 3 in 9 numbers instead of 30, for one reduce-scatter and one all-gather in a step."
    )


def check_step(job: Job, number: int, rank: int, seen: Sequence[Seen], weights: Tensor, norm: float) -> None:
    """Step ``number`` on ``rank``: first what was sent, then gradient, norm and weights."""
    where, before, after = f"step {number} on rank {rank} of {job.ranks}", seen[number - 1], seen[number]
    if number == 1:
        check_gradient(job, rank, after, where)
    check_norm(job, rank, after, where, number, norm)
    if after.weights.isnan().any():
        raise Wrong(
            f"weights after {where} have NaN: 1 - beta^step is 0 if a step is counted after it instead of before."
        )
    if not torch.allclose(after.weights, weights, rtol=1e-9, atol=1e-12):
        raise Wrong(f"weights after {where} {wrong_weights(job, number, rank, before.weights, after.weights)}")
    kinds = Counter(one.kind for one in after.records)
    if job.ranks > 1 and kinds != {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}:
        found = ", ".join(f"{times} {kind}" for kind, times in sorted(kinds.items()))
        raise Wrong(
            f"{where} calls {found}: the gradients need one reduce_scatter, the norm an all_reduce of one number, and "
            "the weights one all_gather, as many bytes as the all-reduce of the gradients that they replace."
        )
    numbers = max((one.num_bytes // 8 for one in after.records if one.kind == "all_reduce"), default=1)
    if numbers > 1:
        raise Wrong(
            f"{where} calls all_reduce with {numbers} numbers: only the squared norm, one number, needs a sum on all."
        )


def check_gradient(job: Job, rank: int, seen: Seen, where: str) -> None:
    """What gradient the first step has used, from the first moment, which is (1 - beta1) times it."""
    mean, own = job.gradients[0].mean(0), job.gradients[0, rank]
    clipping = job.adam.max_norm / (mean.norm() + 1e-6)
    real = max(0, min(len(mean) - rank * len(seen.state.exp_avg), len(seen.state.exp_avg)))
    used = seen.state.exp_avg[:real] / (1 - job.adam.beta1)

    def is_used(vector: Tensor) -> bool:
        return torch.allclose(used, job.shards(vector)[rank][:real], rtol=1e-9, atol=1e-12)

    if not is_used(mean * clipping.clamp(max=1)):
        reasons = (
            (
                mean * clipping,
                "is enlarged to the norm of the limit: clipping makes long gradients shorter, and no other.",
            ),
            (mean, "is not clipped: multiply by max_norm / (norm + 1e-6) if that is below 1."),
            (
                mean * (job.adam.max_norm / mean.norm()).clamp(max=1),
                "is clipped without the 1e-6 that clip_grad_norm_ adds to the norm.",
            ),
            (
                mean * (job.adam.max_norm / (job.shards(mean)[rank].norm() + 1e-6)).clamp(max=1),
                "is clipped by the norm of the rank's own shard: use the norm of the whole gradient, or the direction "
                "changes.",
            ),
            (
                mean * clipping.clamp(max=1) * job.adam.beta1 / (1 - job.adam.beta1),
                "has the weight beta1, and the old moment 1 - beta1: exchange them.",
            ),
            (
                mean * job.ranks,
                "is the sum over the ranks: divide it by their number, which Adam and clipping would hide.",
            ),
            (mean / job.ranks, "is divided twice by the number of ranks: the mean divides once."),
            (own, "is that of the rank's own samples: reduce it over the ranks first."),
            (
                own / job.ranks,
                "is a part of the rank's own samples: reduce it over the ranks, which sums, then divide.",
            ),
            (
                mean + job.adam.weight_decay * job.weights,
                "has the weight decay in it: AdamW decays the weights instead.",
            ),
        )
        for vector, reason in reasons:
            if is_used(vector):
                raise Wrong(f"The gradient that exp_avg takes in {where} {reason}")
        raise Wrong(
            f"exp_avg after {where} is not (1 - beta1) times the rank's shard of the mean gradient: look at what the "
            "reduce-scatter returns, and at the factor of the clipping."
        )
    squared = seen.state.exp_avg_sq[:real] / (1 - job.adam.beta2)
    if not torch.allclose(squared, used.square(), rtol=1e-9, atol=1e-12):
        raise Wrong(f"exp_avg_sq after {where} is not (1 - beta2) times the square of the clipped gradient.")


def check_norm(job: Job, rank: int, seen: Seen, where: str, number: int, norm: float) -> None:
    """The norm that the step has returned."""
    if not isinstance(seen.norm, float):
        raise Wrong(f"{where} returns a {type(seen.norm).__name__}: return the norm as a float, by item().")
    if abs(seen.norm - norm) < 1e-9 * norm:
        return
    shards = [shard.norm().item() for shard in job.shards(job.gradients[number - 1].mean(0))]
    reasons = (
        (
            shards[rank],
            "the norm of one shard, so add the squares of all ranks by an all_reduce, or each rank clips otherwise.",
        ),
        (sum(shards), "the sum of the norms of the shards, so add their squares, and take the root of the sum."),
        (norm**2, "its square, so take the root."),
        (norm * job.ranks, "the norm of the sum over the ranks, so divide before its norm is taken."),
        (
            job.gradients[number - 1, rank].norm().item(),
            "that of the rank's own gradient, so reduce the gradients first.",
        ),
        (min(norm, job.adam.max_norm), "that after clipping, and the one before it belongs in the log."),
    )
    reason = next(
        (reason for value, reason in reasons if abs(seen.norm - value) < 1e-5 * value),
        "no norm that the check knows, so look at what is squared and added.",
    )
    raise Wrong(f"The norm in {where} is {seen.norm:.6g} instead of {norm:.6g}: it is {reason}")


def wrong_weights(job: Job, number: int, rank: int, before: Tensor, after: Tensor) -> str:
    """What is wrong with the weights of a step whose moments are right."""
    if torch.equal(before, after):
        return "are those before it: write into the tensor of the caller, by weights.copy_()."
    others = [place for place in range(job.ranks) if place != rank]
    if all(torch.equal(job.shards(before)[place], job.shards(after)[place]) for place in others if others):
        return "have changed in the rank's own shard alone: gather the shards of the other ranks."
    if number > 1:
        return "are wrong, and were right after the first step: the moments and the number of steps must last in state."
    adam, gradient = job.adam, job.gradients[0].mean(0)
    gradient = gradient * (adam.max_norm / (gradient.norm() + 1e-6)).clamp(max=1)
    decay, rate = 1 - adam.learning_rate * adam.weight_decay, adam.learning_rate
    mean, square = (1 - adam.beta1) * gradient, (1 - adam.beta2) * gradient.square()
    update = rate * gradient / (gradient.abs() + adam.eps)
    reasons = (
        (
            before * decay - rate * mean / (square.sqrt() + adam.eps),
            "have no bias correction: divide by 1 - beta^step.",
        ),
        (
            before * decay - rate * gradient / (square.sqrt() + adam.eps),
            "have a bias correction of exp_avg alone: divide exp_avg_sq by 1 - beta2^step, too.",
        ),
        (
            before * (1 - adam.weight_decay) - update,
            "decay by weight_decay in each step: AdamW decays by learning_rate * weight_decay.",
        ),
        (before - update, "have no weight decay: multiply them by 1 - learning_rate * weight_decay before the update."),
        ((before - update) * decay, "are decayed after the update, where AdamW decays before it."),
        (
            before * decay - rate * gradient / (gradient.square() + adam.eps).sqrt(),
            "have eps inside of the root: add it to the root, of which it is a bound from below.",
        ),
        (before * decay + update, "have moved up the gradient: subtract the update."),
    )
    for wrong, reason in reasons:
        if torch.allclose(after, wrong, rtol=1e-9, atol=1e-12):
            return reason
    return "are wrong, and the moments are right: look at the update, and at the order of the gathered shards."


def check_master_weights(answer: ModuleType) -> None:
    """Thirty updates that are each below the spacing of bf16, and together are not lost."""
    job = Job.of(answer, 2, 4, UNCLIPPED)
    adam = replace(job.adam, learning_rate=1e-4, weight_decay=0.0, eps=1e-12)

    def run(communicator: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        weights = torch.ones(4, dtype=torch.bfloat16)
        state = answer.start(communicator, weights, torch.float32)
        require_tensor(state.master, "master for weights in bf16", (2,), torch.float32)
        for _ in range(30):
            answer.update(communicator, weights, torch.ones_like(weights), state, adam)
        sent = max((one.num_bytes for one in communicator.records if one.kind == "all_gather"), default=0)
        if sent > weights.nbytes:
            raise Wrong(
                f"The all_gather of 4 weights in bf16 has {sent} bytes instead of {weights.nbytes}: round the master "
                "weights before they are sent, and not after."
            )
        return state.master, weights

    for master, weights in run_ranks(2, run).results:
        if not torch.allclose(master, torch.full_like(master, 1 - 30e-4), rtol=1e-5):
            raise Wrong(
                f"After 30 updates of 1e-4 a master weight of 1 is {master[0]:.5f}: the bf16 weights lose an update "
                "that is below their spacing of 1/256, so that master weights must last from step to step."
            )
        if not torch.equal(weights, torch.cat([master, master]).to(torch.bfloat16)):
            raise Wrong("The bf16 weights are not the rounded master weights: gather what the ranks have rounded.")
