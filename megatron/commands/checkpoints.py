"""Checkpoints of weights alone: what the commands that write them share, and the average of checkpoints; and the report
on a checkpoint."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

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

    from megatron.checkpoint.files import AnyPath
    from megatron.checkpoint.manifest import Manifest
    from megatron.checkpoint.safetensors_file import Entry
    from megatron.checkpoint.schema import SavedState
    from megatron.checkpoint.streaming import ChunkedModel, SavedTensors

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


def save_weights(
    save: str,
    iteration: int,
    model: "ChunkedModel",
    architecture: TransformerConfig,
    precision: PrecisionConfig,
    tokenizer: TokenizerConfig,
    progress: Progress,
    generation_config: str | None = None,
    furnish: Callable[[Path], object] = lambda directory: None,
) -> str:
    """Copy ``model`` to a checkpoint in ``save``, with the groups of flags that weights and their tokenizer determine,
    and with the files that ``furnish`` adds.

    Returns the command with which training continues from it.
    """
    from megatron.checkpoint.streaming import save_streaming
    from megatron.training.checkpoints.saved_run import state_of_weights

    flags = {"model": asdict(ModelConfig.of(architecture)), "tokenizer": asdict(tokenizer)}
    flags["precision"] = asdict(precision)
    state = state_of_weights(iteration, architecture, flags, generation_config).to_json()
    progress.expect(model.nbytes)
    save_streaming(Path(save), iteration, model, state, furnish)
    words = ["--load", save, "--finetune", *model_flags(architecture), *changed_words(tokenizer)]
    return f"train on with: pretrain_llama.py {shlex.join(words)}"


def save_derived(
    save: str,
    iteration: int,
    model: "ChunkedModel",
    architecture: TransformerConfig,
    source: "SavedState",
    tokenizer: TokenizerConfig,
    progress: Progress,
) -> str:
    """:func:`save_weights` of a ``model`` made from the checkpoint of ``source``, with a copy of its ``tokenizer``."""
    from megatron.checkpoint.directory import iteration_directory
    from megatron.checkpoint.tokenizer_files import COPY, copy_tokenizer_of, flags_of_copy

    copied = flags_of_copy(tokenizer, iteration_directory(Path(save), iteration).resolve() / COPY)
    precision, generation = source.flag_group("precision", PrecisionConfig), source.generation_config

    def furnish(saving: Path) -> None:
        copy_tokenizer_of(tokenizer, saving / COPY)

    return save_weights(save, iteration, model, architecture, precision, copied, progress, generation, furnish)


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


def verified_checkpoint(load: str, ckpt_step: int | None) -> "tuple[SavedTensors, SavedState]":
    """The checkpoint of ``--load``, compared with its digests; raises :class:`CheckpointError`."""
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.finding import find_checkpoint, missing_checkpoint, verify_share
    from megatron.checkpoint.schema import upgrade
    from megatron.checkpoint.streaming import SavedTensors

    root = path_of(load)
    iteration = find_checkpoint(root, ckpt_step)
    if iteration is None:
        raise missing_checkpoint(root)
    verify_share(root, iteration, rank=0, size=1)
    saved = SavedTensors(root, iteration)
    return saved, upgrade(saved.manifest.state, saved.manifest.format_version)


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
    from megatron.checkpoint.streaming import AveragedModel
    from megatron.checkpoint.tokenizer_files import tokenizer_of
    from megatron.training.checkpoints.comparison import check_architecture

    check_unused(Path(config.save))
    saved, states = zip(*(verified_checkpoint(config.load, iteration) for iteration in config.iterations))
    architecture = states[0].architecture
    for one, state in zip(saved, states):
        where = f"The checkpoint of iteration {one.iteration} in {config.load}"
        check_architecture(asdict(architecture), asdict(state.architecture), where, "average checkpoints of one run")
    model = AveragedModel(saved, config.weights or [1.0] * len(saved), progress.advance)
    tokenizer = tokenizer_of(states[0], path_of(config.load), saved[0].iteration)
    source = replace(states[0], generation_config=None)
    command = save_derived(config.save, config.iteration, model, architecture, source, tokenizer, progress)
    return (
        f"wrote the average of iterations {', '.join(map(str, config.iterations))} to "
        f"{iteration_directory(Path(config.save), config.iteration)}, without optimizer state\n{command}"
    )


def run(config: Average) -> None:
    config.check()
    with Progress() as progress:
        message = average(config, progress)
    print(message)


main_average = partial(run_tool, Average, run, AVERAGE, interrupted="nothing has")


# --- the report on a checkpoint --------------------------------------------------------------------------------

INSPECT = """\
Print the content and origin of a checkpoint; with --verify, check it for damage.

