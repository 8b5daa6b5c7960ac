"""A run as the dry run and the planner have it, from its flags."""

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.planner.plan import Run
from megatron.training.build.vocabulary import planned_vocabulary


def planned_run(flags: str, num_gpus: int) -> Run:
    """The checked run of ``flags`` on ``num_gpus`` ranks."""
    config = parse_command_line(flags.split())
    check_run(config, num_gpus)
    return Run.of(config, num_gpus, planned_vocabulary(config))
