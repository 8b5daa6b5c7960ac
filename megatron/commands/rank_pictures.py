"""Pictures of a layout: the groups of ranks, and what each rank holds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.commands.tool import run_tool, write_file
from megatron.config.parallel import ParallelConfig
from megatron.core.context_parallel import ContextSplit
from megatron.core.data_parallel.buffer import plan_buffer
from megatron.core.parameter import Division, columns_box, sharded_boxes
from megatron.core.topology import EXPERT_AXES, RankGrid
from megatron.errors import ConfigError
from megatron.flags import require_at_least, values_of
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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    node_size: int = 8
    """Ranks of a node."""
    svg: str | None = None
    """File for a drawing: a column for each rank, a row for each axis. Cells of one color are a group; the number is
    the position on the axis."""


def grid_of(config: RankGroupsConfig) -> RankGrid:
    """The grid of the layout; raises :class:`ConfigError` if the sizes do not divide the ranks."""
    config.parallel.check()
    require_at_least(1, values_of(config, "num_gpus", "node_size"))
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

    drawing = Drawing(left(grid.world_size) + 4, TOP + len(axes) * LINE + 6, font_size=11)
    drawing.text(4, 14, f"--rank-order {grid.order}", "start", bold=True)
    drawing.text(4, TOP - 8, "rank", "start")
    for rank in range(grid.world_size):
        drawing.text(left(rank) + CELL // 2, TOP - 8, str(rank))
    for row, axis in enumerate(axes):
        y = TOP + row * LINE
        drawing.text(4, y + 15, axis, "start", bold=True)
        for number, group in enumerate(grid.groups((axis,))):
            for position, rank in enumerate(group):
                drawing.box(left(rank), y, CELL - 1, LINE - 5, COLORS[number % len(COLORS)])
                drawing.text(left(rank) + CELL // 2, y + 15, str(position))
    return str(drawing)


def print_groups(config: RankGroupsConfig) -> None:
    refuse_urls({"--svg": config.svg}, "name a local file")
    grid = grid_of(config)
    print("\n".join(describe(grid, config.node_size)))
    if config.svg is not None:
        write_file("--svg", config.svg, draw(grid, config.node_size))


main_groups = partial(
    run_tool,
    RankGroupsConfig,
    print_groups,
    "Print the groups of ranks of a layout, also those of experts, and how many nodes each touches; --svg draws them.",
)


# --- what each rank holds ------------------------------------------------------------------------------------

PICTURES_DESCRIPTION = """\
Draw what each rank holds under tensor, sequence, context, expert and data parallelism: the pictures of docs/.

