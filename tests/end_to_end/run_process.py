"""Training runs as a user starts them: real flags, real processes, and what they leave behind.

A process costs seconds before its first iteration, so whatever needs no second rank and no signal may call the
entry point here (:func:`call_training`); the outcome has the same form.
"""

import functools
import io
import json
import math
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from megatron import errors
from megatron.commands import pretrain_llama
from megatron.errors import ExitCode
from megatron.operation import attempts, failure
from tests.forked import fork_context

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0
PROMPT = 90.0
"""Seconds within which a run that ends at once has ended, also on a busy machine: less than any time limit of a run."""
VOCABULARY = 384

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "CUDA_VISIBLE_DEVICES": ""}

FlagValue = str | int | float | bool | None | Path | Sequence[str | int | float]
Flags = dict[str, FlagValue]
Record = dict[str, Any]
Main = Callable[[Sequence[str]], int]


# --- what is trained on --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus and the tokenizer that made it."""

    prefix: Path
    tokenizer: Path


@functools.cache
def tiny_corpus(base: Path) -> Corpus:
    """The session's corpus: modules of Python's library, with a SentencePiece tokenizer trained on them.

    ``base`` is the session's temporary directory, so that all test files share one corpus.
    """
    directory = base / "end_to_end_corpus"
    directory.mkdir()
    text, tokenizer = directory / "text.jsonl", directory / "tokenizer.model"
    write_documents(text, documents=60)
    run_tool(
        "tools/train_tokenizer.py",
        *("--input", text, "--model-prefix", tokenizer.with_suffix(""), "--vocab-size", VOCABULARY),
    )
    return Corpus(tokenize(text, tokenizer), tokenizer)


def write_documents(path: Path, documents: int, first: int = 0) -> None:
    """Write so many modules of Python's library (of up to 6,000 characters) as jsonl."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[first : first + documents]
    texts = [module.read_text(encoding="utf-8", errors="replace")[:6000] for module in modules]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def tokenize(text: Path, tokenizer: Path) -> Path:
    """Tokenize a jsonl file; the prefix of the result."""
    prefix = text.with_suffix("")
    run_tool(
        "tools/preprocess_data.py",
        *("--input", text, "--output-prefix", prefix, "--append-eod"),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer),
    )
    return prefix.with_name(f"{prefix.name}_text_document")


# --- flags ---------------------------------------------------------------------------------------------------

TINY_RUN: Flags = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "make_vocab_size_divisible_by": 16,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 8,
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "split": "80,10,10",
    "num_workers": 0,
    "log_interval": 1,
    "peak_tflops": 1.0,
    "device": "cpu",
}


MOCK_RUN: Flags = {**TINY_RUN, "split": None, "mock_data": True, "vocab_size": 120}
"""A tiny run on synthetic data."""


def flags_of(corpus: Corpus, **changes: FlagValue) -> list[str]:
    """The command line of a tiny run on ``corpus``, with flags added, changed, or (None) left out."""
    source = {
        "data_path": str(corpus.prefix),
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": str(corpus.tokenizer),
    }
    return words_of({**TINY_RUN, **source, **changes})


def saving_in(directory: Path) -> Flags:
    """The flags of a run that saves in ``directory``, resumes from there, and writes its metrics there."""
    return {"save": directory, "load": directory, "metrics_jsonl": directory / "metrics.jsonl"}


def saving_run(corpus: Corpus, run: Path, **changes: FlagValue) -> list[str]:
    """A run of four iterations that saves in ``run/first`` after each."""
    length: Flags = {"bf16": True, "global_batch_size": 4, "train_iters": 4, "lr_decay_iters": 4, "save_interval": 1}
    places: Flags = {**saving_in(run / "first"), "metrics_jsonl": run / "metrics.jsonl"}
    return flags_of(corpus, **{**length, **places, **changes})


def words_of(flags: Mapping[str, FlagValue]) -> list[str]:
    """Flags by their names, as on a command line; those with None are left out."""
    return [word for name, value in flags.items() for word in _words(name, value)]


def _words(name: str, value: FlagValue) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, str | int | float | Path):
        return [f"--{flag}", str(value)]
    return [f"--{flag}", *map(str, value)]


# --- processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what its ranks wrote (without what torchrun says of itself)."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    launcher: str = ""
    """torchrun's own words."""

    @property
    def errors(self) -> list[str]:
        """The sentences meant for the user, of all ranks; if torchrun has ended rank 0 before it spoke, that of its
        last box."""
        said = [line for line in self.stderr.splitlines() if line.startswith("ERROR: ")]
        return said or [sentence for sentence in [self.root_cause] if sentence.startswith("ERROR: ")]

    def refusal(self, *words: str) -> str:
        """The sentence with which a run has failed, the only one of all its ranks; it has these ``words``."""
        assert self.exit_code not in (0, 75, None), self.stdout
        (sentence,) = self.errors
        assert all(word in sentence for word in words), sentence
        return sentence

    @property
    def root_cause(self) -> str:
        """What the last box of torchrun says; empty if there is none."""
        _, _, box = self.launcher.rpartition("Root Cause (first observed failure):")
        return box.rpartition("traceback : ")[2].partition("\n=====")[0]

    def succeeded(self) -> "Outcome":
        """This outcome, which must be a success: the run is complete, or has stopped where it was asked to."""
        stopped = self.exit_code == 1 and self.root_cause.startswith("Stopped on request")  # as torchrun says it
        assert stopped or self.exit_code in (0, 75), f"{self.stdout}\n{self.stderr}\n{self.launcher}"
        return self


