"""Average the weights of several checkpoints of one run, for example of the stable phase of --lr-decay-style WSD.

The result is a checkpoint of weights alone, without optimizer state: it can be evaluated, exported, and trained on with
--finetune. It is written block by block, so memory does not grow with the model.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatron.commands.tool import run_tool
from megatron.commands.weight_checkpoints import (
    Progress,
    check_unused,
    derived_weights,
    save_weights,
    verified_checkpoint,
)
from megatron.errors import ConfigError
from megatron.flags import require_at_least, require_positive
from megatron.urls import check_place, refuse_urls


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


main = partial(run_tool, Average, run, __doc__, interrupted="nothing has")
