"""The comparison of two sides: every part, then experiments on both."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron.comparison.batch import Batch
from megatron.comparison.bisection import first_beyond, rows
from megatron.comparison.curves import compare_curves
from megatron.comparison.data import compare_data
from megatron.comparison.experiment import MASKS, STEPS, ExperimentError, Request, with_values_of
from megatron.comparison.finding import Comparison, Verdict
from megatron.comparison.flags import changes_model, compare_flags, compare_surroundings, config_for
from megatron.comparison.layouts import small_layout
from megatron.comparison.megatron_core_recorder import record_megatron_core
from megatron.comparison.search import Found, Runner, Search, operations_of
from megatron.comparison.side import Side, open_side
from megatron.comparison.transformers_recorder import record_transformers
from megatron.comparison.verdict import judge
from megatron.comparison.weights import compare_weights, is_vocabulary, tensors_of
from megatron.config.run import RunConfig
from megatron.errors import UserError
from megatron.training.batch_schedule import build_batches
from megatron.training.build.vocabulary import planned_vocabulary


def compare(
    names: tuple[str, str],
    runner: Runner | None,
    directory: Path,
    most_ranks: int,
    say: Callable[[str], None],
    megatron_core: Path | None = None,
) -> Verdict:
    """The verdict on the sides at the paths ``names``; without a ``runner`` no experiments are made. ``megatron_core``
    is the Python of an environment with megatron-core, which computes sides of Megatron-LM."""
    a, b = open_side("A", names[0]), open_side("B", names[1])
    say("comparing flags, data, weights and curves ...")
    flags = compare_flags(a, b)
    curves = compare_curves(a, b)
    first = (curves.figures or {}).get("first")
    parts = [flags, *compare_surroundings(a, b), compare_data(a, b, first), compare_weights(a, b), curves]
    if runner is None:
        return judge(parts, None, "--no-experiments was given.")
    say("running the first steps of both sides, recorded ...")
    try:
        return judge(parts, experiments(a, b, flags, first, runner, directory, most_ranks, megatron_core))
    except UserError as error:
        return judge(parts, None, str(error))


def experiments(
    a: Side,
    b: Side,
    flags: Comparison,
    first: int | None,
    runner: Runner,
    directory: Path,
    most_ranks: int,
    megatron_core: Path | None,
) -> Found:
    """What experiments on both sides find; ``first`` is the iteration at which the curves begin to differ. Raises
    :class:`UserError` if they cannot be made.

    A side of Megatron-LM without ``megatron_core`` is computed by this code with its flags."""
    foreign = [side for side in (a, b) if side.kind == "hugging-face" or (side.kind == "megatron-lm" and megatron_core)]
    if len(foreign) == 2:
        raise ExperimentError("neither side has flags of this code, with which samples are read: name one that has.")
    sides = [runnable(side, other, most_ranks) for side, other in ((a, b), (b, a)) if side not in foreign]
    if foreign:
        search = Search(runner, directory, sides[0], sides[0], flags.differences, moved="B" if foreign[0] is a else "A")
        return beside(search, foreign[0], megatron_core)
    search = Search(runner, directory, sides[0], sides[1], flags.differences)
    found = search()
    is_open = found.operations.is_complete and not found.causes and not found.operations.differences
    if is_open and (first or any(one.changes_loss for one in flags.differences)):
        return later_steps(a, search, found, first)
    return found


def later_steps(a: Side, search: Search, found: Found, first: int | None) -> Found:
    """What is ``found``, and by the same search where schedules, samples and what trained weights do may differ: from
    the ``first`` iteration that differs on, else in the last steps, from A's newest checkpoint before them."""
    last = min(map(last_iteration, (search.a, search.b))) - STEPS
    done = min(first - 1, last) if first else last
    if done < STEPS:
        return found
    begun = max((one for one in a.checkpoints if 0 < one <= done), default=None) if a.config else None
    trained = None if begun is None else str(a.checkpoints[begun].resolve())
    weights = "initial weights" if begun is None else f"A's weights of iteration {begun}"
    try:
        later = replace(search, directory=search.directory / "later", done=done, checkpoint=trained)()
    except UserError as error:
        compared = f"{found.operations.compared} From {weights}, none: {error}"
        return replace(found, operations=replace(found.operations, compared=compared, is_complete=False))
    compared = f"{found.operations.compared} From {weights}: {later.operations.compared}"
    is_bitwise = found.is_bitwise and later.is_bitwise
    return replace(later, operations=replace(later.operations, compared=compared), is_bitwise=is_bitwise)