Reads only the manifest, unless --verify compares every file with its digests.
"""
"""Text of ``tools/inspect_checkpoint.py --help``."""
_LAYOUT = {
    "tensor_model_parallel_size": "tensor",
    "context_parallel_size": "context",
    "pipeline_model_parallel_size": "pipeline",
}


@dataclass(frozen=True)
class InspectConfig:
    """Checkpoint to inspect."""

    load: str
    """Directory or URL of checkpoints."""
    ckpt_step: int | None = None
    """Iteration to inspect instead of the latest."""
    verify: bool = False
    """Read every file and compare it with its digests and its tensors with the manifest; the exit code is 1 for a
    damaged file."""
    json: bool = False
    """Print one JSON object with all flags of the run."""

    def check(self) -> None:
        require_at_least(0, {"--ckpt-step": self.ckpt_step})
        check_place("--load", self.load)


def inspect(config: InspectConfig) -> dict[str, Any]:
    """The content of the report, as JSON."""
    from megatron.checkpoint.directory import locate_checkpoint
    from megatron.checkpoint.files import path_of
    from megatron.checkpoint.finding import find_checkpoint, list_checkpoints, missing_checkpoint
    from megatron.checkpoint.manifest import read_manifest

    root = path_of(config.load)
    iteration = find_checkpoint(root, config.ckpt_step)
    if iteration is None:
        raise missing_checkpoint(root)
    directory = locate_checkpoint(root, iteration)
    manifest = read_manifest(directory)
    files = sorted(manifest.file_list, key=lambda file: file.name)
    return {
        "directory": str(directory),
        "iteration": iteration,
        "iterations_there": list_checkpoints(root),
        "state": manifest.state,
        "bytes": sum(file.size for file in files),
        "files": {file.name: {"bytes": file.size, "xxh3_128": file.digest} for file in files},
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "chunks": len(tensor.files),
                "bytes": prod(tensor.shape) * tensor.dtype.itemsize,
            }
            for name, tensor in manifest.tensors.items()
        },
        "damage": find_damage(directory, manifest) if config.verify else None,
    }


def find_damage(directory: "AnyPath", manifest: "Manifest") -> list[str]:
    """The damage of each file that is not as it was written, or whose tensors are not those of ``manifest``."""
    from megatron.checkpoint.files import verify_file
    from megatron.checkpoint.safetensors_file import VerifiedSafetensors

    entries: dict[str, dict[str, Entry]] = {file.name: {} for file in manifest.file_list}
    for name in manifest.tensors:
        for chunk in manifest.chunks(name):
            entries[chunk.file.name][chunk.key] = chunk.entry
    damage = []
    for file in sorted(manifest.file_list, key=lambda file: file.name):
        try:
            verify_file(directory, file)
            with VerifiedSafetensors(directory, file) as content:
                content.check_entries(entries[file.name])
        except CheckpointError as error:
            damage.append(str(error))
    return damage


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    state = found["state"]
    yield f"{found['directory']}: iteration {found['iteration']}, {size(found['bytes'])} in {len(found['files'])} files"
    yield f"iterations there: {', '.join(map(str, found['iterations_there']))}"
    if "consumed_samples" in state:
        yield f"samples consumed: {state['consumed_samples']:,}"
    for stage in state.get("data_stages", ()):
        data = stage["data"]
        paths = [corpus["path"] for corpus in data.get("corpora", ())]
        start = f"after iteration {stage['first_iteration']} and {stage['first_sample']:,} samples"
        corpora = "synthetic samples" if data.get("mock_data") else ", ".join(paths) or "corpora not recorded"
        corpora = f"samples of {data['loader']}" if data.get("loader") else corpora
        yield f"data stage {stage['name']}: {start}, sequences of {data['sequence_length']}, {corpora}"
    if "architecture" in state:
        yield f"architecture: {words(state['architecture'])}"
    yield f"written by: {written_by(state.get('flags', {}))}"
    yield ""
    yield from table(found["tensors"])
    yield ""
    for kind, total in bytes_by_kind(found["tensors"]).items():
        yield f"{kind}: {size(total)}"
    if found["damage"] is not None:
        yield from found["damage"] or ["every file is as it was written"]


def written_by(flags: Mapping[str, Any]) -> str:
    """The layout and precision of the run; only a checkpoint that was converted has none."""
    if "parallel" not in flags:
        return "a conversion, not a run"
    parallel = flags["parallel"]
    layout = {name: parallel.get(key) for key, name in _LAYOUT.items()}
    layout["data-parallel sharding"] = sharding(parallel)
    precision = next((name for name in ("bf16", "fp16", "fp64") if flags.get("precision", {}).get(name)), "fp32")
    optimizer = flags.get("optimizer", {}).get("optimizer")
    return words({**layout, "precision": precision, "optimizer": optimizer})


def sharding(parallel: Mapping[str, Any]) -> str:
    """The data-parallel strategy under any of its flags."""
    if parallel.get("use_torch_fsdp2"):
        return "optim_grads_params"
    by_default = "optim" if parallel.get("use_distributed_optimizer") else "no_shard"
    return parallel.get("data_parallel_sharding_strategy") or by_default


def words(values: Mapping[str, Any]) -> str:
    """Names and values in a line, without what is not set."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def table(tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = [("tensor", "dtype", "shape", "size")]
    for name, tensor in tensors.items():
        rows.append((name, tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "scalar", size(tensor["bytes"])))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        yield f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"


def bytes_by_kind(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of the model, of each part of the optimizer's state, and of the random-number states."""
    totals: Counter[str] = Counter()
    for name, tensor in tensors.items():
        parts = name.split("/")
        totals["/".join(parts[:2]) if parts[0] == "optimizer" else parts[0]] += tensor["bytes"]
    return totals


def size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def print_report(config: InspectConfig) -> int:
    """Print the report; 1 for a damaged checkpoint."""
    config.check()
    found = inspect(config)
    print(json.dumps(found, indent=1) if config.json else "\n".join(lines(found)))
    return 1 if found["damage"] else 0


main_inspect = partial(run_tool, InspectConfig, print_report, INSPECT)
