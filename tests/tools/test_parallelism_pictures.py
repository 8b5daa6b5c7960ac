"""The pictures of what each rank holds: those in docs/ are of today, and show what the code divides."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from megatron.commands import parallelism_pictures
from megatron.commands.parallelism_pictures import PICTURES, RANKS, SHARDED, bytes_kept
from megatron.core.topology import RankGrid

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
    svg = parallelism_pictures.expert_parallel(RankGrid(tp=1, dp=4, ep=2), experts=4)
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
