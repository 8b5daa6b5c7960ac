"""The state of a run as a checkpoint holds it, in global names and coordinates, and its way back."""

import logging
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.checkpointing import (
    load_checkpoint,
    read_state,
    read_tensor_shapes,
    save_checkpoint,
    verify_share,
)
from megatron.checkpoint.conversion import fill_from_hugging_face, hugging_face_architecture
from megatron.checkpoint.finding import find_checkpoint
from megatron.checkpoint.names import FP8, MASTER, MODEL
from megatron.checkpoint.sharded_tensor import BoxedTensor
from megatron.checkpoint.storage import Saving
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import CheckpointError
from megatron.config.model import LlamaConfig
from megatron.config.optimizer import LearningRateConfig
from megatron.core.communication import Communicator
from megatron.core.data_parallel.strategy import DataParallel, StoredWeight
from megatron.core.fp8 import Fp8Layers
from megatron.core.optimizer.learning_rate import LearningRateSchedule
from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.weight_decay import WeightDecaySchedule
from megatron.training.launch import on_first_rank, together

_logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far the run is."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0


def model_tensors(weights: Iterable[StoredWeight], with_copies: bool = True) -> dict[str, Tensor]:
    """The weights that a rank stores by global name; ``with_copies``, also the head's copy of a tied weight, which is
    loaded but not saved."""
    return {
        f"{MODEL}{weight.info.name}": BoxedTensor.from_flat_range(weight.info, weight.tensor, weight.start)
        for weight in weights
        if with_copies or weight.info.tied_end != "head"
    }


def optimizer_tensors(optimizer: Optimizer, with_copies: bool = True) -> dict[str, Tensor]:
    """Master weights and moments by global name; a rank names only what it has a part of.

    ``with_copies`` as in :func:`model_tensors`.
    """
    return {
        f"optimizer/{state.kind}/{state.info.name}": BoxedTensor.from_flat_range(state.info, state.tensor, state.start)
        for state in optimizer.state()
        if with_copies or state.info.tied_end != "head"
    }


def fp8_tensors(fp8: Fp8Layers | None) -> dict[str, Tensor]:
    """Scales and amax histories by the global name of their linear layer."""
    return {} if fp8 is None else {f"{FP8}{name}": tensor for name, tensor in fp8.state().items()}


def random_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The random-number states of a rank. Nothing in Llama draws from them; a user's code may."""
    states = {f"random/torch/rank_{rank}": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"random/cuda/rank_{rank}"] = torch.cuda.get_rng_state(device)
    numbers: Any = np.random.get_state(legacy=False)["state"]
    states[f"random/numpy/rank_{rank}"] = torch.from_numpy(np.append(numbers["key"].astype(np.int64), numbers["pos"]))
    version, words, _ = random.getstate()
    assert version == 3
    states[f"random/python/rank_{rank}"] = torch.tensor(words, dtype=torch.int64)
    return states


def seed_random(seed: int) -> None:
    """Start every global generator from ``--seed``, the same on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random(states: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """The inverse of :func:`random_tensors`."""
    torch.set_rng_state(states[f"random/torch/rank_{rank}"])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[f"random/cuda/rank_{rank}"], device)
    numbers = states[f"random/numpy/rank_{rank}"].numpy()
    np.random.set_state(("MT19937", numbers[:-1].astype(np.uint32), int(numbers[-1]), 0, 0.0))
    random.setstate((3, tuple(states[f"random/python/rank_{rank}"].tolist()), None))


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that was found, and what it says of itself."""

    root: Path
    iteration: int
    shapes: dict[str, tuple[int, ...]]
    """Global shape by tensor name."""
    state: dict[str, Any]
    """What is not a tensor."""

    @property
    def progress(self) -> Progress:
        """How far the saved run was."""
        names = ("iteration", "consumed_samples", "skipped_samples")
        return Progress(**{name: self.state[name] for name in names})


def find_saved_run(config: CheckpointConfig, world: Communicator) -> SavedRun | None:
    """The checkpoint that ``--load`` means, or None where there is nothing to load; all ranks call it."""
    if config.load is None:
        return None
    bad: dict[tuple[Path, int], CheckpointError] = {}
    while True:
        try:
            # One rank looks, so that all load the same checkpoint and the file system is asked once.
            found = on_first_rank(world, lambda: look_up_saved_run(config, bad))
        except CheckpointError as nothing_left:
            # What is wrong with the latest tells more.
            raise next(iter(bad.values()), nothing_left) from None
        if found is None:
            return None
        try:
            together(world, partial(verify_share, found.root, found.iteration, world.rank, world.size))
            return found
        except CheckpointError as error:
            if not config.checkpoint_fallback or config.ckpt_step is not None:
                raise
            if world.rank == 0:
                _logger.warning("Passing over the checkpoint of iteration %d: %s", found.iteration, error)
            bad[found.root, found.iteration] = error


