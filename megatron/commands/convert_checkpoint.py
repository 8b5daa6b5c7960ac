"""Convert a model from or to Hugging Face's files, convert a checkpoint of Megatron-LM, or give a dense model experts.

All conversions copy block by block, so memory does not grow with the model. The result appears only when it is
complete.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands.checkpoints import (
    DtypeName,
    Progress,
    check_unused,
    precision_of,
    save_derived,
    save_weights,
    tokenizer_size,
    torch_dtype,
    verified_checkpoint,
)
from megatron.commands.tool import run_tool
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.flags import require_at_least
from megatron.urls import check_place, refuse_urls

if TYPE_CHECKING:
    from megatron.checkpoint.hugging_face.weights import HuggingFaceExport
    from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint
    from megatron.checkpoint.schema import SavedState
    from megatron.data.tokenizers import Tokenizer

DEFAULT_FACTOR = 8.0  # rotary scaling factor of Megatron-LM's model without an argument

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class FromHuggingFace:
    """Hugging Face's safetensors and config.json to a checkpoint of weights, for --load DIR --finetune."""

    hf: str
    """Directory with config.json and the safetensors files; tokenizer files are copied, too."""
    save: str
    """Directory for the checkpoint; it must not have one yet."""
    dtype: DtypeName = "keep"
    """Dtype to store; keep does not convert. Training converts the loaded weights to its precision."""
    iteration: int = 0
    """Iteration under which the checkpoint is saved."""
    apply_layernorm_1p: bool = False
    """Store the weights of norms for training with --apply-layernorm-1p: the gain minus one, in fp32."""
    text_only: bool = False
    """Accept a multimodal model, and convert only its text model."""

    def check(self) -> None:
        require_at_least(0, {"--iteration": self.iteration})
        refuse_urls({"--hf": self.hf, "--save": self.save}, "name a directory")


@dataclass(frozen=True)
class ToHuggingFace:
    """Convert a checkpoint to safetensors and config.json for transformers."""

    load: str
    """Directory or URL of checkpoints."""
    hf: str
    """Directory to create; it must be empty or not exist."""
    ckpt_step: int | None = None
    """Iteration to convert instead of the latest."""
    dtype: DtypeName = "keep"
    """Dtype to write; keep does not convert. Other dtypes are converted from the optimizer's fp32 master weights if the
    checkpoint has them, so --dtype fp32 writes these exactly."""
    ema: bool = False
    """Convert the moving average of the weights (--ema-decay) instead of the weights."""
    max_shard_size: str = "5GB"
    """Largest safetensors file, in bytes or as 500MB, 5GB, 2GiB; a larger tensor has a file of its own."""
    tokenizer: bool = True
    """Write the tokenizer for transformers, too; --no-tokenizer writes the model alone."""

    def check(self) -> None:
        require_at_least(0, {"--ckpt-step": self.ckpt_step})
        check_place("--load", self.load)
        refuse_urls({"--hf": self.hf}, "name a directory, and copy it afterwards")
        self.max_shard_bytes  # noqa: B018

    @property
    def max_shard_bytes(self) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", self.max_shard_size.strip().upper())
        if match is None or float(match[1]) == 0:
            raise ConfigError(f"--max-shard-size {self.max_shard_size} is no size: write it as 500MB, 5GB or in bytes.")
        return max(1, int(float(match[1]) * _UNITS[match[2] or ""]))


@dataclass(frozen=True)
class FromMegatron:
    """Megatron-LM's checkpoint (--ckpt-format torch_dist) to a checkpoint of weights, for --load DIR --finetune."""

    load: str
    """Directory of Megatron-LM's checkpoints, or of one iteration."""
    save: str
    """Directory for the checkpoint; it must not have one yet."""
    ckpt_step: int | None = None
    """Iteration to convert instead of the latest."""
    dtype: DtypeName = "keep"
    """Dtype to store; keep does not convert. Training converts the loaded weights to its precision."""
    iteration: int = 0
    """Iteration under which the checkpoint is saved."""
    vocab_size: int | None = None
    """Number of ids without padding (default: from the tokenizer in the saved arguments, if its files are at hand;
    otherwise all rows of the embedding)."""
    tokenizer_model: str | None = None
    """Place of the tokenizer here, instead of the one in the saved arguments."""

    def check(self) -> None:
        require_at_least(0, {"--ckpt-step": self.ckpt_step, "--iteration": self.iteration})
        require_at_least(1, {"--vocab-size": self.vocab_size})
        places = {"--load": self.load, "--save": self.save, "--tokenizer-model": self.tokenizer_model}
        refuse_urls({flag: place for flag, place in places.items() if place is not None}, "name a local path")