def last_iteration(side: tuple[RunConfig, int]) -> int:
    """The last iteration of a run."""
    training, batches = side[0].training, build_batches(side[0], side[0].parallel.data_parallel_size(side[1]))
    return training.train_iters or batches.iterations_for_samples(training.train_samples or 0)


def beside(search: Search, other: Side, megatron_core: Path | None) -> Found:
    """The search for the first operation in which a side of this code differs from a model that transformers or
    megatron-core computes, from the weights of its first checkpoint."""
    label = search.moved
    weights, config = search.directory / "weights.safetensors", config_for(other)
    if config is None:
        raise ExperimentError(f"the architecture of {other.label} is not known: name a checkpoint.")
    if other.checkpoints:
        vocabulary = planned_vocabulary(search.a[0]).size  # Megatron-LM's has padding
        zero_centered = search.a[0].model.apply_layernorm_1p
        tensors = tensors_of(other, min(other.checkpoints), zero_centered)
        save_file({name: one[:vocabulary].clone() if is_vocabulary(name) else one for name, one in tensors}, weights)
    search.weights = str(weights) if other.checkpoints else None
    start = Request(weights=search.weights, save_weights=None if other.checkpoints else str(weights))
    ours = search.run(label, f"{label}-fp64", search.a, start, fp64=True)[:1]
    search.facts = ours[0].facts
    batch = Path(search.batches(f"{label}-fp64")[0])
    if other.kind == "megatron-lm" and not config.data.masks_documents:
        samples, batch = Batch.load(batch), search.directory / "without-documents.safetensors"
        replace(samples, document_starts=None).save(batch)
    if other.kind == "hugging-face":
        theirs = record_transformers(other.path, Batch.load(batch), dtype=torch.float64, weights=weights)
    else:
        assert megatron_core is not None
        architecture = config.model.resolve(ours[0].facts["vocab_size"], 1, ours[0].facts["length"])
        theirs = record_megatron_core(megatron_core, architecture, batch, weights, search.directory / "megatron-core")
    found = list(rows([theirs], ours) if label == "B" else rows(ours, [theirs]))
    first = first_beyond(found)
    operations = operations_of(found, first, search.facts, "in fp64, without updates")
    if first is None:
        return Found(operations)
    # The flags of the other side, moved into our run, must give what the other side computes. It has our samples.
    search.flags = [one for one in search.flags if changes_model(one.what)]
    search.b, names = search.a, [one.what for one in search.flags]
    search.a = with_values_of(search.a[0], config, names), search.a[1]
    same = Request(search.batches(f"{label}-fp64"), str(weights))
    return Found(operations, search.blame([theirs], same) or operations.differences)


def runnable(side: Side, other: Side, most_ranks: int) -> tuple[RunConfig, int]:
    """The flags of a side for an experiment, and its number of ranks; a side of Megatron-LM reads the samples of the
    ``other``, and masks them as its own flags say."""
    config = config_for(side)
    if side.kind == "megatron-lm" and config is not None and other.config is not None:
        masks = {name: getattr(config.data, name) for name in MASKS}
        config = replace(config, data=replace(other.config.data, **masks), tokenizer=other.config.tokenizer)
    if config is None:
        raise ExperimentError(f"the flags of {side.label} are not known: name its run directory or a checkpoint.")
    if config.data.seq_length is None or config.training.micro_batch_size is None:
        raise ExperimentError(f"the flags of {side.label} say nothing of its training: name a checkpoint of a run.")
    world_size = side.world_size or config.parallel.model_parallel_size
    if world_size <= most_ranks:
        return config, world_size
    return small_layout(config, world_size, most_ranks)
