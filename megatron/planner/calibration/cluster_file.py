"""A calibrated cluster as a TOML file."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from statistics import median

from megatron.planner.calibration.fit import Fitted
from megatron.planner.calibration.measure import Calibrated, Measured, Sample
from megatron.planner.step_time.cluster import Cluster

_TABLES = ("name", "sources", "constants")


def cluster_file(calibrated: Calibrated, measured: Measured, base: str | None, date: str, machine: str) -> str:
    """The text of the file: with ``base`` the constants that differ from it, else all fields."""
    lines = [f"# Measured on {date} by tools/calibrate_cluster.py: {machine}."]
    lines += [f"# {line}" for line in summary(calibrated, measured)]
    lines += list(_fields(calibrated.cluster)) if base is None else [f'base = "{base}"']
    lines += ["", "[sources]", *_sources(calibrated, measured, base, date)]
    lines += ["", "[constants]", *(f"{name} = {value:.6g}" for name, value in calibrated.cluster.constants.items())]
    return "\n".join(lines) + "\n"


def summary(calibrated: Calibrated, measured: Measured) -> Iterator[str]:
    """For each kind of measurement: how many, their spread over the turns, and the error of the fitted formula."""
    for kind, samples in _samples(measured).items():
        if samples:
            spread = median(one.spread for one in samples)
            fitted = calibrated.errors.get(kind)
            error = "" if fitted is None else f"; the formula is off by {fitted.median_error:.1%} in the median"
            yield f"{kind}: {len(samples)} measured, spread {spread:.1%}{error}"


def _samples(measured: Measured) -> Mapping[str, list[Sample]]:
    by_link: dict[str, list[Sample]] = {"link": [], "network": []}
    for shape, sample in measured.collectives.items():
        by_link["network" if shape.spans_nodes else "link"].append(sample)
    return {
        "products": list(measured.products.values()),
        "attention": list(measured.attention.values()),
        "copies": [measured.copy],
        **by_link,
        "steps": list(measured.steps.values()),
    }


def _fields(cluster: Cluster) -> Iterator[str]:
    for one in fields(Cluster):
        value = getattr(cluster, one.name)
        if one.name in _TABLES or value == one.default:
            continue
        if isinstance(value, str):
            yield f'{one.name} = "{value}"'
        else:
            yield f"{one.name} = {value:.6g}" if isinstance(value, float) else f"{one.name} = {value}"


def _sources(calibrated: Calibrated, measured: Measured, base: str | None, date: str) -> Iterator[str]:
    cluster = calibrated.cluster
    if base is None:
        stated = [one.name for one in fields(Cluster) if getattr(cluster, one.name) != one.default]
        for name in stated:
            if name not in _TABLES:
                yield f'{name} = "{_SOURCES.get(name, "of this machine")}, {date}"'
    for name in cluster.constants:
        kind = next((kind for kind, fitted in calibrated.errors.items() if name in fitted.constants), None)
        yield f'{name} = "{_of(kind, calibrated.errors, measured)}, {date}"'


_SOURCES = {
    "bf16_flops": "measured, the largest rate of a product in the format of the training",
    "hbm_bytes_per_s": "measured, a copy",
    "link_bytes_per_s": "measured, rings of ranks in a node",
    "network_bytes_per_s": "measured, rings over nodes; of one node assumed: its memory",
    "multiprocessors": "products on CPUs have no waves of tiles",
    "fp8_flops": "CPUs have no FP8 products",
    "node_size": "processes of the calibration in a node",
}


def _of(kind: str | None, errors: Mapping[str, Fitted], measured: Measured) -> str:
    if kind is None:
        return "CPUs: collectives need the cores and do not overlap; rates of links are measured"
    samples = _samples(measured)[kind]
    return f"fitted to {len(samples)} measured {kind}, median error {errors[kind].median_error:.1%}"
