"""A run that resumes on other data than it had is refused; a new data stage begins at the first of its samples."""

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.manifest import read_checkpoint
from megatron.commands import checkpoints
from megatron.commands.checkpoints import InspectConfig
from megatron.data.loader import Microbatch
from megatron.training.loop import listeners, trainer
from megatron.training.loop.data import next_microbatch
from tests.data.corpora import slow_blend, slow_order, write
from tests.end_to_end.run_process import (
    TINY_RUN,
    Flags,
    FlagValue,
    Outcome,
    assert_close,
    call_training,
    checkpoint_of,
    fork_training,
    iterations,
    saving_in,
    words_of,
)

END = 63
SEED = 1234
STEP = 8
"""Samples of a batch."""

SMALL: Flags = {
    **TINY_RUN,
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": STEP,
    "train_iters": None,
    "train_samples": 12 * STEP,
    "lr_warmup_iters": None,
    "lr_warmup_samples": 2 * STEP,
    "lr_decay_samples": 20 * STEP,
    "lr_decay_style": "linear",
    "split": "1,0,0",
    "fp64": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": END,
}


@dataclass(frozen=True)
class WrittenCorpus:
    """A corpus on disk, and what is in it."""

    prefix: Path
    documents: list[list[int]]

    def samples(self, count: int, seq_length: int, wanted: int) -> list[list[int]]:
        """The tokens of the first samples, where a run needs ``wanted`` samples of it, token by token."""
        lengths = [len(document) for document in self.documents]
        order, rows, shuffled = slow_order(lengths, 0, len(lengths), seq_length, wanted, SEED)
        stream = [token for document in order for token in self.documents[document]]
        starts = [sum(lengths[document] for document in order[:place]) + offset for place, offset in rows]
        return [stream[starts[row] : starts[row] + seq_length] for row in shuffled[:count]]


def write_corpus(prefix: Path, seed: int) -> WrittenCorpus:
    random = np.random.default_rng(seed)
    documents = [[*random.integers(END, size=random.integers(20, 60)).tolist(), END] for _ in range(70)]
    write(prefix, documents, END + 1)
    return WrittenCorpus(prefix, documents)


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> WrittenCorpus:
    return write_corpus(tmp_path_factory.mktemp("a") / "a", 1)


@pytest.fixture(scope="module")
def b(tmp_path_factory: pytest.TempPathFactory) -> WrittenCorpus:
    return write_corpus(tmp_path_factory.mktemp("b") / "b", 2)


def flags(directory: Path, *words: object, **changes: FlagValue) -> list[str]:
    """A run on the corpora and weights ``words``, saving in ``directory``."""
    data: Flags = {"data_path": [str(word) for word in words] or None}
    return words_of({**SMALL, **saving_in(directory), **data, **changes})


# --- refusals ------------------------------------------------------------------------------------------------


Saved = tuple[Path, tuple[object, ...]]
"""A run of two iterations on a blend: its directory, and the words of the blend."""


