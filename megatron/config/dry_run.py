"""Flags for a dry run."""

from dataclasses import dataclass, fields

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
from megatron.urls import refuse_urls

DEFAULT_GPU_MEMORY = 80.0
"""GiB of an H100."""
ALLOWANCE = 4 * 2**30
"""Bytes outside of tensors: the CUDA context, buffers of NCCL and cuBLAS, memory inside kernels, fragmentation."""


@dataclass(frozen=True)
class DryRunConfig:
    """Simulate the run without GPUs, memory or network; see docs/dry_run.md."""

    dry_run: bool = False
    """Do not train: simulate one step of every pipeline stage of a run on --num-gpus ranks with fake tensors, and
    report layout, memory, communication, pipeline bubble and FLOPs."""
    num_gpus: int | None = None
    """Dry run, --plan and --explain-flags: number of ranks of the run."""
    dry_run_rank: int | None = None
    """Dry run: simulate this rank only (default: one rank of every pipeline stage)."""
    dry_run_whole: bool = False
    """Dry run: simulate every layer and microbatch, instead of one layer of each kind whose memory and collectives are
    repeated for the others. The result is the same."""
    dry_run_json: str | None = None
    """Dry run: file for the report in JSON."""
    dry_run_html: str | None = None
    """Dry run: file for the report as a page: charts of memory, bytes sent and schedule, in one HTML file that loads
    nothing."""
    gpu_memory_gb: float | None = None
    """Dry run and --plan: memory of a GPU in GiB (default: 80; with --plan the memory of the cluster's
    GPUs)."""
    gpus_per_node: int = 8
    """Dry run and --plan: GPUs of a node, which the fast link connects: 8 of a DGX, 72 of a GB200 NVL72 (default with
    --plan: the cluster's nodes). Traffic is divided into bytes inside a node and across nodes."""
    dry_run_expert_load: float = 1.0
    """Dry run: tokens that the experts of the simulated rank receive, relative to the mean over the expert-parallel
    ranks. 1 is a balanced load; a higher one needs more memory for activations."""

    @property
    def gpu_memory(self) -> int:
        """Memory of a GPU in bytes."""
        return int((DEFAULT_GPU_MEMORY if self.gpu_memory_gb is None else self.gpu_memory_gb) * 2**30)

    def check(self) -> None:
        require_at_least(1, values_of(self, "num_gpus", "gpus_per_node"))
        require_at_least(0, values_of(self, "dry_run_rank"))
        require_positive(values_of(self, "gpu_memory_gb", "dry_run_expert_load"))
        refuse_urls(values_of(self, "dry_run_json", "dry_run_html"), "use a local file")
        dependent = (field.name for field in fields(self) if field.name != "dry_run")
        require_flag("--dry-run", self.dry_run, changed_flags(self, *dependent))
        if self.dry_run and self.num_gpus is None:
            raise ConfigError("--dry-run needs --num-gpus: set it to the number of ranks of the run.")
        if self.dry_run_rank is not None and self.num_gpus is not None and self.dry_run_rank >= self.num_gpus:
            raise ConfigError(
                f"--dry-run-rank {self.dry_run_rank} is not below --num-gpus {self.num_gpus}; ranks count from 0: use "
                "a smaller one."
            )
