"""A mistake of the user ends the run with one sentence that says what to do, at once, and harms nothing.

Every case starts from a run that exists already and names its directory in --save and --load: whatever is wrong
with the new flags, the files of the old run must come out of it byte for byte as they were.
"""

import json
import re
import shutil
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
    Flags,
    FlagValue,
    Outcome,
    RunningTraining,
    bytes_under,
    call_training,
    flags_of,
    fork_training,
    iterations,
    saving_in,
)

DONE = 4


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
    """The directory of the finished run; the corpus is beside it, in ``data``."""
    corpus: Corpus

    def flags(self, changes: Flags) -> list[str]:
        """Flags that would continue the run, but for ``changes``."""
        return flags_of(self.corpus, **{**saving_in(self.run), **changes})


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

Mistake = Callable[[Scene], Flags]
"""Spoils a scene; the flags that are wrong."""
BIN, IDX, TOKENIZER = "data/corpus.bin", "data/corpus.idx", "data/tokenizer.model"
SHARD, MANIFEST = (f"run/iter_{DONE:07d}/{name}" for name in ("rank_00000.safetensors", "manifest.json"))


def spoilt(file: str, spoil: Callable[[Path], None]) -> Mistake:
    """A file of the scene is spoilt."""

    def mistake(scene: Scene) -> Flags:
        spoil(scene.run.parent / file)
        return {}

    return mistake


def cut(path: Path) -> None:
    """A copy that stopped early."""
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    """A block of another file."""
    content = bytearray(path.read_bytes())
    content[16:64] = b"\xff" * 48
    path.write_bytes(content)


def flags(**changes: FlagValue) -> Mistake:
    """Nothing but flags is wrong."""
    return lambda scene: dict(changes)


def nothing_to_load(scene: Scene) -> Flags:
    """--load names a directory without a checkpoint."""
    return {"load": scene.run / "elsewhere", "exit_on_missing_checkpoint": True}


def notes_as_metrics(scene: Scene) -> Flags:
    """--metrics-jsonl names a file of another kind."""
    notes = scene.run / "notes.txt"
    notes.write_text('{"text": "not metrics"}\n{"text": "but needed"}\n')
    return {"metrics_jsonl": notes}


MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    # tests/config has the flags that are wrong by themselves.
    "processes do not divide": (flags(tensor_model_parallel_size=2), ("1 processes", "--tensor-model-parallel-size")),
    "corpus is nowhere": (flags(data_path="nowhere/corpus"), ("nowhere/corpus.idx", "--data-path")),
    "corpus without .bin": (spoilt(BIN, Path.unlink), ("corpus.bin does not exist", "tools/preprocess_data.py")),
    "corpus without .idx": (spoilt(IDX, Path.unlink), ("corpus.idx does not exist", "tools/preprocess_data.py")),
    "truncated .bin": (spoilt(BIN, cut), ("corpus.bin", "copy it again")),
    "truncated .idx": (spoilt(IDX, cut), ("corpus.idx", "tools/preprocess_data.py")),
    "split without data": (flags(split="0,1,0"), ("--split",)),
    "tokenizer of other data": (
        flags(tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=9, load=None, save=None),
        ("corpus.bin", "0..9", "the tokenizer does not match the data", "--vocab-size"),
    ),
    "tokenizer of another type": (flags(tokenizer_type="TikTokenizer"), ("tokenizer.model", "--tokenizer-type")),
    "tokenizer of another size": (flags(vocab_size=100), ("--vocab-size 100", str(VOCABULARY))),
    "no tokenizer file": (spoilt(TOKENIZER, Path.unlink), ("tokenizer.model does not exist", "--tokenizer-model")),
    "garbled tokenizer": (
        spoilt(TOKENIZER, garble),
        ("tokenizer.model is not a SentencePiece model", "--tokenizer-model"),
    ),
    "checkpoint of another model": (
        flags(num_layers=3, ffn_hidden_size=96),
        ("another architecture", "--num-layers is 3 here and 2 there", "--ffn-hidden-size is 96 here and 64 there"),
    ),
    "checkpoint of another schedule": (flags(lr=1e-3), ("peak 0.001", "--override-opt-param-scheduler")),
    "checkpoint that does not exist": (flags(ckpt_step=3), ("iteration 3", f"it has: {DONE}")),
    "nothing to load": (nothing_to_load, ("elsewhere", "has no checkpoint")),
    "truncated checkpoint": (spoilt(SHARD, cut), ("rank_00000.safetensors", "load another checkpoint")),
    "garbled checkpoint": (spoilt(SHARD, garble), ("rank_00000.safetensors is damaged", "load another checkpoint")),
    "checkpoint without a file": (spoilt(SHARD, Path.unlink), ("rank_00000.safetensors",)),
    "checkpoint without a manifest": (spoilt(MANIFEST, cut), ("has no readable checkpoint",)),
    "profile that cannot be written": (
        flags(profile_pipeline=str(REPOSITORY)),
        ("--profile-pipeline", "cannot be written"),
    ),
    "events in a file": (lambda scene: {"tensorboard_dir": scene.corpus.tokenizer}, ("--tensorboard-dir",)),
    "save to a file": (lambda scene: {"save": scene.corpus.tokenizer}, ("tokenizer.model",)),
    "memory history on a CPU": (
        flags(record_memory_history=True),
        ("--record-memory-history records the allocations of a GPU",),
    ),
    "metrics over notes": (notes_as_metrics, ("notes.txt", "is not a metrics file")),
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


# --- real processes ------------------------------------------------------------------------------------------


def test_plain_python_says_it_in_one_sentence(scene: Scene) -> None:
    """And before torch is imported, which takes a second or many on a cluster's file system."""
    outcome = RunningTraining(scene.flags({"tensor_model_paralel_size": 2})).finish()
    assert outcome.stderr.splitlines() == [
        "ERROR: --tensor-model-paralel-size is not a flag of pretrain_llama.py: did you mean "
        "--tensor-model-parallel-size?"
    ]
    assert not outcome.stdout


TWO_RANK_MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    "processes do not divide": (
        flags(tensor_model_parallel_size=4, num_query_groups=4),
        ("2 processes", "--tensor-model-parallel-size 4"),
    ),
    "truncated .bin": (spoilt(BIN, cut), ("corpus.bin", "copy it again")),
    "garbled checkpoint": (spoilt(SHARD, garble), ("rank_00000.safetensors is damaged",)),
}


@pytest.mark.parametrize("mistake", TWO_RANK_MISTAKES)
def test_two_ranks_speak_with_one_voice(scene: Scene, mistake: str) -> None:
    spoil, words = TWO_RANK_MISTAKES[mistake]
    command = scene.flags({"tensor_model_parallel_size": 2, **spoil(scene)})
    before = bytes_under(scene.run)
    assert_one_sentence(fork_training(command, 2), *words)
    assert bytes_under(scene.run) == before


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
