"""An experiment: a run of a side's flags for a few steps with recorders, in its layout, with weights and samples that
are given; and the flags of such a run.

The run is ordinary training in processes of its own. What it is given stands in a request, a JSON file; what it leaves
are the recordings and, if wanted, its initial weights as a safetensors file of whole tensors.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.directory import iteration_of
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.dry_run import DryRunConfig, FlagFileConfig, PlanConfig
from megatron.config.operation import LoggingConfig, OperationConfig
from megatron.config.precision import KernelConfig, PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER
from megatron.config.run_yaml import run_yaml
from megatron.config.training import OptimizerConfig, ValidationConfig
from megatron.core.control import run_on_rank0
from megatron.core.parameter import ParameterInfo, flat_range_boxes
from megatron.data.data_module import DataContext
from megatron.errors import UserError
from megatron.features.record_tensors.recording import Recording, load_recording
from megatron.training.build.run import RunParts
from megatron.training.checkpoints.saved_run import Progress
from megatron.training.loop.trainer import Listener, Trainer

STEPS = 2
"""Recorded iterations. Clipping and weight decay show in the second one: Adam's first update has no scale."""
MASKS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking")
"""The fields of the data that say what of a sample counts."""


@dataclass(frozen=True)
class Request:
    """What a run is given and asked for; ``None``: the run's own."""

    batches: Sequence[str] | None = None
    """Files of the samples of each iteration, as a recorder writes them."""
    weights: str | None = None
    """File of the initial weights, by global name."""
    checkpoint: str | None = None
    """Checkpoint of this code with the initial weights."""
    save_weights: str | None = None
    """File that receives the initial weights."""
    progress: tuple[int, int] = (0, 0)
    """Iterations and samples that schedules and samples count as done."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def parts(self) -> RunParts:
        """The replaced parts of the run."""
        given = None if self.batches is None else lambda context: given_samples(self.batches or (), context)
        listeners: list[Listener] = [] if self.weights is None else [GivenWeights(Path(self.weights))]
        listeners += [] if self.save_weights is None else [SavedWeights(Path(self.save_weights))]
        return RunParts(build_loader=given, listeners=listeners, progress=Progress(*self.progress))


def given_samples(batches: Sequence[str], context: DataContext) -> Iterator[Any]:
    """This data-parallel rank's samples of each file: its token ids and the weights of its losses."""
    size = context.config.micro_batch_size
    for path in batches:
        batch = load_file(path)
        # [samples, length + 1]: the last label is the token after the last one.
        tokens = torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1).numpy()
        mask = batch["loss_mask"].numpy().astype(np.float32)
        for first in range(context.rank * size, len(tokens), context.size * size):
            yield from zip(tokens[first : first + size], mask[first : first + size])


class GivenWeights(Listener):
    """Loads the initial weights from a file of whole tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self._is_done = path, False

    def on_iteration_start(self, trainer: Trainer) -> None:
        if self._is_done:
            return
        self._is_done = True
        optimizer, data_parallel = trainer.module.optimizer, trainer.module.data_parallel
        masters = [(one.info, one.start, one.tensor) for one in optimizer.state() if one.kind == "master"]
        with safe_open(self.path, "pt") as file, torch.no_grad():
            known = set(file.keys())
            local = [(one.info, one.start, one.tensor) for one in data_parallel.local_params]
            for info, start, flat in [*local, *masters]:
                if info.name in known:
                    _fill(flat, info, start, file.get_slice(info.name))
        if not optimizer.has_master_weights:
            optimizer.reload_master_weights()
        optimizer.reset_average()
        optimizer.publish()
        data_parallel.finish_param_all_gather()


def _fill(flat: Tensor, info: ParameterInfo, start: int, source: Any) -> None:
    """Fill elements from ``start`` of a flattened local parameter from a whole tensor in a file."""
    for box, begin, end in flat_range_boxes(info, start, start + flat.numel()):
        part = source[tuple(slice(first, first + size) for first, size in zip(box.global_offset, box.shape))]
        flat.view(-1)[begin - start : end - start] = part.reshape(-1).to(flat)


class SavedWeights(Listener):
    """Saves the initial weights to a file of whole tensors; a collective."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_iteration_start(self, trainer: Trainer) -> None:
        if self.path.exists():
            return
        sharing = trainer.module.data_parallel.sharing
        parts = [
            (one.info.name, one.info.global_shape, box, one.weight.view(-1)[begin - one.start : end - one.start].cpu())
            for one in trainer.module.optimizer.shards
            if sharing.is_counted(one.info, over_all_ranks=True)
            for box, begin, end in flat_range_boxes(one.info, one.start, one.start + one.weight.numel())
        ]
        gathered = trainer.context.control.all_gather_object(parts)

        def write() -> None:
            tensors: dict[str, Tensor] = {}
            for name, shape, box, part in (one for parts in gathered for one in parts):
                whole = tensors.setdefault(name, part.new_zeros(shape))
                place = tuple(slice(first, first + size) for first, size in zip(box.global_offset, box.shape))
                whole[place] = part.view(box.shape)
            save_file(tensors, self.path)

        run_on_rank0(trainer.context.control, write)


