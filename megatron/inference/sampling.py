"""The choice of the next token from logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.inference import GenerationConfig

_MOST_LIKELY = 256
"""Tokens that are sorted first: they nearly always have the probability of --top-p, and a vocabulary is large."""


class Sampler:
    """Draws the next tokens of several texts. A text's tokens depend on its own seed and logits alone."""

    def __init__(self, config: GenerationConfig, numbers: Sequence[int]) -> None:
        """For the texts with ``numbers``."""
        self._config = config
        self._random = {number: torch.Generator().manual_seed(config.seed + number) for number in numbers}

    def draw(self, logits: Tensor, numbers: Sequence[int]) -> list[int]:
        """The next id of each of the texts ``numbers`` from its logits, ``[texts, vocabulary]``."""
        if self._config.temperature == 0:
            ids: list[int] = logits.argmax(dim=-1).tolist()
            return ids
        candidates, ids_of_candidates = self._candidates(logits.cpu().double())
        sums = candidates.cumsum(dim=-1)
        drawn = torch.stack([torch.rand(1, generator=self._random[number], dtype=torch.float64) for number in numbers])
        # The first candidate whose sum exceeds the drawn part of the total. A total may round up to the bound.
        places = torch.searchsorted(sums, drawn * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
        chosen: list[int] = ids_of_candidates.gather(1, places).flatten().tolist()
        return chosen

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids of the tokens to draw from, the most likely first, ``[texts, candidates]`` each; 0 for
        tokens that are left out."""
        config, vocabulary = self._config, logits.shape[1]
        probabilities = torch.softmax(logits / config.temperature, dim=-1)
        if config.top_p == 1 and not config.top_k:
            return probabilities, torch.arange(vocabulary).expand_as(probabilities)
        count = min(config.top_k or _MOST_LIKELY, vocabulary)
        likely, ids = probabilities.topk(count)
        if not config.top_k and count < vocabulary and bool((likely.sum(dim=-1) < config.top_p).any()):
            likely, ids = probabilities.sort(dim=-1, descending=True)
        # Keep a token while the tokens before it have less than top_p; the first always stays.
        before = likely.cumsum(dim=-1) - likely
        return likely.where(before < config.top_p, 0.0), ids
