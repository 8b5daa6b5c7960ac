"""Recordings: fingerprints of tensors in global coordinates, equal in every layout, and their file.

A tensor of a step is a matrix with a row for each position of each sample and a column for each feature; a parameter is
one as it is. Each rank makes the fingerprint of its rectangle, and the sum over the ranks is that of the whole:

- the digest is a sum of its bits times weights of row and column, modulo 2^64: equal bits give equal digests;
- the sketch is the matrix multiplied from both sides by random signs and summed in cells of rows and columns. It is
  linear: the sketch of a difference is the difference of the sketches, whose norm estimates that of the difference
  (AMS sketch; Alon, Matias and Szegedy, 1999), and whose largest cell says where it is;
- elements at places that depend on the shape alone are kept as they are.

The file is a safetensors file, docs/why_does_my_loss_differ.md describes it. Nothing here needs a run: recorders of
other frameworks use the same functions.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from megatron.errors import DataError

FORMAT = "megatron-llama-recording-1"
CELLS = (64, 16)
"""Rows and columns of a sketch; a cell of a matrix with fewer rows or columns is one row or column."""
NUM_ELEMENTS = 32

Direction = Literal["input", "forward", "gradient", "weight_gradient", "weight", "update"]
"""``gradient``: of the mean loss with respect to a tensor of the forward pass; ``weight_gradient``: to a parameter,
summed over all ranks, before clipping; ``weight``: the master weights before the update; ``update``: their change."""
DIRECTIONS: tuple[Direction, ...] = ("weight", "input", "forward", "gradient", "weight_gradient", "update")
"""In the order in which a step computes them."""

LAYER_OPERATIONS = (
    "input_layernorm",
    "self_attention.query",
    "self_attention.key",
    "self_attention.value",
    "self_attention.rotated_query",
    "self_attention.rotated_key",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "attention_residual",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.gate",
    "mlp.up",
    "mlp.activation",
    "mlp.shared_experts",
    "mlp",
    "output",
)
"""The tensors of ``layers.N`` in the order of the forward pass. ``rotated_…``: what attention multiplies, after norms
of heads. ``mlp.router``: the weight of each expert for each token, 0 where it is not chosen."""
_USED_BY = {
    "self_attention.linear_qkv": "self_attention.query",
    "self_attention.q_layernorm": "self_attention.rotated_query",
    "self_attention.k_layernorm": "self_attention.rotated_key",
    "self_attention.softmax_offset": "self_attention.core_attention",
    "mlp.linear_fc1": "mlp.gate",
    "mlp.experts.linear_fc1": "mlp",
    "mlp.linear_fc2": "mlp",
}
"""The operation of a layer that uses the parameters of a module, where it has another name."""
_LAST = 1 << 30
FIRST_OPERATIONS, LAST_OPERATIONS = ("embedding",), ("final_layernorm", "output_layer", "logits", "loss")


class TensorName(NamedTuple):
    """What was recorded: the result of an operation or a parameter, and in which direction."""

    direction: Direction
    name: str


@dataclass(frozen=True)
class Rectangle:
    """Where the rows and columns of a local matrix are in the global one."""

    rows: Tensor  # [r], int64
    columns: Tensor  # [c], int64
    shape: tuple[int, int]
    """Rows and columns of the global matrix."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a matrix, or of a rank's part of it."""

    shape: tuple[int, int]
    digest: int
    squares: float
    """The sum of the squares of all elements."""
    sketch: np.ndarray  # CELLS, fp64
    elements: np.ndarray  # [NUM_ELEMENTS], fp64; 0 where another part has the element

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        """The fingerprint of two parts of a matrix."""
        assert self.shape == other.shape, (self.shape, other.shape)
        digest = (self.digest + other.digest) % 2**64
        squares, sketch = self.squares + other.squares, self.sketch + other.sketch
        return Fingerprint(self.shape, digest, squares, sketch, self.elements + other.elements)

    def scaled(self, factor: float) -> "Fingerprint":
        """Of the matrix times ``factor``; the digest remains that of the bits before."""
        squares = self.squares * factor * factor
        return Fingerprint(self.shape, self.digest, squares, self.sketch * factor, self.elements * factor)

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan

    def distance(self, other: "Fingerprint") -> float:
        """The norm of the difference over the larger norm: 0 for equal bits, otherwise within a tenth; NaN and inf if
        a number is not finite. inf for other shapes."""
        if self.shape != other.shape:
            return math.inf
        both_nan = math.isnan(self.squares) and math.isnan(other.squares)
        if self.digest == other.digest and (self.squares == other.squares or both_nan):
            return 0.0
        scale = max(self.norm, other.norm)
        difference = float(np.linalg.norm(self.sketch - other.sketch))
        return difference / scale if scale else 0.0

    def largest_cell(self, other: "Fingerprint") -> tuple[range, range]:
        """The rows and columns of the cell that differs most."""
        differences = np.abs(self.sketch - other.sketch)
        row, column = np.unravel_index(int(np.argmax(np.nan_to_num(differences, nan=np.inf))), CELLS)
        ranges = []
        for cell, cells, size in zip((int(row), int(column)), CELLS, self.shape):
            first, last = -(-cell * size // cells), -(-(cell + 1) * size // cells)
            ranges.append(range(first, max(last, first + 1)))
        return ranges[0], ranges[1]


def fingerprint(matrix: Tensor, rectangle: Rectangle) -> Fingerprint:
    """The fingerprint of the local ``matrix`` ``[r, c]``, which is ``rectangle`` of the global one."""
    matrix = matrix.detach()
    rows, columns = rectangle.rows.to(matrix.device), rectangle.columns.to(matrix.device)
    wide = matrix.double()
    signed = wide * _sign(rows, 1).unsqueeze(1) * _sign(columns, 2)  # [r, c]
    sketch = wide.new_zeros(CELLS)
    by_column = wide.new_zeros(len(rows), CELLS[1])  # [r, 16]
    by_column.index_add_(1, columns * CELLS[1] // rectangle.shape[1], signed)
    sketch.index_add_(0, rows * CELLS[0] // rectangle.shape[0], by_column)
    # The weights of rows and columns are odd, so a single changed bit changes the sum.
    bits = wide.view(torch.int64) if matrix.is_floating_point() else matrix.long()
    digest = (bits * (_hash(rows, 3) | 1).unsqueeze(1) * (_hash(columns, 4) | 1)).sum()
    elements = wide.new_zeros(NUM_ELEMENTS)
    kept_rows, kept_columns = (places.to(matrix.device) for places in element_places(rectangle.shape))
    at_row, at_column = kept_rows.unsqueeze(1) == rows, kept_columns.unsqueeze(1) == columns  # [32, r], [32, c]
    here = at_row.any(1) & at_column.any(1)
    elements[here] = wide[at_row.int().argmax(1)[here], at_column.int().argmax(1)[here]]
    squares = float(wide.square().sum())
    return Fingerprint(rectangle.shape, int(digest) % 2**64, squares, sketch.cpu().numpy(), elements.cpu().numpy())


def whole(matrix: Tensor) -> Fingerprint:
    """The fingerprint of a matrix ``[rows, columns]``, or of a vector ``[rows]``, that this process has as a whole."""
    matrix = matrix.reshape(matrix.shape[0], -1)
    rows, columns = matrix.shape
    return fingerprint(matrix, Rectangle(torch.arange(rows), torch.arange(columns), (rows, columns)))


def element_places(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The rows and columns of the elements that are kept, ``[NUM_ELEMENTS]`` each."""
    numbers = torch.arange(NUM_ELEMENTS)
    return (_hash(numbers, 5) >> 1).abs() % shape[0], (_hash(numbers, 6) >> 1).abs() % shape[1]


def _hash(numbers: Tensor, salt: int) -> Tensor:
    """64 random bits for each number (the finaliser of SplitMix64; Steele et al., 2014)."""
    bits = (numbers + (salt << 48) + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _sign(numbers: Tensor, salt: int) -> Tensor:
    return 1.0 - 2.0 * (_hash(numbers, salt) & 1).double()


# --- recordings ----------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """The fingerprints of one training step."""

    facts: dict[str, Any] = field(default_factory=dict)
    """``iteration``, ``samples`` and ``length`` of the batch, ``head_size``, ``precision``, ``loss``, ``grad_norm``,
    ``learning_rate``, ``kernels`` …; missing if unknown."""
    tensors: dict[TensorName, Fingerprint] = field(default_factory=dict)

    def add(self, name: TensorName, part: Fingerprint) -> None:
        """Add a part of a tensor."""
        self.tensors[name] = self.tensors[name] + part if name in self.tensors else part

    def ordered(self) -> list[TensorName]:
        """The names in the order in which a step computes them."""
        return sorted(self.tensors, key=step_order)


def step_order(tensor: TensorName) -> tuple[int, int, int, str]:
    """The place of a tensor in a step: weights, input, the forward pass, the backward pass in the other direction, the
    gradients of the parameters as the backward pass makes them, and the update."""
    layer, operation = split_layer(tensor.name)
    known: tuple[str, ...] = LAYER_OPERATIONS if layer is not None else FIRST_OPERATIONS + LAST_OPERATIONS
    while operation not in known and "." in operation:
        module = operation.rpartition(".")[0]
        operation = _USED_BY.get(module, module)
    place = known.index(operation) if operation in known else len(known)
    is_last = layer is None and operation not in FIRST_OPERATIONS
    number = _LAST if is_last else -1 if layer is None else layer
    sign = -1 if tensor.direction in ("gradient", "weight_gradient") else 1
    return DIRECTIONS.index(tensor.direction), sign * number, sign * place, tensor.name


def split_layer(name: str) -> tuple[int | None, str]:
    """``layers.3.mlp.up`` is (3, ``mlp.up``), ``logits`` is (None, ``logits``)."""
    words = name.split(".", 2)
    if words[0] == "layers" and len(words) == 3 and words[1].isdigit():
        return int(words[1]), words[2]
    return None, name


def sum_of(recordings: Iterable[Recording]) -> Recording:
    """The recording whose parts the ranks made; facts are those of the first that has them."""
    total = Recording()
    for one in recordings:
        total.facts = {**one.facts, **total.facts}
        for name, part in one.tensors.items():
            total.add(name, part)
    return total


def save_recording(path: Path, recording: Recording) -> None:
    names = recording.ordered()
    prints = [recording.tensors[name] for name in names]
    arrays = {
        "digest": np.array([one.digest for one in prints], dtype=np.uint64),
        "squares": np.array([one.squares for one in prints], dtype=np.float64),
        "sketch": np.array([one.sketch for one in prints], dtype=np.float64).reshape(-1, *CELLS),
        "elements": np.array([one.elements for one in prints], dtype=np.float64).reshape(-1, NUM_ELEMENTS),
    }
    listed = [[*name, *one.shape] for name, one in zip(names, prints)]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    metadata = {"format": FORMAT, "facts": json.dumps(recording.facts), "tensors": json.dumps(listed)}
    save_file(arrays, draft, metadata)
    draft.replace(path)


def load_recording(path: Path) -> Recording:
    """The recording in a file; raises :class:`DataError` for what is none."""
    try:
        with safe_open(path, "numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(f"{path} is no recording of this version ({FORMAT}): record it again.")
            arrays = {name: file.get_tensor(name) for name in ("digest", "squares", "sketch", "elements")}
        recording = Recording(json.loads(metadata["facts"]))
        for number, (direction, name, rows, columns) in enumerate(json.loads(metadata["tensors"])):
            recording.tensors[TensorName(direction, name)] = Fingerprint(
                (rows, columns),
                int(arrays["digest"][number]),
                float(arrays["squares"][number]),
                arrays["sketch"][number],
                arrays["elements"][number],
            )
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise DataError(f"{path} is no recording ({error}): name a file of --record-tensors.") from None
    return recording