# --- flags ---------------------------------------------------------------------------------------------------


def recorded(config: RunConfig, directory: Path, request: Request, *, fp64: bool) -> RunConfig:
    """The flags of a side's experiment: its model, layout, optimizer and schedules, in its precision or in fp64."""
    data = replace(config.data, num_workers=0, new_data_stage=None)
    if request.batches is not None:
        # The request gives the samples; the name is for the checks.
        data = DataConfig(
            data_module="RunParts:build_loader",
            num_workers=0,
            seq_length=data.seq_length,
            **{name: getattr(data, name) for name in MASKS},
        )
    steps = steps_from(request.progress[0])
    # The run was perhaps on another machine.
    device: Literal["auto", "cpu"] = "cpu" if config.training.device == "cpu" else "auto"
    return replace(
        as_fp64(config) if fp64 else config,
        data=data,
        checkpoint=CheckpointConfig() if request.checkpoint is None else weights_of(Path(request.checkpoint)),
        operation=OperationConfig(),
        logging=LoggingConfig(
            log_interval=1, record_tensors=str(directory), record_tensors_iterations=steps, peak_tflops=1.0
        ),
        validation=ValidationConfig(),
        training=replace(config.training, exit_interval=steps[-1], exit_duration_in_mins=None, device=device),
        parallel=replace(config.parallel, distributed_backend=None),
        dry_run=DryRunConfig(),
        plan=PlanConfig(),
        flag_files=FlagFileConfig(),
    )


def weights_of(checkpoint: Path) -> CheckpointConfig:
    """The flags that load the weights of a checkpoint."""
    step = iteration_of(checkpoint)
    return CheckpointConfig(load=str(checkpoint.parent), ckpt_step=step, finetune=True, checkpoint_fallback=False)


def as_fp64(config: RunConfig) -> RunConfig:
    """The flags in fp64, which kernels of other packages and narrower optimizer states exclude."""
    states = ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    defaults: dict[str, Any] = {name: getattr(OptimizerConfig(), name) for name in states}
    return replace(
        config,
        model=replace(config.model, transformer_impl="local", attention_backend="auto"),
        moe=replace(config.moe, moe_router_dtype=None),
        optimizer=replace(config.optimizer, **defaults),
        precision=PrecisionConfig(fp64=True),
        kernels=KernelConfig(),
    )


def with_batch_size(config: RunConfig, samples: int) -> RunConfig:
    """The flags with ``samples`` in every iteration."""
    training = replace(
        config.training, global_batch_size=samples, rampup_batch_size=None, step_batch_size_schedule=None
    )
    return replace(config, training=training)


def with_values_of(config: RunConfig, other: RunConfig, flags: Sequence[str]) -> RunConfig:
    """``config`` with the values that ``flags`` have in ``other``."""
    for flag in flags:
        found = RUN_PARSER.find(flag)
        if found is None:
            continue
        name = found[0].field.name
        for group in fields(config):
            if name in {one.name for one in fields(getattr(config, group.name))}:
                value = getattr(getattr(other, group.name), name)
                config = replace(config, **{group.name: replace(getattr(config, group.name), **{name: value})})
    return config


class ExperimentError(UserError):
    """A run of an experiment failed."""


@dataclass(frozen=True)
class Processes:
    """Runs experiments in processes of this machine."""

    code: Mapping[str, Path]
    """The checkout of each side."""

    def __call__(self, label: str, config: RunConfig, world_size: int, request: Request, directory: Path) -> None:
        """Run the flags of the side ``label``, and keep their files in ``directory``."""
        directory.mkdir(parents=True)
        request.save(directory / "request.json")
        (directory / "flags.yaml").write_text(run_yaml(config, "flags.yaml"), encoding="utf-8")
        launcher = ["-m", "megatron.operation.launch", "--standalone", f"--nproc-per-node={world_size}"]
        words = ["-m", "megatron.commands.record_step", "request.json", "--config", "flags.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(self.code[label]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *(launcher if world_size > 1 else ()), *words]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        (directory / "log.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        if not (directory / "records" / f"iter_{steps_from(request.progress[0])[-1]:07d}.safetensors").exists():
            text = done.stderr.rpartition("ERROR: ")[2] if "ERROR: " in done.stderr else f"exit code {done.returncode}"
            reason = " ".join(line for line in text.split("\n\n")[0].splitlines()[:8])
            raise ExperimentError(
                f"The flags of {label} do not run here: {reason} (--keep DIR keeps {directory.name}/log.txt)."
            )


def steps_from(done: int) -> tuple[int, ...]:
    """The iterations of an experiment after those that are done."""
    return tuple(range(done + 1, done + 1 + STEPS))


def read_steps(directory: Path, done: int = 0) -> list[Recording]:
    """The recordings of an experiment."""
    return [load_recording(directory / f"iter_{step:07d}.safetensors") for step in steps_from(done)]


def batches_of(directory: Path, done: int = 0) -> list[str]:
    """The files of the samples of an experiment."""
    return [str(directory / f"iter_{step:07d}.batch.safetensors") for step in steps_from(done)]
