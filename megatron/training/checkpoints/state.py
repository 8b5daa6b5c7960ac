"""The state of a run, saved to and loaded from checkpoints; its tensors by their global names: weights, optimizer, FP8,
experts, random-number states."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.boxes import BoxedTensor
from megatron.checkpoint.checkpointing import SaveBackend, load_checkpoint, save_checkpoint
from megatron.checkpoint.files import path_of
from megatron.checkpoint.finding import directory_below
from megatron.checkpoint.hugging_face.weights import HuggingFaceModel, fill_from_hugging_face
from megatron.checkpoint.manifest import EMA, FP8, LOADER, MASTER, MODEL
from megatron.checkpoint.schema import DataStage, Rollback, SavedState
from megatron.console import print_warning
from megatron.core.control import ControlGroup, run_on_all_ranks, run_on_rank0
from megatron.core.data_parallel.strategy import LocalParam
from megatron.core.fp8 import Fp8Layers
from megatron.core.hyperparameters import Hyperparameters, LearningRateSchedule, WeightDecaySchedule
from megatron.core.moe.routing import ExpertBalance
from megatron.core.optimizer import Optimizer, OptimizerState
from megatron.data.data_module import SavedLoader
from megatron.errors import CheckpointError
from megatron.features.spikes.flags import UpdateGuard
from megatron.training.checkpoints.comparison import check_architecture
from megatron.training.checkpoints.saved_run import Progress, SavedRun, Start, resolve_lr_schedule
from megatron.training.context import RunContext, TrainModule


@dataclass
class RunState:
    """The state of a run that a checkpoint holds."""

    context: RunContext
    architecture: TransformerConfig
    module: TrainModule
    lr_schedule: LearningRateSchedule
    weight_decay: WeightDecaySchedule | None
    """None where it is constant."""
    progress: Progress
    data_stages: tuple[DataStage, ...]
    guard: UpdateGuard
    rollbacks: tuple[Rollback, ...] = ()
    generation_config: str | None = None
    """Text of ``generation_config.json`` of the Hugging Face model that the run started from, for ``to-hf``."""
    loader_state: Tensor | None = None
    """The state of a user's data loader after the last sample that was trained, if it has one."""
    saved_loader: SavedLoader | None = None
    """Its states in the checkpoint that was loaded."""
    learning_rate_factor: float = 1.0
    """Factor of the learning rate, for ``--inject-fault spike``; in no checkpoint."""

    def skips(self, batch_size: int) -> bool:
        """Whether a rollback skips the samples of the next batch."""
        return any(one.leaves_out(self.progress.consumed_samples, batch_size) for one in self.rollbacks)

    def begin_stage(self) -> None:
        """Forget earlier losses and skipped samples: they do not apply to the data of a new stage."""
        self.guard.forget()
        self.rollbacks = tuple(one.before(self.progress.consumed_samples) for one in self.rollbacks)

    def metrics(self) -> dict[str, float]:
        """Unusual facts for the record of an iteration."""
        return self.guard.metrics() | ({"rollbacks": len(self.rollbacks)} if self.rollbacks else {})

    def hyperparameters(self) -> Hyperparameters:
        samples, config = self.progress.consumed_samples, self.context.config.learning_rate
        hyperparameters = Hyperparameters(self.lr_schedule(samples))
        if config.decoupled_lr is not None:
            decoupled = replace(self.lr_schedule, peak=config.decoupled_lr, minimum=config.vocabulary_min_lr)
            hyperparameters = replace(hyperparameters, vocabulary_learning_rate=decoupled(samples))
        if self.learning_rate_factor != 1.0:
            vocabulary = hyperparameters.vocabulary_learning_rate
            hyperparameters = replace(
                hyperparameters,
                learning_rate=hyperparameters.learning_rate * self.learning_rate_factor,
                vocabulary_learning_rate=None if vocabulary is None else vocabulary * self.learning_rate_factor,
            )
        if self.weight_decay is not None:
            hyperparameters = replace(hyperparameters, weight_decay=self.weight_decay(samples))
        return hyperparameters

    def save(self, saving: SaveBackend | None = None, root: Path | None = None) -> Path:
        """Save under ``root``, by default ``--save``, at once or with ``saving``; a collective."""
        config, topology = self.context.config.checkpoint, self.context.topology
        if root is None:
            assert config.save is not None
            root = Path(config.save)
        # Beside master weights the model's weights have the model's dtype, also those that are gathered in FP8.
        dtype = self.module.data_parallel.formats.weight if self.module.optimizer.has_master_weights else None
        tensors = model_tensors(self.module.data_parallel.local_params, with_copies=False, dtype=dtype)
        if config.save_optim:
            tensors |= optimizer_tensors(self.module.optimizer, with_copies=False)
        same_on_ranks = fp8_tensors(self.module.fp8) | bias_tensors(self.module.experts)
        stage = topology.grid.group(topology.rank, ("tp", "cp", "dp"))
        tensors |= {name: BoxedTensor.from_whole(tensor, stage) for name, tensor in same_on_ranks.items()}
        if config.save_rng:
            tensors |= random_tensors(topology.rank, topology.device)
        place = topology.coordinates
        if self.loader_state is not None and not (place["tp"] or place["cp"] or place["pp"]):
            # Of the ranks with the same samples, one on the first stage, which always reads them.
            tensors[f"{LOADER}{place['dp']}"] = self.loader_state
        state = SavedState(
            **asdict(self.progress),
            optimizer_steps=self.module.optimizer.num_steps,
            has_master_weights=self.module.optimizer.has_master_weights,
            loss_scaler=self.module.loss_scaler.to_json(),
            lr_schedule=self.lr_schedule,
            architecture=self.architecture,
            flags=asdict(self.context.config),
            data_stages=self.data_stages,
            rollbacks=self.rollbacks,
            update_guard=self.guard.to_json(),
            generation_config=self.generation_config,
        )
        return save_checkpoint(root, self.progress.iteration, tensors, state.to_json(), topology.control, saving)

    def load(self, saved: SavedRun, weights_only: bool) -> None:
        """Load ``saved``, or its weights alone; a collective."""
        config, topology = self.context.config.checkpoint, self.context.topology
        ours, theirs = asdict(self.architecture), asdict(saved.state.architecture)
        check_architecture(ours, theirs, f"The checkpoint under {saved.root}", weights_only=weights_only)
        if not weights_only:
            self.lr_schedule = resolve_lr_schedule(
                self.lr_schedule, saved.state.lr_schedule, self.context.config.learning_rate
            )
            self.rollbacks = saved.state.rollbacks
            if saved.state.update_guard is not None:
                self.guard.restore(saved.state.update_guard)
        self.generation_config = saved.state.generation_config
        with_optimizer = config.load_optim and not weights_only
        tensors = self._wanted_tensors(saved, with_optimizer) | bias_tensors(self.module.experts)
        random_states = random_tensors(topology.rank, topology.device)
        with_random = config.load_rng and not weights_only and random_states.keys() <= saved.shapes.keys()
        fp8_states = {
            name: tensor.new_empty(saved.shapes[name])
            for name, tensor in fp8_tensors(self.module.fp8).items()
            if name in saved.shapes  # none in the checkpoint of a run without FP8
        }
        has_average = any(name.startswith(EMA) for name in tensors)
        loaders = {} if weights_only else self._saved_loaders(saved)
        wanted = tensors | fp8_states | (random_states if with_random else {}) | loaders
        load_checkpoint(saved.root, saved.iteration, wanted, topology.control)
        if self.module.fp8 is not None:
            self.module.fp8.load({name.removeprefix(FP8): tensor for name, tensor in fp8_states.items()})
        if with_random:
            restore_random(random_states, topology.rank, topology.device)
        if with_optimizer:
            self.module.optimizer.num_steps = saved.state.optimizer_steps
            self.module.loss_scaler.restore(saved.state.loss_scaler)
        if not with_optimizer or not self.module.optimizer.has_master_weights:
            self.module.optimizer.reload_master_weights()
        if self.module.optimizer.has_master_weights and not saved.state.has_master_weights:
            # The weights of the model are the best that the checkpoint has.
            masters = renamed(optimizer_tensors(self.module.optimizer), MASTER, MODEL)
            load_checkpoint(saved.root, saved.iteration, masters, topology.control)
        if not has_average:
            self.module.optimizer.reset_average()
        if self.module.optimizer.has_master_weights:
            # The checkpoint's weights may be rounded to another format than the model's.
            self.module.optimizer.publish()
            self.module.data_parallel.finish_param_all_gather()

    def _saved_loaders(self, saved: SavedRun) -> dict[str, Tensor]:
        """Empty tensors for the states of the data loader that this rank needs."""
        names = [name for name in saved.shapes if name.startswith(LOADER)]
        size, topology = len(names), self.context.topology
        if size == topology.grid.dp:
            names = [f"{LOADER}{topology.data_parallel.rank}"]
        else:
            names = [f"{LOADER}{rank}" for rank in range(size)]
        states = {name: torch.empty(saved.shapes[name], dtype=torch.uint8) for name in names}
        self.saved_loader = SavedLoader(size, list(states.values())) if states else None
        return states

    def load_hugging_face(self, source: Path, text_only: bool, control: ControlGroup) -> str:
        """Load the weights of a Hugging Face model; a collective, in which each rank reads its shards.

        Returns a description of the tensors beside the text model that ``text_only`` drops.
        """

        def fill() -> str:
            model = HuggingFaceModel(source, text_only, "--load-hf-text-only")
            # Hugging Face stores gains, from which the weights of norms follow in both forms.
            is_zero_centered = self.architecture.apply_layernorm_1p
            theirs = replace(model.architecture, apply_layernorm_1p=is_zero_centered)
            check_architecture(asdict(self.architecture), asdict(theirs), f"The model in {source}", weights_only=True)
            masters = [state for state in self.module.optimizer.state() if state.kind == "master"]
            owned: list[LocalParam | OptimizerState] = [*self.module.data_parallel.local_params, *masters]
            fill_from_hugging_face(source, model.weights, theirs, [(one.info, one.start, one.tensor) for one in owned])
            self.generation_config = model.description.generation_config
            return model.describe_left_out()

        left_out = run_on_all_ranks(control, fill)
        if not self.module.optimizer.has_master_weights:
            self.module.optimizer.reload_master_weights()
        self.module.optimizer.reset_average()
        self.module.optimizer.publish()
        self.module.data_parallel.finish_param_all_gather()
        return left_out

    def _continued_states(self, saved: SavedRun) -> dict[str, Tensor]:
        """The optimizer state; of the moving average only if the checkpoint has one."""
        states = optimizer_tensors(self.module.optimizer)
        has_average, log = any(name.startswith(EMA) for name in saved.shapes), self.context.log_rank0
        if self.module.optimizer.averages and not has_average:
            log(f"--ema-decay: {saved.root} has no moving average, so it begins with the loaded weights")
            return {name: tensor for name, tensor in states.items() if not name.startswith(EMA)}
        if has_average and self.context.config.optimizer.ema_decay is None:
            log(f"WARNING: the moving average of the weights in {saved.root} ends here: add --ema-decay to continue it")
        return states

    def _wanted_tensors(self, saved: SavedRun, with_optimizer: bool) -> dict[str, Tensor]:
        weights = model_tensors(self.module.data_parallel.local_params)
        if self.context.config.validation.skip_train and self.context.config.validation.eval_ema:
            if not any(name.startswith(EMA) for name in saved.shapes):
                raise CheckpointError(
                    f"The checkpoint under {saved.root} has no moving average of the weights: remove --eval-ema, or "
                    "load a checkpoint of a run with --ema-decay."
                )
            return _preferring(saved, EMA, weights)
        if not with_optimizer:
            return weights
        states = self._continued_states(saved)
        wanted = self.context.config.optimizer.optimizer
        # The checkpoint of converted weights has no optimizer.
        trained_with = saved.state.flags.get("optimizer", {}).get("optimizer", wanted)
        if trained_with != wanted:
            raise CheckpointError(
                f"The checkpoint under {saved.root} was trained with --optimizer {trained_with}, not {wanted}: use "
                "that optimizer, or initialize its state with --no-load-optim."
            )
        if states and not any(name.startswith("optimizer/") for name in saved.shapes):
            raise CheckpointError(
                f"The checkpoint under {saved.root} has no optimizer state: add --no-load-optim to initialize it."
            )
        # If only one of the two runs has master weights, the model's weights of the other are as precise.
        if saved.state.has_master_weights and not self.module.optimizer.has_master_weights:
            weights = _preferring(saved, MASTER, weights)
        if saved.state.has_master_weights and self.module.optimizer.has_master_weights:
            # Weights that are gathered in FP8 exist as master weights alone.
            data_parallel = self.module.data_parallel
            dtype = data_parallel.formats.weight
            weights = model_tensors(local for local in data_parallel.local_params if local.tensor.dtype == dtype)
        if not saved.state.has_master_weights:
            states = {name: tensor for name, tensor in states.items() if not name.startswith(MASTER)}
        unknown = sorted({name.split("/", 2)[2] for name in states.keys() - saved.shapes.keys()})
        if unknown:
            more = f" and of {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise CheckpointError(
                f"The checkpoint under {saved.root} has no optimizer state of {unknown[0]}{more}, which was not "
                "trained there: add --no-load-optim to initialize the state of all parameters, or freeze it again "
                "(--freeze-parameters)."
            )
        return weights | states


