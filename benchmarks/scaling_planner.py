"""The dry run and the search for a layout, over the number of ranks and over the size of the model."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from unittest import mock

from benchmarks.lib.scaling_curve import Curve, Point, cost_of
from megatron.commands import plan_layout, pretrain_llama

MODELS = {"llama3.2-1b": 1.2e9, "llama3.1-8b": 8.0e9, "llama3.1-70b": 70.6e9, "llama3.1-405b": 405.9e9}
_LAYOUTS = {
    "llama3.2-1b": "",
    "llama3.1-8b": "",
    "llama3.1-70b": "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4",
    "llama3.1-405b": "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
}


def dry_run(model: str, ranks: int) -> int:
    words = (
        f"--model {model} --mock-data --seq-length 8192 --micro-batch-size 1 --global-batch-size {4 * ranks} "
        f"--train-iters 1 --lr 1 --bf16 --use-distributed-optimizer {_LAYOUTS[model]} --dry-run --num-gpus {ranks}"
    )
    with _quiet():
        return int(pretrain_llama.main(words.split()))


def search(model: str, ranks: int) -> int:
    words = (
        f"--model {model} --cluster h100 --num-gpus {ranks} --seq-length 8192 --global-batch-size {4 * ranks} "
        "--precision bf16"
    )
    with _quiet(), mock.patch.object(sys, "argv", ["plan_layout.py", *words.split()]):
        return int(plan_layout.main())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def curves(largest: bool) -> list[Curve]:
    """Ranks grow at one model, and models at one number of ranks."""
    sizes = (8, 64, 512, 4096, 16384) if largest else (8, 64, 512)
    models = dict(list(MODELS.items())[: 4 if largest else 2])
    by_ranks = {ranks: _cost(lambda ranks=ranks: dry_run("llama3.1-8b", ranks)) for ranks in sizes}  # type: ignore[misc]
    by_model = {model: _cost(lambda model=model: dry_run(model, 1024)) for model in models}  # type: ignore[misc]
    searched = {ranks: _cost(lambda ranks=ranks: search("llama3.1-70b", ranks)) for ranks in sizes[1:]}  # type: ignore[misc]
    found = tuple(Point(ranks, *cost) for ranks, cost in searched.items())
    return [
        Curve("dry run of 8B", "ranks", tuple(Point(n, *cost) for n, cost in by_ranks.items()), order=0.5),
        Curve(
            "dry run on 1,024 ranks",
            "parameters",
            tuple(Point(MODELS[model], *cost) for model, cost in by_model.items()),
            order=0.75,
        ),
        Curve("search for a layout of 70B", "ranks", found, order=0.75),
    ]


def _cost(call: Callable[[], int]) -> tuple[float, int]:
    code, cost = cost_of(call)
    assert code == 0, code
    return cost.seconds, cost.bytes
