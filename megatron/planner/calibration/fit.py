"""Constants of the prices from measurements, by least squares of the relative errors.

Every formula is linear in the unknowns that one kind of measurement determines, so each column of a problem is the
price of the formula with one unknown at 1 and the others at 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megatron.planner.calibration.measure import Sample
from megatron.planner.calibration.operations import AttentionShape, CollectiveShape, ProductShape
from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.step_time.cluster import Cluster
from megatron.planner.step_time.prices import BACKWARD_ATTENTION, Constants, Machines, product_seconds, product_traffic
from megatron.planner.step_time.workload import Array

_SIZES = ("rows", "columns", "depth")


@dataclass(frozen=True)
class Fitted:
    """Constants, and how well the formula reproduces the measurements with them."""

    constants: Mapping[str, float]
    errors: tuple[float, ...]
    """Relative, of each measurement."""

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))


def nonnegative_least_squares(columns: Array, target: Array, base: Array | float = 0.0) -> Array:
    """The ``x >= 0`` that minimises the squared relative errors of ``base + columns [n, k] @ x`` against
    ``target [n]``; by trying every subset of the few columns."""
    scaled, wanted = columns / target[:, None], 1 - base / target
    number = columns.shape[1]
    best, least = np.zeros(number), float((wanted**2).sum())
    for size in range(1, number + 1):
        for chosen in map(list, combinations(range(number), size)):
            found = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
            loss = float(((scaled[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and loss < least * (1 - 1e-9):
                best, least = np.zeros(number), loss
                best[chosen] = found
    return best


def _solve(
    columns: Sequence[Array], samples: Sequence[Sample], base: Array | float = 0.0
) -> tuple[Array, tuple[float, ...]]:
    """The unknowns, and the relative error of each sample."""
    matrix, target = np.stack(columns, axis=1), np.array([one.median for one in samples])
    found = nonnegative_least_squares(matrix, target, base)
    return found, tuple(((base + matrix @ found) / target - 1).tolist())


def fit_products(
    cluster: Cluster, fitted: Constants, shapes: Sequence[ProductShape], samples: Sequence[Sample], element_bytes: int
) -> Fitted:
    """The share of the peak, the inner length of half the rate, and the share of the traffic that is not hidden."""
    machines, name = Machines([cluster]), f"product_{cluster.generation}"
    rows, columns, depth = (np.array([getattr(one, field) for one in shapes], dtype=float) for field in _SIZES)
    # A weight gradient reads and writes the fp32 main gradient instead of writing an output.
    added = 8.0 - element_bytes
    extra = np.array([added * one.rows * one.columns if one.is_weight_gradient else 0.0 for one in shapes])
    traffic = product_traffic(rows, columns, depth, False, extra, element_bytes)

    def price(depth_constant: float, bytes_share: float) -> Array:
        constants = {**fitted, name: 1.0, "product_depth": depth_constant, "product_bytes": bytes_share}
        return product_seconds(machines, constants, rows, columns, depth, traffic, np.zeros(len(shapes), dtype=bool))

    peak = price(0.0, 0.0)
    found, errors = _solve([peak, price(1.0, 0.0) - peak, price(0.0, 1.0) - peak], samples)
    constants = {name: 1 / found[0], "product_depth": found[1] / found[0], "product_bytes": found[2]}
    return Fitted({key: float(value) for key, value in constants.items()}, errors)


def fit_attention(
    cluster: Cluster,
    fitted: Constants,
    name: str,
    is_cudnn: bool,
    shapes: Sequence[AttentionShape],
    samples: Sequence[Sample],
) -> Fitted:
    """The share of the peak, which has the constant ``name``, and the length of half the rate."""
    machines = Machines([cluster])
    flops = (1 + BACKWARD_ATTENTION) * np.array([one.forward_flops for one in shapes])
    length = np.array([float(one.length) for one in shapes])
    rate = machines.attention_flops({**fitted, name: 1.0, "attention_length": 0.0}, is_cudnn, length)
    (inverse, extra), errors = _solve([flops / rate, flops / rate / length], samples)
    # Where the rate still grows at the longest length, its limit is not measured. Then ten times that length has half
    # of the limit.
    inverse = max(inverse, extra / (10 * length.max()))
    return Fitted({name: float(1 / inverse), "attention_length": float(extra / inverse)}, errors)


def fit_link(shapes: Sequence[CollectiveShape], samples: Sequence[Sample], with_latency: bool) -> tuple[float, Fitted]:
    """Bytes per second of rings, and the errors. ``with_latency`` also fits the latency of a collective, which is
    not returned: a step has no term for it."""
    sent = np.array([one.sent for one in shapes])
    columns = [sent, np.ones(len(sent))] if with_latency else [sent]
    found, errors = _solve(columns, samples)
    return 1 / float(found[0]), Fitted({}, errors)


def fit_step(steps: Sequence[PlannedStep], cluster: Cluster, constants: Constants, samples: Sequence[Sample]) -> Fitted:
    """What only whole steps show: the factor of the operations between products, the gap of a layer, the factor of the
    optimizer and the seconds of a step; ``constants`` has everything else."""
    names = ("own_elementwise", "layer_gap", "optimizer", "step")
    none = {**constants, **dict.fromkeys(names, 0.0)}
    base = StepPrices(cluster, none).price(steps).total
    columns = [StepPrices(cluster, {**none, name: 1.0}).price(steps).total - base for name in names]
    found, errors = _solve(columns, samples, base)
    return Fitted({name: float(value) for name, value in zip(names, found)}, errors)


def without_overlap() -> dict[str, float]:
    """Constants of a machine whose collectives need its own cores: nothing overlaps, and rates do not fall with the
    number of nodes. The file's rates of the links are measured."""
    exposed = ("exposed_tensor_parallel", "exposed_messages", "exposed_interleaved_messages", "fsdp2_contention")
    return {**dict.fromkeys((*exposed, "link", "network"), 1.0), "hidden_data_parallel": 0.0, "growth": 0.0}
