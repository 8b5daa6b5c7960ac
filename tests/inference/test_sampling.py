"""Tokens are drawn with the probabilities that temperature, top-k and top-p define."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config.inference import GenerationConfig
from megatron.inference.generator import Sampler

CONFIG = GenerationConfig(temperature=1.0, top_p=1.0)
DRAWS = 4000


def defined(logits: Tensor, config: GenerationConfig) -> Tensor:
    """The probabilities, token by token."""
    probabilities = torch.softmax(logits.double() / config.temperature, dim=0)
    kept, total = torch.zeros_like(probabilities), 0.0
    for number, token in enumerate(probabilities.argsort(descending=True).tolist()):
        if total < config.top_p and (number < config.top_k or not config.top_k):
            kept[token] = probabilities[token]
        total += float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.7, "top_k": 2}, {"top_p": 0.95, "top_k": 600}],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [7, 700])
def test_frequencies_are_the_probabilities(changes: dict[str, float], vocabulary: int) -> None:
    """With a flat distribution over a large vocabulary, top-p needs more than the tokens that are sorted first."""
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * (1.5 if vocabulary == 7 else 0.3)
    numbers = range(DRAWS)
    drawn = Sampler(config, numbers).draw(logits.expand(DRAWS, -1), numbers)
    wanted = defined(logits, config)
    assert not wanted[drawn].eq(0).any(), "a token was drawn that is left out"
    counts = torch.bincount(torch.tensor(drawn), minlength=vocabulary)
    # In ranges of equal probability, which have enough draws each.
    groups = (wanted.cumsum(0) * 5).floor().clamp(max=4).long()
    share, expected = (torch.zeros(5, dtype=torch.float64).index_add_(0, groups, x.double()) for x in (counts, wanted))
    assert (share / DRAWS - expected).abs().max() < 5 * 0.5 / math.sqrt(DRAWS)


def test_the_nucleus_ends_where_its_probability_is_reached() -> None:
    """Of four equal tokens two have half of the probability."""
    drawn = Sampler(replace(CONFIG, top_p=0.5), range(DRAWS)).draw(torch.zeros(DRAWS, 4), range(DRAWS))
    assert len(set(drawn)) == 2


def test_temperature_0_and_one_token_of_top_k_are_greedy() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    for changes in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}):
        sampler = Sampler(replace(CONFIG, **changes), range(5))
        assert sampler.draw(logits, range(5)) == logits.argmax(dim=1).tolist()


def test_a_text_draws_the_same_with_any_others_beside_it() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    together = Sampler(CONFIG, range(4))
    first, second = together.draw(logits, range(4)), together.draw(logits[2:], [2, 3])
    alone = Sampler(replace(CONFIG, seed=CONFIG.seed + 2), [0])
    assert [alone.draw(logits[2:3], [0]), alone.draw(logits[2:3], [0])] == [[first[2]], [second[0]]]
