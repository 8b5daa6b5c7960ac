"""Constants of the prices from measurements, by least squares of the relative errors, and the file of the cluster.

Every formula is linear in the unknowns that one kind of measurement determines, so each column of a problem is the
price of the formula with one unknown at 1 and the others at 0.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from megatron.core.precision import number_formats
from megatron.planner.calibration.measure import Measured, Plan, Ranks, Sample
from megatron.planner.calibration.operations import (
    AttentionShape,
    CollectiveShape,
    ProductShape,
    planned_step,
    with_layers,
)
from megatron.planner.rehearsal.price import PlannedStep, StepPrices
from megatron.planner.step_time.prices import (
    BACKWARD_ATTENTION,
    Constants,
    Machines,
    constant_name,
    load_fitted,
    product_seconds,
    product_traffic,
)
from megatron.planner.step_time.workload import Array, Cluster

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
    columns: Sequence[Array], samples: Mapping[Any, Sample], base: Array | float = 0.0
) -> tuple[Array, tuple[float, ...]]:
    """The unknowns, and the relative error of each sample."""
    matrix, target = np.stack(columns, axis=1), np.array([one.median for one in samples.values()])
    found = nonnegative_least_squares(matrix, target, base)
    return found, tuple(((base + matrix @ found) / target - 1).tolist())


def fit_products(
    cluster: Cluster, fitted: Constants, samples: Mapping[ProductShape, Sample], element_bytes: int
) -> Fitted:
    """The share of the peak, the inner length of half the rate, and the share of the traffic that is not hidden."""
    machines, name = Machines([cluster]), f"product_{cluster.generation}"
    rows, columns, depth = (np.array([getattr(one, field) for one in samples], dtype=float) for field in _SIZES)
    # A weight gradient reads and writes the fp32 main gradient instead of writing an output.
    added = 8.0 - element_bytes
    extra = np.array([added * one.rows * one.columns if one.is_weight_gradient else 0.0 for one in samples])
    traffic = product_traffic(rows, columns, depth, False, extra, element_bytes)

    def price(depth_constant: float, bytes_share: float) -> Array:
        constants = {**fitted, name: 1.0, "product_depth": depth_constant, "product_bytes": bytes_share}
        return product_seconds(machines, constants, rows, columns, depth, traffic, np.zeros(len(samples), dtype=bool))

    # Unknowns: 1 / share, depth / share, and the share of the traffic; the time is linear in them.
    peak = price(0.0, 0.0)
    found, errors = _solve([peak, price(1.0, 0.0) - peak, price(0.0, 1.0) - peak], samples)
    constants = {name: 1 / found[0], "product_depth": found[1] / found[0], "product_bytes": found[2]}
    return Fitted({key: float(value) for key, value in constants.items()}, errors)


def fit_attention(
    cluster: Cluster, fitted: Constants, name: str, is_cudnn: bool, samples: Mapping[AttentionShape, Sample]
) -> Fitted:
    """The share of the peak, which has the constant ``name``, and the length of half the rate."""
    machines = Machines([cluster])
    flops = (1 + BACKWARD_ATTENTION) * np.array([one.forward_flops for one in samples])
    length = np.array([float(one.length) for one in samples])
    rate = machines.attention_flops({**fitted, name: 1.0, "attention_length": 0.0}, is_cudnn, length)
    (inverse, extra), errors = _solve([flops / rate, flops / rate / length], samples)
    # Where the rate still grows at the longest length, its limit is not measured. Then ten times that length has half
    # of the limit.
    inverse = max(inverse, extra / (10 * length.max()))
    return Fitted({name: float(1 / inverse), "attention_length": float(extra / inverse)}, errors)


def fit_link(samples: Mapping[CollectiveShape, Sample], with_latency: bool) -> tuple[float, Fitted]:
    """Bytes per second of rings, and the errors. ``with_latency`` also fits the latency of a collective, which is
    not returned: a step has no term for it."""
    sent = np.array([one.sent for one in samples])
    columns = [sent, np.ones(len(sent))] if with_latency else [sent]
    found, errors = _solve(columns, samples)
    return 1 / float(found[0]), Fitted({}, errors)


def fit_step(
    steps: Sequence[PlannedStep], cluster: Cluster, constants: Constants, samples: Mapping[Any, Sample]
) -> Fitted:
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


@dataclass(frozen=True)
class Calibrated:
    """The cluster that the measurements describe."""

    cluster: Cluster
    errors: Mapping[str, Fitted]
    """The fits by kind of measurement."""


def calibrated(plan: Plan, measured: Measured, base: Cluster | None, memory_gib: float, ranks: Ranks) -> Calibrated:
    """The cluster of the measurements: ``base`` with its constants replaced, or one of CPUs."""
    cluster = base or _cpu_cluster(plan, measured, memory_gib, ranks.local_size)
    element_bytes = number_formats(plan.config.precision, plan.config.optimizer).weight.itemsize
    # Without a base the machine is a CPU: its constants replace those of GPUs.
    fitted = load_fitted() | (without_overlap() if base is None else {})
    name = constant_name(measured.attention_kind, cluster.generation)
    is_cudnn = measured.attention_kind == "cudnn"
    found = {
        "products": fit_products(cluster, fitted, measured.products, element_bytes),
        "attention": fit_attention(cluster, fitted, name, is_cudnn, measured.attention),
    }
    constants = without_overlap() if base is None else {}
    for one in found.values():
        constants |= one.constants
    cluster, constants, of_links = _with_links(cluster, constants, measured, is_base=base is not None)
    found |= of_links
    # What is left of whole steps after everything else.
    steps = [
        planned_step(with_layers(plan.config, layers, batch), 1, plan.vocab_size, microbatches, cluster)
        for layers, batch, microbatches in measured.steps
    ]
    found["steps"] = fit_step(steps, cluster, {**fitted, **constants}, measured.steps)
    constants |= found["steps"].constants
    return Calibrated(replace(cluster, constants=constants), found)


def _cpu_cluster(plan: Plan, measured: Measured, memory_gib: float, local_size: int) -> Cluster:
    """Peaks are the largest measured rates; links are replaced by :func:`_with_links` where there are any."""
    flops = max(2.0 * one.rows * one.columns * one.depth / sample.median for one, sample in measured.products.items())
    copy_rate = 2.0 * plan.copy_bytes / measured.copy.median
    return Cluster(
        name="cpu",
        generation="cpu",
        bf16_flops=flops,
        fp8_flops=0.0,
        hbm_bytes_per_s=copy_rate,
        multiprocessors=1,
        memory_gib=memory_gib,
        node_size=local_size,
        link_bytes_per_s=copy_rate,
        network_bytes_per_s=copy_rate,
    )


def _with_links(
    cluster: Cluster, constants: dict[str, float], measured: Measured, is_base: bool
) -> tuple[Cluster, dict[str, float], dict[str, Fitted]]:
    """The cluster with measured rates of its links, or with the shares of its rates that were measured."""
    found: dict[str, Fitted] = {}
    for spans_nodes, link in ((False, "link"), (True, "network")):
        of_link = {one: sample for one, sample in measured.collectives.items() if one.spans_nodes == spans_nodes}
        messages = {one: sample for one, sample in of_link.items() if one.kind == "message"}
        rings = {one: sample for one, sample in of_link.items() if one not in messages}
        if not rings:
            continue
        # On CPUs the latency is mostly the wait for the other ranks: it lowers the rate.
        rate, found[link] = fit_link(rings, with_latency=is_base)
        if is_base:
            constants[link] = rate / getattr(cluster, f"{link}_bytes_per_s")
        else:
            cluster = replace(cluster, **{f"{link}_bytes_per_s": rate})  # type: ignore[arg-type]
            if messages:
                # Messages do not overlap on a CPU; their time is relative to the rate of rings.
                slower, _ = fit_link(messages, with_latency=True)
                constants |= dict.fromkeys(("exposed_messages", "exposed_interleaved_messages"), rate / slower)
    return cluster, constants, found


_TABLES = ("name", "sources", "constants")


def cluster_file(calibrated: Calibrated, measured: Measured, base: str | None, date: str, machine: str) -> str:
    """The text of the file: with ``base`` the constants that differ from it, else all fields."""
    lines = [f"# Measured on {date} by tools/calibrate_cluster.py: {machine}."]
    lines += [f"# {line}" for line in summary(calibrated, measured)]
    if base is not None:
        lines.append(f'base = "{base}"')
    for one in fields(Cluster) if base is None else ():
        value = getattr(calibrated.cluster, one.name)
        if one.name not in _TABLES and value != one.default:
            text = f'"{value}"' if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else value
            lines.append(f"{one.name} = {text}")
    lines += ["", "[sources]", *_sources(calibrated, base, date)]
    lines += ["", "[constants]", *(f"{name} = {value:.6g}" for name, value in calibrated.cluster.constants.items())]
    return "\n".join(lines) + "\n"


def summary(calibrated: Calibrated, measured: Measured) -> Iterator[str]:
    """A line for each kind of measurement: their number, their spread over the turns, the error of the formula."""
    by_link: dict[str, list[Sample]] = {"link": [], "network": []}
    for shape, sample in measured.collectives.items():
        by_link["network" if shape.spans_nodes else "link"].append(sample)
    by_kind: dict[str, Collection[Sample]] = {
        "products": measured.products.values(),
        "attention": measured.attention.values(),
        "copies": [measured.copy],
        **by_link,
        "steps": measured.steps.values(),
    }
    for kind, samples in by_kind.items():
        if samples:
            spread = median(one.spread for one in samples)
            fitted = calibrated.errors.get(kind)
            error = "" if fitted is None else f"; the formula is off by {fitted.median_error:.1%} in the median"
            yield f"{kind}: {len(samples)} measured, spread {spread:.1%}{error}"


def _sources(calibrated: Calibrated, base: str | None, date: str) -> Iterator[str]:
    cluster = calibrated.cluster
    if base is None:
        for one in fields(Cluster):
            if one.name not in _TABLES and getattr(cluster, one.name) != one.default:
                yield f'{one.name} = "{_SOURCES.get(one.name, "of this machine")}, {date}"'
    for name in cluster.constants:
        source = "CPUs: collectives need the cores and do not overlap; rates of links are measured"
        for kind, fitted in calibrated.errors.items():
            if name in fitted.constants:
                source = f"fitted to {len(fitted.errors)} measured {kind}, median error {fitted.median_error:.1%}"
        yield f'{name} = "{source}, {date}"'


_SOURCES = {
    "bf16_flops": "measured, the largest rate of a product in the format of the training",
    "hbm_bytes_per_s": "measured, a copy",
    "link_bytes_per_s": "measured, rings of ranks in a node",
    "network_bytes_per_s": "measured, rings over nodes; of one node assumed: its memory",
    "multiprocessors": "products on CPUs have no waves of tiles",
    "fp8_flops": "CPUs have no FP8 products",
    "node_size": "processes of the calibration in a node",
}
