"""Muon: momentum orthogonalised with a Newton-Schulz iteration, for hidden matrices; AdamW for other parameters.

Sources: Muon (https://kellerjordan.github.io/posts/muon), Muon is Scalable for LLM Training (arXiv 2502.16982). Flags,
defaults and arithmetic are Megatron-LM's. docs/optimizer.md has the formulas and the costs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal

from megatron.flags import changed_flags, require_at_least, require_flag, require_fraction, require_positive, values_of
from megatron.update_rules.adam import Adam
from megatron.update_rules.rule import Flags, Group, ParameterFacts, Ranks, UpdateContext, UpdateRule, take_flags

if TYPE_CHECKING:
    from torch import Tensor

Coefficients = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan's post, and torch.optim.Muon.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # https://leloykun.github.io/ponder/muon-opt-coeffs
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932, algorithm 1), divided by 1.01 to the power of 1, 3 and 5.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Coefficients a, b, c of each step: X becomes a X + (b XXᵀ + c (XXᵀ)²) X."""
EPSILON = 1e-15
"""Lower bound of the norm by which a matrix is divided."""


@dataclass(frozen=True)
class MuonFlags(Flags):
    """Flags of ``--optimizer muon``."""

    muon_momentum: float = 0.9
    """Decay of muon's momentum, an average of gradients."""
    muon_nesterov: bool = False
    """Orthogonalise the average of gradient and momentum (Nesterov) instead of the momentum."""
    muon_num_ns_steps: int = 5
    """Steps of the Newton-Schulz iteration."""
    muon_coefficient_type: Literal["quintic", "simple", "polar_express"] = "quintic"
    """Coefficients of these steps. See docs/optimizer.md."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of the update of an m x n matrix: spectral is sqrt(max(m, n)), unit_rms_norm sqrt(m / n), shape_scaling
    sqrt(max(1, m / n))."""
    muon_extra_scale_factor: float = 1.0
    """Additional factor of the update. With --muon-scale-mode spectral, 0.2 gives updates about as large as AdamW's."""
    muon_fp32_matmul_prec: Literal["medium", "high"] = "medium"
    """Precision of the Newton-Schulz iteration: medium is bf16, high is fp32 (TF32 on GPUs). Under --fp64 it is always
    fp64."""
    muon_tp_mode: Literal["duplicated", "distributed"] = "duplicated"
    """Orthogonalisation of matrices that are sharded over tensor-parallel ranks: all-gather and compute the whole
    matrix on each rank (duplicated), or all-reduce every XXᵀ (distributed). Megatron-LM's blockwise would make the
    update depend on the tensor-parallel size."""
    muon_no_split_qkv: bool = False
    """Orthogonalise the fused weight of query, key and value as one matrix instead of three."""
    muon_split_fc1: bool = False
    """Orthogonalise gate and up projection as two matrices instead of one."""
    muon_scalar_optimizer: Literal["adam"] = "adam"
    """Update rule of embedding, output layer and norm weights: AdamW, with the flags of adam."""

    def check(self, optimizer: str) -> None:
        require_fraction(values_of(self, "muon_momentum"))
        require_at_least(1, values_of(self, "muon_num_ns_steps"))
        require_positive(values_of(self, "muon_extra_scale_factor"))
        names = [field.name for field in fields(MuonFlags)]
        require_flag("--optimizer muon", optimizer == "muon", changed_flags(self, *names))


