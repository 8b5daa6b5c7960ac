"""A model as EleutherAI's lm-eval reads one: its tasks ask for log probabilities and for texts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron.config.inference import GenerationConfig
from megatron.errors import ConfigError
from megatron.inference.cached_model import Ids, score_continuations
from megatron.inference.generator import TextStream, generate_ids
from megatron.inference.loading import OpenModel

_SAMPLING = ("temperature", "top_k", "top_p")


class LmEvalModel(TemplateLM):
    """Answers the requests of lm-eval's tasks. Every rank must receive the same requests: each answer is a collective.

    ``add_bos`` begins every text with the tokenizer's beginning-of-text token.
    """

    def __init__(self, model: OpenModel, batch_size: int, add_bos: bool = False) -> None:
        super().__init__()
        self._open, self._tokenizer, self.batch_size, self._add_bos = model, model.tokenizer, batch_size, add_bos
        self._is_quiet = model.topology.rank != 0

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self._tokenizer.eod if self._tokenizer.bos is None else self._tokenizer.bos

    @property
    def max_length(self) -> int:
        return self._open.model.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self._tokenizer.tokenize(string)
        begins = self._add_bos if add_special_tokens is None else add_special_tokens and self._add_bos
        return [self.prefix_token_id, *ids] if begins else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([pair[1:] for pair in requests], disable_tqdm)

    def _scores(self, pairs: Sequence[tuple[Ids, Ids]], quietly: bool) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc="log probabilities", disable=quietly or self._is_quiet) as bar:
            scores = score_continuations(self._open.model, pairs, self.batch_size, bar.update)
        return [(one.log_probability, one.is_greedy) for one in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each whole text, in windows of the model's length of which each id is in one."""
        pairs: list[tuple[Ids, Ids]] = []
        texts: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self._tokenizer.tokenize(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for window in windows:
                pairs.append(make_disjoint_window(window))
                texts.append(number)
        totals = [0.0] * len(requests)
        for number, (log_probability, _) in zip(texts, self._scores(pairs, disable_tqdm), strict=True):
            totals[number] += log_probability
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """A text after each context, until one of the task's strings, the end of the document, or the number of tokens.

        Raises :class:`ConfigError` for a setting of a task that generation here does not have.
        """
        alike: dict[str, list[int]] = {}  # requests of equal settings, which a batch can have
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm or self._is_quiet) as bar:
            for numbers in alike.values():
                config, until = sampling_of(requests[numbers[0]].args[1])
                room = self.max_length - config.max_new_tokens
                if room < 1:
                    raise ConfigError(
                        f"A task asks for {config.max_new_tokens} new tokens, and the model has {self.max_length} "
                        "positions: leave the task out."
                    )
                # Without the first ids of a context if there is no room for the new text.
                prompts = {
                    number: (self.tok_encode(requests[number].args[0]) or [self.prefix_token_id])[-room:]
                    for number in numbers
                }
                numbers.sort(key=lambda number: len(prompts[number]))
                for first in range(0, len(numbers), self.batch_size):
                    batch = numbers[first : first + self.batch_size]
                    for number, text in zip(batch, self._texts([prompts[number] for number in batch], config, until)):
                        texts[number] = text
                    bar.update(len(batch))
        return texts

    def _texts(self, prompts: Sequence[list[int]], config: GenerationConfig, until: Sequence[str]) -> list[str]:
        """The texts of a batch, each up to the first of the strings ``until``."""
        streams = [TextStream(self._tokenizer, prompt) for prompt in prompts]
        texts, unfinished = [""] * len(prompts), set(range(len(prompts)))
        for turn in generate_ids(self._open.model, prompts, config, self._open.stop_ids):
            for new in turn:
                if new.row not in unfinished:
                    continue
                text = texts[new.row] + streams[new.row].add_token(new)
                ends = [place for place in (text.find(end) for end in until) if place >= 0]
                texts[new.row] = text[: min(ends)] if ends else text
                if ends or new.finish is not None:
                    unfinished.remove(new.row)
            if not unfinished:
                break
        return texts


def sampling_of(settings: dict[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """The sampling that a task asks for, greedy by default, and the strings that end a text."""
    asked = normalize_gen_kwargs(settings)
    until = [end for end in asked.pop("until", []) if end]
    temperature = 1.0 if asked.pop("do_sample", None) else 0.0
    config = GenerationConfig(max_new_tokens=asked.pop("max_gen_toks"), temperature=temperature, top_p=1.0)
    config = replace(config, **{name: asked.pop(name) for name in _SAMPLING if name in asked})
    unknown = {name: value for name, value in asked.items() if value is not None}
    if unknown:
        words = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise ConfigError(f"A task asks for {words}, which generation does not have: leave the task out.")
    return config, until
