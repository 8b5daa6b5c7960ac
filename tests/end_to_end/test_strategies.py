"""A run changes its data-parallel strategy and its number of ranks on the way, or stops and goes on, and its losses do
not show it.

In bf16 the comparison is of bits: a tolerance wide enough for sums in another order would hide a master weight that was
lost. The sum of two numbers does not depend on their order, so runs agree to the bit where each adds up the same pairs
of gradients, and where nothing is clipped, since a norm adds up more. The rest is compared in fp64.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.run_process import (
    REPOSITORY,
    Corpus,
    FlagValue,
    RunningTraining,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    grad_norms,
    losses,
    tiny_corpus,
)
from tests.end_to_end.test_pipeline_run import Command, Runs, assert_same_records, run_in_turn

pytestmark = pytest.mark.slow(reason="many runs of two and four ranks; tests/parallel proves the same in process")

Flags = Mapping[str, FlagValue | Path]

LENGTH, STOP = 8, 4
RUN: Flags = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "train_iters": LENGTH,
    "eval_interval": 2,
    "eval_iters": 1,
    "adam_beta2": 0.95,
}
BF16: Flags = {**RUN, "bf16": True}
TWO_GRADIENTS: Flags = {**BF16, "clip_grad": 0, "micro_batch_size": 4}
"""A batch of two microbatches, whose gradients are added up."""
TWO_PAIRS: Flags = {**BF16, "clip_grad": 0, "micro_batch_size": 2}
"""Of four: the first two are added up, the last two, and both sums. So do two shard groups of two ranks, and two ranks
that reduce each of their two microbatches by itself."""
EXACT: Flags = {
    **RUN,
    "fp64": True,
    "untie_embeddings_and_output_weights": False,
    "micro_batch_size": 1,
    "hidden_size": 66,
    "kv_channels": 16,
}
"""Added up in any order, clipped, with a tied weight, and with rows that four ranks cannot divide evenly."""

STRATEGIES: dict[str, Flags] = {
    "no_shard": {},
    "optim": {"use_distributed_optimizer": True},
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "optim_grads_params": {"use_torch_fsdp2": True},
}
FULLY_SHARDED = STRATEGIES["optim_grads_params"]
ONCE_A_STEP: Flags = {**FULLY_SHARDED, "torch_fsdp2_reshard_after_forward": False}
NARROW_MOMENTS: Flags = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
NARROW_AND_LATE: Flags = {
    **NARROW_MOMENTS,
    "main_grads_dtype": "bf16",
    "grad_reduce_in_bf16": True,
    "defer_grad_reduce": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
TWO_INSTANCES: Flags = {"num_distributed_optimizer_instances": 2}
TWO_STAGES: Flags = {"pipeline_model_parallel_size": 2}


# --- many runs, each handed from ranks to ranks --------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """A part of a run, up to iteration ``stop``."""

    ranks: int
    stop: int
    layout: Flags


Relay = tuple[Flags, Sequence[Leg]]
"""A run whose every leg loads what the one before has saved."""

WITHOUT_STOP: dict[str, Relay] = {
    **{name: (TWO_GRADIENTS, [Leg(2, LENGTH, layout)]) for name, layout in STRATEGIES.items()},
    "gathered once a step": (TWO_GRADIENTS, [Leg(2, LENGTH, ONCE_A_STEP)]),
    "narrow moments": (TWO_GRADIENTS, [Leg(2, LENGTH, {**FULLY_SHARDED, **NARROW_MOMENTS})]),
    "narrow and late": (BF16, [Leg(2, LENGTH, {**FULLY_SHARDED, **NARROW_AND_LATE})]),
}
STOPPED = ("optim_grads_params", "gathered once a step", "narrow moments", "narrow and late")
RELAYS: dict[str, Relay] = {
    "two gradients": (
        TWO_GRADIENTS,
        [
            Leg(2, 2, STRATEGIES["no_shard"]),
            Leg(2, 4, {**FULLY_SHARDED, "overlap_param_gather": True}),
            Leg(2, 5, {**STRATEGIES["optim"], "overlap_grad_reduce": True}),
            Leg(2, 6, ONCE_A_STEP),
            Leg(1, LENGTH, FULLY_SHARDED),
        ],
    ),
    "two pairs": (
        TWO_PAIRS,
        [
            Leg(4, 2, {**STRATEGIES["optim"], **TWO_INSTANCES}),
            Leg(4, 4, {**FULLY_SHARDED, **TWO_INSTANCES}),
            Leg(4, 5, {**FULLY_SHARDED, **TWO_STAGES, "pipeline_schedule": "zb-v"}),
            Leg(2, LENGTH, FULLY_SHARDED),
        ],
    ),
    "any order": (
        EXACT,
        [
            Leg(1, 1, STRATEGIES["no_shard"]),
            Leg(4, 2, {**FULLY_SHARDED, **TWO_INSTANCES}),
            Leg(4, 3, {**STRATEGIES["optim"], **TWO_STAGES}),
            Leg(4, 4, {**FULLY_SHARDED, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
            Leg(4, 5, {**FULLY_SHARDED, **TWO_STAGES, "pipeline_schedule": "zb-h1"}),
            Leg(4, 6, FULLY_SHARDED),
            Leg(2, 7, FULLY_SHARDED),
            Leg(1, LENGTH, FULLY_SHARDED),
        ],
    ),
}
RUNS: dict[str, Relay] = {
    **WITHOUT_STOP,
    **{
        f"{name}, stopped": (flags, [Leg(leg.ranks, STOP, leg.layout), leg])
        for name, (flags, (leg,)) in WITHOUT_STOP.items()
        if name in STOPPED
    },
    **RELAYS,
    "two pairs, four ranks": (TWO_PAIRS, [Leg(4, LENGTH, {**STRATEGIES["optim"], **TWO_INSTANCES})]),
    "any order, one process": (EXACT, [Leg(1, LENGTH, STRATEGIES["no_shard"])]),
}


def rounds(relays: Mapping[str, Relay]) -> Iterator[tuple[int, list[tuple[str, Leg]]]]:
    """All legs, each after the one before it, with as few starts of ranks as that needs: ranks and what they run."""
    waiting = {name: list(legs) for name, (_, legs) in relays.items()}
    while any(waiting.values()):
        for ranks in (1, 4, 2):
            mine = []
            for name, legs in waiting.items():
                while legs and legs[0].ranks == ranks:
                    mine.append((name, legs.pop(0)))
            if mine:
                yield ranks, mine


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs; what each said in its last leg."""
    directory = tmp_path_factory.mktemp("runs")
    said: dict[str, str] = {}
    for ranks, legs in rounds(RUNS):
        commands: dict[str, Command] = {}
        for name, leg in legs:
            files = {"save": directory / name, "load": directory / name, "metrics_jsonl": directory / f"{name}.jsonl"}
            words = flags_of(corpus, **{**RUNS[name][0], **leg.layout, **files}, exit_interval=leg.stop)
            commands[f"{name} up to {leg.stop}"] = "pretrain_llama", words
        if ranks == 1:
            outputs = {leg: call_training(words).succeeded().stdout for leg, (_, words) in commands.items()}
        else:
            outputs = run_in_turn(commands, tmp_path_factory.mktemp("ranks"), ranks)
        said |= {name: output for (name, _), output in zip(legs, outputs.values())}
    return Runs(directory, said)


