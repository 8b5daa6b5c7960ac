"""A mistake of the user ends the run with one sentence that says what to do, at once, and harms nothing.

Every case starts from a run that exists already and names its directory in --save and --load: whatever is wrong
with the new flags, the files of the old run must come out of it byte for byte as they were.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    PROMPT,
    REPOSITORY,
    TINY_RUN,
    VOCABULARY,
    Corpus,
    FlagValue,
    Outcome,
    RunningTraining,
    bytes_under,
    call_training,
    checkpoint_of,
    descendants,
    flags_of,
    iterations,
    run_training,
)

DONE = 4

Changes = dict[str, FlagValue | Path]


@pytest.fixture(scope="module")
def finished_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few iterations with its checkpoint and metrics."""
    directory = tmp_path_factory.mktemp("finished")
    flags = flags_of(corpus, exit_interval=DONE, save=directory, metrics_jsonl=directory / "metrics.jsonl")
    call_training(flags).succeeded()
    return directory


@dataclass(frozen=True)
class Scene:
    """What a case may spoil: all of it is a copy."""

    run: Path
    """The directory of the finished run."""
    corpus: Corpus

    def flags(self, changes: Changes) -> list[str]:
        """Flags that would continue the run, but for ``changes``."""
        common: Changes = {"save": self.run, "load": self.run, "metrics_jsonl": self.run / "metrics.jsonl"}
        return flags_of(self.corpus, **{**common, **changes})


@pytest.fixture
def scene(finished_run: Path, corpus: Corpus, tmp_path: Path) -> Scene:
    """A finished run and a corpus."""
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(finished_run, run)
    data.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{suffix}", data / f"corpus{suffix}")
    shutil.copy(corpus.tokenizer, data / "tokenizer.model")
    return Scene(run, Corpus(data / "corpus", data / "tokenizer.model"))


def assert_one_sentence(outcome: Outcome, *words: str) -> None:
    """One line for the user over all ranks, which names what it must; no traceback or crash, no waiting."""
    assert outcome.exit_code not in (0, None)
    assert len(outcome.errors) == 1, outcome.stderr
    for noise in ("Traceback", "terminate called"):
        assert noise not in outcome.stderr, outcome.stderr
    sentence = outcome.errors[0]
    assert re.fullmatch(r"ERROR: .{20,}[.?]", sentence), sentence
    for word in words:
        assert word in sentence
    assert outcome.seconds < PROMPT


# --- what is spoilt ------------------------------------------------------------------------------------------


def shard(scene: Scene) -> Path:
    """The file with the tensors of the checkpoint."""
    return checkpoint_of(scene.run, DONE) / "rank_00000.safetensors"


def no_bin(scene: Scene) -> Changes:
    """The corpus has lost its .bin file."""
    Path(f"{scene.corpus.prefix}.bin").unlink()
    return {}


def no_idx(scene: Scene) -> Changes:
    """The corpus has lost its .idx file."""
    Path(f"{scene.corpus.prefix}.idx").unlink()
    return {}


def short_bin(scene: Scene) -> Changes:
    """The copy of the .bin file stopped early."""
    _cut(Path(f"{scene.corpus.prefix}.bin"))
    return {}


def short_idx(scene: Scene) -> Changes:
    """The copy of the .idx file stopped early."""
    _cut(Path(f"{scene.corpus.prefix}.idx"))
    return {}


def no_tokenizer(scene: Scene) -> Changes:
    """There is no tokenizer file."""
    scene.corpus.tokenizer.unlink()
    return {}


def garbled_tokenizer(scene: Scene) -> Changes:
    """The tokenizer file holds something else."""
    scene.corpus.tokenizer.write_bytes(b"\xff\x00\x17" * 1000)
    return {}


def short_shard(scene: Scene) -> Changes:
    """The copy of the checkpoint stopped early."""
    _cut(shard(scene))
    return {}


def garbled_shard(scene: Scene) -> Changes:
    """A block of the checkpoint's file is of another file."""
    content = bytearray(shard(scene).read_bytes())
    content[16:64] = b"\xff" * 48
    shard(scene).write_bytes(content)
    return {}


def no_shard(scene: Scene) -> Changes:
    """A file of the checkpoint is missing."""
    shard(scene).unlink()
    return {}


def garbled_manifest(scene: Scene) -> Changes:
    """The only checkpoint has a manifest that cannot be read."""
    manifest = checkpoint_of(scene.run, DONE) / "manifest.json"
    manifest.write_text(manifest.read_text()[:1000])
    return {}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flags(**changes: FlagValue) -> Callable[[Scene], Changes]:
    """Nothing but flags is wrong."""
    return lambda scene: dict(changes)


def nothing_to_load(scene: Scene) -> Changes:
    """--load names a directory without a checkpoint."""
    return {"load": scene.run / "elsewhere", "exit_on_missing_checkpoint": True}


