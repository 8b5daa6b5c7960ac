"""Simulate a run that fails and restarts: days, effective time, lost GPU-hours by cause, and what a minute is worth.

python tools/simulate_run.py --gpus 16384 --days 54
python tools/simulate_run.py --gpus 1024 --step-s 8 --steps 250000 --elastic-min-nodes 120 --html simulated.html
python tools/simulate_run.py --from runs/llama/checkpoints --gpus 2048 --days 30

Every input is printed with its source. --from estimates them from the records of a run, and replays what ended its
attempts (docs/effective_time.md).
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated, Any, NamedTuple

from megatron.command_line.flag import flags_of
from megatron.command_line.parser import Parser, parse
from megatron.command_line.words import split_words
from megatron.commands.tool import run_tool, write_file, write_json
from megatron.errors import ConfigError
from megatron.flags import Argument, require_at_least, require_fraction, require_positive, values_of
from megatron.operation import run_summary
from megatron.operation.attempts import account
from megatron.operation.recorded_run import estimate, lost_gpu_seconds
from megatron.operation.simulated_run import LLAMA_3, FailureTable, RunModel, random_events, read_table, simulate
from megatron.planner.arithmetic import written
from megatron.reports import page as html
from megatron.reports import svg
from megatron.urls import refuse_urls


@dataclass(frozen=True, kw_only=True)
class SimulateRunConfig(RunModel):
    """The run, and what to write."""

    causes: str | None = None
    """TOML file of interruptions by cause, like megatron/operation/llama3_failures.toml, which is the default."""
    gpu_hours_per_failure: float | None = None
    """GPU-hours between failures (default: the rate of the table of causes)."""
    gpu_hours_per_straggler: float | None = None
    """GPU-hours until a node becomes slow (default: none does)."""
    from_: str | None = None
    """Run directory: its records give the defaults of the inputs, and are replayed."""
    seeds: int = 20
    """Simulated runs."""
    json: Annotated[str | None, Argument(alone="-")] = None
    """Print one JSON object instead of text, or write it to this file."""
    html: str | None = None
    """Write a page: one file without references to others."""

    def check(self) -> None:
        refuse_urls({"--causes": self.causes, "--json": self.json, "--html": self.html}, "name a local file")
        values = {flag.name: getattr(self, flag.field.name) for flag in flags_of(type(self))}
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        may_be_zero = {name for name in numbers if name.endswith(("-s", "-share", "--spares")) and name != "--step-s"}
        require_at_least(0, {name: numbers.pop(name) for name in may_be_zero})
        require_positive(numbers)
        require_fraction(values_of(self, "correlated_share"), with_one=True)
        require_at_least(1, values_of(self, "straggler_factor"))
        if (self.days is None) == (self.steps is None):
            raise ConfigError("The run has no end, or two: give either --days or --steps.")
        if self.nodes * self.gpus_per_node != self.gpus and self.nodes > 1:
            raise ConfigError(f"--gpus {self.gpus} is no multiple of --gpus-per-node {self.gpus_per_node}: change one.")
        if self.nodes % self.nodes_per_replica or (self.elastic_min_nodes or 1) > self.nodes:
            raise ConfigError(
                f"--gpus {self.gpus} are {self.nodes} nodes: --nodes-per-replica {self.nodes_per_replica} must divide "
                "them, and --elastic-min-nodes must not be more."
            )


class Figures(NamedTuple):
    """By name a value for each seed; mean GPU-hours by cause and part; mean number of events by cause."""

    values: Mapping[str, Sequence[float]]
    lost: Mapping[tuple[str, str], float]
    events: Mapping[str, float]

    def mean(self, name: str) -> float:
        return fmean(self.values[name])


def figures(run: RunModel, table: FailureTable, seeds: int) -> Figures:
    """The figures of ``seeds`` runs; the events of a seed are the same whatever the other inputs are."""
    run = run.with_interval(table)
    values = defaultdict[str, list[float]](list)
    lost, events = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
    for seed in range(seeds):
        found = simulate(run, random_events(run, table, seed))
        time, losses = account(found.attempts), lost_gpu_seconds(found.attempts, run.gpus)
        for (cause, part), gpu_s in found.hidden.items():
            losses[cause, part] += gpu_s
            losses[cause, "between attempts"] -= gpu_s * (part == "waiting")
        values["days"].append(time.wall_s / 86400.0)
        values["days of work"].append((time.wall_s - sum(losses.values()) / run.gpus) / 86400.0)
        values["effective time"].append(time.effective_time or 0.0)
        values["interruptions"].append(sum(one.cause is not None for one in found.attempts))
        values["unexpected"].append(sum(one.is_failure for one in found.attempts))
        losses["spare nodes", "spare nodes"] = time.wall_s * run.num_spares * run.gpus_per_node
        values["lost GPU-hours"].append(sum(losses.values()) / 3600.0)
        for key, gpu_s in losses.items():
            lost[key] += gpu_s / 3600.0 / seeds
        for one in found.attempts:
            events[one.cause or ""] += 1.0 / seeds
    return Figures(dict(values), dict(lost), dict(events))


def changes(config: SimulateRunConfig) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(name, the share of failures that are left, changed inputs): one input better by a minute, or by another unit."""
    minutes = ["notice", "hang", "decide", "start", "load", "warm_up", "commit"]
    minutes += ["local_load"] * (config.local_interval_s > 0) + ["straggler"] * bool(config.gpu_hours_per_straggler)
    for name in minutes:
        value = getattr(config, f"{name}_s")
        if less := min(60.0, value):
            words = "1 minute" if less == 60.0 else f"all {less:.3g} s"
            yield f"{words} less of --{name.replace('_', '-')}-s {value:.4g}", 1.0, {f"{name}_s": value - less}
    yield f"half of --save-s {config.save_s:.4g}", 1.0, {"save_s": config.save_s / 2}
    if config.save_interval_s:
        yield "the best save interval", 1.0, {"save_interval_s": 0.0}
    name, interval_s = ("no local copies", 0.0) if config.local_interval_s else ("local copies every minute", 60.0)
    yield name, 1.0, {"local_interval_s": interval_s}
    yield "10 % fewer failures", 0.9, {}
    yield "one more spare node", 1.0, {"spares": config.num_spares + 1}
    yield "nodes repaired an hour sooner", 1.0, {"repair_s": max(0.0, config.repair_s - 3600.0)}