class Muon(UpdateRule):
    """Muon for the matrices of the transformer layers, ``others`` for other parameters."""

    name = "muon"
    flags = MuonFlags
    is_elementwise = False

    def __init__(self, flags: MuonFlags, others: UpdateRule) -> None:
        self._flags, self._others = flags, others

    @classmethod
    def of(cls, config: Any) -> "Muon":
        return cls(take_flags(config, MuonFlags), Adam.of(config))

    def rule_for(self, info: ParameterFacts) -> UpdateRule:
        """AdamW for vectors, and for weights with one row per token id."""
        return self if len(info.global_shape) == 2 and not info.is_vocabulary else self._others

    def mup_obstacle(self) -> str | None:
        """Updates keep their spectral norm over widths if the scale depends only on the ratio of rows and columns."""
        if self._flags.muon_scale_mode != "spectral":
            return None
        return "with --muon-scale-mode spectral its updates grow with the width: use unit_rms_norm or shape_scaling."

    def state(self, weight: "Tensor") -> "dict[str, Tensor]":
        return {"momentum_buffer": weight.new_zeros(weight.shape)}

    def bind(self, groups: Sequence[Group], context: UpdateContext) -> Callable[[int], None]:
        """Momentum and weight decay run on shards; each matrix is orthogonalised on one rank."""
        updates = context.whole_matrices(lambda info: self.rule_for(info) is self)
        momentum, nesterov = self._flags.muon_momentum, self._flags.muon_nesterov

        def orthogonalize(info: ParameterFacts, matrix: "Tensor") -> "Tensor":
            return self.orthogonalize(info, matrix, context.tensor_parallel)

        def update(step: int) -> None:
            shards = {shard.info.name: (shard, group) for group in groups for shard in group.shards}
            directions = {}
            for name, (shard, _) in shards.items():
                gradient, average = shard.gradient.to(shard.weight.dtype), shard.state["momentum_buffer"]
                average.lerp_(gradient, 1.0 - momentum)
                # The gradient is not needed any more; its memory holds the direction.
                directions[name] = gradient.lerp_(average, momentum) if nesterov else average
            for name, direction in updates(directions, orthogonalize):
                shard, group = shards[name]
                shard.weight.mul_(1.0 - group.learning_rate * group.weight_decay)
                shard.weight.add_(direction, alpha=-group.learning_rate)

        return update

    def orthogonalize(self, info: ParameterFacts, matrix: "Tensor", ranks: Ranks) -> "Tensor":
        """The scaled update of this tensor-parallel rank's shard of a parameter, from the same shard of the momentum
        ``matrix``; of fused weights section by section."""
        fused = {
            "linear_qkv.weight": not self._flags.muon_no_split_qkv,
            "linear_fc1.weight": self._flags.muon_split_fc1,
        }
        is_split = any(info.name.endswith(name) and splits for name, splits in fused.items())
        heights = info.section_rows if is_split else [matrix.shape[0]]
        # The dimension that tensor parallelism divides, if any.
        pairs = zip(info.global_shape, info.local_shape)
        divided_dim = next((dim for dim, (whole, part) in enumerate(pairs) if whole != part), None)
        update = matrix.new_empty(matrix.shape)
        for section, target in zip(matrix.split(heights), update.split(heights)):
            target.copy_(self._orthogonalize_section(section, divided_dim, ranks))
        return update

    def _orthogonalize_section(self, part: "Tensor", divided_dim: int | None, ranks: Ranks) -> "Tensor":
        flags, size = self._flags, list(part.shape)
        if divided_dim is not None:
            size[divided_dim] *= ranks.size
        scale = scale_factor(size[0], size[1], flags.muon_scale_mode) * flags.muon_extra_scale_factor
        coefficients = newton_schulz_coefficients(flags.muon_coefficient_type, flags.muon_num_ns_steps)
        with _tf32(flags.muon_fp32_matmul_prec == "high"):
            in_bf16 = flags.muon_fp32_matmul_prec == "medium"
            if divided_dim is None or ranks.size == 1:
                return scale * newton_schulz(part, coefficients, in_bf16)
            if flags.muon_tp_mode == "distributed":
                return scale * newton_schulz(part, coefficients, in_bf16, divided_dim, ranks.all_reduce)
            # [tp, m/tp, n] or [tp, m, n/tp]
            gathered = ranks.all_gather(part.unsqueeze(0))
            whole = gathered.flatten(0, 1) if divided_dim == 0 else gathered.movedim(0, 1).flatten(1)
            return scale * newton_schulz(whole, coefficients, in_bf16).chunk(ranks.size, divided_dim)[ranks.rank]


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """Factor of the orthogonalised update of a ``[rows, columns]`` matrix."""
    factors = {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
    }
    return factors[mode]


def newton_schulz_coefficients(kind: str, steps: int) -> list[Coefficients]:
    """The coefficients of every step. Polar Express converges, so its last ones repeat; others are cycled."""
    known = COEFFICIENTS[kind]
    if kind == "polar_express":
        return [*known[:steps], *[known[-1]] * (steps - len(known))]
    return list(islice(cycle(known), steps))


def newton_schulz(
    matrix: "Tensor",
    coefficients: Sequence[Coefficients],
    in_bf16: bool,
    divided_dim: int | None = None,
    add_up: "Callable[[Tensor], Tensor]" = lambda tensor: tensor,
) -> "Tensor":
    """Map the singular values of ``matrix`` close to 1 with an odd polynomial per step; its singular vectors stay.

    With ``divided_dim``, ``matrix`` is this rank's shard along that dimension, and ``add_up`` sums over the ranks. fp64
    is computed in fp64, other formats in bf16 or as they are.
    """
    import torch

    # XXᵀ sums over columns: the dimension that ranks divide, otherwise the longer one.
    is_transposed = divided_dim == 0 if divided_dim is not None else matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_transposed else matrix
    norm = add_up(x.square().sum()).sqrt()
    x = x / norm.clamp(min=EPSILON)
    if in_bf16 and x.dtype != torch.float64:
        x = x.bfloat16()
    for a, b, c in coefficients:
        gram = add_up(x @ x.mT)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    x = x.to(matrix.dtype)
    return x.mT if is_transposed else x


@contextmanager
def _tf32(is_on: bool) -> Iterator[None]:
    """Allow TF32 for fp32 matrix products on GPUs."""
    import torch

    before = torch.get_float32_matmul_precision()
    if is_on:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
