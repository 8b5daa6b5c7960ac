"""Flags that read other flags from files."""

from dataclasses import dataclass

from megatron.flags import changed_flags, require_flag, values_of
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class FlagFileConfig:
    """Flags that are read from files."""

    config: str | None = None
    """YAML file with flags, such as the run.yaml of a run directory: lr: 3e-4, bf16: true, data-path: [0.7, a, 0.3, b].
    Flags of the command line override flags of the file, wherever they stand."""
    explain_flags: str | None = None
    """Recipe of Megatron-LM: a model_config.yaml of its functional tests, a directory of them, a shell script, or a
    file of flags. Print for each flag whether it is kept, has no effect here, or must be corrected, and exit with code
    0 if the run would start, otherwise 2. Other flags of the command line are added to the recipe; --num-gpus is the
    number of ranks (default: torchrun's in the script, or the fewest that the layout needs). A script is read as bash
    without arguments would in this environment; no command of it runs, and what cannot be decided without running it is
    named."""
    explain_edit: bool = False
    """Before --explain-flags, take out the flags of architectures that are not in the registry, and replace corpus and
    tokenizer by mock data (megatron/config/recipes.py has the list)."""

    explain_run_script: bool = False
    """Run the script of --explain-flags with bash, and explain what the programs receive that it starts. Only torchrun,
    python, srun, sbatch, mpirun, nsys, ft_launcher and uv are replaced by programs that record their words and do
    nothing else. Every other command of the script is executed, so use this for a script that you would also start."""

    def check(self) -> None:
        refuse_urls(values_of(self, "config", "explain_flags"), "copy the file to a local path")
        require_flag(
            "--explain-flags", self.explain_flags is not None, changed_flags(self, "explain_edit", "explain_run_script")
        )
