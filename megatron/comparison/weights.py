"""The weights of two sides at the same iterations, tensor by tensor under global names."""

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


def model_of(side: Side, iteration: int) -> ChunkedModel:
    """The weights of a side, readable by rows under the names ``model/...``."""
    directory = side.checkpoints[iteration]
    if side.kind == "hugging-face":
        return HuggingFaceImport(directory, None, lambda done: None)
    if side.kind == "megatron-lm":  # with the padding of the vocabulary
        return MegatronImport(MegatronCheckpoint(directory), None, None, lambda done: None)
    return AveragedModel([SavedTensors(directory.parent, iteration)], [1.0], lambda done: None)


def tensors_of(side: Side, iteration: int) -> Iterator[tuple[str, Tensor]]:
    """The whole weights under their global names."""
    model = model_of(side, iteration)
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
        rows = list(_differences(model_of(a, iteration), model_of(b, other)))
        for name, sides, remark in rows[: _SHOWN if is_initial else 1]:
            more = "" if is_initial else f"; {len(rows)} tensors differ, as the steps before do"
            where = f"iteration {iteration}: {remark}{more}"
            found.append(Difference("weights", name.removeprefix(MODEL), *sides, where, changes_loss=is_initial))
        if rows:
            break
    compared = ", ".join(str(one) if one == other else f"{one} of A, {other} of B" for one, other in pairs)
    return Comparison("weights", f"Iterations {compared}, up to the first that differs.", tuple(found))


def _iterations(side: Side) -> str:
    return ", ".join(map(str, sorted(side.checkpoints))) or "no checkpoint"


def _differences(a: ChunkedModel, b: ChunkedModel) -> Iterator[tuple[str, tuple[str, str], str]]:
    """Name, both sides and the difference of every tensor that differs by more than its dtypes round."""
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        one, other = a.tensors.get(name), b.tensors.get(name)
        if one is None or other is None:
            sides = "missing" if one is None else "present", "missing" if other is None else "present"
            yield name, sides, "one side has no such tensor"
            continue
        (rows, *rest), (rows_b, *rest_b) = one.shape, other.shape
        if rest != rest_b or (rows != rows_b and not is_vocabulary(name)):
            yield name, (str(list(one.shape)), str(list(other.shape))), "other shapes"
            continue
        differs = _difference(a, b, name, min(rows, rows_b), rest)
        if differs is not None:
            text = "" if rows == rows_b else f"; the common {min(rows, rows_b)} of {rows} and {rows_b} rows"
            yield name, differs[0], differs[1] + text


def _difference(
    a: ChunkedModel, b: ChunkedModel, name: str, rows: int, rest: list[int]
) -> tuple[tuple[str, str], str] | None:
    """The norms of a tensor and how they differ; None if they differ by no more than rounding."""
    width = rest[0] if rest else 1
    chunks = [slice(one.start, min(one.stop, rows)) for one in a.chunks[name] if one.start < rows]
    prints = []
    squares = 0.0
    for rows_ in chunks:
        one, other = (model.read(name, rows_).reshape(-1, width).double() for model in (a, b))
        squares += float((one - other).square().sum())
        place = Rectangle(torch.arange(rows_.start, rows_.stop), torch.arange(width), (rows, width))
        prints.append([fingerprint(matrix, place) for matrix in (one, other)])
    left, right = (sum(parts[1:], start=parts[0]) for parts in zip(*prints))
    distance = squares**0.5 / max(left.norm, right.norm, 1e-300)
    dtypes = [model.tensors[name].dtype for model in (a, b)]
    if distance <= max(torch.finfo(dtype).eps for dtype in dtypes):
        return None
    where_rows, where_columns = left.largest_cell(right)
    where = f"rows {span(where_rows)}, columns {span(where_columns)}"
    return (f"norm {left.norm:.6g}", f"norm {right.norm:.6g}"), f"{distance:.1e} of the norm, most in {where}"
