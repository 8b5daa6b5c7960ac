"""The pictures of what each rank holds and of the groups of ranks: those in docs/ are of today, and show what the code
divides."""

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

from megatron.commands import rank_pictures
from megatron.commands.rank_pictures import (
    PICTURES,
    RANKS,
    SHARDED,
    RankGroupsConfig,
    bytes_kept,
    describe,
    draw,
    grid_of,
)
from megatron.config.parallel import ParallelConfig
from megatron.core.topology import RankGrid
from megatron.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    "tensor-parallel": "tensor_parallel",
    "sequence-parallel": "tensor_parallel",
    "context-parallel": "context_parallel",
    "expert-parallel": "moe",
    "zero": "data_parallel",
}


def areas(svg: str) -> dict[str, float]:
    """The coloured area of every rank."""
    found: dict[str, float] = defaultdict(float)
    for width, height, rank in re.findall(r'width="([\d.]+)" height="([\d.]+)" fill="#\w+" class="(rank\d)"', svg):
        found[rank] += float(width) * float(height)
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_the_pages_show_the_pictures_that_the_command_draws(name: str) -> None:
    assert (REPOSITORY / f"docs/images/{name}.svg").read_text() == PICTURES[name](), (
        "python tools/parallelism_pictures.py --output docs/images"
    )
    assert f"(images/{name}.svg)" in (REPOSITORY / f"docs/{PAGES[name]}.md").read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_ranks_have_equal_areas(name: str) -> None:
    areas_of_ranks = areas(PICTURES[name]())
    assert len(areas_of_ranks) == (8 if name == "expert-parallel" else RANKS)
    assert all(area == pytest.approx(areas_of_ranks["rank0"]) for area in areas_of_ranks.values())


def test_tensor_parallel_ranks_share_the_weights_of_a_layer() -> None:
    hidden, unit = 8, 11.0**2
    qkv, proj, mlp = 2 * hidden * hidden, hidden * hidden, 3 * 2 * hidden * hidden
    assert sum(areas(PICTURES["tensor-parallel"]()).values()) == pytest.approx((qkv + proj + mlp) * unit)


def test_a_rank_has_its_experts_alone() -> None:
    svg = rank_pictures.expert_parallel(RankGrid(tp=1, dp=4, ep=2), experts=4)
    places = re.findall(r'y="([\d.]+)" width="[\d.]+" height="[\d.]+" fill="#\w+" class="rank(\d)"', svg)
    by_rank = {rank: sorted(float(y) for y, other in places if other == rank) for rank in "0123"}
    assert by_rank["0"] == by_rank["2"] and by_rank["1"] == by_rank["3"]
    assert max(by_rank["0"]) < min(by_rank["1"])
    assert "among ranks 0 1, among 2 3" in svg and "the same experts: ranks 0 2, 1 3" in svg


def test_the_strategies_keep_the_bytes_of_the_pages_table() -> None:
    page = (REPOSITORY / "docs/data_parallel.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| ([\d.]+) \|", page, re.MULTILINE))
    found = {name.partition(" ")[0]: bytes_kept(name, 8) for name in SHARDED}
    assert found == {name: float(number) for name, number in rows.items()}


# --- groups of ranks ------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def config_of(order: str, num_gpus: int = 32) -> RankGroupsConfig:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        rank_order=order,
    )
    return RankGroupsConfig(num_gpus, parallel)


@pytest.mark.parametrize(
    ("order", "nodes"), [("tp-cp-ep-dp-pp", {"ep": "1", "pp": "2"}), ("tp-cp-ep-pp-dp", {"ep": "2", "pp": "1"})]
)
def test_the_text_says_how_many_nodes_a_group_touches(order: str, nodes: dict[str, str]) -> None:
    rows = {line.split()[0]: line.split() for line in describe(grid_of(config_of(order)), 8)}
    assert {axis: rows[axis][3] for axis in nodes} == nodes
    assert rows["ep"][1:3] == ["8", "4"]
    assert len(rows["ep"]) == 4 + 8


@pytest.mark.parametrize(
    ("name", "order"), [("folding", "tp-cp-ep-dp-pp"), ("folding-default-order", "tp-cp-ep-pp-dp")]
)
def test_the_pictures_are_of_today(name: str, order: str) -> None:
    grid = grid_of(config_of(order))
    picture = (REPOSITORY / f"docs/images/{name}.svg").read_text(encoding="utf-8")
    assert picture == draw(grid, 8)
    # Every rank has a cell in every row, with its position on the axis.
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    ep = texts.index("ep")
    by_group = [position for group in grid.groups(("ep",)) for position in range(len(group))]
    assert texts[ep + 1 : ep + 33] == list(map(str, by_group))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^The 6 ranks of a pipeline stage .* raise --num-gpus"):
        grid_of(config_of("tp-cp-ep-dp-pp", 12))
    with pytest.raises(ConfigError, match=r"--num-gpus 0 must be at least 1"):
        grid_of(RankGroupsConfig(0))
    with pytest.raises(ConfigError, match=re.escape("not a multiple of --tensor-model-parallel-size 2")):
        grid_of(RankGroupsConfig(3, ParallelConfig(tensor_model_parallel_size=2)))