def gains(config: SimulateRunConfig, table: FailureTable, base: Figures) -> list[tuple[str, float, float]]:
    """Each change, and the mean hours and GPU-hours of the run that it gains; the most first."""
    found = []
    for name, left, changed in changes(config):
        other = figures(replace(config, **changed), table.changed(left), config.seeds)
        # One of the two is fixed: a shorter run with the same work, or more work in the same days.
        hours = 24.0 * (other.mean("days of work") - base.mean("days of work") - other.mean("days") + base.mean("days"))
        spares = 24.0 * other.mean("days") * config.gpus_per_node * ("spares" in changed)
        found.append((name, hours, hours * config.gpus - spares))
    return sorted(found, key=lambda one: -one[2])


@dataclass(frozen=True)
class Report:
    """A simulated run, with everything that is shown."""

    config: SimulateRunConfig
    inputs: Sequence[tuple[str, str, str]]
    """Name, value and source."""
    figures: Figures
    gains: Sequence[tuple[str, float, float]]
    compared: Mapping[str, float]
    """Effective time by a formula, of the records, of their replay."""

    @property
    def best_minute(self) -> str:
        """A sentence; empty if no minute is worth anything."""
        minutes = [one for one in self.gains if one[0].startswith("1 minute") and one[1] > 0]
        return f"Worth most: {minutes[0][0]}, {written(minutes[0][2])} GPU-hours." if minutes else ""

    def tables(self) -> list[list[tuple[str, ...]]]:
        """Inputs, runs, losses by cause and by part, gains: rows of cells, the first of them headings."""
        runs: list[tuple[str, ...]] = [(f"{self.config.seeds} runs", "median", "5 %", "95 %")]
        for name, values in self.figures.values.items():
            cuts = quantiles(list(values) * 2, n=20, method="inclusive")
            runs.append((name, shown(name, cuts[9]), shown(name, cuts[0]), shown(name, cuts[18])))
        runs += [(name, shown(name, value), "", "") for name, value in self.compared.items()]
        lost: list[list[tuple[str, ...]]] = []
        for index, heading in enumerate(("lost by cause", "lost by part")):
            sums = summed(self.figures.lost, index)
            shares = {name: f"{100 * hours / sum(sums.values()):.1f} %" for name, hours in sums.items()}
            counts = {name: f"{number:.1f}" for name, number in self.figures.events.items() if not index}
            rows = [(name, written(hours), shares[name], counts.get(name, "")) for name, hours in sums.items()]
            lost.append([(heading, "GPU-hours", "share", "" if index else "events"), *rows])
        worth = [(name, *(written(round(one, 6)) for one in gained)) for name, *gained in self.gains]
        return [[("input", "", "source"), *self.inputs], runs, *lost, [("gained by", "hours", "GPU-hours"), *worth]]


