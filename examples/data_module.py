"""Data of your own: sums of two numbers, where only the results count for the loss.

    python pretrain_llama.py … --data-module examples/data_module.py:build

Sample number n is a function of n alone, so a resumed run begins at ``consumed_samples``, with any number of ranks. A
loader that cannot say so has ``state_dict`` and ``load_state_dict``: docs/data.md.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from megatron_llama import DataContext


def build(context: DataContext) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The samples of this data-parallel rank: token ids [s + 1], and the weight of each loss [s]."""
    kind = ["train", "validation"].index(context.split)
    for number in count(context.consumed_samples + context.rank, context.size):
        random = np.random.default_rng([context.config.training.seed, kind, number])
        tokens, weights = [context.end_of_document], [0.0]
        while len(tokens) <= context.config.seq_length:
            one, other = random.integers(100, size=2)
            question = context.tokenizer.tokenize(f"{one} + {other} =")
            answer = [*context.tokenizer.tokenize(f" {one + other}"), context.end_of_document]
            tokens += question + answer
            weights += [0.0] * len(question) + [1.0] * len(answer)
        yield np.array(tokens[: context.config.seq_length + 1]), np.array(weights[1 : context.config.seq_length + 1])