def look_up_saved_run(config: CheckpointConfig, known_bad: Collection[tuple[Path, int]] = ()) -> SavedRun | None:
    """As :func:`find_saved_run`, but on one rank alone and by the manifest alone: no other file is looked at.

    It is the newest of what is left in the directories to load from, without those ``known_bad``, and in the first of
    those that have it.
    """
    found: tuple[int, Path] | None = None
    errors: list[CheckpointError] = []
    first, *copies = map(Path, config.load_roots)
    for root in (first, *copies):
        bad = [iteration for place, iteration in known_bad if place == root]
        try:
            iteration = find_checkpoint(root, config.ckpt_step, bad, config.checkpoint_fallback, first)
        except CheckpointError as error:
            errors.append(error)
            continue
        if iteration is not None and (found is None or iteration > found[0]):
            found = iteration, root
    if found is None:
        if errors:
            raise errors[0]
        if config.exit_on_missing_checkpoint:
            where = " and ".join(config.load_roots)
            raise CheckpointError(f"--load {where} holds no checkpoint: check the path, or start without --load.")
        return None
    for defect in errors:
        if not config.checkpoint_fallback:
            raise defect
        _logger.warning("Loading from %s: %s", found[1], defect)
    iteration, root = found
    return SavedRun(root, iteration, read_tensor_shapes(root, iteration), read_state(root, iteration))


@dataclass
class RunState:
    """Everything of a run that a checkpoint holds."""

    architecture: LlamaConfig
    data_parallel: DataParallel
    optimizer: Optimizer
    schedule: LearningRateSchedule
    learning_rate: LearningRateConfig
    loss_scaler: LossScaler
    progress: Progress
    rank: int
    device: torch.device
    flags: Mapping[str, Any]
    fp8: Fp8Layers | None = None
    weight_decay: WeightDecaySchedule | None = None

    def vocabulary_learning_rate(self, consumed_samples: int) -> float | None:
        """The learning rate of embedding and head, where they have one apart (``--decoupled-lr``)."""
        peak = self.learning_rate.decoupled_lr
        if peak is None:
            return None
        return replace(self.schedule, peak=peak, minimum=self.learning_rate.vocabulary_min_lr)(consumed_samples)

    def save(self, config: CheckpointConfig, saving: Saving | None = None) -> Path:
        """Save under ``--save``, at once or as ``saving`` does it; all ranks call it."""
        assert config.save is not None
        tensors = model_tensors(self.data_parallel.stored_weights, with_copies=False)
        if config.save_optim:
            tensors |= optimizer_tensors(self.optimizer, with_copies=False)
        tensors |= {name: BoxedTensor.from_whole(tensor) for name, tensor in fp8_tensors(self.fp8).items()}
        if config.save_rng:
            tensors |= random_tensors(self.rank, self.device)
        state = {
            **asdict(self.progress),
            "optimizer_steps": self.optimizer.num_steps,
            "has_master_weights": self.optimizer.has_master_weights,
            "loss_scaler": self.loss_scaler.to_json(),
            "schedule": self.schedule.to_json(),
            "architecture": asdict(self.architecture),
            "flags": dict(self.flags),
        }
        return save_checkpoint(Path(config.save), self.progress.iteration, tensors, state, saving=saving)

    def load(self, saved: SavedRun, config: CheckpointConfig, weights_only: bool) -> None:
        """Take over what ``saved`` holds; all ranks call it. ``weights_only`` starts everything else afresh."""
        wanted = asdict(self.architecture)
        check_architecture(wanted, saved.state["architecture"], f"The checkpoint under {saved.root}")
        if not weights_only:
            self.schedule = settle_schedule(self.schedule, saved.state["schedule"], self.learning_rate)
        with_optimizer = config.load_optim and not weights_only
        tensors = self._wanted_tensors(saved, with_optimizer)
        random_states = random_tensors(self.rank, self.device)
        with_random = config.load_rng and not weights_only and random_states.keys() <= saved.shapes.keys()
        fp8_states = self._saved_fp8_states(saved)
        load_checkpoint(saved.root, saved.iteration, tensors | fp8_states | (random_states if with_random else {}))
        if self.fp8 is not None:
            self.fp8.load({name.removeprefix(FP8): tensor for name, tensor in fp8_states.items()})
        if with_random:
            restore_random(random_states, self.rank, self.device)
        if with_optimizer:
            self.optimizer.num_steps = saved.state["optimizer_steps"]
            # Older checkpoints have none, like those of runs with a constant scale.
            self.loss_scaler.restore(saved.state.get("loss_scaler"))
        else:
            self.optimizer.reload_master_weights()
        if self.optimizer.has_master_weights and not saved.state["has_master_weights"]:
            masters = _renamed(optimizer_tensors(self.optimizer), MASTER, MODEL)
            load_checkpoint(saved.root, saved.iteration, masters)
        if self.optimizer.has_master_weights:
            # The weights of the checkpoint may have been rounded to another format.
            self.optimizer.publish()
            self.data_parallel.wait_for_parameters()

    def load_hugging_face(self, source: Path, world: Communicator) -> None:
        """Start from the weights of a model in Hugging Face's files; all ranks call it, each reads its own part."""

        def fill() -> None:
            theirs = asdict(hugging_face_architecture(source))
            check_architecture(asdict(self.architecture), theirs, f"The model in {source}")
            weights = [(stored.info, stored.start, stored.tensor) for stored in self.data_parallel.stored_weights]
            masters = [
                (state.info, state.start, state.tensor) for state in self.optimizer.state() if state.kind == "master"
            ]
            fill_from_hugging_face(source, weights + masters)

        together(world, fill)

    def _saved_fp8_states(self, saved: SavedRun) -> dict[str, Tensor]:
        """Room for what the checkpoint knows of this rank's FP8 layers; a run without FP8 left nothing."""
        return {
            name: tensor.new_empty(saved.shapes[name])
            for name, tensor in fp8_tensors(self.fp8).items()
            if name in saved.shapes
        }

    def _wanted_tensors(self, saved: SavedRun, with_optimizer: bool) -> dict[str, Tensor]:
        weights = model_tensors(self.data_parallel.stored_weights)
        states = optimizer_tensors(self.optimizer)
        if not with_optimizer:
            return weights
        wanted = self.flags["optimizer"]["optimizer"]
        # Weights that no run of ours trained know of no optimizer.
        trained_with = saved.state["flags"].get("optimizer", {}).get("optimizer", wanted)
        if trained_with != wanted:
            raise CheckpointError(
                f"The checkpoint under {saved.root} was trained with --optimizer {trained_with}, not {wanted}: give "
                "that flag, or start the optimizer afresh with --no-load-optim."
            )
        if states and not any(name.startswith("optimizer/") for name in saved.shapes):
            raise CheckpointError(
                f"The checkpoint under {saved.root} holds no optimizer state: add --no-load-optim to start it afresh."
            )
        # Where one run has master weights and the other's model is as wide, the wider of the two is the truth.
        if saved.state["has_master_weights"] and not self.optimizer.has_master_weights:
            weights = _renamed(weights, MODEL, MASTER)
        if not saved.state["has_master_weights"]:
            states = {name: tensor for name, tensor in states.items() if not name.startswith(MASTER)}
        return weights | states


