"""Exercise 6: context parallelism, the split of a sequence and the merge of attention over two sets of keys. The page
is docs/course/6_context_parallel.md.

Fill the two holes, then: megatron-llama course check 6
"""

from torch import Tensor


def chunk(number: int, num_chunks: int, length: int) -> list[int]:
    """The positions of chunk ``number`` of a sequence of ``length`` in ``num_chunks`` equal chunks."""
    size = length // num_chunks
    return list(range(number * size, (number + 1) * size))


def positions(rank: int, num_ranks: int, length: int) -> list[int]:
    """The positions that ``rank`` holds, ascending; ``length`` is a multiple of ``2 * num_ranks``.

    The query at position i attends to the i + 1 keys up to its own. Every rank must have the same number of these
    pairs, every position is on one rank, and a rank has two pieces of neighbouring positions: kernels are fast on
    tiles, not on single rows.
    """
    first = chunk(rank, 2 * num_ranks, length)
    second = chunk(2 * num_ranks - 1 - rank, 2 * num_ranks, length)
    return first + second


def merge(
    first: Tensor, first_log_sum_exp: Tensor, second: Tensor, second_log_sum_exp: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each: its output and log-sum-exp.

    An output ``[b, n, s, d]`` is softmax(scores) values, a log-sum-exp ``[b, n, s]`` is log(sum(exp(scores))). A query
    that sees no key of a set has the output 0 and the log-sum-exp minus infinity there. Log-sum-exps may be a thousand,
    whose exponential is no number of fp64. ``Tensor.logaddexp`` may help.
    """
    log_sum_exp = first_log_sum_exp.logaddexp(second_log_sum_exp)
    # A query that sees no key at all has minus infinity here; its weights would be exp(-inf + inf), not a number.
    reference = log_sum_exp.masked_fill(log_sum_exp.isneginf(), 0.0)
    first_weight = (first_log_sum_exp - reference).exp().unsqueeze(-1)  # [b, n, s, 1]
    second_weight = (second_log_sum_exp - reference).exp().unsqueeze(-1)
    return first * first_weight + second * second_weight, log_sum_exp