MISTAKES: dict[str, tuple[Callable[[Scene], Changes], tuple[str, ...]]] = {
    "unknown flag": (flags(tensor_model_paralel_size=2), ("--tensor-model-parallel-size",)),
    "flag of Megatron-LM that is not supported": (
        flags(moe_expert_capacity_factor=1.25),
        ("--moe-expert-capacity-factor", "remove it"),
    ),
    "required flag missing": (flags(seq_length=None), ("--seq-length",)),
    "processes do not divide": (flags(tensor_model_parallel_size=2), ("1 processes", "--tensor-model-parallel-size")),
    "heads do not divide": (flags(num_attention_heads=3), ("--num-attention-heads 3", "--hidden-size 32")),
    "key-value heads do not divide": (flags(num_query_groups=3), ("--num-query-groups 3",)),
    "batch does not divide": (flags(global_batch_size=7), ("--global-batch-size", "multiples of 2")),
    "odd head size": (flags(kv_channels=7), ("--kv-channels",)),
    "no sequence": (flags(seq_length=0), ("--seq-length",)),
    "seed out of range": (flags(seed=-1), ("--seed",)),
    "not supported yet": (flags(context_parallel_size=2), ("--context-parallel-size",)),
    "not a Llama": (flags(swiglu=False), ("--no-swiglu", "remove")),
    "no data": (flags(data_path=None), ("--data-path", "--mock-data")),
    "corpus is nowhere": (flags(data_path="nowhere/corpus"), ("nowhere/corpus.idx", "--data-path")),
    "corpus without .bin": (no_bin, ("corpus.bin does not exist", "tools/preprocess_data.py")),
    "corpus without .idx": (no_idx, ("corpus.idx does not exist", "tools/preprocess_data.py")),
    "truncated .bin": (short_bin, ("corpus.bin", "copy it again")),
    "truncated .idx": (short_idx, ("corpus.idx", "tools/preprocess_data.py")),
    "split without data": (flags(split="0,1,0"), ("--split",)),
    "tokenizer of other data": (
        flags(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=9, load=None, save=None),
        ("corpus.bin", "0..9", "the tokenizer does not match the data", "--vocab-size"),
    ),
    "tokenizer of another type": (flags(tokenizer_type="TikTokenizer"), ("tokenizer.model", "--tokenizer-type")),
    "tokenizer of another size": (flags(vocab_size=100), ("--vocab-size 100", str(VOCABULARY))),
    "no tokenizer file": (no_tokenizer, ("tokenizer.model does not exist", "--tokenizer-model")),
    "garbled tokenizer": (garbled_tokenizer, ("tokenizer.model is not a SentencePiece model", "--tokenizer-model")),
    "checkpoint of another model": (
        flags(num_layers=3, ffn_hidden_size=96),
        ("another architecture", "--num-layers is 3 here and 2 there", "--ffn-hidden-size is 96 here and 64 there"),
    ),
    "checkpoint of another schedule": (flags(lr=1e-3), ("peak 0.001", "--override-opt-param-scheduler")),
    "checkpoint that does not exist": (flags(ckpt_step=3), ("iteration 3", f"it has: {DONE}")),
    "nothing to load": (nothing_to_load, ("elsewhere", "has no checkpoint")),
    "truncated checkpoint": (short_shard, ("rank_00000.safetensors", "load another checkpoint")),
    "garbled checkpoint": (garbled_shard, ("rank_00000.safetensors is damaged", "load another checkpoint")),
    "checkpoint without a file": (no_shard, ("rank_00000.safetensors",)),
    "checkpoint without a manifest": (garbled_manifest, ("has no readable checkpoint",)),
    "metrics file is a directory": (flags(metrics_jsonl=str(REPOSITORY)), ("--metrics-jsonl", "Is a directory")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_ends_in_one_sentence_and_harms_nothing(scene: Scene, mistake: str) -> None:
    spoil, words = MISTAKES[mistake]
    command = scene.flags(spoil(scene))
    before = bytes_under(scene.run)
    assert_one_sentence(call_training(command), *words)
    assert bytes_under(scene.run) == before


def test_the_flags_without_a_mistake_continue_the_run(scene: Scene) -> None:
    """The cases above mean nothing if their common flags are wrong already."""
    call_training(scene.flags({})).succeeded()
    done = [record["iteration"] for record in iterations(scene.run / "metrics.jsonl")]
    assert done == list(range(1, int(str(TINY_RUN["train_iters"])) + 1))


def test_tensorboard_directory_that_is_a_file_ends_in_one_sentence(corpus: Corpus, tmp_path: Path) -> None:
    occupied = tmp_path / "events"
    occupied.touch()
    assert_one_sentence(call_training(flags_of(corpus, tensorboard_dir=occupied)), "--tensorboard-dir")


def test_directory_that_cannot_be_saved_to_is_noticed_before_training(corpus: Corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    outcome = call_training(flags_of(corpus, save=corpus.tokenizer, metrics_jsonl=metrics))
    assert_one_sentence(outcome, str(corpus.tokenizer))
    assert not iterations(metrics)


def test_metrics_are_never_written_over_a_file_of_another_kind(corpus: Corpus, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Not metrics.\nBut needed.\n")
    outcome = call_training(flags_of(corpus, metrics_jsonl=notes))
    assert_one_sentence(outcome, "notes.txt")
    assert bytes_under(tmp_path) == {"notes.txt": b"Not metrics.\nBut needed.\n"}


# --- real processes ------------------------------------------------------------------------------------------


def test_plain_python_says_it_in_one_sentence(scene: Scene) -> None:
    """And before torch is imported, which takes a second or many on a cluster's file system."""
    outcome = run_training(scene.flags({"tensor_model_paralel_size": 2}))
    assert outcome.stderr.splitlines() == [
        "ERROR: --tensor-model-paralel-size is not a flag of pretrain_llama.py: did you mean "
        "--tensor-model-parallel-size?"
    ]
    assert not outcome.stdout


TWO_RANK_MISTAKES: dict[str, tuple[Callable[[Scene], Changes], tuple[str, ...]]] = {
    "processes do not divide": (
        flags(tensor_model_parallel_size=4, num_query_groups=4),
        ("2 processes", "--tensor-model-parallel-size 4"),
    ),
    "truncated .bin": (short_bin, ("corpus.bin", "copy it again")),
    "garbled checkpoint": (garbled_shard, ("rank_00000.safetensors is damaged",)),
}


@pytest.mark.parametrize("mistake", TWO_RANK_MISTAKES)
def test_two_ranks_speak_with_one_voice(scene: Scene, mistake: str) -> None:
    spoil, words = TWO_RANK_MISTAKES[mistake]
    command = scene.flags({"tensor_model_parallel_size": 2, **spoil(scene)})
    before = bytes_under(scene.run)
    assert_one_sentence(run_training(command, processes=2), *words)
    assert bytes_under(scene.run) == before


@pytest.mark.slow(reason="two ranks; one process stops in test_continuing.py")
def test_two_ranks_stop_at_a_loss_that_is_not_finite(scene: Scene) -> None:
    """With the checkpoint kept from before it, although every iteration is saved."""
    changes: Changes = {"lr": 1e38, "override_opt_param_scheduler": True, "save_interval": 1}
    before = bytes_under(checkpoint_of(scene.run, DONE))
    outcome = run_training(scene.flags(changes), processes=2)
    assert_one_sentence(outcome, "gradient norm nan", "--lr", "--no-check-for-nan-in-loss-and-grad")
    stopped_in = int(outcome.errors[0].split()[2])
    saved = sorted(path.name for path in scene.run.glob("iter_*"))
    assert saved == [f"iter_{iteration:07d}" for iteration in range(DONE, stopped_in)]
    assert bytes_under(checkpoint_of(scene.run, DONE)) == before
    assert all(record["lm_loss"] is not None for record in iterations(scene.run / "metrics.jsonl"))


@pytest.mark.slow(reason="a process of its own")
def test_fault_that_a_loader_process_meets_ends_in_one_sentence(scene: Scene) -> None:
    metrics = scene.run / "new.jsonl"
    changes: Changes = {"train_iters": 20_000, "num_workers": 1, "mmap_bin_files": False}
    run = RunningTraining(scene.flags({**changes, "load": None, "save": None, "metrics_jsonl": metrics}))
    run.wait_for_records(metrics, 3)
    Path(f"{scene.corpus.prefix}.bin").write_bytes(b"")
    assert_one_sentence(run.finish(timeout=PROMPT), "corpus.bin was truncated")


@pytest.mark.slow(reason="processes that wait for each other")
def test_run_ends_when_one_of_its_loader_processes_is_killed(corpus: Corpus, tmp_path: Path) -> None:
    """As the kernel does when memory runs out: nobody waits for microbatches that will never come."""
    metrics = tmp_path / "metrics.jsonl"
    run = RunningTraining(flags_of(corpus, train_iters=20_000, num_workers=2, metrics_jsonl=metrics))
    run.wait_for_records(metrics, 3)
    os.kill(descendants(run.process.pid)[0], signal.SIGKILL)
    assert run.finish(timeout=PROMPT).exit_code != 0


LATE_FIRST_RANK = """
import os, runpy, sys, time
time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
sys.argv[0] = {script}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sentence_is_said_even_if_the_first_rank_is_the_last_to_notice(corpus: Corpus, tmp_path: Path) -> None:
    """torchrun ends every rank as soon as one has failed: another rank must not fail before rank 0 has spoken."""
    script = tmp_path / "late.py"
    script.write_text(LATE_FIRST_RANK.format(script=json.dumps(str(REPOSITORY / "pretrain_llama.py"))))
    outcome = RunningTraining(flags_of(corpus, no_such_flag=1), processes=2, script=script).finish()
    assert_one_sentence(outcome, "--no-such-flag")