@dataclass(frozen=True)
class Upcycle:
    """A checkpoint of a dense model to a checkpoint of weights with experts: each is a copy of the MLP of its layer."""

    load: str
    """Directory or URL of checkpoints of a dense model."""
    save: str
    """Directory for the new checkpoint; it must not have one yet."""
    num_experts: int
    """Number of experts of a layer."""
    moe_router_topk: int = 2
    """Number of experts that a token is sent to; at least 2."""
    moe_layer_freq: str = "1"
    """Which layers have experts, as in training."""
    moe_upcycling_granularity: int = 1
    """Only 1: every expert is as wide as the MLP."""
    seed: int = 1234
    """Seed of the initial weights of the routers; a new run with this --seed starts with the same."""
    ckpt_step: int | None = None
    """Iteration to convert instead of the latest."""
    iteration: int = 0
    """Iteration under which the checkpoint is saved."""

    def check(self) -> None:
        require_at_least(2, {"--num-experts": self.num_experts, "--moe-router-topk": self.moe_router_topk})
        require_at_least(0, {"--ckpt-step": self.ckpt_step, "--iteration": self.iteration})
        check_place("--load", self.load)
        refuse_urls({"--save": self.save}, "name a directory")
        if self.moe_router_topk > self.num_experts:
            raise ConfigError(
                f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {self.num_experts}: lower it."
            )
        if self.moe_upcycling_granularity != 1:
            raise ConfigError(
                f"--moe-upcycling-granularity {self.moe_upcycling_granularity} would divide the MLP into smaller "
                "experts, which is not implemented: use 1."
            )


COMMANDS = {"from-hf": FromHuggingFace, "to-hf": ToHuggingFace, "from-megatron": FromMegatron, "upcycle": Upcycle}


# --- from Hugging Face ---------------------------------------------------------------------------------------


