"""AdamW or SGD over the pieces that this rank owns, with master weights and clipping by the global norm.

The update itself is torch's (fused where torch has it). Where the weights that data parallelism stores have the
master weights' format, they *are* the master weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.data_parallel.strategy import DataParallel
from megatron.core.kernels.selection import OptimizerKernels
from megatron.core.optimizer.update import build_torch_optimizer
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.core.topology import Topology

_DECAYS, _IS_VOCABULARY = "decays", "is_vocabulary"
"""Keys of ours in torch's parameter groups."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step tells."""

    grad_norm: float
    """Global L2 norm before clipping, of the gradient of the mean loss."""
    is_applied: bool
    """False when the norm was not finite: then nothing was changed."""
    num_zeros: int | None
    """Zeros in the gradient, if asked for."""


@dataclass(frozen=True)
class OptimizerState:
    """One tensor of the optimizer's state: ``kind`` of elements ``[start, start + numel)`` of a parameter."""

    kind: str
    info: ParameterInfo
    start: int
    tensor: Tensor


class Optimizer:
    """Updates the pieces of ``data_parallel``."""

    def __init__(
        self,
        config: OptimizerConfig,
        data_parallel: DataParallel,
        topology: Topology,
        kernels: OptimizerKernels | None = None,
    ) -> None:
        kernels = kernels or OptimizerKernels()
        self._squared_norm = kernels.squared_norm
        self._clip_grad = config.clip_grad
        self._data_parallel = data_parallel
        self._ranks = data_parallel.piece_ranks
        self._pieces = data_parallel.pieces
        self.has_master_weights = data_parallel.needs_master_weights
        """Whether master weights exist beside the model's."""
        master = data_parallel.formats.master
        # The same tensor where it has that format already.
        self._masters = [piece.weight.to(master) for piece in self._pieces]
        is_first = topology.tensor_parallel.rank == 0
        counted = [number for number, piece in enumerate(self._pieces) if _is_counted(piece.info, is_first)]
        self._counted_pieces = [self._pieces[number] for number in counted]
        self._counted = [piece.gradient for piece in self._counted_pieces]
        self._counted_weights = [self._masters[number] for number in counted]
        self._device = topology.device
        gradients = [piece.gradient for piece in self._pieces]
        groups = self._parameter_groups(config.weight_decay)
        self._torch_optimizer = build_torch_optimizer(config, groups, self._masters, gradients, kernels.adam)

    def _parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        groups: list[dict[str, object]] = []
        for decays, is_vocabulary in product((True, False), (False, True)):
            kind = decays, is_vocabulary
            members = [
                master
                for master, piece in zip(self._masters, self._pieces)
                if (piece.info.weight_decay, piece.info.is_vocabulary) == kind
            ]
            if members:
                decay = weight_decay if decays else 0.0
                groups.append(
                    {"params": members, "weight_decay": decay, _DECAYS: decays, _IS_VOCABULARY: is_vocabulary}
                )
        return groups

    def step(
        self,
        learning_rate: float,
        gradient_factor: float,
        count_zeros: bool = False,
        *,
        vocabulary_learning_rate: float | None = None,
        weight_decay: float | None = None,
    ) -> StepResult:
        """Clip and update.

        The gradients times ``gradient_factor`` are those of the mean loss. With a norm that is not finite,
        nothing changes. Gradients are overwritten. ``vocabulary_learning_rate`` is that of embedding and head where
        they have one of their own; ``weight_decay`` that of this step where it is not the configured one.
        """
        grad_norm = self.global_norm(self._counted) * abs(gradient_factor)
        num_zeros = self._count_zeros() if count_zeros else None
        if not torch.isfinite(torch.tensor(grad_norm)):
            return StepResult(grad_norm, is_applied=False, num_zeros=num_zeros)
        factor = gradient_factor * clip_coefficient(grad_norm, self._clip_grad)
        if factor != 1.0 and self._pieces:
            torch._foreach_mul_([piece.gradient for piece in self._pieces], factor)
        for group in self._torch_optimizer.param_groups:
            is_apart = vocabulary_learning_rate is not None and group.get(_IS_VOCABULARY)
            group["lr"] = vocabulary_learning_rate if is_apart else learning_rate
            if weight_decay is not None and group.get(_DECAYS):
                group["weight_decay"] = weight_decay
        self._torch_optimizer.step()
        self.publish()
        return StepResult(grad_norm, is_applied=True, num_zeros=num_zeros)

    def publish(self) -> None:
        """Write the master weights to the model, on every rank."""
        outdated = [
            (piece.weight, master) for piece, master in zip(self._pieces, self._masters) if piece.weight is not master
        ]
        if outdated:
            weights, masters = zip(*outdated)
            torch._foreach_copy_(weights, masters)
        self._data_parallel.publish_parameters()

    def reload_master_weights(self) -> None:
        """Take the model's weights as master weights (after loading a model without optimizer state)."""
        for piece, master in zip(self._pieces, self._masters):
            if piece.weight is not master:
                master.copy_(piece.weight)

    def global_norm(self, tensors: list[Tensor]) -> float:
        """L2 norm over this rank's ``tensors`` and those of all ranks with other pieces."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if tensors:
            total += self._squared_norm(tensors)
        return float(self._ranks.all_reduce(total).sqrt())

    def weight_norm(self) -> float:
        """L2 norm of all weights."""
        return self.global_norm(self._counted_weights)

    def _count_zeros(self) -> int:
        zeros = sum(
            end - begin - int(torch.count_nonzero(piece.gradient[begin - piece.start : end - piece.start]))
            for piece in self._counted_pieces
            # Padding of the vocabulary lies in no box: it is no part of the model.
            for _, begin, end in flat_range_boxes(piece.info, piece.start, piece.stop)
        )
        return int(self._ranks.all_reduce(torch.tensor(zeros, dtype=torch.int64, device=self._device)))

    def state(self) -> Iterator[OptimizerState]:
        """Every tensor of the state but the step count; loading writes into them."""
        for master, piece in zip(self._masters, self._pieces):
            if master is not piece.weight:
                yield OptimizerState("master", piece.info, piece.start, master)
            for kind, tensor in self._torch_optimizer.state[master].items():
                if kind != "step":
                    yield OptimizerState(kind, piece.info, piece.start, tensor)

    def memory(self) -> dict[str, int]:
        """Bytes of master weights and moments on this rank, measured from the tensors."""
        sizes = {"master weights": 0, "moments": 0}
        for state in self.state():
            sizes["master weights" if state.kind == "master" else "moments"] += state.tensor.nbytes
        return sizes

    @property
    def num_steps(self) -> int:
        """Updates so far (Adam's bias correction)."""
        steps = (state["step"] for state in self._torch_optimizer.state.values() if "step" in state)
        return int(next(steps, 0))

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for state in self._torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _is_counted(info: ParameterInfo, is_first_tensor_parallel_rank: bool) -> bool:
    """Whether this rank's copy is the one that a norm counts, of those that several ranks hold."""
    return (info.tensor_parallel_sharded or is_first_tensor_parallel_rank) and info.tied_end != "head"


def clip_coefficient(grad_norm: float, limit: float) -> float:
    """Factor that brings ``grad_norm`` down to ``limit``; 1 below it, or when ``limit`` is 0 (no clipping)."""
    if limit == 0.0 or grad_norm <= limit:
        return 1.0
    return limit / (grad_norm + 1e-6)
