"""Flags of commands that do not train: a dry run, the search of a layout, the explanation of flags from a file."""

from dataclasses import dataclass, fields

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
from megatron.urls import refuse_urls

# GiB of an H100.
DEFAULT_GPU_MEMORY = 80.0
# Bytes outside of tensors: the CUDA context, buffers of NCCL and cuBLAS, memory inside kernels, fragmentation.
ALLOWANCE = 4 * 2**30


@dataclass(frozen=True)
class DryRunConfig:
    """Simulate the run without GPUs, memory or network; see docs/dry_run.md."""

    dry_run: bool = False
    """Do not train: simulate one step of every pipeline stage of a run on --num-gpus ranks with fake tensors, and
    report layout, memory, communication, pipeline bubble and FLOPs."""
    num_gpus: int | None = None
    """Dry run, --plan and --explain-flags: number of ranks of the run."""
    # What is simulated
    dry_run_rank: int | None = None
    """Dry run: simulate this rank only (default: one rank of every pipeline stage)."""
    dry_run_whole: bool = False
    """Dry run: simulate every layer and microbatch, instead of one layer of each kind whose memory and collectives are
    repeated for the others. The result is the same."""
    # Reports
    dry_run_json: str | None = None
    """Dry run: file for the report in JSON."""
    dry_run_html: str | None = None
    """Dry run: file for the report as a page: charts of memory, bytes sent and schedule, in one HTML file that loads
    nothing."""
    # The cluster
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


@dataclass(frozen=True)
class PlanConfig:
    """Search the layout of a run; see docs/planner.md."""

    plan: bool = False
    """Do not train: search the fastest layouts that fit on --num-gpus GPUs, and print their flags, times and costs.
    Every flag of the layout that is given is a constraint. tools/plan_layout.py has more flags."""
    plan_cluster: str = "h100"
    """Plan: name of a cluster (a100-80gb, h100, h200, b200, gb200, ...), or the path of a TOML file."""
    plan_json: str | None = None
    """Plan: file for all layouts in JSON."""
    plan_html: str | None = None
    """Plan: file for the report, a page without references to other files."""

    plan_tokens: float = 1e12
    """Plan: tokens of the whole run, for days and price."""
    plan_price_per_gpu_hour: float | None = None
    """Plan: price of a GPU for an hour (default: the cluster's)."""
    plan_measured: str | None = None
    """Plan: --metrics-jsonl file of a real run on this cluster, whose step time corrects the level of all
    predictions."""

    def check(self) -> None:
        refuse_urls(values_of(self, "plan_cluster", "plan_json", "plan_html", "plan_measured"), "use a local file")
        require_positive(values_of(self, "plan_tokens"))
        require_at_least(0, values_of(self, "plan_price_per_gpu_hour"))
        names = (flag.name for flag in fields(self) if flag.name != "plan")
        require_flag("--plan", self.plan, changed_flags(self, *names))


@dataclass(frozen=True)
class FlagFileConfig:
    """Flags that are read from files."""

    config: str | None = None
    """YAML file with flags, such as the run.yaml of a run directory: lr: 3e-4, bf16: true, data-path: [0.7, a, 0.3, b].
    Flags of the command line override flags of the file, wherever they stand."""
    explain_flags: tuple[str, ...] | None = None
    """Without a value: print the flags that are not at their defaults, and where each value comes from (the command
    line, a line of --config, the preset, the model of --load-hf), and exit. With a recipe of Megatron-LM (a
    model_config.yaml of its functional tests, a directory of them, a shell script, or a file of flags): print for each
    flag whether it is kept, has no effect here, or must be corrected, and exit with code 0 if the run would start,
    otherwise 2. Other flags of the command line are added to the recipe; --num-gpus is the number of ranks (default:
    torchrun's in the script, or the fewest that the layout needs). A script is read as bash without arguments would in
    this environment; no command of it runs, and what cannot be decided without running it is named."""
    explain_edit: bool = False
    """Before --explain-flags, take out the flags of architectures that are not in the registry, and replace corpus and
    tokenizer by mock data (megatron/config/recipes.py has the list)."""

    explain_run_script: bool = False
    """Run the script of --explain-flags with bash, and explain what the programs receive that it starts. Only torchrun,
    python, srun, sbatch, mpirun, nsys, ft_launcher and uv are replaced by programs that record their words and do
    nothing else. Every other command of the script is executed, so use this for a script that you would also start."""

    def check(self) -> None:
        recipes = self.explain_flags or ()
        if len(recipes) > 1:
            raise ConfigError(f"--explain-flags takes one recipe, not {len(recipes)}: name a directory of them.")
        places = {"--config": self.config, "--explain-flags": next(iter(recipes), None)}
        refuse_urls(places, "copy the file to a local path")
        require_flag(
            "--explain-flags with a recipe", bool(recipes), changed_flags(self, "explain_edit", "explain_run_script")
        )