def from_hugging_face(config: FromHuggingFace, progress: Progress) -> str:
    """Convert; returns the message for the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.hugging_face.weights import HuggingFaceImport
    from megatron.checkpoint.tokenizer_files import COPY, copy_tokenizer

    source, root = Path(config.hf), Path(config.save)
    check_unused(root)
    model = HuggingFaceImport(
        source, torch_dtype(config.dtype), progress.advance, config.apply_layernorm_1p, config.text_only
    )
    copied = iteration_directory(root, config.iteration).resolve() / COPY
    tokenizer = tokenizer_of(source, copied, model.architecture.vocab_size)
    command = save_weights(
        config.save,
        config.iteration,
        model,
        model.architecture,
        precision_of(model.dtype),
        tokenizer,
        progress,
        model.model.description.generation_config,
        lambda saving: copy_tokenizer(source, saving / COPY),
    )
    left_out = model.model.describe_left_out()
    return (
        f"wrote {model.architecture.num_parameters():,} parameters to {iteration_directory(root, config.iteration)}\n"
        + (left_out and f"{left_out}\n")
        + command
    )


def tokenizer_of(source: Path, copied: Path, vocab_size: int) -> TokenizerConfig:
    """The flags for the tokenizer in ``source``, whose copy will be under ``copied``, in a model of ``vocab_size``
    ids."""
    from megatron.checkpoint.hugging_face.config import tokenizer_flags

    # The copy does not exist yet: take the size of the source.
    flags, ids = tokenizer_flags(source, copied), tokenizer_size(tokenizer_flags(source, source))
    # For a tokenizer that cannot be used, the size says nothing.
    return flags if ids is None or ids >= vocab_size else replace(flags, vocab_size=vocab_size)


# --- to Hugging Face -----------------------------------------------------------------------------------------


def to_hugging_face(config: ToHuggingFace, progress: Progress) -> str:
    """Convert; returns the message for the user."""
    from megatron.checkpoint.directory import check_free, fresh_directory
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.hugging_face.weights import HuggingFaceExport, write_weights
    from megatron.checkpoint.tokenizer_files import tokenizer_of

    target = Path(config.hf)
    check_free(target)
    saved, state = verified_checkpoint(config.load, config.ckpt_step)
    flags = tokenizer_of(state, path_of(config.load), saved.iteration)
    tokenizer = tokenizer_to_write(flags) if config.tokenizer else None
    model = HuggingFaceExport(saved, torch_dtype(config.dtype), progress.advance, config.ema)
    progress.expect(sum(entry.nbytes for entry in model.entries.values()))
    with fresh_directory(target) as saving:
        write_weights(saving, model.entries, model.parts_of, config.max_shard_bytes)
        notes = write_description(saving, model, state, flags, tokenizer)
    if depths := state.architecture.mtp_num_layers:
        notes.append(f"left out the depths of --mtp-num-layers {depths}, which transformers does not have")
    return "\n".join([f"wrote iteration {saved.iteration} of {config.load} to {target}, from {model.source}*", *notes])


def tokenizer_to_write(flags: TokenizerConfig) -> "Tokenizer":
    """The tokenizer of a checkpoint; raises :class:`CheckpointError` if there is none, or if it has no files."""
    from megatron.data.tokenizers import build_tokenizer

    remedy = "add --no-tokenizer to write the model without one"
    if flags.tokenizer_type is None:
        raise CheckpointError(f"The checkpoint names no tokenizer: {remedy}.")
    if flags.tokenizer_type == "NullTokenizer":
        raise CheckpointError(f"NullTokenizer, whose text is ids, does not exist in transformers: {remedy}.")
    try:
        return build_tokenizer(flags)
    except (ConfigError, DataError) as error:
        raise CheckpointError(f"{str(error).rstrip('.')}, or {remedy}.") from error


def write_description(
    saving: Path, model: "HuggingFaceExport", state: "SavedState", flags: TokenizerConfig, tokenizer: "Tokenizer | None"
) -> list[str]:
    """Write config.json and the tokenizer's files; returns lines about them for the user."""
    from megatron.checkpoint.files import explained, write_text_durably
    from megatron.checkpoint.hugging_face.config import CONFIG, GENERATION_CONFIG, config_fields
    from megatron.checkpoint.hugging_face.weights import write_json
    from megatron.checkpoint.tokenizer_files import write_tokenizer

    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eod)
    fields = config_fields(model.architecture, str(model.dtype).removeprefix("torch."), bos, eos)
    write_json(saving / CONFIG, fields)
    if state.generation_config is not None:
        with explained("write", saving):
            write_text_durably(saving / GENERATION_CONFIG, state.generation_config)
    if tokenizer is None:
        return ["without a tokenizer, and without special tokens in config.json (--no-tokenizer)"]
    return write_tokenizer(saving, flags, tokenizer, fields["model_type"])


# --- from Megatron-LM -----------------------------------------------------------------------------------------


