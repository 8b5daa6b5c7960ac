"""A run whose ranks share sequences is the run of one process, also inside documents and from checkpoint to checkpoint.

As in :mod:`tests.end_to_end.test_pipeline_run`, the same ranks train in turn whatever can be trained one after the
other.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset, SampleSettings
from megatron.data.indexed_dataset import IndexedDataset
from tests.end_to_end.run_process import (
    Corpus,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    grad_norms,
    losses,
    records,
    tiny_corpus,
    tokenize,
    write_documents,
)
from tests.end_to_end.test_pipeline_run import (
    TOLERANCE,
    Command,
    Flags,
    Runs,
    assert_same_records,
    run_in_turn,
    zeros_and_norms,
)

in_ranks = pytest.mark.slow(reason="many runs of two and four ranks; tests/parallel proves their numbers in process")

LENGTH, STOP = 6, 3
SEQUENCE = 32
DOCUMENTS: dict[str, Flags] = {
    "ignored": {},
    "attention mask": {"reset_attention_mask": True},
    "loader's masking": {"dataloader_inter_document_masking": True},
    "positions": {"reset_position_ids": True},
    "attention mask and positions": {
        "reset_attention_mask": True,
        "dataloader_inter_document_masking": True,
        "reset_position_ids": True,
    },
}
ALL = "attention mask and positions"
UNMARKED: Flags = dict.fromkeys(DOCUMENTS[ALL], False)
RUN: Flags = {
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": SEQUENCE,
    "init_method_std": 0.1,
    "fp64": True,
    "train_iters": LENGTH,
    "eval_interval": 2,
    "eval_iters": 1,
    "eod_mask_loss": True,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
}
"""Four microbatches of two samples; evaluations after iterations 2, 4 and 6, and a test. Initial weights are large, so
that much depends on attention from the beginning."""

TWO_RANKS: dict[str, Flags] = {
    "p2p": {"context_parallel_size": 2},
    "allgather": {"context_parallel_size": 2, "cp_comm_type": "allgather"},
    "a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "one type per layer": {"context_parallel_size": 2, "cp_comm_type": ("p2p", "a2a", "allgather", "a2a")},
}
FOUR_RANKS: dict[str, Flags] = {
    "four parts, p2p": {"context_parallel_size": 4},
    "four parts, a2a": {"context_parallel_size": 4, "cp_comm_type": "a2a"},
    "two levels": {
        "context_parallel_size": 4,
        "cp_comm_type": ("a2a+p2p", "p2p", "a2a+p2p", "a2a"),
        "hierarchical_context_parallel_sizes": (2, 2),
    },
    "tensor parallel": {
        **TWO_RANKS["a2a"],
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": True,
    },
    "interleaved": {
        **TWO_RANKS["one type per layer"],
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "zb-h1": {**TWO_RANKS["allgather"], "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "fully sharded": {**TWO_RANKS["p2p"], "use_torch_fsdp2": True},
    "sharded optimizer": {**TWO_RANKS["p2p"], "use_distributed_optimizer": True, "overlap_grad_reduce": True},
}
SAID: dict[str, str] = {
    "p2p": "2 ranks on CPU = tensor 1 x context 2 (p2p) x pipeline 1 x data 1 (no_shard), fp64",
    "allgather": "2 ranks on CPU = tensor 1 x context 2 (allgather) x pipeline 1 x data 1 (no_shard), fp64",
    "a2a": "2 ranks on CPU = tensor 1 x context 2 (a2a) x pipeline 1 x data 1 (no_shard), fp64",
    "one type per layer": "tensor 1 x context 2 (p2p, a2a, allgather) x pipeline 1 x data 1 (no_shard), fp64",
    "four parts, p2p": "4 ranks on CPU = tensor 1 x context 4 (p2p) x pipeline 1 x data 1 (no_shard), fp64",
    "four parts, a2a": "4 ranks on CPU = tensor 1 x context 4 (a2a) x pipeline 1 x data 1 (no_shard), fp64",
    "two levels": "tensor 1 x context 4 (a2a+p2p, p2p, a2a) x pipeline 1 x data 1 (no_shard), fp64",
    "tensor parallel": "tensor 2, sequence parallel x context 2 (a2a) x pipeline 1 x data 1 (no_shard), fp64",
    "interleaved": "tensor 1 x context 2 (p2p, a2a, allgather) x pipeline 2 x data 1 (no_shard), fp64",
    "zb-h1": "tensor 1 x context 2 (allgather) x pipeline 2 x data 1 (no_shard), fp64",
    "fully sharded": "tensor 1 x context 2 (p2p) x pipeline 1 x data 2 (optim_grads_params), fp64",
    "sharded optimizer": "tensor 1 x context 2 (p2p) x pipeline 1 x data 2 (optim), fp64",
    "bf16": "tensor 1 x context 2 (p2p, a2a, allgather) x pipeline 1 x data 1 (optim), bf16",
}
"""How a run names its layout."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Lines of Python's library, cut to 1 to 11 characters, each a document."""
    text = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    write_documents(text, documents=6)
    modules = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    lines = [line.strip() for module in modules for line in module.splitlines() if line.strip()]
    documents = [line[: 1 + number % 11] for number, line in enumerate(lines)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    tokenizer = tiny_corpus(tmp_path_factory.getbasetemp()).tokenizer
    return Corpus(tokenize(text, tokenizer), tokenizer)


def test_samples_hold_several_documents_of_many_lengths(corpus: Corpus) -> None:
    """Else nothing here says anything of documents."""
    indexed = IndexedDataset(str(corpus.prefix))
    end = int(indexed.get(0)[-1])
    assert len({len(indexed.get(number)) for number in range(len(indexed))}) > 5
    settings = SampleSettings(seq_length=SEQUENCE, seed=1, split="1", document_end=end)
    dataset = GPTDataset(indexed, 0, None, settings)
    counts = [int(np.sum(dataset[number]["document_starts"])) for number in range(100)]
    assert min(counts) >= 3 and max(counts) - min(counts) >= 3


@pytest.fixture(scope="module")
def alone(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One process, with documents treated in every way; and once more up to a stop."""
    directory = tmp_path_factory.mktemp("alone")
    said = {}
    for name, documents in DOCUMENTS.items():
        run = flags_of(corpus, **{**RUN, **documents}, metrics_jsonl=directory / f"{name}.jsonl")
        said[name] = call_training(run).succeeded().stdout
    # What follows compares nothing unless the run learns.
    assert losses(directory / f"{ALL}.jsonl")[-1] < losses(directory / f"{ALL}.jsonl")[0] - 0.3
    stopped = flags_of(corpus, **{**RUN, **DOCUMENTS[ALL]}, exit_interval=STOP, save=directory / "stopped")
    call_training(stopped).succeeded()
    return Runs(directory, said)


def in_documents(corpus: Corpus, runs: Mapping[str, Flags], directory: Path) -> dict[str, Command]:
    """Commands of runs with all flags of documents, each with its metrics."""
    return {
        name: (
            "pretrain_llama",
            flags_of(corpus, **{**RUN, **DOCUMENTS[ALL], "metrics_jsonl": directory / f"{name}.jsonl", **flags}),
        )
        for name, flags in runs.items()
    }


BF16: Flags = {
    **TWO_RANKS["one type per layer"],
    "fp64": False,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
}


@pytest.fixture(scope="module")
def in_two(corpus: Corpus, alone: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two ranks that share every sequence, in every way; stopped, and gone on from one process; and in bf16."""
    directory = tmp_path_factory.mktemp("in_two")
    halves: Flags = {
        **BF16,
        "save": directory / "halves",
        "load": directory / "halves",
        "metrics_jsonl": directory / "halves.jsonl",
    }
    runs: dict[str, Flags] = {
        **TWO_RANKS,
        "ignored": {**TWO_RANKS["p2p"], **UNMARKED},
        "positions": {**TWO_RANKS["allgather"], **UNMARKED, **DOCUMENTS["positions"]},
        "stopped": {**TWO_RANKS["one type per layer"], "exit_interval": STOP, "save": directory / "stopped"},
        "from one process": {**TWO_RANKS["one type per layer"], "load": alone.directory / "stopped"},
        "bf16": {**BF16, "save": directory / "bf16"},
        "first half": {**halves, "exit_interval": STOP},
        "second half": halves,
    }
    return Runs(directory, run_in_turn(in_documents(corpus, runs, directory), directory))


@pytest.fixture(scope="module")
def in_four(corpus: Corpus, in_two: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Four ranks in every way, and one of them from where two stopped."""
    directory = tmp_path_factory.mktemp("in_four")
    runs: dict[str, Flags] = {
        **FOUR_RANKS,
        "positions": {**FOUR_RANKS["interleaved"], **UNMARKED, **DOCUMENTS["positions"]},
        "from two ranks": {**FOUR_RANKS["tensor parallel"], "load": in_two.directory / "stopped"},
    }
    return Runs(directory, run_in_turn(in_documents(corpus, runs, directory), directory, processes=4))


# --- the same numbers ----------------------------------------------------------------------------------------


def assert_same_run(found: Runs, name: str, wanted: Runs, documents: str) -> None:
    """Loss, gradient norm, validation and test loss; zeros in the gradient and the norm of the weights."""
    whole = computed(wanted.metrics(documents))
    kinds = [key for record in whole for key in record if "loss" in key and key != "loss_scale"]
    assert kinds == [*["lm_loss", "lm_loss", "validation_loss"] * 3, "test_loss"]
    assert_same_records(computed(found.metrics(name)), whole)
    counts = zeros_and_norms(wanted.said[documents])
    assert len(counts) == LENGTH and int(counts[0][0]) > 0
    assert zeros_and_norms(found.said[name]) == counts


@in_ranks
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_that_share_a_sequence_of_documents_train_as_one(in_two: Runs, alone: Runs, layout: str) -> None:
    assert SAID[layout] in in_two.said[layout]
    assert_same_run(in_two, layout, alone, ALL)


@in_ranks
@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_context_parallelism_beside_another_trains_as_one_process(in_four: Runs, alone: Runs, layout: str) -> None:
    assert SAID[layout] in in_four.said[layout]
    assert_same_run(in_four, layout, alone, ALL)


@in_ranks
def test_the_log_says_how_tensor_parallelism_overlaps_or_that_it_has_nothing_to(
    corpus: Corpus, in_four: Runs, tmp_path: Path
) -> None:
    said = "tensor-parallel overlap: pipelined (symmetric memory needs GPUs)"
    assert [name for name in FOUR_RANKS if said in in_four.said[name]] == ["tensor parallel"]
    alone = call_training(flags_of(corpus, **{**RUN, "train_iters": 1, "lr_warmup_iters": 0}, tp_comm_overlap=True))
    assert "--tp-comm-overlap has no effect with --tensor-model-parallel-size 1" in alone.succeeded().stdout


@in_ranks
def test_ranks_that_share_a_sequence_train_as_one_where_documents_are_ignored(in_two: Runs, alone: Runs) -> None:
    assert_same_run(in_two, "ignored", alone, "ignored")


@in_ranks
def test_ranks_that_share_a_sequence_train_as_one_where_only_positions_restart(
    in_two: Runs, in_four: Runs, alone: Runs
) -> None:
    """Unlike inside documents, the loss depends on where positions restart; also on a stage without embedding."""
    assert_same_run(in_two, "positions", alone, "positions")
    assert_same_run(in_four, "positions", alone, "positions")


# --- checkpoints from layout to layout -----------------------------------------------------------------------


@in_ranks
def test_same_layout_goes_on_bit_by_bit_in_bf16(in_two: Runs) -> None:
    """Context-parallel ranks divide master weights and moments among them."""
    assert SAID["bf16"] in in_two.said["bf16"]
    assert f"continuing after iteration {STOP}" in in_two.said["second half"]
    assert computed(in_two.metrics("halves")) == computed(in_two.metrics("bf16"))
    halves, whole = (checkpoint_of(in_two.directory / name, LENGTH) for name in ("halves", "bf16"))
    assert_same_tensors(halves, whole)


@in_ranks
def test_checkpoint_of_two_ranks_that_share_a_sequence_goes_on_in_one_process(
    corpus: Corpus, in_two: Runs, alone: Runs, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags: Flags = {**RUN, **DOCUMENTS[ALL], "load": in_two.directory / "stopped"}
    call_training(flags_of(corpus, **flags, metrics_jsonl=metrics)).succeeded()
    wanted = [record for record in computed(alone.metrics(ALL)) if record["iteration"] > STOP]
    assert_same_records(computed(metrics), wanted)


@in_ranks
@pytest.mark.parametrize("name", ["from one process", "from two ranks"])
def test_checkpoint_of_another_layout_goes_on_where_ranks_share_a_sequence(
    in_two: Runs, in_four: Runs, alone: Runs, name: str
) -> None:
    """That of one process in two ranks, and that of two ranks in four."""
    runs = in_two if name == "from one process" else in_four
    assert f"continuing after iteration {STOP}" in runs.said[name]
    wanted = [record for record in computed(alone.metrics(ALL)) if record["iteration"] > STOP]
    assert_same_records(computed(runs.metrics(name)), wanted)


# --- documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", ["attention mask", "positions"])
def test_documents_change_the_loss_of_every_iteration(alone: Runs, documents: str) -> None:
    differences = [
        abs(found - other)
        for found, other in zip(losses(alone.metrics(documents)), losses(alone.metrics("ignored")), strict=True)
    ]
    assert min(differences) > 1e-4, differences


def test_evaluation_stays_inside_documents_too(corpus: Corpus, alone: Runs, tmp_path: Path) -> None:
    """Of the same weights, which training inside documents or outside would not leave."""
    found = {}
    for name, documents in DOCUMENTS.items():
        metrics = tmp_path / f"{name}.jsonl"
        flags: Flags = {**RUN, **documents, "load": alone.directory / "stopped", "skip_train": True}
        call_training(flags_of(corpus, **flags, metrics_jsonl=metrics)).succeeded()
        found[name] = [value for record in records(metrics) for key, value in record.items() if "loss" in key]
    wanted = found["attention mask"]
    assert len(wanted) == 2 and found["loader's masking"] == wanted
    assert_close(found[ALL], wanted, TOLERANCE)
    for name in ("ignored", "positions"):
        assert min(abs(one - other) for one, other in zip(found[name], wanted)) > 1e-3, found
    assert min(abs(one - other) for one, other in zip(found["positions"], found["ignored"])) > 1e-4, found


def test_both_flags_that_keep_attention_inside_documents_mean_the_same(alone: Runs) -> None:
    assert computed(alone.metrics("loader's masking")) == computed(alone.metrics("attention mask"))


def test_positions_inside_documents_change_nothing_where_attention_stays_there(alone: Runs) -> None:
    """Rotated queries and keys tell each other nothing but their distance; only what is rounded differs."""
    found, wanted = alone.metrics(ALL), alone.metrics("attention mask")
    assert_close(losses(found), losses(wanted), TOLERANCE)
    assert_close(grad_norms(found), grad_norms(wanted), TOLERANCE)
    assert grad_norms(found) != grad_norms(wanted)