def _preferring(saved: SavedRun, kind: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` under the names of ``kind``; frozen ones, which exist as weights alone, under their own names."""
    others = renamed(weights, MODEL, kind)
    return {other if other in saved.shapes else name: tensor for (name, tensor), other in zip(weights.items(), others)}


def resume(state: RunState, start: Start, context: RunContext) -> None:
    """Load the checkpoint of ``start``, if any, else the model of ``--load-hf``."""
    config, log_rank0 = context.config.checkpoint, context.log_rank0
    if start.saved is not None:
        weights_only = not start.is_resumed or context.config.validation.skip_train
        state.load(start.saved, weights_only)
        log_rank0(f"loaded checkpoint {start.saved.root}, continuing after iteration {state.progress.iteration}")
        return
    origin = "random weights" if config.load_hf is None else f"the weights of {config.load_hf}"
    if config.load is not None:

        def report() -> None:
            log_rank0(f"{config.load} has no checkpoint yet: starting from {origin}")
            if (below := directory_below(path_of(str(config.load)))) is not None:
                print_warning(f"{below} has checkpoints: to resume from them, stop this run and use --load {below}.")

        run_on_rank0(context.control, report)
    if config.load_hf is not None:
        left_out = state.load_hugging_face(Path(config.load_hf), config.load_hf_text_only, context.control)
        log_rank0(f"loaded {origin}" + (left_out and f"; {left_out}"))


# --- tensors -------------------------------------------------------------------------------------------------


def model_tensors(
    weights: Iterable[LocalParam], with_copies: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """This rank's weights by global name, in ``dtype`` if it is given; ``with_copies`` includes copies of
    weights whose home is another stage, which are loaded but not saved."""
    return {
        f"{MODEL}{weight.info.name}": BoxedTensor.from_flat_range(
            weight.info, weight.tensor.to(dtype or weight.tensor.dtype), weight.start, weight.holders, weight.division
        )
        for weight in weights
        if with_copies or not weight.info.is_copy
    }


def optimizer_tensors(optimizer: Optimizer, with_copies: bool = True) -> dict[str, Tensor]:
    """This rank's master weights and moments by global name; ``with_copies`` as in :func:`model_tensors`."""
    return {
        f"optimizer/{state.kind}/{state.info.name}": BoxedTensor.from_flat_range(
            state.info, state.tensor, state.start, state.holders, state.division
        )
        for state in optimizer.state()
        if with_copies or not state.info.is_copy
    }


def fp8_tensors(fp8: Fp8Layers | None) -> dict[str, Tensor]:
    """Scales and amax histories by the global name of their linear layer."""
    return {} if fp8 is None else {f"{FP8}{name}": tensor for name, tensor in fp8.state().items()}


def bias_tensors(experts: ExpertBalance | None) -> dict[str, Tensor]:
    """The biases of the routers of this rank's layers by global name."""
    return {} if experts is None else {f"{MODEL}{name}": tensor for name, tensor in experts.state().items()}


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The tensors whose name starts with ``old``, under names that start with ``new`` instead."""
    return {new + name.removeprefix(old): tensor for name, tensor in tensors.items() if name.startswith(old)}


# --- random numbers -----------------------------------------------------------------------------------------


def random_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The random-number states of a rank. Training draws no random numbers; a user's code may."""
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
    """Seed every global generator with ``--seed``, the same on all ranks."""
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
