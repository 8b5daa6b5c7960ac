"""Checkpoints of weights alone: what the commands that write them share, and the average of checkpoints."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from megatron.architectures.catalog import PRESETS
from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands.tool import run_tool
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig, preset
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError, UserError
from megatron.flags import changed_words, require_at_least, require_positive
from megatron.urls import check_place, refuse_urls

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

    from megatron.checkpoint.schema import SavedState
    from megatron.checkpoint.streaming import SavedTensors

DtypeName = Literal["keep", "bf16", "fp16", "fp32"]


class Progress:
    """A bar on standard error that counts bytes, in a ``with`` statement."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit="B", unit_scale=True, desc="converting", disable=None)
        # expect(total) sets the number of bytes, advance(count) adds some that are done.
        self.expect: Callable[[int], object] = self._bar.reset
        self.advance: Callable[[int], object] = self._bar.update

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class StreamedModel(Protocol):
    """A model whose tensors are read chunk by chunk."""

    @property
    def tensors(self) -> "Mapping[str, TensorStorageMetadata]": ...

    @property
    def nbytes(self) -> int: ...

    def read(self, name: str, chunk: "ChunkStorageMetadata", /) -> "Tensor": ...


def save_weights(
    save: str,
    model: StreamedModel,
    state: "SavedState",
    progress: Progress,
    furnish: Callable[[Path], object] = lambda directory: None,
) -> str:
    """Copy ``model`` to a checkpoint in ``save``, with the files that ``furnish`` adds.

    Returns the command with which training continues from it.
    """
    from megatron.checkpoint.streaming import save_streaming

    progress.expect(model.nbytes)
    save_streaming(Path(save), state.iteration, model.tensors, model.read, state.to_json(), furnish=furnish)
    tokenizer = changed_words(state.flag_group("tokenizer", TokenizerConfig))
    flags = ["--load", save, "--finetune", *model_flags(state.architecture), *tokenizer]
    return f"train on with: pretrain_llama.py {shlex.join(flags)}"


def weights_state(
    iteration: int,
    architecture: TransformerConfig,
    precision: PrecisionConfig,
    tokenizer: TokenizerConfig,
    generation_config: str | None = None,
) -> "SavedState":
    """The state of a checkpoint of weights, with the groups of flags that weights and their tokenizer determine."""
    from megatron.training.checkpoints.saved_run import state_of_weights

    flags = {"model": asdict(ModelConfig.of(architecture)), "tokenizer": asdict(tokenizer)}
    flags["precision"] = asdict(precision)
    return state_of_weights(iteration, architecture, flags, generation_config)


def derived_weights(
    source: "SavedState", tokenizer: TokenizerConfig, architecture: TransformerConfig, iteration: int, save: str
) -> "tuple[SavedState, Callable[[Path], object]]":
    """The state of weights made from the checkpoint of ``source``, and a function that copies its tokenizer to them."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.tokenizer_files import COPY, copy_tokenizer_of, flags_of_copy

    copied = flags_of_copy(tokenizer, iteration_directory(Path(save), iteration).resolve() / COPY)
    precision = source.flag_group("precision", PrecisionConfig)
    state = weights_state(iteration, architecture, precision, copied, source.generation_config)
    return state, lambda saving: copy_tokenizer_of(tokenizer, saving / COPY)


def precision_of(dtype: "torch.dtype") -> PrecisionConfig:
    import torch

    return PrecisionConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)


def torch_dtype(name: DtypeName) -> "torch.dtype | None":
    """The dtype to store; None keeps the dtype of the source."""
    import torch

    return {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def check_unused(root: Path) -> None:
    """Raise :class:`CheckpointError` where ``root`` holds checkpoints, which the new one would supersede."""
    from megatron.checkpoint.finding import find_checkpoint

    if find_checkpoint(root) is not None:
        raise CheckpointError(f"--save {root} holds checkpoints already: choose an empty directory.")


def model_flags(architecture: TransformerConfig) -> list[str]:
    """The shortest flags that give the architecture: a preset's name, or every size."""
    wanted = ModelConfig.of(architecture)
    in_preset = replace(wanted, apply_layernorm_1p=False)
    for name in PRESETS:
        resolved = preset(name).resolve(architecture.vocab_size, 1, 1)
        if ModelConfig.of(resolved) == in_preset:
            return ["--model", name, *changed_words(ModelConfig(apply_layernorm_1p=wanted.apply_layernorm_1p))]
    return changed_words(wanted)


