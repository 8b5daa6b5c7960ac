"""The table of published runs: which rows are fitted, which contradict others, and which measure the same thing."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.planner.step_time.published import PublishedRun, Row, read_published, text
from megatron.planner.step_time.workload import Run

TABLE = Path(__file__).with_name("runs.csv")
DOUBTFUL: tuple[Mapping[str, str], ...] = (
    {"source": "bloom", "step_time_s": "113.01"},
    {"source": "bloom", "step_time_s": "148.24"},
    {"source": "llm-foundry", "model": "MPT-30B", "seq": "8192"},
    {"source": "torchtitan", "seq": "65536", "gpus": "8"},
    {"source": "nemo-25xx", "step_time_s": "6.2894"},
)
"""Rows whose times contradict other rows of their source. They are fitted, and errors are stated with and without
them."""
_HELD_BACK = 5
"""One row in so many is not fitted, but predicted."""
_MEASURED = ("tflops_per_gpu", "mfu", "step_time_s", "tokens_per_s_per_gpu", "memory_gb")
_RELEASE = re.compile(r"NeMo [\d.]+(?:/[\d.]+)?|v25[\d.]*\d|\d\d\.\d\d page|June 2025|MP mode [A-Z]+")
_DAY_OF_BLOOM = re.compile(r"; (\d\d-\d\d)\b")


def fitted_and_held_back(path: Path = TABLE) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """The measured runs that can be priced: those to fit, and those to predict."""
    usable = [one for one in read_published(path) if one.run is not None and one.seconds is not None]
    return [one for one in usable if not _is_held_back(one.row)], [one for one in usable if _is_held_back(one.row)]


def _is_held_back(row: Row) -> bool:
    """By a digest of what describes the run, without what was measured."""
    stated = "|".join(f"{name}={value}" for name, value in row.items() if name not in _MEASURED and name != "where")
    return int(hashlib.sha256(stated.encode()).hexdigest(), 16) % _HELD_BACK == 0


def sources(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """The sources, in the order of their first rows."""
    yield from dict.fromkeys(one.source for one in runs)


def is_doubtful(one: PublishedRun) -> bool:
    """Whether the row is one of :data:`DOUBTFUL`."""
    return any(all(one.row.get(name) == value for name, value in row.items()) for row in DOUBTFUL)


def without_doubtful(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs whose times do not contradict others."""
    return [one for one in runs if not is_doubtful(one)]


def run_of(one: PublishedRun) -> Run:
    """The run of a row that can be priced."""
    assert one.run is not None
    return one.run


def precision(one: PublishedRun) -> str:
    """As stated; of rows without one fp16 of Megatron-LM before 2023, else bf16, which take the same time."""
    is_old = run_of(one).software.elementwise == "megatron-2021"
    return text(one.row, "precision") or ("fp16" if is_old else "bf16")


def release(one: PublishedRun) -> str:
    """Release of the software, as far as the row states it.

    BLOOM's logbook says that the adapters of the nodes became faster on 25 February, and not to compare across.
    """
    where = text(one.row, "where")
    if one.source == "bloom":
        day = _DAY_OF_BLOOM.search(where)
        return "" if day is None else "from 02-25" if day.group(1) >= "02-25" else "before 02-25"
    _, _, own = where.partition("; ")  # after the name of the document
    return ", ".join(dict.fromkeys(_RELEASE.findall(own)))


def model_of_row(one: PublishedRun) -> Hashable:
    """The shapes of the model, and the sequence length."""
    run = run_of(one)
    return (run.layers, run.hidden, run.heads, run.kv_heads, run.ffn, run.vocab, run.seq_length)


def same_software(one: PublishedRun) -> Hashable:
    """Runs of one source with the same GPU, precision, software with its options, and release."""
    return (one.source, one.row["gpu"], precision(one), run_of(one).software, release(one))


def same_job(one: PublishedRun) -> Hashable:
    """Runs of the same software that train the same model with the same sequence length."""
    return (same_software(one), one.row["model"], model_of_row(one))


def same_layout(one: PublishedRun) -> tuple[str, Run]:
    """The key of runs with the same layout, job and GPUs. They may differ in the release of their software, which a
    model of layouts does not know."""
    run = run_of(one)
    return (one.row["gpu"], replace(run, software=replace(run.software, main_grad_bytes=0)))


def same_replica(one: PublishedRun) -> Hashable:
    """Runs of one layout of a model on one kind of GPU, with any number of data-parallel replicas and any batch."""
    gpu, run = same_layout(one)
    return (gpu, replace(run, gpus=0, dp=0, global_batch_size=0))


def split_by_twins(
    runs: Sequence[PublishedRun], known: Sequence[PublishedRun]
) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """The runs that have a twin among the ``known`` ones, and the others.

    A twin is a run of the same layout whose tokens per second and GPU could be copied instead of predicted.
    """
    replicas = {same_replica(one) for one in known}
    twins = [one for one in runs if same_replica(one) in replicas]
    return twins, [one for one in runs if same_replica(one) not in replicas]


def groups(runs: Sequence[PublishedRun], key: Callable[[PublishedRun], Hashable]) -> dict[Hashable, list[int]]:
    """The positions of the runs by key."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, one in enumerate(runs):
        found[key(one)].append(number)
    return found
