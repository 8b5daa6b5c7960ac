"""Flags for a dry run."""

from dataclasses import dataclass

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least, require_positive

DEFAULT_GPU_MEMORY = 80.0
"""GiB of an H100."""


@dataclass(frozen=True)
class DryRunConfig:
    """Find out what a run will need, without GPUs, memory or network; see docs/dry_run.md."""

    dry_run: bool = False
    """Do not train: run one step of every pipeline stage of a run on --num-gpus ranks with tensors that have no memory,
    and report layout, memory, communication, bubble and FLOPs."""
    num_gpus: int | None = None
    """Dry run: ranks of the run."""
    dry_run_rank: int | None = None
    """Dry run: look at this rank alone, instead of one rank of every pipeline stage."""
    dry_run_json: str | None = None
    """Dry run: file that receives the report, too."""
    gpu_memory_gb: float | None = None
    """Dry run: memory of a GPU in GiB (default: 80)."""

    @property
    def gpu_memory(self) -> int:
        """Bytes of a GPU."""
        return int((DEFAULT_GPU_MEMORY if self.gpu_memory_gb is None else self.gpu_memory_gb) * 2**30)

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(1, {"--num-gpus": self.num_gpus})
        require_at_least(0, {"--dry-run-rank": self.dry_run_rank})
        require_positive({"--gpu-memory-gb": self.gpu_memory_gb})
        given = {
            "--num-gpus": self.num_gpus,
            "--dry-run-rank": self.dry_run_rank,
            "--dry-run-json": self.dry_run_json,
            "--gpu-memory-gb": self.gpu_memory_gb,
        }
        if not self.dry_run:
            for flag, value in given.items():
                if value is not None:
                    raise ConfigError(f"{flag} belongs to --dry-run: add that, or remove {flag}.")
            return
        if self.num_gpus is None:
            raise ConfigError("--dry-run needs --num-gpus: add the number of ranks that the run will have.")
        if self.dry_run_rank is not None and self.dry_run_rank >= self.num_gpus:
            raise ConfigError(
                f"--dry-run-rank {self.dry_run_rank} is not among the {self.num_gpus} ranks of --num-gpus, which count "
                "from 0: choose a smaller one."
            )
