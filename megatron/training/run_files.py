"""What rank 0 leaves in the run directory: files that say what was started (the command, the flags, the versions, the
code), and the record of the attempt (megatron/operation/attempts.py), with the refusal after too many failed ones.

    RUN_DIR/command.sh         the command, to run again
    RUN_DIR/run.yaml           the flags that differ from their defaults (megatron/config/words.py)
    RUN_DIR/environment.json   versions, GPU driver, commit, variables of NCCL and CUDA
    RUN_DIR/changes.patch      what differs from the commit, if it is small
    RUN_DIR/earlier/0001/      the same files of earlier attempts, if they were different

No file holds a secret: the value of a variable such as ``WANDB_API_KEY`` is replaced by the name of the variable.
"""

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.directory import TRACKER, saved_iterations
from megatron.config.run import RunConfig
from megatron.config.run_yaml import run_yaml
from megatron.errors import ExitCode, NoProgressError, UserError, cause_of
from megatron.operation.attempt_recorder import (
    AttemptRecorder,
    Beginning,
    FailureFacts,
    RecorderThread,
    outcome_of,
    process_age_s,
    reported_failure,
)
from megatron.operation.attempts import EffectiveTimeMeter, check_progress
from megatron.operation.heartbeat import Heartbeat, RunSettings, run_directory

if TYPE_CHECKING:
    import torch

    from megatron.training.context import RunContext

COMMAND, FLAGS, ENVIRONMENT, PATCH = "command.sh", "run.yaml", "environment.json", "changes.patch"
FILES = (COMMAND, FLAGS, ENVIRONMENT, PATCH)
EARLIER = "earlier"
REDACTED = "REDACTED"

_REPOSITORY = Path(__file__).resolve().parents[2]
_LONGEST_WAIT_S = 10.0  # for the thread that writes the files, at the end of the run
_LARGEST_PATCH = 2**20
_GIT_SECONDS = 20.0
_HOSTS_LENGTH = 4000  # characters of all host names; the settings have 8 KB
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--[\w-]*(api-?key|access-?key|auth-?token|secret|passw|credential)[\w-]*", re.IGNORECASE)
_SHORTEST_SECRET = 8
_PASSWORD_IN_URL = re.compile(r"(\w://)[^/@\s]+@")
_VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "OMP_", "GLOO_", "NVTE_", "TRITON_", "UCX_")
_OF_ONE_RANK = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC")
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "tiktoken",
    "sentencepiece",
    "transformers",
    "triton",
    "transformer-engine",
    "flash-attn",
    "apex",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-resiliency-ext",
    "tensorboard",
    "wandb",
)


@dataclass(frozen=True)
class StartedCommand:
    """How this process was started."""

    words: tuple[str, ...]
    directory: str
    """The working directory."""
    world_size: int
    local_world_size: int
    environment: Mapping[str, str]

    @staticmethod
    def of(
        arguments: Sequence[str],
        own_words: Sequence[str],
        parent_words: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
    ) -> "StartedCommand":
        """``arguments`` are the flags of the training, ``own_words`` all words of this process.

        Under torch's agent, the parent is the launcher, and its words contain the script and the flags.
        """
        is_whole = "TORCHELASTIC_RUN_ID" in environment and tuple(parent_words[-len(arguments) :]) == tuple(arguments)
        world_size = int(environment.get("WORLD_SIZE", 1))
        return StartedCommand(
            tuple(parent_words if is_whole and arguments else own_words),
            directory,
            world_size,
            int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            environment,
        )


def words_of_process(pid: int) -> list[str]:
    """The words with which a process was started; empty where the system does not tell."""
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


# --- secrets -------------------------------------------------------------------------------------------------


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables whose names say that their values are secret, the longest values first."""
    found = [
        (name, value)
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    ]
    return dict(sorted(found, key=lambda item: -len(item[1])))


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with ``REDACTED`` for passwords in URLs, and with ``$NAME`` for the values of secret variables."""
    for name, value in secret_variables(environment).items():
        text = text.replace(value, f"${name}")
    return _PASSWORD_IN_URL.sub(rf"\1{REDACTED}@", text)


def quoted(word: str, environment: Mapping[str, str]) -> str:
    """A word for a shell; the value of a secret variable becomes a reference to the variable."""
    parts = [word]
    for name, value in secret_variables(environment).items():
        parts = [
            piece
            for part in parts
            for piece in (re.split(f"({re.escape(value)})", part) if not part.startswith("\0") else [part])
        ]
        parts = [f"\0{name}" if part == value else part for part in parts]
    texts = [
        f'"${{{part[1:]}:?}}"' if part.startswith("\0") else shlex.quote(_PASSWORD_IN_URL.sub(rf"\1{REDACTED}@", part))
        for part in parts
        if part
    ]
    return "".join(texts) or "''"