def from_megatron(config: FromMegatron, progress: Progress) -> str:
    """Convert; returns the message for the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.megatron_lm.conversion import MegatronCheckpoint, MegatronImport
    from megatron.checkpoint.megatron_lm.torch_dist import find_iteration

    root, directory = Path(config.save), find_iteration(Path(config.load), config.ckpt_step)
    check_unused(root)
    source = MegatronCheckpoint(directory)
    saved_tokenizer, ids = tokenizer_here(source, config.tokenizer_model)
    model = MegatronImport(source, config.vocab_size or ids, torch_dtype(config.dtype), progress.advance)
    rows = model.architecture.vocab_size
    tokenizer = TokenizerConfig() if ids is None else saved_tokenizer
    if ids is not None and ids != rows:
        # NullTokenizer has one id more than its --vocab-size.
        tokenizer = replace(tokenizer, vocab_size=rows - (tokenizer.tokenizer_type == "NullTokenizer"))
    precision = precision_of(model.dtype)
    command = save_weights(config.save, config.iteration, model, model.architecture, precision, tokenizer, progress)
    vocabulary_note = f"the vocabulary has {rows} ids; left out {model.num_padding_rows} rows of padding"
    if (config.vocab_size or ids) is None:
        vocabulary_note = (
            f"kept all {rows} rows of the vocabulary, since the tokenizer is not at hand: give --tokenizer-model or "
            "--vocab-size to leave out padding"
        )
    factor = model.architecture.rope_scaling_factor
    rotary_note = []
    if model.architecture.use_rope_scaling and factor != DEFAULT_FACTOR:
        rotary_note.append(
            f"the rotary scaling factor is {factor:g}, as in the arguments; Megatron-LM's pretrain_gpt.py computes "
            f"with {DEFAULT_FACTOR:g}, whatever --rope-scaling-factor says"
        )
    return "\n".join(
        [
            f"wrote {model.architecture.num_parameters():,} parameters of {directory} to "
            f"{iteration_directory(root, config.iteration)}, without the state of the optimizer",
            vocabulary_note,
            *rotary_note,
            command,
        ]
    )


def tokenizer_here(source: "MegatronCheckpoint", place: str | None) -> tuple[TokenizerConfig, int | None]:
    """The flags of the model's tokenizer, at ``place`` if it is given, and its number of ids.

    The number is None if its files are not here. A tokenizer at ``place`` that cannot be used is a :class:`UserError`.
    """
    from megatron.checkpoint.megatron_lm.conversion import shown, tokenizer_of
    from megatron.data.tokenizers import build_tokenizer

    flags = tokenizer_of(source.arguments)
    if place is None:
        return flags, tokenizer_size(flags)
    if flags.tokenizer_type is None:
        kind = shown(source.arguments.get("tokenizer_type"))
        raise ConfigError(
            f"--tokenizer-model {place} is of the type in {source.where}, {kind}, which is not supported: use "
            "--vocab-size instead."
        )
    flags = replace(flags, tokenizer_model=place)
    return flags, build_tokenizer(flags).vocab_size


# --- experts -------------------------------------------------------------------------------------------------


def upcycle(config: Upcycle, progress: Progress) -> str:
    """Convert; returns the message for the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.streaming import UpcycledModel
    from megatron.checkpoint.tokenizer_files import tokenizer_of

    root = Path(config.save)
    check_unused(root)
    saved, state = verified_checkpoint(config.load, config.ckpt_step)
    architecture = with_experts(state.architecture, config)
    model = UpcycledModel(saved, architecture, config.seed, progress.advance)
    tokenizer = tokenizer_of(state, path_of(config.load), saved.iteration)
    command = save_derived(config.save, config.iteration, model, architecture, state, tokenizer, progress)
    return (
        f"wrote {architecture.num_parameters():,} parameters to {iteration_directory(root, config.iteration)}\n"
        f"{command}"
    )


def with_experts(dense: TransformerConfig, config: Upcycle) -> TransformerConfig:
    """The architecture of the dense model with experts; raises :class:`UserError`."""
    if dense.num_experts is not None:
        raise CheckpointError(
            f"--load {config.load} has {dense.num_experts} experts already: upcycle the checkpoint of a dense model."
        )
    flags = replace(
        ModelConfig.of(dense),
        num_experts=config.num_experts,
        moe_router_topk=config.moe_router_topk,
        moe_layer_freq=config.moe_layer_freq,
    )
    resolved = flags.resolve(dense.vocab_size, tensor_parallel_size=1, seq_length=1)
    return replace(resolved, padded_vocab_size=dense.padded_vocab_size)


# --- the command -------------------------------------------------------------------------------------------------


_CONVERSIONS: Mapping[type[Any], Callable[[Any, Progress], str]] = {
    FromHuggingFace: from_hugging_face,
    ToHuggingFace: to_hugging_face,
    FromMegatron: from_megatron,
    Upcycle: upcycle,
}


def convert(config: FromHuggingFace | ToHuggingFace | FromMegatron | Upcycle) -> str:
    """Run a subcommand; returns the message for the user."""
    config.check()
    with Progress() as progress:
        return _CONVERSIONS[type(config)](config, progress)


main = partial(run_tool, COMMANDS, lambda config: print(convert(config)), __doc__, interrupted="nothing has")
