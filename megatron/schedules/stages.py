"""Division of the layers among the virtual stages of the pipeline.

P pipeline ranks with V chunks each have P x V virtual stages, numbered in the order of the layers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from megatron.errors import ConfigError

PlacementShape = Literal["loop", "v"]

LONGEST_LAYOUT = 100_000
"""Limit of the letters of a layout with its repetitions expanded."""


@dataclass(frozen=True)
class VirtualStage:
    """Content of one of the P x V chunks of the model."""

    layers: range
    """Global layer numbers."""
    has_embedding: bool = False
    has_output_layer: bool = False
    """Final norm, output layer and loss."""

    @property
    def is_empty(self) -> bool:
        return not (self.layers or self.has_embedding or self.has_output_layer)


@dataclass(frozen=True)
class _Units:
    """The units of an even split: the layers, and the embedding and the loss where they count as a layer."""

    num_layers: int
    with_embedding: bool
    with_loss: bool

    @property
    def total(self) -> int:
        return self.num_layers + self.with_embedding + self.with_loss

    def __str__(self) -> str:
        counted = " and ".join(["embedding"] * self.with_embedding + ["head"] * self.with_loss)
        return f"--num-layers {self.num_layers}" + (f" (with {counted}: {self.total})" if counted else "")

    def ways_to_divide_by(self, divisor: int, is_one_chunk: bool) -> str:
        """Remedies if ``divisor`` does not divide the units."""
        uncounted = ["--account-for-embedding-in-pipeline-split"] * (not self.with_embedding)
        uncounted += ["--account-for-loss-in-pipeline-split"] * (not self.with_loss)
        missing = -self.total % divisor
        ways = []
        if missing <= len(uncounted):
            ways += [f"add {' and '.join(uncounted[-missing:])}, which makes {self.total + missing}"]
        ways += [
            "choose another --pipeline-model-parallel-size"
            + ("" if is_one_chunk else " (or number of chunks, where the schedule allows it)")
        ]
        if is_one_chunk and len(uncounted) == 2:
            ways += ["give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"]
        return ", ".join(ways) + ", or write the split as --pipeline-model-parallel-layout"


def pipeline_rank(virtual_stage: int, num_stages: int, shape: PlacementShape) -> int:
    chunk, rank = divmod(virtual_stage, num_stages)
    return num_stages - 1 - rank if shape == "v" and chunk % 2 else rank


def split_evenly(
    num_layers: int,
    num_stages: int,
    num_chunks: int = 1,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> tuple[VirtualStage, ...]:
    """Equal numbers of layers on every virtual stage; embedding and loss may count as a layer each.

    Raises :class:`ConfigError` if the division has a remainder.
    """
    units = _Units(num_layers, account_for_embedding, account_for_loss)
    num_virtual_stages = num_stages * num_chunks
    if units.total < num_virtual_stages:
        raise ConfigError(
            f"{_virtual_stages(num_stages, num_chunks)} are too many for {units}, because each needs a layer: lower "
            f"--pipeline-model-parallel-size{' or the number of chunks' if num_chunks > 1 else ''}."
        )
    if units.total % num_virtual_stages:
        raise ConfigError(
            f"{units} does not divide evenly into {_virtual_stages(num_stages, num_chunks)}: "
            f"{units.ways_to_divide_by(num_virtual_stages, is_one_chunk=num_chunks == 1)}."
        )
    counts = [units.total // num_virtual_stages] * num_virtual_stages
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    return _in_order(counts)


def split_nearly_evenly(num_layers: int, num_stages: int) -> tuple[VirtualStage, ...]:
    """The most even split; the first stages have one layer more if there is a remainder."""
    fewest, rest = divmod(num_layers, num_stages)
    return _in_order([fewest + (stage < rest) for stage in range(num_stages)])


def chunks_of_layers(
    num_layers: int,
    num_stages: int,
    layers_per_chunk: int,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> int:
    """Chunks on each pipeline rank; raises :class:`ConfigError` if the division has a remainder."""
    units = _Units(num_layers, account_for_embedding, account_for_loss)
    if units.total % (num_stages * layers_per_chunk):
        raise ConfigError(
            f"{units} does not divide evenly into chunks of --num-layers-per-virtual-pipeline-stage "
            f"{layers_per_chunk} on {num_stages} pipeline ranks: "
            f"{units.ways_to_divide_by(num_stages * layers_per_chunk, is_one_chunk=False)}."
        )
    return units.total // (num_stages * layers_per_chunk)


def split_around_ends(
    num_layers: int, num_stages: int, num_chunks: int = 1, first: int | None = None, last: int | None = None
) -> tuple[VirtualStage, ...]:
    """``first`` and ``last`` layers on the first and last pipeline rank, the rest evenly on the others.

    The chunks of a rank are equal. Raises :class:`ConfigError` if the division has a remainder.
    """
    assert num_stages > 1
    given = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    spelling = " and ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    others = num_stages - sum(value is not None for value in given.values())
    rest = num_layers - (first or 0) - (last or 0)
    if others == 0 and rest != 0:
        raise ConfigError(
            f"{spelling} do not add up to --num-layers {num_layers} on two pipeline ranks: remove one of the two flags."
        )
    if others > 0 and (rest <= 0 or rest % others):
        raise ConfigError(
            f"{spelling}: {max(rest, 0)} of --num-layers {num_layers} remain for the other pipeline ranks, which need "
            f"a positive multiple of {others}: change the flag, or write the split as "
            "--pipeline-model-parallel-layout."
        )
    middle = rest // others if others else 0
    by_rank = [middle] * num_stages
    by_rank[0] = middle if first is None else first
    by_rank[-1] = middle if last is None else last
    for rank, count in enumerate(by_rank):
        if count % num_chunks:
            raise ConfigError(
                f"{spelling}: the {count} layers on pipeline rank {rank} are not divisible by "
                f"--num-virtual-stages-per-pipeline-rank {num_chunks}: use multiples of {num_chunks}, or write the "
                "split as --pipeline-model-parallel-layout."
            )
    return _in_order([count // num_chunks for _ in range(num_chunks) for count in by_rank])


def split_by_layout(layout: str, num_layers: int, num_stages: int) -> tuple[VirtualStage, ...]:
    """The virtual stages of a layout string of Megatron-LM, such as ``Et*3|(tt|)*2tL``.

    Raises :class:`ConfigError` if it is not well-formed, or does not fit the model or ``num_stages`` pipeline ranks.
    """
    letters = _write_out(layout)
    if not (letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1):
        raise _layout_error(
            layout, "it must begin with its only E (embedding) and end with its only L (output layer and loss)"
        )
    if letters.count("t") != num_layers:
        raise _layout_error(
            layout, f"it has {letters.count('t')} layers (t), but --num-layers is {num_layers}: add or remove some"
        )
    counts = [stage.count("t") for stage in letters.split("|")]
    if len(counts) % num_stages:
        raise _layout_error(
            layout,
            f"its number of stages, {len(counts)}, is not a multiple of --pipeline-model-parallel-size {num_stages}: "
            f"write {num_stages} stages, or a multiple for several chunks on each pipeline rank",
        )
    return _in_order(counts)


def check_that_no_rank_idles(
    layout: str, stages: Sequence[VirtualStage], num_stages: int, shape: PlacementShape
) -> None:
    """Raise :class:`ConfigError` if a pipeline rank holds neither a layer nor an end of the model."""
    busy = {pipeline_rank(number, num_stages, shape) for number, stage in enumerate(stages) if not stage.is_empty}
    idle = sorted(set(range(num_stages)) - busy)
    if idle:
        numbers = [n for n in range(len(stages)) if pipeline_rank(n, num_stages, shape) == idle[0]]
        where = " and ".join(f"stage {number + 1}" for number in numbers)
        raise _layout_error(
            layout,
            f"pipeline rank {idle[0]} has no layers ({where} of {len(stages)}): move a layer (t) there, or "
            "lower --pipeline-model-parallel-size",
        )


def _in_order(counts: Sequence[int]) -> tuple[VirtualStage, ...]:
    """Virtual stages with these numbers of layers, the first with the embedding, the last with the output layer."""
    ends = list(accumulate(counts))
    return tuple(
        VirtualStage(range(end - count, end), has_embedding=number == 0, has_output_layer=number == len(counts) - 1)
        for number, (end, count) in enumerate(zip(ends, counts))
    )


def _virtual_stages(num_stages: int, num_chunks: int) -> str:
    if num_chunks == 1:
        return f"{num_stages} pipeline stages"
    return f"{num_stages * num_chunks} virtual stages ({num_stages} pipeline ranks x {num_chunks} chunks)"


def _layout_error(layout: str, problem: str) -> ConfigError:
    return ConfigError(f"--pipeline-model-parallel-layout {layout!r} cannot be used: {problem}.")


def _write_out(layout: str) -> str:
    """The layout with its repetitions expanded and without commas and spaces: E, t, L and |."""
    groups: list[list[str]] = [[]]
    for token in re.findall(r"\*[0-9]{0,6}|.", re.sub(r"[,\s]", "", layout)):
        if token == "(":
            groups.append([])
        elif token == ")" and len(groups) > 1:
            group = "".join(groups.pop())
            groups[-1].append(group)
        elif token[0] == "*" and len(token) > 1 and groups[-1]:
            if len(groups[-1][-1]) * int(token[1:]) > LONGEST_LAYOUT:
                raise _layout_error(
                    layout, f"it has more than {LONGEST_LAYOUT} letters when expanded: lower a repetition"
                )
            groups[-1][-1] *= int(token[1:])
        elif token in ("E", "t", "L", "|"):
            groups[-1].append(token)
        elif token == "m":
            raise _layout_error(layout, "m (multi-token prediction) is not supported: remove it")
        else:
            raise _layout_error(
                layout,
                f"{token!r} is not valid there: use E for the embedding, t for a layer, L for the output layer, | to "
                "end a stage, and t*3 or (tt|)*3 to repeat",
            )
    if len(groups) > 1:
        raise _layout_error(layout, "a parenthesis is not closed: add ')'")
    return "".join(groups[0])
