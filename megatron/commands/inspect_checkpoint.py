"""Print the content and origin of a checkpoint; with --verify, check it for damage.

Reads only the manifest, unless --verify compares every file with its digests.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from megatron.commands.tool import run_tool
from megatron.errors import CheckpointError
from megatron.flags import require_at_least
from megatron.urls import check_place

if TYPE_CHECKING:
    from megatron.checkpoint.files import AnyPath
    from megatron.checkpoint.manifest import Manifest
    from megatron.checkpoint.safetensors_file import Entry

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
            entries[chunk.file.name][chunk.key] = manifest.entry(name, chunk)
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
    totals: dict[str, int] = {}
    for name, tensor in tensors.items():
        parts = name.split("/")
        kind = "/".join(parts[:2]) if parts[0] == "optimizer" else parts[0]
        totals[kind] = totals.get(kind, 0) + tensor["bytes"]
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


main = partial(run_tool, InspectConfig, print_report, __doc__)