LossAt = tuple[int, str, float]


def all_losses(metrics: Path) -> list[LossAt]:
    """Training, validation and test losses in the order of the file, with their iteration."""
    return [
        (record["iteration"], kind, record[kind])
        for record in computed(metrics)
        for kind in ("lm_loss", "validation_loss", "test_loss")
        if kind in record
    ]


# --- one strategy and another --------------------------------------------------------------------------------


def test_what_is_compared_learns_and_evaluates(runs: Runs) -> None:
    """Or else the other tests would show nothing."""
    for name in ("no_shard", "any order, one process"):
        found = all_losses(runs.metrics(name))
        trained = [loss for _, kind, loss in found if kind == "lm_loss"]
        assert len(trained) == LENGTH and trained[-1] < trained[0] - 0.5
        assert [(iteration, kind) for iteration, kind, _ in found if kind != "lm_loss"] == [
            *((iteration, "validation_loss") for iteration in (2, 4, 6, 8)),
            (LENGTH, "test_loss"),
        ]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "no_shard"] + ["gathered once a step"])
def test_every_strategy_has_the_same_losses_to_the_bit_from_the_first_on(runs: Runs, name: str) -> None:
    """The first is of the initial weights, which do not depend on the strategy."""
    assert all_losses(runs.metrics(name)) == all_losses(runs.metrics("no_shard"))
    assert_close(grad_norms(runs.metrics(name)), grad_norms(runs.metrics("no_shard")), 1e-6)