class RunningTraining:
    """A started run: plain python for one process, torchrun for several."""

    def __init__(self, flags: Sequence[str], processes: int = 1, script: Path = REPOSITORY / "pretrain_llama.py"):
        self._logs = Path(tempfile.mkdtemp(prefix="training-"))
        self._processes = processes
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            # Each rank to its own files, so that its words cannot be mistaken for torchrun's.
            command += ["--redirects", "3", "--log-dir", str(self._logs / "ranks")]
        self._started = time.monotonic()
        with (self._logs / "stdout.log").open("wb") as stdout, (self._logs / "stderr.log").open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, str(script), *flags],
                env=environment(),
                cwd=self._logs,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=heed_interrupts,
            )

    def wait_for_records(self, metrics: Path, count: int) -> None:
        """Wait until the run has logged ``count`` iterations."""

        def has_logged() -> bool:
            assert self.process.poll() is None, self.finish()
            return len(iterations(metrics)) >= count

        wait_until(has_logged, START_TIMEOUT)

    def stderr_so_far(self) -> str:
        """What the one process of this run has written to standard error."""
        return (self._logs / "stderr.log").read_text()

    def kill(self) -> None:
        """SIGKILL to the launcher and every rank, as when the machine goes down."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            # One may be gone already.
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, timeout: float = START_TIMEOUT) -> Outcome:
        """Wait for the end; a run that does not end is killed, and fails the test."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        seconds = time.monotonic() - self._started
        launcher = ""
        if self._processes == 1:
            stdout, stderr = ((self._logs / f"{stream}.log").read_text() for stream in ("stdout", "stderr"))
        else:
            launcher = (self._logs / "stderr.log").read_text()
            stdout, stderr = (self._of_all_ranks(f"{stream}.log") for stream in ("stdout", "stderr"))
        shutil.rmtree(self._logs)
        return Outcome(self.process.returncode, stdout, stderr, seconds, launcher)

    def _of_all_ranks(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self._logs.glob(f"ranks/*/attempt_0/*/{name}")))