def _without_secret_flags(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The words, without the values of flags such as ``--auth-token``, unless a variable has the value, too."""
    known, found = set(secret_variables(environment).values()), list(words)
    for index, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if not _SECRET_FLAG.fullmatch(flag.replace("_", "-")):
            continue
        if has_value and value not in known:
            found[index] = f"{flag}={REDACTED}"
        elif not has_value and index + 1 < len(words) and words[index + 1] not in known:
            found[index + 1] = REDACTED
    return found


# --- content -------------------------------------------------------------------------------------------------


def command_script(command: StartedCommand) -> str:
    """``command.sh``: one line for each flag."""
    environment = command.environment
    lines: list[list[str]] = [["exec"]]
    for word in _without_secret_flags(command.words, environment):
        if word.startswith("--") and len(lines[-1]) > 1:
            lines.append([])
        lines[-1].append(quoted(word, environment))
    nodes = max(1, command.world_size // max(1, command.local_world_size))
    where = f", on each of {nodes} nodes; this is the command of the node with rank 0" if nodes > 1 else ""
    ranks = f"{command.world_size} rank" + "s" * (command.world_size != 1)
    alone = command.world_size > 1 and "TORCHELASTIC_RUN_ID" not in environment
    launcher = "# The launcher is not known: start as many processes as before.\n" if alone else ""
    body = " \\\n    ".join(" ".join(line) for line in lines)
    return (
        f"#!/usr/bin/env bash\n# The command of this run: {ranks}{where}.\n{launcher}set -e\n"
        f"cd {quoted(command.directory, environment)}\n{body}\n"
    )


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in ("megatron-llama", *_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def gpu_driver() -> str | None:
    try:
        match = re.search(r"Kernel Module[\w ]*?\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None


def environment_json(command: StartedCommand, accelerator: Mapping[str, Any], code: Mapping[str, Any] | None) -> str:
    """``environment.json``; nothing in it changes if the same run is started again."""
    variables = {
        name: without_secrets(value, command.environment)
        for name, value in sorted(command.environment.items())
        if name.startswith(_VARIABLES) and not name.startswith(_OF_ONE_RANK) and not _SECRET_NAME.search(name)
    }
    content = {
        "versions": package_versions(),
        "accelerator": {"driver": gpu_driver(), **accelerator},
        "git": code,
        "world_size": command.world_size,
        "ranks_per_node": command.local_world_size,
        "variables": variables,
    }
    return json.dumps(content, indent=1) + "\n"


def read_code(root: Path) -> tuple[dict[str, Any] | None, str]:
    """The commit of the repository ``root`` and whether files differ from it, and the difference if it is small.

    None for code that is in no repository, and where git is not installed.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            return None, ""
        commit = _git(root, "rev-parse", "HEAD").strip()
        patch = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None, ""
    is_small = len(patch.encode()) <= _LARGEST_PATCH
    code = {"commit": commit, "is_changed": bool(patch), "patch": PATCH if patch and is_small else None}
    return code, patch if is_small else ""


def _git(root: Path, *words: str) -> str:
    """The output of a git command that starts no other program and takes no lock."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "-C", str(root), *words]
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_GIT_SECONDS
    )
    return done.stdout.decode()


# --- writing -------------------------------------------------------------------------------------------------


def write_run_files(directory: Path, contents: Mapping[str, str]) -> None:
    """Write the files of this attempt; files of an earlier attempt are kept if they differ. Raises :class:`OSError`.

    Only one process may write, because a draft always has the same name: a killed process leaves it to the next one.
    """
    drafts = {name: directory / f".{name}.draft" for name in FILES}
    for draft in drafts.values():
        draft.unlink(missing_ok=True)
    found = {name: (directory / name).read_text("utf-8") for name in FILES if (directory / name).is_file()}
    wanted = {name: text for name, text in contents.items() if text}
    if found == wanted:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if found:
        parent = directory / EARLIER
        parent.mkdir(exist_ok=True)
        number = max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0) + 1
        target = parent / f"{number:04d}"
        target.mkdir()
        for name in found:
            os.replace(directory / name, target / name)
    for name, text in wanted.items():
        drafts[name].write_text(text, encoding="utf-8")
        drafts[name].chmod(0o755 if name == COMMAND else 0o644)
        os.replace(drafts[name], directory / name)


@contextmanager
def run_files_written(context: "RunContext", command: StartedCommand) -> Iterator[Callable[[], None]]:
    """A context with a function that writes the files on rank 0 in a thread, once; an error is a warning.

    Call it when the run is built, so that a start with a mistake changes no file. The directories of the run must be
    locked. Without a run directory nothing is written.
    """
    directory = run_directory(context.config)
    if directory is None or context.control.rank > 0 or context.config.validation.skip_train:
        yield lambda: None
        return

    def write() -> None:
        try:
            accelerator = describe_accelerator(context.topology.device)
            write_run_files(directory, run_files(context.config, command, accelerator, _REPOSITORY))
        except Exception as error:
            context.warn_rank0(f"The files that describe this run are not in {directory}: {error}")

    thread = threading.Thread(target=write, name="run files", daemon=True)

    def start() -> None:
        if thread.ident is None:  # a run is built again after a rollback
            thread.start()

    try:
        yield start
    finally:
        if thread.ident is not None:
            thread.join(_LONGEST_WAIT_S)


def run_files(
    config: RunConfig, command: StartedCommand, accelerator: dict[str, Any], repository: Path
) -> dict[str, str]:
    """The content of every file; empty for one that is not to be written."""
    code, patch = read_code(repository)
    return {
        COMMAND: command_script(command),
        FLAGS: without_secrets(run_yaml(config, FLAGS), command.environment),
        ENVIRONMENT: environment_json(command, accelerator, code),
        PATCH: without_secrets(patch, command.environment),
    }


def describe_accelerator(device: "torch.device") -> dict[str, Any]:
    import torch

    from megatron.core.device import device_name

    found: dict[str, Any] = {"device": device_name(device) or "CPU", "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


# --- the attempt ---------------------------------------------------------------------------------------------


@dataclass
class AttemptEnd:
    """How the attempt ended."""

    exit_code: ExitCode = ExitCode.CRASH


@contextmanager
def attempt_recorded(context: "RunContext") -> Iterator[AttemptEnd]:
    """Record the seconds of this attempt, here on rank 0 if no launcher does; the body sets the end.

    The directories of the run must be locked. Without a run directory nothing is written. Raises
    :class:`~megatron.errors.NoProgressError` on every rank after ``--max-failed-attempts``; without ``--save`` there
    are no checkpoints to measure progress by.
    """
    config, control, heartbeat = context.config, context.control, context.heartbeat
    end, directory = AttemptEnd(), run_directory(config)
    if directory is None or config.validation.skip_train:
        yield end
        return
    hosts = _fitting(control.all_gather_object(socket.gethostname()))
    beginning, thread, counts_from, refusal = _beginning(heartbeat), None, None, None
    if control.rank == 0:
        limit = config.operation.max_failed_attempts
        if config.checkpoint.save is not None:
            counts_from = newest_iteration(Path(config.checkpoint.save)) or 0
        try:
            if limit and counts_from is not None:
                check_progress(directory, beginning.epoch, counts_from, limit)
        except NoProgressError as error:
            refusal, counts_from = error, None  # a refusal is no further failure
        settings = RunSettings.of(config, control.rank, control.size)
        heartbeat.write_settings(replace(settings, hosts=hosts, counts_from=counts_from).to_json())
        if heartbeat.is_private:
            recorder = AttemptRecorder(
                directory, beginning, control.size, hosts, context.warn_rank0, counts_from=counts_from
            )
            thread = RecorderThread(recorder, heartbeat)
    facts: FailureFacts | None = None

    def check() -> None:
        if refusal is not None:
            raise refusal

    from megatron.core.control import run_on_rank0  # imports torch

    try:
        run_on_rank0(control, check)
        yield end
    except Exception as error:
        end.exit_code = error.exit_code if isinstance(error, UserError) else ExitCode.CRASH
        # Another rank may have failed first, and this one as a consequence.
        facts = reported_failure(directory, beginning.epoch) or FailureFacts(cause_of(error))
        raise
    finally:
        if thread is not None:
            thread.finish(outcome_of([end.exit_code]), end.exit_code, facts)


def effective_time_meter(context: "RunContext") -> EffectiveTimeMeter | None:
    """The meter on rank 0 of a run with a run directory."""
    directory = run_directory(context.config)
    if directory is None or context.control.rank > 0:
        return None
    beginning = _beginning(context.heartbeat)
    return EffectiveTimeMeter(directory, beginning.epoch, beginning.monotonic_ns)


def _beginning(heartbeat: Heartbeat) -> Beginning:
    """When this attempt began. Under the launcher a process may have been started before the attempt (a warm one)."""
    if heartbeat.is_private:
        return Beginning.now(age_s=process_age_s())
    return Beginning.now(age_s=(time.monotonic_ns() - heartbeat.snapshot().attached_ns) / 1e9)


def _fitting(hosts: Sequence[str]) -> tuple[str, ...]:
    """Each host once, as many as the settings have room for."""
    found = list(dict.fromkeys(hosts))
    while len("".join(found)) + 4 * len(found) > _HOSTS_LENGTH:
        found.pop()
    return tuple(found)


def newest_iteration(root: Path) -> int | None:
    """The iteration that was saved last in ``root``, which after a return to an older checkpoint is not the highest."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return max(saved_iterations(root), default=None)