def tokenizer_size(flags: TokenizerConfig) -> int | None:
    """The number of ids of the tokenizer; None without a tokenizer that can be used."""
    from megatron.data.tokenizers import build_tokenizer

    try:
        return None if flags.tokenizer_type is None else build_tokenizer(flags).vocab_size
    except UserError:
        return None


def verified_checkpoint(load: str, ckpt_step: int | None) -> "SavedTensors":
    """The checkpoint of ``--load``, compared with its digests; raises :class:`CheckpointError`."""
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.finding import find_checkpoint, missing_checkpoint, verify_share
    from megatron.checkpoint.streaming import SavedTensors

    root = path_of(load)
    iteration = find_checkpoint(root, ckpt_step)
    if iteration is None:
        raise missing_checkpoint(root)
    verify_share(root, iteration, rank=0, size=1)
    return SavedTensors(root, iteration)


# --- the average of checkpoints --------------------------------------------------------------------------------

AVERAGE = """\
Average the weights of several checkpoints of one run, for example of the stable phase of --lr-decay-style WSD.

The result is a checkpoint of weights alone, without optimizer state: it can be evaluated, exported, and trained on with
--finetune. It is written block by block, so memory does not grow with the model.
"""
"""Text of ``tools/average_checkpoints.py --help``."""


@dataclass(frozen=True)
class Average:
    """The average of checkpoints."""

    load: str
    """Directory or URL of the checkpoints."""
    iterations: tuple[int, ...]
    """Iterations to average, at least two."""
    save: str
    """Directory for the average; it must not have a checkpoint yet."""
    weights: tuple[float, ...] = ()
    """A weight for each iteration, divided by their sum (default: all count the same)."""

    def check(self) -> None:
        check_place("--load", self.load)
        refuse_urls({"--save": self.save}, "name a directory")
        if len(set(self.iterations)) < max(2, len(self.iterations)):
            raise ConfigError(
                f"--iterations {' '.join(map(str, self.iterations))} must be at least two different iterations."
            )
        require_at_least(0, {"--iterations": min(self.iterations)})
        if self.weights and len(self.weights) != len(self.iterations):
            raise ConfigError(
                f"--weights has {len(self.weights)} values for {len(self.iterations)} iterations: give one for each."
            )
        for weight in self.weights:
            require_positive({"--weights": weight})

    @property
    def iteration(self) -> int:
        """The iteration under which the average is saved."""
        return max(self.iterations)


def average(config: Average, progress: Progress) -> str:
    """Write the average; returns the message for the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.schema import upgrade
    from megatron.checkpoint.streaming import AveragedModel
    from megatron.checkpoint.tokenizer_files import tokenizer_of
    from megatron.training.checkpoints.comparison import check_architecture

    check_unused(Path(config.save))
    saved = [verified_checkpoint(config.load, iteration) for iteration in config.iterations]
    states = [upgrade(one.manifest.state, one.manifest.format_version) for one in saved]
    architecture = states[0].architecture
    for one, state in zip(saved, states):
        where = f"The checkpoint of iteration {one.iteration} in {config.load}"
        check_architecture(asdict(architecture), asdict(state.architecture), where, "average checkpoints of one run")
    model = AveragedModel(saved, config.weights or [1.0] * len(saved), progress.advance)
    tokenizer = tokenizer_of(states[0], path_of(config.load), saved[0].iteration)
    source = replace(states[0], generation_config=None)
    state, furnish = derived_weights(source, tokenizer, architecture, config.iteration, config.save)
    command = save_weights(config.save, model, state, progress, furnish)
    return (
        f"wrote the average of iterations {', '.join(map(str, config.iterations))} to "
        f"{iteration_directory(Path(config.save), config.iteration)}, without optimizer state\n{command}"
    )


def run(config: Average) -> None:
    config.check()
    with Progress() as progress:
        message = average(config, progress)
    print(message)


main = partial(run_tool, Average, run, AVERAGE, interrupted="nothing has")