def shown(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if "effective time" in name else written(value)


def summed(lost: Mapping[tuple[str, str], float], index: int) -> dict[str, float]:
    """GPU-hours by cause (0) or by part (1), the most first."""
    sums = defaultdict[str, float](float)
    for key, hours in lost.items():
        sums[key[index]] += hours
    return {name: sums[name] for name in sorted(sums, key=lambda name: -sums[name]) if sums[name] > 1e-6}


def as_text(report: Report) -> str:
    lines = []
    for table in report.tables():
        for number, (first, second, *rest) in enumerate(table):
            cells = [f"  {cell}" if number and cell[:1].isalpha() else f"  {cell:>10}" for cell in rest]
            lines.append(f"{first:<40}{second:>12}{''.join(cells)}".rstrip())
        lines.append("")
    return "\n".join([*lines, report.best_minute]).rstrip()


# --- the page ------------------------------------------------------------------------------------------------

_COLOURS = {
    "repeated steps": "red", "hang": "orange", "end of processes": "sand", "between attempts": "slate",
    "waiting": "brown", "start": "blue", "load": "sky", "warm-up": "mint", "slow steps": "rose",
    "fewer GPUs": "lilac", "saves": "teal", "data and evaluation": "grey", "spare nodes": "violet",
}  # fmt: skip


def simulation_page(report: Report) -> str:
    config, found, tables = report.config, report.figures, report.tables()
    drawn = []
    for head, *rows in tables:
        cells = [[html.Cell(one, is_number=one is not row[0] and not one[:1].isalpha()) for one in row] for row in rows]
        drawn.append(html.table(head, cells, is_sortable=False))
    of_inputs, of_runs, *_, of_gains = drawn
    measure = "days" if config.days is None else "effective time"
    tiles = [html.Tile(name, value, "median", is_main=name == measure) for name, value, *_ in tables[1][1:7]]
    causes, used = (list(summed(found.lost, index)) for index in (0, 1))
    lost = {name: {part: hours for (cause, part), hours in found.lost.items() if cause == name} for name in causes}
    worth = {name: {"gain": max(0.0, gpu_hours)} for name, _, gpu_hours in report.gains}
    end = f"{config.days:g} days" if config.days is not None else f"{config.steps:,} steps"
    note = "Means of the runs, in GPU-hours."
    legend = html.legend((colour, part) for part, colour in _COLOURS.items() if part in used)
    parts = [
        html.tiles(tiles),
        html.section(f"Runs by {measure}", bars(binned(measure, found.values[measure])), of_runs),
        html.section("Lost GPU-hours by cause", bars(lost), legend, note=note),
        html.section("What changes are worth", bars(worth), of_gains, note=f"{note} {report.best_minute}"),
        html.section("Inputs", of_inputs),
    ]
    return html.page(f"{config.gpus:,} GPUs, {end}, simulated", f"{config.seeds} runs with random failures", parts)


def binned(name: str, values: Sequence[float], count: int = 8) -> dict[str, dict[str, float]]:
    """The number of runs in equal intervals of a figure."""
    width, found = (max(values) - min(values)) / count, Counter[str]()
    bins = Counter(min(count - 1, int((value - min(values)) / (width or 1.0))) for value in values)
    edges = [shown(name, min(values) + place * width) for place in range(count + 1)]
    for place in range(count):  # narrow intervals may have equal edges in these digits
        found[f"{edges[place]} to {edges[place + 1]}"] += bins[place]
    return {label: {"runs": float(number)} for label, number in found.items()}


def bars(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Stacked bars by name and part."""
    drawn, end = [], max([1.0, *(sum(parts.values()) for parts in rows.values())])
    for name, parts in rows.items():
        boxes = [
            svg.Part(part, _COLOURS.get(part, "teal"), size, f"{name}, {part}: {written(size)}")
            for part, size in parts.items()
        ]
        drawn.append(svg.Bar(name, "", svg.short(sum(parts.values())), boxes))
    return html.figure(svg.stacked_bars(drawn, [(tick, svg.short(tick)) for tick in svg.nice_ticks(0.0, end)], end))


# --- the command ---------------------------------------------------------------------------------------------


def build_report(config: SimulateRunConfig, words: Sequence[str]) -> Report:
    """Simulate; with ``--from`` with the inputs that its records show, and that ``words`` do not give."""
    given = Parser(SimulateRunConfig, "").read(split_words(words)).of_field
    compared, sources, table = dict[str, float](), dict[str, str](), None
    if config.from_ is not None:
        refuse_urls({"--from": config.from_}, "copy the files to a local directory")
        records = run_summary.read_run(Path(config.from_))
        known, time = estimate(records), account(records.attempts)
        sources = {name: f"{config.from_}: {text}" for name, text in {**known.sources, "days": "wall time"}.items()}
        compared["effective time, recorded"] = time.effective_time or 0.0
        replayed = account(simulate(known.run, known.events).attempts)
        compared["effective time, replayed"] = replayed.effective_time or 0.0
        days = None if "steps" in given else time.wall_s / 86400.0
        config = parse(SimulateRunConfig, None, words, SimulateRunConfig(**{**vars(known.run), "days": days}))
        # Without a failure, the rate of Llama 3.
        table = known.table if 0 < known.table.mtbf_s(1) < math.inf and config.causes is None else None
    config.check()
    table = table or read_table(config.causes or LLAMA_3)
    hours = table.mtbf_s(1) / 3600.0
    slow_nodes = table.gpu_hours / config.gpu_hours_per_straggler if config.gpu_hours_per_straggler else 0.0
    table = table.changed(hours / (config.gpu_hours_per_failure or hours), slow_nodes)
    ready, inputs = replace(config.with_interval(table), spares=config.num_spares), []
    for flag in flags_of(RunModel):
        name, value = flag.field.name, getattr(ready, flag.field.name)
        source = "given" if name in given else sources.get(name, flag.help.partition("Source: ")[2].rstrip("."))
        inputs.append((flag.name, "-" if value is None else written(value), source))
    source = "given" if config.gpu_hours_per_failure else table.source
    inputs.append(("GPU-hours per failure", written(table.mtbf_s(1) / 3600.0), source))
    counts = [sum(one.count for one in table.causes if one.is_failure is kind) for kind in (True, False)]
    source = f"in {written(table.gpu_hours)} GPU-hours"
    inputs.append(("failures, other interruptions", ", ".join(map(written, counts)), source))
    restart = config.notice_s + config.decide_s + config.start_s + config.load_s
    costs = run_summary.Costs(table.mtbf_s(config.gpus), restart, config.save_s)
    compared["effective time, Daly's formula"] = run_summary.effective_time(ready.save_interval_s, costs)
    base = figures(config, table, config.seeds)
    return Report(config, inputs, base, gains(config, table, base), compared)


def simulate_run(arguments: Sequence[str] | None, config: SimulateRunConfig) -> None:
    """Print the figures, and write them as JSON and as a page."""
    report = build_report(config, sys.argv[1:] if arguments is None else arguments)
    if report.config.html is not None:
        write_file("--html", report.config.html, simulation_page(report))
    if report.config.json is None:
        print(as_text(report))
        return
    found = {**vars(report), "flags": vars(report.config), "best_minute": report.best_minute}
    found |= report.figures._asdict() | {"lost": [[*key, hours] for key, hours in report.figures.lost.items()]}
    write_json(report.config.json, {key: found[key] for key in found if key not in ("config", "figures")})


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; the exit code."""
    return run_tool(SimulateRunConfig, partial(simulate_run, arguments), __doc__, arguments)