The positions come from the functions that divide weights, positions, experts and buffers in a run.
"""
"""Text of ``tools/parallelism_pictures.py --help``."""
RANKS = 4
# Bytes of a parameter.
STATE = {"weights": 2, "gradients": 4, "master weights": 4, "moments": 8}
# The state that each strategy shards.
SHARDED = {
    "no_shard": (),
    "optim (ZeRO-1)": ("master weights", "moments"),
    "optim_grads (ZeRO-2)": ("gradients", "master weights", "moments"),
    "optim_grads_params (ZeRO-3)": ("gradients", "master weights", "moments"),
}
# The state that a strategy does not keep: a layer's weights are cast from master weights when they are all-gathered.
CAST = {"optim_grads_params (ZeRO-3)": ("weights",)}
_EMPTY, _LINE = "#eeeeee", "#666666"


@dataclass(frozen=True)
class PicturesConfig:
    """Directory of the pictures."""

    output: str
    """Directory for the SVG files."""


class Drawing:
    """Rectangles and texts of a picture."""

    def __init__(self, width: float, height: float, font_size: int = 13) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="{font_size}" text-anchor="middle">',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]

    def box(self, left: float, top: float, width: float, height: float, fill: str = "none", css: str = "") -> None:
        line = f' stroke="{_LINE}"' if fill in ("none", _EMPTY) else ""
        name = f' class="{css}"' if css else ""
        self._parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="{fill}"{line}{name}/>'
        )

    def text(self, x: float, y: float, words: str, anchor: str = "middle", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{words}</text>')

    def shard(self, left: float, top: float, scale: float, division: Division, rank: int, is_transposed: bool) -> None:
        """The boxes of a rank in a global tensor; transposed: dim 0 to the right."""
        for one in division[2]:
            rows, columns = one.global_offset, one.shape
            x, y, width, height = (
                (rows[0], rows[1], columns[0], columns[1])
                if is_transposed
                else (rows[1], rows[0], columns[1], columns[0])
            )
            self.box(left + x * scale, top + y * scale, width * scale, height * scale, COLORS[rank], f"rank{rank}")

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def tensor_parallel(ranks: int = RANKS, hidden: int = 8) -> str:
    """The weights of a layer, ``x W^T``: rows of a weight are its outputs, which point to the right here."""
    heads, groups, width, scale = hidden, hidden // 2, 2 * hidden, 11.0
    weights: list[tuple[str, Callable[[int], Division], bool]] = [
        ("linear_qkv", lambda rank: sharded_boxes((heads, groups, groups), (hidden,), rank, ranks), True),
        ("linear_proj", lambda rank: columns_box(hidden, heads, rank, ranks), True),
        ("linear_fc1", lambda rank: sharded_boxes((width, width), (hidden,), rank, ranks), True),
        ("linear_fc2", lambda rank: columns_box(hidden, width, rank, ranks), True),
    ]
    drawing = Drawing(960, 270)
    left, gap = 20.0, 36.0
    for name, division, is_transposed in weights:
        columns, rows = division(0)[0]
        drawing.text(left, 22, name, "start", bold=True)
        drawing.text(left, 40, "query, key, value" if "qkv" in name else "gate, up" if "fc1" in name else "", "start")
        for rank in range(ranks):
            drawing.shard(left, 50, scale, division(rank), rank, is_transposed)
        drawing.box(left, 50, columns * scale, rows * scale)
        left += max(columns * scale, 84) + gap
    _legend(drawing, 20, 254, ranks)
    return str(drawing)


def sequence_parallel(ranks: int = RANKS, length: int = 8, hidden: int = 8) -> str:
    """The activations of a sequence in a layer: positions downwards, features to the right."""
    positions: Callable[[int], Division] = lambda rank: sharded_boxes((length,), (hidden,), rank, ranks)  # noqa: E731
    features: Callable[[int], Division] = lambda rank: columns_box(length, hidden, rank, ranks)  # noqa: E731
    steps = [("norm", positions), ("attention", features), ("norm", positions), ("MLP", features)]
    between = ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter")
    scale, width, top = 11.0, 225.0, 40.0
    drawing = Drawing(960, 180)
    for number, (name, division) in enumerate(steps):
        left = 20 + number * width
        drawing.text(left, 22, f"{name}: {'positions' if division is positions else 'heads or columns'}", "start", True)
        for rank in range(ranks):
            drawing.shard(left, top, scale, division(rank), rank, False)
        drawing.box(left, top, hidden * scale, length * scale)
        drawing.text(left + 155, top + 48, f"{between[number]} →")
    _legend(drawing, 20, 164, ranks)
    return str(drawing)


def context_parallel(ranks: int = RANKS, length: int = 16) -> str:
    """Which rank computes the attention of a query with a key."""
    cell, left, top = 18, 110, 40
    drawing = Drawing(left + length * cell + 20, top + length * cell + 40)
    drawing.text(left, 22, "keys →", "start", bold=True)
    for rank in range(ranks):
        split = ContextSplit(rank, ranks)
        for query in split.positions(length).tolist():
            drawing.text(
                left - 8, top + query * cell + 14, f"{'query ' if not query else ''}{query}, rank {rank}", "end"
            )
            for key in range(query + 1):
                drawing.box(left + key * cell, top + query * cell, cell - 1, cell - 1, COLORS[rank], f"rank{rank}")
    _legend(drawing, left, top + length * cell + 26, ranks)
    return str(drawing)


def expert_parallel(grid: RankGrid | None = None, experts: int = 8) -> str:
    """The experts of every rank of a stage."""
    grid = grid or RankGrid(tp=2, dp=4, ep=4, etp=1)
    per_rank, cell, left, top = experts // grid.ep, 44, 110, 66
    drawing = Drawing(left + grid.stage_size * cell + 20, top + experts * 24 + 60)
    drawing.text(left - 10, 22, "rank", "end", bold=True)
    drawing.text(left - 10, 40, "tensor", "end")
    drawing.text(left - 10, 58, "expert", "end")
    for expert in range(experts):
        drawing.text(left - 10, top + expert * 24 + 17, f"expert {expert}", "end")
    for rank in range(grid.stage_size):
        position, x = grid.coordinates(rank), left + rank * cell
        drawing.text(x + cell / 2, 22, str(rank), bold=True)
        drawing.text(x + cell / 2, 40, str(position["tp"]))
        drawing.text(x + cell / 2, 58, str(position["ep"]))
        for expert in range(experts):
            is_here = expert // per_rank == position["ep"]
            fill, css = (COLORS[position["ep"]], f"rank{rank}") if is_here else (_EMPTY, "")
            drawing.box(x, top + expert * 24, cell - 2, 22, fill, css)
    bottom = top + experts * 24 + 22
    words = [f"{' '.join(map(str, group))}" for group in grid.groups(("ep",))]
    drawing.text(left, bottom, f"all-to-all among ranks {', among '.join(words)}", "start")
    words = [f"{' '.join(map(str, group))}" for group in grid.groups(("edp",))]
    drawing.text(left, bottom + 20, f"the same experts: ranks {', '.join(words)}", "start")
    return str(drawing)


def data_parallel(ranks: int = RANKS, parameters: int = 256) -> str:
    """Weights, gradients and optimizer state of every rank under each sharding strategy."""
    layout = plan_buffer([parameters], ranks)
    scale, left, row = 40.0, 110.0, 20.0
    drawing = Drawing(left + sum(STATE.values()) * scale + 40, 40 + len(SHARDED) * (ranks * row + 34) + 10)
    x = left
    for name, size in STATE.items():
        drawing.text(x + size * scale / 2, 22, name, bold=True)
        x += size * scale + 6
    top = 40.0
    for strategy, sharded in SHARDED.items():
        drawing.text(8, top + 14, f"{strategy}: {bytes_kept(strategy, ranks):g} bytes a parameter", "start", bold=True)
        for rank in range(ranks):
            y, x = top + 22 + rank * row, left
            drawing.text(left - 10, y + 14, f"rank {rank}", "end")
            for name, size in STATE.items():
                ((start, stop),) = layout.shard(rank, ranks) if name in sharded else layout.buckets
                drawing.box(x, y, size * scale, row - 3, _EMPTY)
                share = size * scale / layout.size
                if name not in CAST.get(strategy, ()):
                    drawing.box(x + start * share, y, (stop - start) * share, row - 3, COLORS[rank], f"rank{rank}")
                x += size * scale + 6
        top += ranks * row + 34
    return str(drawing)


def bytes_kept(strategy: str, ranks: int) -> float:
    """Bytes of a parameter that a rank keeps between steps."""
    kept = STATE.keys() - CAST.get(strategy, ())
    return sum(STATE[name] / (ranks if name in SHARDED[strategy] else 1) for name in kept)


def _legend(drawing: Drawing, left: float, y: float, ranks: int) -> None:
    for rank in range(ranks):
        drawing.box(left + rank * 80, y - 12, 14, 14, COLORS[rank])
        drawing.text(left + rank * 80 + 20, y, f"rank {rank}", "start")


PICTURES: Mapping[str, Callable[[], str]] = {
    "tensor-parallel": tensor_parallel,
    "sequence-parallel": sequence_parallel,
    "context-parallel": context_parallel,
    "expert-parallel": expert_parallel,
    "zero": data_parallel,
}


def draw_all(config: PicturesConfig) -> None:
    refuse_urls({"--output": config.output}, "name a local directory")
    for name, draw in PICTURES.items():
        path = Path(config.output) / f"{name}.svg"
        write_file("--output", path, draw())
        print(path)


main_pictures = partial(run_tool, PicturesConfig, draw_all, PICTURES_DESCRIPTION)
