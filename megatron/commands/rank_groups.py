"""Print the groups of ranks of a layout, also those of experts, and how many nodes each touches; --svg draws them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import tyro

from megatron.commands.tool import run_tool, write_file
from megatron.config.parallel import ParallelConfig
from megatron.core.topology import EXPERT_AXES, RankGrid
from megatron.errors import ConfigError
from megatron.training.initialize import rank_grid
from megatron.urls import refuse_urls

AXES = ("tp", "cp", "dp", "pp", *EXPERT_AXES)
# Colors of the groups of an axis.
COLORS = (
    "#9ecae9", "#ffbf79", "#88d27a", "#ff9d98", "#d6a5c9", "#f2cf5b", "#83bcb6", "#d8b5a5",
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#b79a20", "#439894", "#9d755d",
)  # fmt: skip
CELL, LEFT, TOP, GAP, LINE = 22, 46, 44, 8, 26


@dataclass(frozen=True)
class RankGroupsConfig:
    """A layout and what to show of it. The flags of the layout are those of pretrain_llama.py."""

    num_gpus: int
    """Ranks of the run."""
    parallel: tyro.conf.OmitArgPrefixes[ParallelConfig] = field(default_factory=ParallelConfig)
    node_size: int = 8
    """Ranks of a node."""
    svg: str | None = None
    """File for a drawing: a column for each rank, a row for each axis. Cells of one color are a group; the number is
    the position on the axis."""


def grid_of(config: RankGroupsConfig) -> RankGrid:
    """The grid of the layout; raises :class:`ConfigError` if the sizes do not divide the ranks."""
    config.parallel.check()
    parallel = config.parallel
    # Experts fold their own axes out of the ranks of a stage.
    experts = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    stage = parallel.data_parallel_size(config.num_gpus) * parallel.model_parallel_size
    stage //= parallel.pipeline_model_parallel_size
    if stage % experts:
        raise ConfigError(
            f"The {stage} ranks of a pipeline stage are not a multiple of --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_size} x --expert-model-parallel-size {parallel.expert_model_parallel_size}: "
            "lower one of them, or raise --num-gpus."
        )
    return rank_grid(parallel, config.num_gpus)


def describe(grid: RankGrid, node_size: int) -> Iterator[str]:
    """A line for each axis."""
    yield f"{'axis':6}{'size':>6}{'groups':>8}{'nodes of a group':>18}   with rank 0"
    for axis in AXES:
        groups = list(grid.groups((axis,)))
        nodes = [len({rank // node_size for rank in group}) for group in groups]
        span = f"{min(nodes)}" if min(nodes) == max(nodes) else f"{min(nodes)} to {max(nodes)}"
        ranks = " ".join(map(str, groups[0][:16])) + (" …" if len(groups[0]) > 16 else "")
        yield f"{axis:6}{len(groups[0]):6}{len(groups):8}{span:>18}   {ranks}"


def draw(grid: RankGrid, node_size: int) -> str:
    """The grid as SVG; axes of one rank are left out."""
    axes = [axis for axis in AXES if len(grid.group(0, (axis,))) > 1]

    def left(rank: int) -> int:
        return LEFT + rank * CELL + rank // node_size * GAP

    width, height = left(grid.world_size) + 4, TOP + len(axes) * LINE + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="14" text-anchor="start" font-weight="bold">--rank-order {grid.order}</text>',
        f'<text x="4" y="{TOP - 8}" text-anchor="start">rank</text>',
    ]
    lines += [f'<text x="{left(rank) + CELL // 2}" y="{TOP - 8}">{rank}</text>' for rank in range(grid.world_size)]
    for row, axis in enumerate(axes):
        y = TOP + row * LINE
        lines.append(f'<text x="4" y="{y + 15}" text-anchor="start" font-weight="bold">{axis}</text>')
        for number, group in enumerate(grid.groups((axis,))):
            for position, rank in enumerate(group):
                lines.append(
                    f'<rect x="{left(rank)}" y="{y}" width="{CELL - 1}" height="{LINE - 5}" '
                    f'fill="{COLORS[number % len(COLORS)]}"/>'
                    f'<text x="{left(rank) + CELL // 2}" y="{y + 15}">{position}</text>'
                )
    return "\n".join([*lines, "</svg>\n"])


def print_groups(config: RankGroupsConfig) -> None:
    refuse_urls({"--svg": config.svg}, "name a local file")
    grid = grid_of(config)
    print("\n".join(describe(grid, config.node_size)))
    if config.svg is not None:
        write_file("--svg", config.svg, draw(grid, config.node_size))


main = partial(run_tool, RankGroupsConfig, print_groups, __doc__)
