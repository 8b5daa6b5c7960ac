"""A side of a comparison: what a path that the user names holds. Nothing is unpickled."""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from megatron.checkpoint.directory import MANIFEST, TRACKER, iteration_of, locate_checkpoint, saved_iterations
from megatron.checkpoint.finding import directory_below, read_run_state
from megatron.checkpoint.hugging_face.config import CONFIG, read_json_object
from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint
from megatron.checkpoint.megatron_lm.torch_dist import FORMAT
from megatron.comparison.megatron_log import read_log
from megatron.config.command_line import CommandLine
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.run_yaml import read_run_yaml
from megatron.errors import DataError
from megatron.flags import flag_of
from megatron.metrics.jsonl import RUN, History, read_history
from megatron.training.run_files import COMMAND, ENVIRONMENT, FLAGS
from megatron.urls import from_hub, is_hub_name, refuse_urls

Kind = Literal["run", "checkpoint", "hugging-face", "megatron-lm"]
_KNOWN = (
    "name a run directory, a directory of checkpoints or one of them, a file of --metrics-jsonl, a model of Hugging "
    "Face, or Megatron-LM's checkpoints or log"
)
_LOGS = ("*.log", "*.out", "*.txt")
_RELEASE = "release"


@dataclass(frozen=True)
class Side:
    """A run or a checkpoint of this code, a model of Hugging Face, or a run of Megatron-LM."""

    label: Literal["A", "B"]
    path: Path
    kind: Kind
    config: RunConfig | None = None
    """The flags of a run of this code, or of the run that saved the checkpoint; None if they are not known."""
    known_groups: frozenset[str] = frozenset()
    """The groups of ``config`` that are known: of a converted checkpoint only some, the others have their defaults."""
    foreign: Mapping[str, Any] | None = None
    """Megatron-LM's arguments by name, or the fields of ``config.json``."""
    environment: Mapping[str, Any] | None = None
    """``environment.json`` of the run directory."""
    checkpoints: Mapping[int, Path] = field(default_factory=dict)
    """By iteration, the directories of the checkpoints; a model of Hugging Face is one of iteration 0."""
    curve: History | None = None
    """Losses and gradient norms of iterations."""
    world_size: int | None = None
    """Ranks of the last attempt; None if unknown."""


def open_side(label: Literal["A", "B"], place: str | Path) -> Side:
    """What is at ``place``. Raises :class:`UserError` with a sentence for what cannot be compared."""
    refuse_urls({label: str(place)}, "copy what it names to a local directory")
    path = Path(place)
    if not path.exists():
        remedy = from_hub(str(place)) if is_hub_name(str(place)) else "give an existing path"
        raise DataError(f"{label} {path} does not exist: {remedy}.")
    side = Side(label, path, "run")
    if path.is_file():
        return _of_file(side)
    if (path / FLAGS).is_file():
        return _of_run(side)
    if (path / MANIFEST).is_file():
        if (iteration := iteration_of(path)) is None:
            raise DataError(f"{label} {path} is a checkpoint under another name: rename it to iter_ and its iteration.")
        return _of_checkpoints(side, {iteration: path})
    if (path / FORMAT).is_file() or any(path.glob("mp_rank_*")):
        return _of_megatron(side, {iteration_of(path) or 0: path})
    if found := checkpoints_in(path):
        is_ours = (found[max(found)] / MANIFEST).is_file()
        return _of_checkpoints(side, found) if is_ours else _of_megatron(side, found)
    if (path / CONFIG).is_file():
        return replace(
            side, kind="hugging-face", foreign=read_json_object(path / CONFIG), checkpoints={0: path.resolve()}
        )
    below = directory_below(path)
    hint = f"{below} has checkpoints: use it instead" if below is not None else _KNOWN
    raise DataError(f"{label} {path} is nothing that can be compared: {hint}.")


def checkpoints_in(root: Path) -> dict[int, Path]:
    """The directories of the checkpoints in ``root``, of this code or Megatron-LM, by iteration."""
    if (root / TRACKER).is_file() and (root / TRACKER).read_bytes()[:64].strip() == _RELEASE.encode():
        return {0: root / _RELEASE}
    return {iteration: locate_checkpoint(root, iteration) for iteration in saved_iterations(root)}


# --- each kind -----------------------------------------------------------------------------------------------


def _of_file(side: Side) -> Side:
    """A metrics file, whose records are objects, or a log."""
    with side.path.open("rb") as file:
        if file.read(1) == b"{":
            return _with_curve(side, side.path)
    log = read_log(side.path)
    curve = log.history if log.history.iterations else None
    if log.is_ours:
        return replace(side, curve=curve)
    return replace(side, kind="megatron-lm", foreign=log.arguments or None, curve=curve)


