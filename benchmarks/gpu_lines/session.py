"""The flags that benchmarks/first_contact.py and benchmarks/gpu_day.py share, and what both do with them."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.gpu_lines.line import Line, Verdict, read_results
from benchmarks.gpu_lines.runner import Session, Start, run_lines, start_process
from benchmarks.gpu_lines.table import as_text, verdict_of
from megatron.errors import ConfigError
from megatron.flags import require_positive
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class SessionConfig:
    """Where lines run, and where their results go."""

    out: str
    """Directory of all results; further lines add to it."""
    archive: str | None = None
    """File that gets all results in one, under 16 MiB, after every line (default: all.tgz in --out)."""
    only: tuple[str, ...] = ()
    """Names of the lines to run, in this order (default: all, the most valuable first)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU where there is one."""
    tiny: bool = False
    """Rehearse with tiny shapes."""

    def check(self, names: Sequence[str]) -> None:
        """Raise :class:`ConfigError` for what cannot run; ``names`` are the names of all lines."""
        refuse_urls({"--out": self.out, "--archive": self.archive}, "name a local one")
        unknown = [name for name in self.only if name not in names]
        if unknown:
            raise ConfigError(f"--only {' '.join(unknown)} is not a line: choose from {', '.join(names)}.")
        if self.device == "cuda" and not has_gpu():
            raise ConfigError("--device cuda needs a GPU, and none is found: rehearse with --device cpu --tiny.")
        if self.resolved_device == "cpu" and not self.tiny:
            raise ConfigError("A CPU takes days for the shapes of a GPU: add --tiny for a rehearsal.")

    @property
    def resolved_device(self) -> str:
        """``cpu`` or ``cuda``."""
        if self.device != "auto":
            return self.device
        return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU. torch is not asked: importing it takes seconds of the session."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def command(words: Sequence[str]) -> str:
    """The command of a session for a page: without the directories of one machine."""
    places = ("--out", "--archive")
    flags = (Path(word).name if flag in places else word for flag, word in pairwise(words))
    return " ".join(["python", f"benchmarks/{Path(words[0]).name}", *flags])


def run_session(config: SessionConfig, lines: Sequence[Line], seconds: float, start: Start = start_process) -> int:
    """Run the lines of ``--only``, or all; print the table. The exit code is 1 if a line that ran is not right."""
    by_name = {line.name: line for line in lines}
    config.check(list(by_name))
    require_positive({"--seconds": seconds})
    chosen = [by_name[name] for name in config.only] or list(lines)
    archive = None if config.archive is None else Path(config.archive).resolve()
    out = Path(config.out).resolve()
    run_lines(Session(out, config.resolved_device, config.tiny, seconds, command(sys.argv), archive), chosen, start)
    results = read_results(out)
    print(f"\n{as_text(results)}", end="", flush=True)
    return 0 if all(verdict_of(results[line.name]) == Verdict.RIGHT for line in chosen) else 1
