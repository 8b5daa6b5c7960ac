"""A trained model that continues texts."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from megatron.config.inference import GenerationConfig
from megatron.inference.generator import complete
from megatron.inference.loading import OpenModel, join_ranks, load_model


class Model:
    """A model of a checkpoint, in this process or divided among those of torchrun. It is a context manager.

    ``load`` is a directory or URL of checkpoints, ``ckpt_step`` an iteration other than the last, ``tokenizer_model``
    the tokenizer's file if it has moved.
    """

    def __init__(
        self,
        load: str | os.PathLike[str],
        *,
        ckpt_step: int | None = None,
        tokenizer_model: str | os.PathLike[str] | None = None,
        pipeline_model_parallel_size: int = 1,
    ) -> None:
        tokenizer = None if tokenizer_model is None else str(tokenizer_model)
        with ExitStack() as end:
            topology = end.enter_context(join_ranks(pipeline_model_parallel_size))
            self._model = load_model(str(load), topology, ckpt_step, tokenizer)
            self._end = end.pop_all()
        # A model that is not closed leaves its groups before Python takes the modules down.
        weakref.finalize(self, self._end.close)

    def generate(self, prompt: str, **sampling: float) -> str:
        """The prompt with its continuation; a collective. ``sampling`` are the fields of
        :class:`~megatron.config.inference.GenerationConfig`."""
        return self.generate_batch([prompt], **sampling)[0]

    def generate_batch(self, prompts: Sequence[str], **sampling: float) -> list[str]:
        """:meth:`generate` for several prompts at once."""
        return continued(self._model, prompts, sampling)

    def close(self) -> None:
        """Leave the process groups."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, error, trace)


def continued(model: OpenModel, prompts: Sequence[str], sampling: dict[str, float]) -> list[str]:
    """The prompts with their continuations, as one batch."""
    config = replace(GenerationConfig(), **sampling)  # type: ignore[arg-type]
    config.check()
    completions = complete(model.model, model.tokenizer, prompts, config, model.stop_ids)
    return [f"{one.prompt}{one.text}" for one in completions]
