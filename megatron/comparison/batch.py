"""A batch that both sides of a comparison compute, and the recording of what they compute. Megatron-core's process
imports this module, so it needs no other part of this code."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.errors import DataError
from megatron.features.record_tensors.recording import Recording, TensorName, whole

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Batch:
    """The samples of a step as a loader makes them, ``[samples, length]`` each."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, the tokens one place on
    loss_mask: Tensor  # float32
    document_starts: Tensor | None = None  # bool; attention and positions restart there

    def save(self, path: Path) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        # Copies: labels are often a view of the text of which tokens are one, too.
        tensors = {name: tensor.clone().contiguous() for name, tensor in given.items() if tensor is not None}
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> "Batch":
        """The batch in a file; raises :class:`DataError` for what is none."""
        try:
            tensors = load_file(path)
            starts = tensors.pop("document_starts", None)
            return cls(**tensors, document_starts=None if starts is None else starts.bool())
        except (OSError, SafetensorError, TypeError) as error:
            raise DataError(f"{path} is no batch ({error}): record it again.") from None

    def mean(self, losses: Tensor) -> Tensor:
        """The loss of the step from the losses of all tokens, in rows: the mean over the tokens that are not masked."""
        mask = self.loss_mask.flatten().to(losses)
        return (losses.flatten() * mask).sum() / mask.sum()

    def start_recording(self, dtype: torch.dtype, **facts: Any) -> Recording:
        """A recording of a step on this batch, with its input."""
        precision = next(name for name, one in PRECISIONS.items() if one == dtype)
        samples, length = self.tokens.shape
        recording = Recording({"iteration": 0, "samples": samples, "length": length, "precision": precision, **facts})
        for name in ("tokens", "labels", "loss_mask"):
            recording.add(TensorName("input", name), whole(getattr(self, name).reshape(-1, 1)))
        return recording


def record_result(recording: Recording, name: str, result: Tensor, as_matrix: Callable[[Tensor], Tensor]) -> None:
    """Record the ``result`` of an operation now, and its gradient when the backward pass has it. ``as_matrix`` gives
    both the form of a recording: a row for each position of each sample, and a column for each feature."""
    recording.add(TensorName("forward", name), whole(as_matrix(result.detach())))
    if result.requires_grad:
        result.register_hook(lambda gradient: recording.add(TensorName("gradient", name), whole(as_matrix(gradient))))


def finish(recording: Recording, loss: Tensor) -> None:
    """Add the facts that are known after the backward pass."""
    squares = (one.squares for name, one in recording.tensors.items() if name.direction == "weight_gradient")
    recording.facts |= {"loss": loss.item(), "grad_norm": math.sqrt(sum(squares))}


class Widened(TorchFunctionMode):
    """Computes in fp64 what other codes compute in fp32 in every dtype: norms, softmax, rotations, routers, losses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = Tensor.double if func is Tensor.float else func
        return function(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})
