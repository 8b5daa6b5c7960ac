"""The comparison of two sides: every part, then experiments on both."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron.comparison.batch import Batch
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.curves import compare_curves
from megatron.comparison.data import compare_data
from megatron.comparison.experiment import ExperimentError, Request, batches_of, with_values_of
from megatron.comparison.finding import Comparison, Verdict
from megatron.comparison.flags import compare_flags, compare_surroundings, config_for
from megatron.comparison.layouts import small_layout
from megatron.comparison.search import Found, Runner, Search, operations_of
from megatron.comparison.side import Side, open_side
from megatron.comparison.transformers_recorder import record_transformers
from megatron.comparison.verdict import judge
from megatron.comparison.weights import compare_weights, tensors_of
from megatron.config.run import RunConfig
from megatron.errors import UserError


def compare(
    names: tuple[str, str], runner: Runner | None, directory: Path, most_ranks: int, say: Callable[[str], None]
) -> Verdict:
    """The verdict on the sides at the paths ``names``; without a ``runner`` no experiments are made."""
    a, b = open_side("A", names[0]), open_side("B", names[1])
    say("comparing flags, data, weights and curves ...")
    flags = compare_flags(a, b)
    parts = [flags, *compare_surroundings(a, b), compare_data(a, b), compare_weights(a, b), compare_curves(a, b)]
    if runner is None:
        return judge(parts, None, "--no-experiments was given.")
    say("running the first steps of both sides, recorded ...")
    try:
        return judge(parts, experiments(a, b, flags, runner, directory, most_ranks))
    except UserError as error:
        return judge(parts, None, str(error))


def experiments(a: Side, b: Side, flags: Comparison, runner: Runner, directory: Path, most_ranks: int) -> Found:
    """What experiments on both sides find. Raises :class:`UserError` if they cannot be made."""
    models = [side for side in (a, b) if side.kind == "hugging-face"]
    if len(models) == 2:
        raise ExperimentError("both sides are models of Hugging Face, which have no flags of this code.")
    sides = [runnable(side, most_ranks) for side in (a, b) if side.kind != "hugging-face"]
    if models:
        weights = str(directory / "weights.safetensors")
        save_file(dict(tensors_of(models[0], 0)), weights)
        search = Search(runner, directory, sides[0], sides[0], flags.differences, weights)
        return beside_transformers(search, models[0], "B" if models[0] is a else "A", directory)
    return Search(runner, directory, sides[0], sides[1], flags.differences)()


def runnable(side: Side, most_ranks: int) -> tuple[RunConfig, int]:
    """The flags of a side for an experiment, and its number of ranks."""
    config = config_for(side)
    if config is None:
        raise ExperimentError(f"the flags of {side.label} are not known: name its run directory or a checkpoint.")
    if config.data.seq_length is None or config.training.micro_batch_size is None:
        raise ExperimentError(f"the flags of {side.label} say nothing of its training: name a checkpoint of a run.")
    world_size = side.world_size or config.parallel.model_parallel_size
    if world_size <= most_ranks:
        return config, world_size
    return small_layout(config, world_size, most_ranks)


def beside_transformers(search: Search, model: Side, label: str, directory: Path) -> Found:
    """The search for the first operation in which a side of this code, ``label``, differs from a model of Hugging
    Face, with the weights of that model."""
    ours = search.run(label, f"{label}-fp64", search.a, Request(weights=search.weights), fp64=True)[:1]
    search.facts = ours[0].facts
    batch = Batch.load(Path(batches_of(directory / f"{label}-fp64" / "records")[0]))
    theirs = [record_transformers(model.path, batch, dtype=torch.float64)]
    first = first_beyond(found := list(rows(theirs, ours) if label == "B" else rows(ours, theirs)))
    operations = operations_of(found, first, search.facts, "in fp64")
    if first is None:
        return Found(operations)
    other = config_for(model)
    same = Request(batches_of(directory / f"{label}-fp64" / "records"), search.weights)
    if other is not None:
        search.b, search.a = (
            search.a,
            (with_values_of(search.a[0], other, [one.what for one in search.flags]), search.a[1]),
        )
        return Found(operations, search.blame(theirs, same) or operations.differences)
    return Found(operations, operations.differences)