def test_the_first_loss_does_not_depend_on_the_number_of_ranks_either(runs: Runs) -> None:
    first = {name: losses(runs.metrics(name))[0] for name, (flags, _) in RUNS.items() if "bf16" in flags}
    assert_close(list(first.values()), [first["no_shard"]] * len(first), 1e-5)


def test_a_run_without_clipping_is_handed_on_to_the_bit(runs: Runs) -> None:
    """From no_shard to FSDP, to ZeRO-1, to FSDP with weights gathered once a step, all on two ranks."""
    found, wanted = all_losses(runs.metrics("two gradients")), all_losses(runs.metrics("no_shard"))
    assert [one for one in found if one[0] <= 6] == [one for one in wanted if one[0] <= 6]


def test_one_process_goes_on_with_what_two_fully_sharded_ranks_saved(runs: Runs) -> None:
    """Its gradients are those of two ranks but for the embedding's, whose rows it adds up one by one."""
    found, wanted = all_losses(runs.metrics("two gradients")), all_losses(runs.metrics("no_shard"))
    assert [one[:2] for one in found] == [one[:2] for one in wanted]
    assert [one for one in found if one[0] == 7] == [one for one in wanted if one[0] == 7]
    assert_close([one[2] for one in found], [one[2] for one in wanted], 1e-5)


def test_four_ranks_in_two_instances_then_in_two_stages_hand_a_run_on_to_two_ranks_to_the_bit(runs: Runs) -> None:
    """From ZeRO-1 to HSDP, to FSDP in each stage of zb-v, to FSDP."""
    assert all_losses(runs.metrics("two pairs")) == all_losses(runs.metrics("two pairs, four ranks"))


def test_a_run_handed_through_strategies_stages_and_numbers_of_ranks_equals_one_process(runs: Runs) -> None:
    """One process; on four ranks HSDP, ZeRO-1 in two stages, FSDP with tensor parallelism, in two stages and alone;
    FSDP on two ranks; one process."""
    assert_same_records(computed(runs.metrics("any order")), computed(runs.metrics("any order, one process")))


# --- one strategy, stopped and started again -----------------------------------------------------------------


@pytest.mark.parametrize("name", STOPPED)
def test_a_fully_sharded_run_that_stops_goes_on_bit_by_bit(runs: Runs, name: str) -> None:
    whole, stopped = name, f"{name}, stopped"
    assert f"continuing after iteration {STOP}" in runs.said[stopped]
    assert computed(runs.metrics(stopped)) == computed(runs.metrics(whole))
    assert_same_tensors(checkpoint_of(runs.directory / stopped, LENGTH), checkpoint_of(runs.directory / whole, LENGTH))


