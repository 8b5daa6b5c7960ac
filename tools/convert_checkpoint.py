#!/usr/bin/env python3
"""Convert a model between Hugging Face's files and a checkpoint for training, or give a dense model experts.

All conversions copy block by block, so memory does not grow with the model. The result appears only when it is
complete.
"""

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from megatron.architectures.registry import PRESETS
from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig, preset
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError, DataError, UserError, report
from megatron.flags import changed_flags, words_of
from megatron.ranges import require_at_least
from megatron.urls import check_place, refuse_urls

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.conversion import HuggingFaceExport, HuggingFaceImport
    from megatron.checkpoint.streaming import SavedTensors

TOKENIZER = "tokenizer"  # its directory in a converted checkpoint

DtypeName = Literal["keep", "bf16", "fp16", "fp32"]
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
    max_shard_size: str = "5GB"
    """Largest safetensors file, in bytes or as 500MB, 5GB, 2GiB; a larger tensor has a file of its own."""

    def check(self) -> None:
        require_at_least(0, {"--ckpt-step": self.ckpt_step})
        check_place("--load", self.load)
        refuse_urls({"--hf": self.hf}, "name a directory, and copy it afterwards")
        self.max_shard_bytes  # noqa: B018

    @property
    def max_shard_bytes(self) -> int:
        """``--max-shard-size`` in bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", self.max_shard_size.strip().upper())
        if match is None or float(match[1]) == 0:
            raise ConfigError(f"--max-shard-size {self.max_shard_size} is no size: write it as 500MB, 5GB or in bytes.")
        return max(1, int(float(match[1]) * _UNITS[match[2] or ""]))


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


Command = (
    Annotated[FromHuggingFace, tyro.conf.subcommand("from-hf")]
    | Annotated[ToHuggingFace, tyro.conf.subcommand("to-hf")]
    | Annotated[Upcycle, tyro.conf.subcommand("upcycle")]
)


class Progress:
    """A bar on standard error that counts bytes."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit="B", unit_scale=True, desc="converting", disable=None)

    def expect(self, total: int) -> None:
        """Say how many bytes there will be."""
        self._bar.reset(total)

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._bar.update(count)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for the time of a conversion."""
    progress = Progress()
    try:
        yield progress
    finally:
        progress.close()


def torch_dtype(name: DtypeName) -> "torch.dtype | None":
    """The number format; None keeps that of the source."""
    import torch

    return {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


# --- from Hugging Face ---------------------------------------------------------------------------------------


def from_hugging_face(config: FromHuggingFace, progress: Progress) -> str:
    """Convert; what to tell the user."""
    from megatron.checkpoint.conversion import HuggingFaceImport
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.hugging_face_files import copy_tokenizer
    from megatron.checkpoint.streaming import save_streaming
    from megatron.training.checkpoints.saved_run import state_of_weights

    source, root = Path(config.hf), Path(config.save)
    check_unused(root)
    model = HuggingFaceImport(
        source, torch_dtype(config.dtype), progress.advance, config.apply_layernorm_1p, config.text_only
    )
    tokenizer = tokenizer_flags(source, iteration_directory(root, config.iteration).resolve() / TOKENIZER)
    progress.expect(model.nbytes)
    save_streaming(
        root,
        config.iteration,
        model.tensors,
        model.read,
        state_of_weights(config.iteration, model.architecture, known_flags(model, tokenizer)).to_json(),
        furnish=lambda saving: copy_tokenizer(source, saving / TOKENIZER),
    )
    flags = ["--load", config.save, "--finetune", *model_flags(model.architecture), *given_flags(tokenizer)]
    left_out = model.model.describe_left_out()
    return (
        f"wrote {model.architecture.num_parameters():,} parameters to {iteration_directory(root, config.iteration)}\n"
        + (left_out and f"{left_out}\n")
        + f"train on with: pretrain_llama.py {shlex.join(flags)}"
    )


def check_unused(root: Path) -> None:
    """Raise :class:`CheckpointError` where ``root`` holds checkpoints, which the new one would supersede."""
    from megatron.checkpoint.finding import find_checkpoint

    if find_checkpoint(root) is not None:
        raise CheckpointError(f"--save {root} holds checkpoints already: choose an empty directory.")


def known_flags(model: "HuggingFaceImport", tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The groups of flags that weights alone tell."""
    import torch

    precision = PrecisionConfig(bf16=model.dtype == torch.bfloat16, fp16=model.dtype == torch.float16)
    return {
        "model": asdict(ModelConfig.of(model.architecture)),
        "tokenizer": asdict(tokenizer),
        "precision": asdict(precision),
    }


def tokenizer_flags(source: Path, copied: Path) -> TokenizerConfig:
    """The flags for the tokenizer in ``source``, whose copy will be under ``copied``."""
    if (source / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(copied))
    model = source / "tokenizer.model"
    if not model.is_file():
        return TokenizerConfig()
    with model.open("rb") as content:
        # Llama 3's file is lines of a token in base64 and its rank; Llama 2's is binary.
        is_text = re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", content.readline(1000)) is not None
    return TokenizerConfig(
        tokenizer_type="TikTokenizer" if is_text else "SentencePieceTokenizer",
        tokenizer_model=str(copied / model.name),
    )


def model_flags(architecture: TransformerConfig) -> list[str]:
    """The shortest flags that give the architecture: a preset's name, or every size."""
    wanted = ModelConfig.of(architecture)
    in_preset = replace(wanted, apply_layernorm_1p=False)
    for name in PRESETS:
        resolved = preset(name).resolve(architecture.vocab_size, 1, 1)
        if ModelConfig.of(resolved) == in_preset:
            return ["--model", name, *given_flags(ModelConfig(apply_layernorm_1p=wanted.apply_layernorm_1p))]
    return given_flags(wanted)


