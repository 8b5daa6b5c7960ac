"""The groups of ranks as text and picture, and the pictures of docs/moe.md."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron.commands.rank_groups import RankGroupsConfig, describe, draw, grid_of
from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError

IMAGES = Path(__file__).parents[2] / "docs/images"
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
    picture = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert picture == draw(grid, 8)
    # Every rank has a cell in every row, with its position on the axis.
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    ep = texts.index("ep")
    by_group = [position for group in grid.groups(("ep",)) for position in range(len(group))]
    assert texts[ep + 1 : ep + 33] == list(map(str, by_group))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^The 6 ranks of a pipeline stage .* raise --num-gpus"):
        grid_of(config_of("tp-cp-ep-dp-pp", 12))
    with pytest.raises(ConfigError, match=re.escape("not a multiple of --tensor-model-parallel-size 2")):
        grid_of(RankGroupsConfig(3, ParallelConfig(tensor_model_parallel_size=2)))
