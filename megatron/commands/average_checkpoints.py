"""Average the weights of several checkpoints of one run, for example of the stable phase of --lr-decay-style WSD.

The result is a checkpoint of weights alone, without optimizer state: it can be evaluated, exported, and trained on with
--finetune. It is written block by block, so memory does not grow with the model.
"""

import shlex
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from megatron.commands.weight_checkpoints import (
    Progress,
    check_unused,
    model_flags,
    verified_checkpoint,
)
from megatron.commands.weight_checkpoints import (
    Progress as progress_bar,
)
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError, UserError, report
from megatron.flags import changed_words, require_at_least, require_positive
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
    from megatron.checkpoint.remote_path import path_of
    from megatron.checkpoint.schema import upgrade
    from megatron.checkpoint.streaming import AveragedModel, save_streaming
    from megatron.checkpoint.tokenizer_files import COPY, copy_tokenizer_of, flags_of_copy, tokenizer_of
    from megatron.training.checkpoints.comparison import check_architecture
    from megatron.training.checkpoints.saved_run import state_of_weights

    check_unused(Path(config.save))
    saved = [verified_checkpoint(config.load, iteration) for iteration in config.iterations]
    states = [upgrade(one.manifest.state, one.manifest.format_version) for one in saved]
    architecture = states[0].architecture
    for one, state in zip(saved, states):
        where = f"The checkpoint of iteration {one.iteration} in {config.load}"
        check_architecture(asdict(architecture), asdict(state.architecture), where, "average checkpoints of one run")
    model = AveragedModel(saved, config.weights or [1.0] * len(saved), progress.advance)
    tokenizer = tokenizer_of(states[0], path_of(config.load), saved[0].iteration)
    copied = flags_of_copy(tokenizer, iteration_directory(Path(config.save), config.iteration).resolve() / COPY)
    groups = {
        "model": asdict(ModelConfig.of(architecture)),
        "tokenizer": asdict(copied),
        "precision": asdict(states[0].flag_group("precision", PrecisionConfig)),
    }
    progress.expect(model.nbytes)
    directory = save_streaming(
        Path(config.save),
        config.iteration,
        model.tensors,
        model.read,
        state_of_weights(config.iteration, architecture, groups).to_json(),
        furnish=lambda saving: copy_tokenizer_of(tokenizer, saving / COPY),
    )
    flags = ["--load", config.save, "--finetune", *model_flags(architecture), *changed_words(copied)]
    return (
        f"wrote the average of iterations {', '.join(map(str, config.iterations))} to {directory}, without optimizer "
        f"state\ntrain on with: pretrain_llama.py {shlex.join(flags)}"
    )


def main() -> int:
    """Run the tool; the exit code."""
    config = tyro.cli(Average, description=__doc__)
    # A terminated run, too, removes what it has written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        config.check()
        with progress_bar() as progress:
            message = average(config, progress)
        print(message)
    except UserError as error:
        report(error, rank=0)
        return 1
    except KeyboardInterrupt:
        print("ERROR: interrupted; nothing has been written.", file=sys.stderr)
        return 130
    return 0
