"""The wandb writer."""

import os
import queue
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_flag, values_of
from megatron.metrics.writer import (
    EvaluationRecord,
    IntervalGate,
    IterationRecord,
    MetricsWriter,
    ReportedRun,
    WriterFlags,
    evaluation_scalars,
)
from megatron.urls import refuse_urls

_MODES_WITHOUT_KEY = frozenset({"offline", "dryrun", "disabled"})
_FINISH_SECONDS = 60
_QUEUE_LENGTH = 1024


@dataclass(frozen=True)
class WandbFlags(WriterFlags):
    wandb_project: str | None = None
    """wandb project; enables the wandb writer. The API key is read only from the environment."""
    wandb_exp_name: str | None = None
    """wandb run name."""
    wandb_entity: str | None = None
    """wandb team or user."""
    wandb_save_dir: str | None = None
    """Directory for wandb's local files (default: DIR/wandb of --save DIR, otherwise ./wandb)."""

    def check(self) -> None:
        remedy = "use a local directory, because object stores cannot append to files"
        refuse_urls(values_of(self, "wandb_save_dir"), remedy)
        dependent = changed_flags(self, "wandb_exp_name", "wandb_entity", "wandb_save_dir")
        require_flag("--wandb-project", self.wandb_project is not None, dependent)

    def check_environment(self, environment: Mapping[str, str]) -> None:
        # wandb prompts for a missing API key on a terminal, and fails elsewhere.
        if self.wandb_project is None or environment.get("WANDB_MODE") in _MODES_WITHOUT_KEY:
            return
        if not environment.get("WANDB_API_KEY") and not environment.get("WANDB_IDENTITY_TOKEN_FILE"):
            raise ConfigError(
                "--wandb-project needs an API key: set WANDB_API_KEY in the environment, or WANDB_MODE=offline "
                "to keep the run on disk."
            )

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        if self.wandb_project is None:
            return None
        directory = Path(self.wandb_save_dir or run.save_directory or ".")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--wandb-save-dir {directory} cannot be created ({error.strerror}): use another directory."
            ) from error
        return WandbWriter(
            self, run, directory, wandb_run_id(run.save_directory, run.resume_iteration, run.environment)
        )


class WandbWriter:
    """Sends records to wandb from a separate thread, so that neither network nor service delays training.

        training ── write_iteration ──▶ queue of points ── thread ──▶ wandb, its files and the network

    Points have Megatron-LM's keys and the iteration as their step; a run whose id exists is continued, and points that
    it already has keep their first value. A run that is not sent within a minute after the end stays on disk for
    ``wandb sync``. Raises :class:`ConfigError` if the wandb package is missing.
    """

    def __init__(self, flags: WandbFlags, run: ReportedRun, directory: Path, run_id: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb-project needs wandb: pip install wandb.") from error
        self._wandb = wandb
        self._gate = IntervalGate(run.plot_interval, run.resume_iteration)
        self._warn = run.warn
        self._failed = False
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_QUEUE_LENGTH)
        self._run_arguments: dict[str, Any] = {
            "project": flags.wandb_project,
            "name": flags.wandb_exp_name,
            "entity": flags.wandb_entity,
            "dir": str(directory),
            "id": run_id,
            "resume": "allow",
            "config": dict(run.flags),
        }
        self._thread = threading.Thread(target=self._serve, name="wandb-writer", daemon=True)
        self._thread.start()

    def write_iteration(self, record: IterationRecord) -> None:
        scalars = self._gate.scalars(record)
        if scalars:
            self._put((record.iteration, scalars))

    def write_evaluation(self, record: EvaluationRecord) -> None:
        self._put((record.iteration, evaluation_scalars(record)))

    def close(self) -> None:
        self._put(None)
        if not self._failed:
            self._thread.join(_FINISH_SECONDS + 30)
        if self._thread.is_alive():
            self._fail("it did not finish in time")

    def _put(self, point: tuple[int, Mapping[str, float]] | None) -> None:
        """Hand a point to the thread; None ends it."""
        if self._failed:
            return
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self._fail("it stopped taking points")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(f"WARNING: wandb is disabled for the rest of this run: {reason}. Training continues.")

    def _serve(self) -> None:
        try:
            # "Stop" on wandb's page sends Ctrl-C to this rank alone, which would not end the run: only report it.
            settings = self._wandb.Settings(
                console="off",
                finish_timeout=_FINISH_SECONDS,
                stop_fn=lambda: self._warn("wandb asked to stop the run; send a signal to the job instead."),
            )
            run = self._wandb.init(settings=settings, **self._run_arguments)
            for iteration, scalars in iter(self._queue.get, None):
                run.log(dict(scalars), step=iteration)
            run.finish()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")


def wandb_run_id(save_directory: str | None, resume_iteration: int, environment: Mapping[str, str]) -> str:
    """The id of the run that is resumed, or a new one, written to a file beside the checkpoints."""
    path = None if save_directory is None else Path(save_directory) / "wandb_run_id.txt"
    if path is not None and resume_iteration > 0 and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = environment.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(run_id + "\n", encoding="utf-8")
        os.replace(partial, path)
    return run_id
