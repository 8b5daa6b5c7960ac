"""Continue texts with a trained model; architecture and tokenizer come from its checkpoint or Hugging Face directory.

Runs in one process, or with tensor and pipeline parallelism under torchrun --nproc-per-node N. Texts go to standard
output, tokens per second to standard error.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from megatron.commands.tool import exit_at_once, run_on_ranks
from megatron.config.inference import GenerationConfig, LoadedModelConfig
from megatron.errors import ConfigError, RankError
from megatron.flags import require_at_least
from megatron.urls import refuse_urls

if TYPE_CHECKING:
    from megatron.inference.generator import Speed
    from megatron.inference.loading import OpenModel


@dataclass(frozen=True)
class GenerateConfig(LoadedModelConfig, GenerationConfig):
    """Model, prompts and sampling."""

    prompt: str | None = None
    """Text to continue."""
    prompts: str | None = None
    """File of texts to continue: one a line, or in a file named *.jsonl the field "prompt" of one object a line. The
    results are printed as JSON, one object a line: the fields of the prompt, and text, tokens, finish."""
    output: str | None = None
    """File for the results of --prompts, instead of standard output."""
    interactive: bool = False
    """Read prompts from standard input. Each continues the text before it; an empty line begins a new text, the end of
    the input ends."""
    batch_size: int = 8
    """Prompts of --prompts that are continued at once."""

    def check(self) -> None:
        LoadedModelConfig.check(self)
        GenerationConfig.check(self)
        refuse_urls({"--prompts": self.prompts, "--output": self.output}, "use a local path")
        given = {"--prompt": self.prompt is not None, "--prompts": self.prompts is not None}
        given["--interactive"] = self.interactive
        if sum(given.values()) != 1:
            named = " and ".join(flag for flag, is_given in given.items() if is_given) or "none of them"
            raise ConfigError(f"Exactly one of {', '.join(given)} is needed, and {named} is given: correct it.")
        if self.output is not None and self.prompts is None:
            raise ConfigError(f"--output {self.output} needs --prompts: add it, or redirect the standard output.")
        require_at_least(1, {"--batch-size": self.batch_size})


def generate(config: GenerateConfig) -> Iterator[str]:
    """The text that the flags ask for, in growing parts; the same on every rank."""
    from megatron.inference.generator import Speed
    from megatron.inference.loading import open_model

    with open_model(config) as opened_model:
        session = Session(config, opened_model, Speed())
        if config.prompt is not None:
            yield from session.continued_prompt(config.prompt)
        elif config.prompts is not None:
            yield from session.results(Path(config.prompts))
        else:
            yield from session.conversation()
        if opened_model.topology.rank == 0:
            print(session.speed, file=sys.stderr)


@dataclass(frozen=True)
class Session:
    """A model and the flags of its texts."""

    config: GenerateConfig
    open: "OpenModel"
    speed: "Speed"

    def continued_prompt(self, prompt: str) -> Iterator[str]:
        from megatron.inference.generator import TextStream, prompt_ids

        ids = prompt_ids(self.open.tokenizer, prompt, self.config.add_bos)
        yield TextStream(self.open.tokenizer, ids).prompt
        yield from self.continuation(ids)
        yield "\n"

    def continuation(self, ids: list[int]) -> Iterator[str]:
        """The text after ``ids``, to which the new ids are added."""
        from megatron.inference.generator import TextStream, generate_ids

        stream = TextStream(self.open.tokenizer, ids)
        for (new,) in generate_ids(self.open.model, [tuple(ids)], self.config, self.open.stop_ids, speed=self.speed):
            if new.finish != "end_of_document":
                ids.append(new.token)
            yield stream.add_token(new)

    def results(self, path: Path) -> Iterator[str]:
        """A line of JSON for every prompt of a file."""
        from megatron.core.control import run_on_rank0
        from megatron.inference.generator import complete, read_prompts

        config = self.config
        prompts = run_on_rank0(self.open.topology.control, lambda: read_prompts(path))
        for first in range(0, len(prompts), config.batch_size):
            batch = prompts[first : first + config.batch_size]
            completions = complete(
                self.open.model,
                self.open.tokenizer,
                [prompt.text for prompt in batch],
                config,
                self.open.stop_ids,
                config.add_bos,
                first,
                self.speed,
            )
            yield from (prompt.result(completion) + "\n" for prompt, completion in zip(batch, completions, strict=True))

    def conversation(self) -> Iterator[str]:
        """Continuations of the lines of standard input, each with the text before it."""
        from megatron.core.control import run_on_rank0
        from megatron.inference.generator import prompt_ids

        max_length = self.config.max_position_embeddings or self.open.model.max_length
        ids: list[int] = []
        while line := run_on_rank0(self.open.topology.control, _read_line):
            line = line.removesuffix("\n")
            if not line:
                ids = []
                continue
            # Only a new text begins with the beginning-of-text token.
            if ids:
                ids += self.open.tokenizer.tokenize("\n" + line)
            else:
                ids = prompt_ids(self.open.tokenizer, line, self.config.add_bos)
            if len(ids) >= max_length:
                yield f"({len(ids)} tokens are too many, a text has at most {max_length}: a new text begins.)\n"
                ids = []
                continue
            yield from self.continuation(ids)
            yield "\n"


def _read_line() -> str:
    """A line of standard input with its end; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def opened(output: str | None, rank: int) -> AbstractContextManager[TextIO]:
    """The file ``output``, or standard output. Other ranks than 0 write to the null device."""
    if rank == 0 and output is None:
        return nullcontext(sys.stdout)
    try:
        return open(os.devnull if rank else str(output), "w", encoding="utf-8")
    except OSError as error:
        raise RankError(f"--output {output} cannot be written ({error.strerror}): use another path.") from error


def print_text(config: GenerateConfig, rank: int) -> None:
    config.check()
    with opened(config.output, rank) as file:
        for part in generate(config):
            print(part, end="", file=file, flush=True)


main = partial(run_on_ranks, GenerateConfig, print_text, __doc__)


def run() -> NoReturn:
    exit_at_once(main())