def fork_training(flags: Sequence[str], processes: int, main: Main = pretrain_llama.main) -> Outcome:
    """Train in processes that are forked, which spares each of them its imports, and treated as by our launcher."""
    logs, started = Path(tempfile.mkdtemp(prefix="training-")), time.monotonic()
    address = {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}", "MASTER_ADDR": "127.0.0.1"}
    address["MASTER_PORT"] = str(free_port())
    variables = {**environment(), **address}
    ranks = [
        fork_context().Process(target=_train_as_rank, args=(rank, variables, list(flags), logs, main))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    try:
        wait_until(lambda: any(map(has_failed, ranks)) or not any(map(is_running, ranks)), START_TIMEOUT)
        if any(map(is_running, ranks)):
            for rank in filter(is_running, ranks):
                rank.terminate()
            # torchrun has the same patience.
            wait_until(lambda: not any(map(is_running, ranks)), 30)
    finally:
        for rank in ranks:
            rank.kill()
    stdout, stderr = ("".join(path.read_text() for path in sorted(logs.glob(f"*.{kind}"))) for kind in ("out", "err"))
    shutil.rmtree(logs)
    codes = [rank.exitcode or 0 for rank in sorted(ranks, key=has_failed, reverse=True)]
    exit_code = next((code for code in codes if code), 0)
    return Outcome(exit_code, stdout, stderr, time.monotonic() - started)


def has_failed(process: BaseProcess) -> bool:
    """Whether a forked process has ended otherwise than complete or stopped on request."""
    return process.exitcode not in (None, ExitCode.COMPLETE, ExitCode.STOPPED)


def is_running(process: BaseProcess) -> bool:
    """Whether a forked process has not ended."""
    return process.exitcode is None


def _train_as_rank(rank: int, variables: Mapping[str, str], flags: Sequence[str], logs: Path, main: Main) -> None:
    os.setsid()
    heed_interrupts()
    for descriptor, kind in ((1, "out"), (2, "err")):
        with (logs / f"{rank}.{kind}").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    # The server's streams end where its own do. A program that replaces these does not close what they write to.
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.chdir(logs)
    # The server that forks keeps the environment of the moment at which it was started.
    os.environ.clear()
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    errors.FIRST_RANK_SECONDS = 2.0
    sys.exit(main(flags))


def call_training(flags: Sequence[str], main: Main = pretrain_llama.main) -> Outcome:
    """Train in this process: the same entry point and flags, without the seconds that a process takes to start."""
    stdout, stderr = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        with mock.patch.dict(os.environ, ENVIRONMENT), redirect_stdout(stdout), redirect_stderr(stderr):
            exit_code = main(flags)
    finally:
        torch.set_num_threads(threads)
    return Outcome(exit_code, stdout.getvalue(), stderr.getvalue(), time.monotonic() - started)


def run_tool(script: str, *arguments: object, processes: int = 1) -> str:
    """Run the entry file of one of the repository's tools, which must succeed; its standard output."""
    return (
        fork_training([str(word) for word in arguments], processes, functools.partial(run_file, script))
        .succeeded()
        .stdout
    )


def run_file(script: str, words: Sequence[str]) -> int:
    """Run a file of the repository as Python does, with these words; a tool that fails exits by itself."""
    sys.argv = [str(REPOSITORY / script), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def environment() -> dict[str, str]:
    """The environment of a run: one thread per rank, wandb on disk, no GPU."""
    return {**os.environ, **ENVIRONMENT}


def run_python(*words: str, cwd: Path = REPOSITORY, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with ``words``, in the environment of a run with these ``variables``."""
    command, env = [sys.executable, *words], environment() | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def heed_interrupts() -> None:
    """In a new process: let SIGINT act, even where the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# Below the ports that a system gives to outgoing connections (32768 and up on Linux, 49152 elsewhere): a port that
# was free when it was asked for isn't taken by somebody's connection before the rank listens on it.
LISTENING_PORTS = range(10_000, 32_768)


def free_port() -> int:
    """A port that nobody listens on, and that no connection takes meanwhile."""
    for _ in range(1000):
        port = random.SystemRandom().choice(LISTENING_PORTS)  # apart from seeds, which tests fix alike in both workers
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"all of a thousand ports of {LISTENING_PORTS} are taken")


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on of a process; torchrun gives each rank a session of its own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...": the name may hold blanks and parentheses.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, unseen = [], [pid]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Poll ``condition`` until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {timeout} s"
        time.sleep(0.01)


# --- what a run leaves behind --------------------------------------------------------------------------------


def records(metrics: Path) -> list[Record]:
    """All records of a metrics file; a line that is just being written is left out."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def iterations(metrics: Path) -> list[Record]:
    """The records of training iterations."""
    return [record for record in records(metrics) if "lm_loss" in record]


def losses(metrics: Path) -> list[float]:
    """The training loss of every logged iteration."""
    return [record["lm_loss"] for record in iterations(metrics)]


def grad_norms(metrics: Path) -> list[float]:
    """The gradient norm of every logged iteration."""
    return [record["grad_norm"] for record in iterations(metrics)]


MEASURED = (
    "iteration_time_ms",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "effective_time",
    "operation/slowest_rank_ratio",
    "time",
    "elapsed_s",
    "run",
)


def computed(metrics: Path) -> list[Record]:
    """All records without what depends on the clock, and without the flags."""
    return [{key: value for key, value in one.items() if key not in MEASURED} for one in records(metrics)]


def assert_close(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    """Every number within ``tolerance``, relative."""
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted)):
        assert math.isclose(one, other, rel_tol=tolerance), f"number {place}: {one!r} instead of {other!r}"


def latest_iteration(save: Path) -> int:
    """What the tracker of a checkpoint directory says."""
    return int((save / "latest_checkpointed_iteration.txt").read_text())


def kept(root: Path) -> list[int]:
    """The checkpoints under a directory, in which no draft may be left."""
    assert not [name for name in os.listdir(root) if name.startswith(".")], os.listdir(root)
    return sorted(int(name.removeprefix("iter_")) for name in os.listdir(root) if name.startswith("iter_"))


def checkpoint_of(save: Path, iteration: int) -> Path:
    """The directory of one checkpoint."""
    return save / f"iter_{iteration:07d}"


def assert_same_tensors(found: Path, wanted: Path, prefix: tuple[str, ...] = ("model/", "optimizer/")) -> None:
    """The tensors with such names hold the same bits in two checkpoints of the same layout."""
    names = sorted(path.name for path in wanted.glob("*.safetensors"))
    assert names
    assert names == sorted(path.name for path in found.glob("*.safetensors"))
    for name in names:
        ours, theirs = load_file(found / name), load_file(wanted / name)
        assert ours.keys() == theirs.keys()
        compared = {key: tensor for key, tensor in theirs.items() if key.startswith(prefix)}
        assert compared
        different = [key for key, tensor in compared.items() if not torch.equal(ours[key], tensor)]
        assert not different, f"{name}: {different}"


def bytes_under(directory: Path) -> dict[str, bytes]:
    """Every file under a directory with its content, but the records of attempts and of their failures."""
    records = {attempts.ATTEMPTS, attempts.CURRENT, failure.FILE, failure.DIRECTORY}
    paths = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): (directory / path).read_bytes() for path in paths if not records & set(path.parts)}