@pytest.fixture(scope="module")
def saved(a: WrittenCorpus, b: WrittenCorpus, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory, words = tmp_path_factory.mktemp("saved"), (0.7, a.prefix, 0.3, b.prefix)
    call_training(flags(directory, *words, exit_interval=2)).succeeded()
    return directory, words


def resumed(saved: Saved, *words: object, **changes: FlagValue) -> Outcome:
    """What becomes of a resume with other words or flags; nothing is saved."""
    alone = {"save": None, "metrics_jsonl": None, "exit_interval": 3}
    return call_training(flags(saved[0], *(words or saved[1]), **{**alone, **changes}))


def assert_refused(outcome: Outcome, *differences: str) -> None:
    assert "iteration        3/" not in outcome.stdout
    beginning = "The data differ from the data of stage first of the checkpoint of iteration 2 under"
    sentence = outcome.refusal(beginning, "--new-data-stage", "--finetune")
    found = sentence.partition(" (")[2].partition("): use the same")[0].split("; ")
    assert len(found) == len(differences), found
    for difference, wanted in zip(found, differences):
        assert wanted in difference


def test_the_same_data_resume_and_all_ranks_refuse_other_data(saved: Saved) -> None:
    """``tests/data/test_data_record.py`` has every setting, corpus and tokenizer that may differ."""
    outcome = resumed(saved).succeeded()
    assert "data stage first continues after 16 of its samples" in outcome.stdout
    assert "has no record" not in outcome.stdout
    assert_refused(resumed(saved, 0.7, saved[1][1]), f"corpus {saved[1][3]}: weight 0.3 in the checkpoint")
    given = flags(saved[0], *saved[1], save=None, metrics_jsonl=None, seed=5)
    assert_refused(fork_training(given, processes=2), "--seed: 1234 in the checkpoint, 5 now")


def test_synthetic_data_are_compared_too(tmp_path: Path) -> None:
    mock_data: Flags = {"mock_data": True, "tokenizer_type": None}
    call_training(flags(tmp_path, exit_interval=2, **mock_data)).succeeded()
    assert_refused(
        call_training(flags(tmp_path, seed=5, seq_length=8, **mock_data)),
        "--seq-length: 16 in the checkpoint, 8 now",
        "--seed: 1234 in the checkpoint, 5 now",
    )
    call_training(flags(tmp_path, exit_interval=3, **mock_data)).succeeded()


@pytest.mark.parametrize("order", ["megatron", "extendable"])
def test_a_run_extended_by_an_epoch_says_that_the_order_changes(a: WrittenCorpus, tmp_path: Path, order: str) -> None:
    """Megatron-LM's order over two epochs does not begin with its order over one."""
    run = functools.partial(flags, tmp_path, a.prefix, sample_order=order, override_opt_param_scheduler=True)
    call_training(run(exit_interval=1)).succeeded()
    same = call_training(run(exit_interval=2)).succeeded()
    longer = call_training(run(exit_interval=3, train_samples=40 * STEP)).succeeded()
    again = call_training(run(exit_interval=4, train_samples=40 * STEP)).succeeded()
    warning = f"WARNING: the run now needs 2 epochs of {a.prefix}, and its checkpoint was trained in the order of 1"
    assert (warning in longer.stdout) == (order == "megatron")
    assert "epochs of" not in same.stdout + again.stdout


@pytest.mark.parametrize("how", ["finetune", "pretrained_checkpoint"])
def test_a_new_run_from_the_weights_compares_nothing(saved: Saved, b: WrittenCorpus, tmp_path: Path, how: str) -> None:
    base = saved[0]
    start: Flags = (
        {"load": base, "finetune": True} if how == "finetune" else {"load": tmp_path, "pretrained_checkpoint": base}
    )
    changes: Flags = {"save": tmp_path, "seq_length": 8, "exit_interval": 1}
    call_training(flags(tmp_path, b.prefix, **{**changes, **start})).succeeded()
    (stage,) = read_checkpoint(tmp_path, 1).state["data_stages"]
    assert (stage["name"], stage["first_iteration"], stage["first_sample"]) == ("first", 0, 0)
    assert [corpus["path"] for corpus in stage["data"]["corpora"]] == [str(b.prefix)]


def test_evaluation_alone_compares_nothing(saved: Saved, b: WrittenCorpus) -> None:
    changes: Flags = {"skip_train": True, "eval_iters": 1, "split": "1,1,0", "exit_interval": None}
    resumed(saved, b.prefix, **changes).succeeded()


def test_other_data_of_evaluation_are_a_warning(a: WrittenCorpus, b: WrittenCorpus, tmp_path: Path) -> None:
    evaluated: Flags = {"eval_interval": 2, "eval_iters": 1, "split": None, "train_data_path": str(a.prefix)}

    def warnings(stop: int, corpus: WrittenCorpus) -> int:
        run = flags(tmp_path, exit_interval=stop, valid_data_path=str(corpus.prefix), **evaluated)
        printed = call_training(run).succeeded().stdout
        return printed.count("WARNING: the evaluation data differ from the checkpoint of iteration ")

    assert [warnings(2, a), warnings(4, b), warnings(6, b)] == [0, 2, 0]


def test_no_password_of_a_corpus_reaches_a_checkpoint(tmp_path: Path) -> None:
    """Neither from a flag nor from a file of corpora."""
    url = "s3://me:secret@bucket/a"
    (tmp_path / "list").write_text(f"0.5 {url} 0.5 b")
    (tmp_path / "splits").write_text(json.dumps({"train": [url]}))
    by_files: list[Flags] = [
        {"data_args_path": tmp_path / "list"},
        {"per_split_data_args_path": tmp_path / "splits", "split": None},
    ]
    for words, changes in (((url,), {}), *(((), changes) for changes in by_files)):
        outcome = call_training(flags(tmp_path / "run", *words, **changes))
        assert "s3://***@bucket/a contains a password" in outcome.errors[0]
        assert "secret" not in outcome.stderr + outcome.stdout


# --- stages --------------------------------------------------------------------------------------------------


def names_and_starts(directory: Path, iteration: int) -> list[tuple[str, int, int]]:
    """Name, first iteration and first sample of the data stages of a checkpoint."""
    stages = read_checkpoint(directory, iteration).state["data_stages"]
    return [(stage["name"], stage["first_iteration"], stage["first_sample"]) for stage in stages]


@contextmanager
def recorded_tokens(module: ModuleType) -> Iterator[list[Any]]:
    """The tokens of every microbatch that ``module`` reads."""
    read, found = next_microbatch, list[Any]()

    def record(source: Iterator[Microbatch], rank: int) -> Microbatch:
        microbatch = read(source, rank)
        found.append(microbatch["tokens"].tolist())
        return microbatch

    with mock.patch.object(module, "next_microbatch", record):
        yield found


def linear_rate(samples: int) -> float:
    """The learning rate of SMALL after so many samples."""
    warmup, decay, peak = 2 * STEP, 20 * STEP, float(str(SMALL["lr"]))
    return peak * samples / warmup if samples <= warmup else peak * (1 - (samples - warmup) / (decay - warmup))


def test_three_stages_with_requeues_are_one_run(a: WrittenCorpus, b: WrittenCorpus, tmp_path: Path) -> None:
    """Two corpora, then one of them, then longer sequences of the other, each command started again as a scheduler
    would; the samples are those of a walk over the documents."""
    run = tmp_path / "run"

    def train(stop: int, *words: object, **changes: FlagValue) -> list[Any]:
        with recorded_tokens(trainer) as microbatches:
            call_training(flags(run, *words, exit_interval=stop, **changes)).succeeded()
        return [sample for microbatch in microbatches for sample in microbatch]

    # 4 iterations of a blend, which is built for 12.
    first = train(4, 0.7, a.prefix, 0.3, b.prefix)
    order = slow_blend([0.7, 0.3], 12 * STEP)
    parts = [corpus.samples(60, 16, wanted) for corpus, wanted in ((a, 69), (b, 30))]
    counts = [0, 0]
    for tokens, corpus in zip(first, order):
        assert tokens == parts[corpus][counts[corpus]]
        counts[corpus] += 1
    assert len(first) == 4 * STEP

    # A stage of 5 iterations, built for the 8 that are left, that is interrupted after 2.
    stage: Flags = {"new_data_stage": "second"}
    second = train(6, b.prefix, **stage) + train(9, b.prefix, **stage)
    assert second == b.samples(5 * STEP, 16, 8 * STEP)

    # 3 more, of sequences twice as long; 24 samples are left, of which the last start needs no flag.
    stage = {"new_data_stage": "third", "seq_length": 32, "global_batch_size": 4}
    third = train(11, a.prefix, **stage)
    third += train(15, a.prefix, seq_length=32, global_batch_size=4)
    assert third == a.samples(24, 32, 24)

    assert names_and_starts(run, 15) == [("first", 0, 0), ("second", 4, 4 * STEP), ("third", 9, 9 * STEP)]
    report = list(checkpoints.lines(checkpoints.inspect(InspectConfig(str(run)))))
    assert f"data stage third: after iteration 9 and 72 samples, sequences of 32, {a.prefix}" in report
    records = iterations(run / "metrics.jsonl")
    consumed = [STEP * n for n in range(1, 10)] + [9 * STEP + 4 * n for n in range(1, 7)]
    assert [record["consumed_samples"] for record in records] == consumed
    rates = [linear_rate(samples) for samples in [0, *consumed[:-1]]]
    assert_close([record["learning_rate"] for record in records[1:]], rates[1:], 1e-12)


def test_evaluation_begins_at_its_first_sample_in_a_stage(a: WrittenCorpus, b: WrittenCorpus, tmp_path: Path) -> None:
    evaluated: Flags = {"split": "5,5,0", "eval_interval": 2, "eval_iters": 1, "new_data_stage": "second"}
    call_training(flags(tmp_path, a.prefix, exit_interval=5, **{**evaluated, "new_data_stage": None})).succeeded()
    with recorded_tokens(listeners) as found:
        for stop in (7, 9):
            call_training(flags(tmp_path, b.prefix, exit_interval=stop, **evaluated)).succeeded()
    # After iterations 6 and 8. The split has the second half of the documents; 5 evaluations are the most it may need.
    half = replace(b, documents=b.documents[35:])
    assert [sample for microbatch in found for sample in microbatch] == half.samples(2 * STEP, 16, 5 * STEP)


def test_a_stage_keeps_the_moments_of_the_optimizer(a: WrittenCorpus, b: WrittenCorpus, tmp_path: Path) -> None:
    """Without them, all else equal, the first moment lacks what decays of the one before."""
    call_training(flags(tmp_path / "run", a.prefix, exit_interval=3)).succeeded()
    before = load_file(checkpoint_of(tmp_path / "run", 3) / "rank_00000.safetensors")
    after = []
    for name, load_optim in (("kept", True), ("fresh", False)):
        changes: Flags = {
            "load": tmp_path / "run",
            "new_data_stage": "second",
            "load_optim": load_optim,
            "clip_grad": 0,
        }
        call_training(flags(tmp_path / name, b.prefix, exit_interval=4, **changes)).succeeded()
        after.append(load_file(checkpoint_of(tmp_path / name, 4) / "rank_00000.safetensors"))
    moments = [name for name in before if name.startswith("optimizer/exp_avg/")]
    assert moments
    for name in moments:
        torch.testing.assert_close(after[0][name] - after[1][name], 0.9 * before[name], rtol=1e-9, atol=1e-15)


def test_a_change_of_the_batch_in_iterations_asks_for_the_schedule(a: WrittenCorpus, tmp_path: Path) -> None:
    """Lengths in iterations are samples of the batch; which schedule counts is the user's to say."""
    by_iterations = dict.fromkeys(("train_samples", "lr_warmup_samples", "lr_decay_samples"))
    by_iterations |= {"train_iters": 8, "lr_warmup_iters": 2}
    call_training(flags(tmp_path, a.prefix, exit_interval=4, **by_iterations)).succeeded()
    longer: Flags = {**by_iterations, "seq_length": 32, "global_batch_size": 4, "new_data_stage": "long"}
    outcome = call_training(flags(tmp_path, a.prefix, **longer))
    assert "The learning-rate schedule of the command line differs" in outcome.errors[0]
    kept: Flags = {**longer, "use_checkpoint_opt_param_scheduler": True}
    call_training(flags(tmp_path, a.prefix, exit_interval=6, **kept)).succeeded()
    call_training(flags(tmp_path, a.prefix, **kept)).succeeded()
    records = iterations(tmp_path / "metrics.jsonl")
    assert [record["consumed_samples"] for record in records] == [8, 16, 24, 32, 36, 40, 44, 48]
    rates = [record["learning_rate"] for record in records]
    peak = float(str(SMALL["lr"]))
    for record, consumed, rate in zip(records[3:], (24, 32, 36, 40, 44), rates[3:]):
        assert math.isclose(rate, peak * (1 - (consumed - 16) / (64 - 16)), rel_tol=1e-12), record
