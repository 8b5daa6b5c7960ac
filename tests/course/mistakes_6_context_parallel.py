"""Mistakes in the answer to exercise 6: a text of it, what stands there instead, and words of the sentence about it."""

SPLIT = "return first + second\n"
REFERENCE = "log_sum_exp.masked_fill(log_sum_exp.isneginf(), 0.0)"
RESULT = "return first * first_weight + second * second_weight, log_sum_exp"
SUM = "log_sum_exp = first_log_sum_exp.logaddexp(second_log_sum_exp)"

MISTAKES = (
    (SPLIT, "return chunk(rank, num_ranks, length)\n", "rank 0 has 78 pairs and rank 3 has 510: late queries"),
    (SPLIT, "return list(range(rank, length, num_ranks))\n", "stripes are nearly equal"),
    ("2 * num_ranks - 1 - rank,", "num_ranks + rank,", "as far from the end as the other is from the start"),
    ("2 * num_ranks - 1 - rank,", "2 * num_ranks - rank,", "a rank has position 48: the last of 8 chunks is 7"),
    ("2 * num_ranks - 1 - rank,", "2 * num_ranks - 2 - rank,", "position 18 is on 2 ranks"),
    (SPLIT, "return second + first\n", "the positions of rank 0 are not ascending"),
    (
        SPLIT,
        "half = range(rank, length // 2, num_ranks)\n    return [*half, *(length - 1 - one for one in half[::-1])]\n",
        "equal work in 12 pieces",
    ),
    (RESULT, "return (first + second) / 2, log_sum_exp", "is the mean of both outputs"),
    (RESULT, "return first + second, log_sum_exp", "is the sum of both"),
    (RESULT, "return first * second_weight + second * first_weight, log_sum_exp", "with the weight of the other"),
    (RESULT, "return first * first_weight + second * second_weight, reference", "a sum without addends"),
    (SUM, "log_sum_exp = (first_log_sum_exp.exp() + second_log_sum_exp.exp()).log()", "a large number overflows"),
    (REFERENCE, "log_sum_exp", "minus infinity minus minus infinity is no number"),
    (REFERENCE, "log_sum_exp.max()", "row by row"),
    (RESULT, f"{RESULT[:-11]}first_log_sum_exp.maximum(second_log_sum_exp)", "it is the larger of the two"),
)