def state_of_weights(iteration: int, architecture: LlamaConfig, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint of weights alone that no run of ours trained.

    It has what :meth:`RunState.load` reads, and says of the rest that it is not there: no samples consumed, no step
    made, no schedule, no master weights. ``flags`` has the groups that are known: of ``model``, ``tokenizer`` and
    ``precision`` other tools build the model.
    """
    return {
        **asdict(Progress(iteration)),
        "optimizer_steps": 0,
        "has_master_weights": False,
        "loss_scaler": None,
        "schedule": None,
        "architecture": asdict(architecture),
        "flags": dict(flags),
    }


def _renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The tensors whose name starts with ``old``, under names that start with ``new`` instead."""
    return {new + name.removeprefix(old): tensor for name, tensor in tensors.items() if name.startswith(old)}


def check_architecture(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    remedy: str = "give the flags it was trained with",
) -> None:
    """Raise :class:`CheckpointError` naming every flag whose value differs from ``saved``, which is ``where``."""
    # The padding depends on the layout, and neither the length nor the initialisation is part of the model.
    free = {"padded_vocab_size", "max_position_embeddings", "init_method_std"}
    different = [
        f"--{name.replace('_', '-')} is {value} here and {saved[name]} there"
        for name, value in wanted.items()
        if name not in free and saved[name] != value
    ]
    if different:
        raise CheckpointError(f"{where} has another architecture ({'; '.join(different)}): {remedy}, or load another.")


def settle_schedule(
    wanted: LearningRateSchedule, saved: Mapping[str, Any] | None, config: LearningRateConfig
) -> LearningRateSchedule:
    """The schedule to resume with; raises :class:`CheckpointError` where flags and checkpoint differ undecided.

    A checkpoint of weights alone (:func:`state_of_weights`) has none.
    """
    if saved is None:
        if config.use_checkpoint_opt_param_scheduler:
            raise CheckpointError(
                "The checkpoint holds no learning-rate schedule: remove --use-checkpoint-opt-param-scheduler."
            )
        return wanted
    if wanted.to_json() == saved or config.override_opt_param_scheduler:
        return wanted
    if config.use_checkpoint_opt_param_scheduler:
        return LearningRateSchedule(**saved)
    different = [
        f"{name} {value} (checkpoint: {saved[name]})"
        for name, value in wanted.to_json().items()
        if saved[name] != value
    ]
    raise CheckpointError(
        f"The learning-rate schedule of the flags differs from the checkpoint's, in samples: {', '.join(different)}. "
        "Add --override-opt-param-scheduler to take the flags', or --use-checkpoint-opt-param-scheduler."
    )
