"""The weights of two sides at the same iterations, tensor by tensor under global names."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.checkpoint.hugging_face.weights import HuggingFaceImport
from megatron.checkpoint.manifest import MODEL
from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint, MegatronImport
from megatron.checkpoint.streaming import AveragedModel, ChunkedModel, SavedTensors
from megatron.comparison.bisection import span
from megatron.comparison.finding import Comparison, Difference
from megatron.comparison.side import Side
from megatron.features.record_tensors.recording import Rectangle, fingerprint

_SHOWN = 12
_ROUNDED = 2.0**-8
"""Twice the unit roundoff of bf16."""


def model_of(side: Side, iteration: int, zero_centered: bool = False) -> ChunkedModel:
    """The weights of a side, readable by rows under the names ``model/...``; those of a model of Hugging Face are
    ``zero_centered``, gains minus one, if the other side's are."""
    directory = side.checkpoints[iteration]
    if side.kind == "hugging-face":
        return HuggingFaceImport(directory, None, lambda done: None, zero_centered)
    if side.kind == "megatron-lm":  # with the padding of the vocabulary
        return MegatronImport(MegatronCheckpoint(directory), None, None, lambda done: None)
    return AveragedModel([SavedTensors(directory.parent, iteration)], [1.0], lambda done: None)


def tensors_of(side: Side, iteration: int, zero_centered: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The whole weights under their global names."""
    model = model_of(side, iteration, zero_centered)
    for name in model.tensors:
        yield name.removeprefix(MODEL), torch.cat([model.read(name, rows) for rows in model.chunks[name]])


def is_vocabulary(name: str) -> bool:
    """Whether the rows of a parameter are ids, of which sides may have different numbers."""
    return "word_embeddings" in name or "output_layer" in name


def compare_weights(a: Side, b: Side) -> Comparison:
    """The weights at every iteration that both sides have. Weights that were trained differ as the steps before them
    do, so only initial ones are a cause."""
    pairs = [(iteration, iteration) for iteration in sorted(a.checkpoints.keys() & b.checkpoints.keys())]
    if "hugging-face" in (a.kind, b.kind) and a.checkpoints and b.checkpoints:
        pairs = [(min(a.checkpoints), min(b.checkpoints))]
    if not pairs:
        have = [f"{side.label} has {_iterations(side)}" for side in (a, b)]
        return Comparison("weights", f"No common iteration: {', '.join(have)}.", is_complete=False)
    found: list[Difference] = []
    for iteration, other in pairs:
        is_initial = iteration == 0 or iteration != other or other == 0
        zero_centered = any(side.config is not None and side.config.model.apply_layernorm_1p for side in (a, b))
        models = [model_of(side, one, zero_centered) for side, one in ((a, iteration), (b, other))]
        rows = sorted(_differences(models[0], models[1], is_initial), key=lambda row: -row[3])
        for name, sides, remark, _ in rows[: _SHOWN if is_initial else 1]:
            more = "" if is_initial else f"; {len(rows)} tensors differ, as the steps before do"
            where = f"iteration {iteration}: {remark}{more}"
            found.append(Difference("weights", name.removeprefix(MODEL), *sides, where, changes_loss=is_initial))
        if rows:
            break
    compared = ", ".join(str(one) if one == other else f"{one} of A, {other} of B" for one, other in pairs)
    return Comparison("weights", f"Iterations {compared}, up to the first that differs.", tuple(found))


def _iterations(side: Side) -> str:
    return ", ".join(map(str, sorted(side.checkpoints))) or "no checkpoint"


def _differences(
    a: ChunkedModel, b: ChunkedModel, is_initial: bool
) -> Iterator[tuple[str, tuple[str, str], str, float]]:
    """Name, both sides, difference and its size of every tensor that differs by more than its dtypes round."""
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        one, other = a.tensors.get(name), b.tensors.get(name)
        if one is None or other is None:
            sides = "missing" if one is None else "present", "missing" if other is None else "present"
            yield name, sides, "one side has no such tensor", math.inf
            continue
        (rows, *rest), (rows_b, *rest_b) = one.shape, other.shape
        if rest != rest_b or (rows != rows_b and not is_vocabulary(name)):
            yield name, (str(list(one.shape)), str(list(other.shape))), "other shapes", math.inf
            continue
        differs = _difference(a, b, name, min(rows, rows_b), rest, is_initial)
        if differs is not None:
            sides, remark, distance = differs
            text = "" if rows == rows_b else f"; the common {min(rows, rows_b)} of {rows} and {rows_b} rows"
            yield name, sides, remark + text, distance


def _difference(
    a: ChunkedModel, b: ChunkedModel, name: str, rows: int, rest: list[int], is_initial: bool
) -> tuple[tuple[str, str], str, float] | None:
    """The norms of a tensor, how they differ, and by how much; None if they differ by no more than rounding: every
    element of initial weights, which one side may have in bf16."""
    width = rest[0] if rest else 1
    prints, squares, is_rounded = [], 0.0, True
    for chunk in [slice(one.start, min(one.stop, rows)) for one in a.chunks[name] if one.start < rows]:
        one, other = (model.read(name, chunk).reshape(-1, width).double() for model in (a, b))
        is_rounded = is_rounded and bool(((one - other).abs() <= _ROUNDED * one.abs().maximum(other.abs())).all())
        squares += float((one - other).square().sum())
        place = Rectangle(torch.arange(chunk.start, chunk.stop), torch.arange(width), (rows, width))
        prints.append([fingerprint(matrix, place) for matrix in (one, other)])
    left, right = (sum(parts[1:], start=parts[0]) for parts in zip(*prints))
    distance = squares**0.5 / max(left.norm, right.norm, 1e-300)
    if is_rounded or (not is_initial and distance <= _ROUNDED):
        return None
    where_rows, where_columns = left.largest_cell(right)
    where = f"rows {span(where_rows)}, columns {span(where_columns)}"
    sides = f"norm {left.norm:.6g}", f"norm {right.norm:.6g}"
    return sides, f"{distance:.1e} of the norm, most in {where}", distance