def given_flags(group: ModelConfig | TokenizerConfig) -> list[str]:
    """The flags of a group that are not at their default."""
    return [
        word
        for field in fields(group)
        if changed_flags(group, field.name)
        for word in words_of(field.name, getattr(group, field.name))
    ]


# --- to Hugging Face -----------------------------------------------------------------------------------------


def to_hugging_face(config: ToHuggingFace, progress: Progress) -> str:
    """Convert; what to tell the user."""
    from megatron.checkpoint.conversion import HuggingFaceExport
    from megatron.checkpoint.hugging_face_files import check_free, fresh_directory, write_weights

    target = Path(config.hf)
    check_free(target)
    saved = verified_checkpoint(config.load, config.ckpt_step)
    model = HuggingFaceExport(saved, torch_dtype(config.dtype), progress.advance)
    progress.expect(sum(entry.nbytes for entry in model.entries.values()))
    with fresh_directory(target) as saving:
        write_weights(saving, model.entries, model.parts_of, config.max_shard_bytes)
        notes = write_description(saving, saved, model)
    return "\n".join([f"wrote iteration {saved.iteration} of {config.load} to {target}, from {model.source}*", *notes])


def write_description(saving: Path, saved: "SavedTensors", model: "HuggingFaceExport") -> list[str]:
    """Write config.json and the tokenizer's files; what to tell the user about them."""
    from megatron.checkpoint.hugging_face_config import config_fields
    from megatron.checkpoint.hugging_face_files import CONFIG, copy_tokenizer, write_json
    from megatron.checkpoint.schema import upgrade
    from megatron.data.tokenizers import build_tokenizer

    state = upgrade(saved.manifest.state, saved.manifest.format_version)
    flags = state.flag_group("tokenizer", TokenizerConfig)
    bos = eos = None
    missing = "" if flags.tokenizer_type else "The checkpoint does not name one."
    try:
        if not missing:
            tokenizer = build_tokenizer(flags)
            bos, eos = tokenizer.bos, tokenizer.eod
        if flags.tokenizer_model is not None:
            copy_tokenizer(Path(flags.tokenizer_model), saving)
    except (ConfigError, DataError) as error:
        missing = str(error)
    dtype = str(model.dtype).removeprefix("torch.")
    write_json(saving / CONFIG, config_fields(model.architecture, dtype, bos, eos))
    return [f"without a tokenizer, and without special tokens in config.json: {missing}"] if missing else []


# --- experts -------------------------------------------------------------------------------------------------


def upcycle(config: Upcycle, progress: Progress) -> str:
    """Convert; what to tell the user."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.schema import upgrade
    from megatron.checkpoint.streaming import save_streaming
    from megatron.checkpoint.upcycling import UpcycledModel
    from megatron.training.checkpoints.saved_run import state_of_weights

    root = Path(config.save)
    check_unused(root)
    saved = verified_checkpoint(config.load, config.ckpt_step)
    state = upgrade(saved.manifest.state, saved.manifest.format_version)
    architecture = with_experts(state.architecture, config)
    model = UpcycledModel(saved, architecture, config.seed, progress.advance)
    tokenizer = state.flag_group("tokenizer", TokenizerConfig)
    groups = {
        "model": asdict(ModelConfig.of(architecture)),
        "tokenizer": asdict(tokenizer),
        "precision": asdict(state.flag_group("precision", PrecisionConfig)),
    }
    progress.expect(model.nbytes)
    save_streaming(
        root,
        config.iteration,
        model.tensors,
        model.read,
        state_of_weights(config.iteration, architecture, groups).to_json(),
    )
    words = ["--load", config.save, "--finetune", *model_flags(architecture), *given_flags(tokenizer)]
    return (
        f"wrote {architecture.num_parameters():,} parameters to {iteration_directory(root, config.iteration)}\n"
        f"train on with: pretrain_llama.py {shlex.join(words)}"
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


def verified_checkpoint(load: str, ckpt_step: int | None) -> "SavedTensors":
    """The checkpoint of ``--load``, compared with its digests; raises :class:`CheckpointError`."""
    from megatron.checkpoint.checkpointing import verify_share
    from megatron.checkpoint.finding import find_checkpoint
    from megatron.checkpoint.remote_path import path_of
    from megatron.checkpoint.streaming import SavedTensors

    root = path_of(load)
    iteration = find_checkpoint(root, ckpt_step)
    if iteration is None:
        raise CheckpointError(f"--load {root} holds no checkpoint: check the path.")
    verify_share(root, iteration, rank=0, size=1)
    return SavedTensors(root, iteration)


# --- the command -------------------------------------------------------------------------------------------------


def convert(config: FromHuggingFace | ToHuggingFace | Upcycle) -> str:
    """Run a subcommand; what to tell the user."""
    config.check()
    with progress_bar() as progress:
        if isinstance(config, FromHuggingFace):
            return from_hugging_face(config, progress)
        if isinstance(config, ToHuggingFace):
            return to_hugging_face(config, progress)
        return upcycle(config, progress)


def main() -> int:
    """Run the tool; the exit code."""
    config = tyro.cli(Command, description=__doc__)
    # A terminated conversion, too, removes what it has written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(convert(config))
    except UserError as error:
        report(error, rank=0)
        return 1
    except KeyboardInterrupt:
        print("ERROR: interrupted; nothing has been written.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