def _of_run(side: Side) -> Side:
    """A run directory: its flags say where checkpoints and metrics are, from its working directory."""
    config = CommandLine.of_flags(read_run_yaml(side.path / FLAGS)).parse().checked()
    side = replace(side, config=config, known_groups=frozenset(one.name for one in fields(RunConfig)))
    with suppress(OSError, ValueError, LookupError, TypeError):
        environment = json.loads((side.path / ENVIRONMENT).read_text(encoding="utf-8"))
        side = replace(side, environment=environment, world_size=environment["world_size"])
    save = located(side.path, config.checkpoint.save)
    root = side.path if save is None or not save.is_dir() else save
    side = _with_architecture(replace(side, checkpoints=checkpoints_in(root)))
    return _with_metrics(side, config, side.path)


def _of_checkpoints(side: Side, found: Mapping[int, Path]) -> Side:
    """Checkpoints of this code; the newest has the flags, which name the metrics file."""
    directory = found[max(found)]
    flags = read_run_state(directory.parent, max(found)).flags
    config = config_of(flags, str(directory))
    side = replace(side, kind="checkpoint", config=config, known_groups=frozenset(flags), checkpoints=dict(found))
    return _with_metrics(_with_architecture(side), config, directory.parent)


def _with_architecture(side: Side) -> Side:
    """``side`` with the sizes of its newest checkpoint if its flags took them from another one (--use-checkpoint-args,
    --load-hf)."""
    if side.config is None or side.config.model.num_layers is not None or not side.checkpoints:
        return side
    newest = max(side.checkpoints)
    given = side.config.model
    kept = {name: getattr(given, name) for name in ("attention_backend", "transformer_impl")}
    architecture = read_run_state(side.checkpoints[newest].parent, newest).architecture
    return replace(side, config=replace(side.config, model=replace(ModelConfig.of(architecture), **kept)))


def _of_megatron(side: Side, found: Mapping[int, Path]) -> Side:
    """Checkpoints of Megatron-LM, and a log beside them."""
    arguments = MegatronCheckpoint(found[max(found)]).arguments
    side = replace(side, kind="megatron-lm", foreign=arguments, checkpoints=dict(found))
    for log in (log for pattern in _LOGS for log in sorted(side.path.glob(pattern)) if log.name != TRACKER):
        with suppress(DataError):
            return replace(side, curve=read_log(log).history)
    return side


def _with_metrics(side: Side, config: RunConfig, directory: Path) -> Side:
    """``side`` with the file of ``--metrics-jsonl``, if it is there and has records."""
    metrics = located(directory, config.logging.metrics_jsonl)
    if metrics is not None and metrics.is_file():
        with suppress(DataError):
            return _with_curve(side, metrics)
    return side


def _with_curve(side: Side, metrics: Path) -> Side:
    """``side`` with the records of a metrics file, and with the flags in them if they are not known."""
    curve = read_history(str(metrics), side.label)
    side = replace(side, curve=curve)
    described = [record[RUN] for record in curve.iterations if isinstance(record.get(RUN), Mapping)]
    if not described:
        return side
    last = described[-1]
    side = replace(side, world_size=side.world_size or last.get("world_size"))
    if side.config is not None or not isinstance(last.get("flags"), Mapping):
        return side
    return replace(side, config=config_of(last["flags"], str(metrics)), known_groups=frozenset(last["flags"]))


# --- flags and places ----------------------------------------------------------------------------------------


def config_of(flags: Mapping[str, Any], where: str) -> RunConfig:
    """The run of the saved ``flags``, by group; missing ones have their defaults. Raises :class:`DataError`."""
    groups = {}
    for group in fields(RunConfig):
        kind: Any = type(getattr(RunConfig(), group.name))
        values = flags.get(group.name, {})
        unknown = sorted(values.keys() - {one.name for one in fields(kind)})
        if unknown:
            raise DataError(
                f"{where} has {flag_of(unknown[0])} {values[unknown[0]]}, which this version of the code does not "
                "have: compare with the version that wrote it."
            )
        groups[group.name] = kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
    return RunConfig(**groups)


def located(directory: Path, place: str | None) -> Path | None:
    """Where the ``place`` of a flag is: from the working directory of the run, whose run directory is ``directory``;
    for a run that was moved, in the directory itself."""
    if place is None:
        return None
    working = Path()
    with suppress(OSError, ValueError):
        found = re.search(r"^cd (.*)$", (directory / COMMAND).read_text(encoding="utf-8"), re.MULTILINE)
        working = Path(*shlex.split(found[1])) if found else working
    path = working / place
    return path if path.exists() else directory / path.name