@pytest.mark.parametrize("name", ["optim_grads_params", "narrow moments"])
def test_moments_are_saved_in_their_own_format_and_weights_in_fp32(runs: Runs, name: str) -> None:
    formats: dict[str, set[torch.dtype]] = {}
    for path in checkpoint_of(runs.directory / name, LENGTH).glob("*.safetensors"):
        for key, tensor in load_file(path).items():
            kind = "/".join(key.split("/")[: 1 if key.startswith("model/") else 2])
            formats.setdefault(kind, set()).add(tensor.dtype)
    moments = torch.bfloat16 if name == "narrow moments" else torch.float32
    assert {kind: formats[kind] for kind in formats if not kind.startswith("random/")} == {
        "model": {torch.float32},
        "optimizer/exp_avg": {moments},
        "optimizer/exp_avg_sq": {moments},
    }


def test_narrow_moments_train_nearly_as_wide_ones(runs: Runs) -> None:
    """But not quite: they are in use."""
    wide, narrow = losses(runs.metrics("optim_grads_params")), losses(runs.metrics("narrow moments"))
    assert_close(narrow, wide, 0.02)
    assert narrow != wide


# --- what a run says, and how it ends ------------------------------------------------------------------------

BYTES_KEPT: dict[str, dict[str, int]] = {
    "no_shard": {"weights": 2, "gradients": 4, "master weights": 4, "moments": 8},
    "optim": {"weights": 2, "gradients": 4, "master weights": 2, "moments": 4},
    "optim_grads": {"weights": 2, "gradients": 2, "master weights": 2, "moments": 4},
    "optim_grads_params": {"weights": 2, "gradients": 2, "moments": 4},
}
"""For each parameter of the model, on each of two ranks."""


def memory(said: str) -> dict[str, float]:
    """MiB by what they are for, from the start-up line."""
    (line,) = re.findall(r"^> memory on this rank: (.+)$", said, re.MULTILINE)
    return {kind: float(size.replace(",", "")) for kind, size in re.findall(r"([a-z ]+?) ([0-9.,]+) MiB(?:, |$)", line)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_start_up_line_tells_the_memory_that_the_strategy_keeps(runs: Runs, name: str) -> None:
    said = runs.said[name]
    ((whole, mine),) = re.findall(r"^> model: ([0-9,]+) parameters, ([0-9,]+) on this rank$", said, re.MULTILINE)
    parameters = int(whole.replace(",", ""))
    assert int(mine.replace(",", "")) == (parameters // 2 if name == "optim_grads_params" else parameters)
    found = memory(said)
    assert list(found) == list(BYTES_KEPT[name])
    for kind, size in BYTES_KEPT[name].items():
        # Half a unit of the last digit, and some padding.
        assert abs(found[kind] - size * parameters / 2**20) < 0.06, kind


def test_memory_falls_from_strategy_to_strategy(runs: Runs) -> None:
    totals = [sum(memory(runs.said[name]).values()) for name in STRATEGIES]
    assert all(less < more - 0.2 for more, less in pairwise(totals)), totals


LAST_WORDS = """
import os, sys
sys.path.insert(0, {repository!r})
from megatron.commands import pretrain_llama

exit_code = pretrain_llama.main(sys.argv[1:])
print("threads:", sorted(open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")))
sys.exit(exit_code)
"""


def test_a_fully_sharded_run_leaves_no_thread_of_a_process_group_behind(corpus: Corpus, tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends aborts the process, after a run that went well."""
    script = tmp_path / "last_words.py"
    script.write_text(LAST_WORDS.format(repository=str(REPOSITORY)))
    flags = flags_of(corpus, **{**TWO_GRADIENTS, **FULLY_SHARDED}, exit_interval=1)
    outcome = RunningTraining(flags, processes=2, script=script).finish().succeeded()
    threads = re.findall(r"^threads: (.+)$", outcome.stdout, re.MULTILINE)
    assert len(threads) == 2
    assert not [line for line in threads if "gloo" in line], threads
