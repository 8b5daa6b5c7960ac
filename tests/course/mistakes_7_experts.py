"""Mistakes in the answer to exercise 7: a text of it, what stands there instead, and words of the sentence about it."""

SORT = "chosen.argsort(stable=True)"
TOKENS = "tokens[choices // experts.shape[1]]"
COUNTS = "chosen.bincount(minlength=num_experts)"
FOR_RANKS = "rows_of_experts.view(num_ranks, -1).sum(dim=1)"
FACTORS = "weights.flatten()[choices].unsqueeze(1)"
RESULT = "by_choice.view(*weights.shape, -1).sum(dim=1)"
BACK = "weighted[choices.argsort()]"

MISTAKES = (
    (SORT, "experts[:, 0].argsort(stable=True)", "is no permutation of 12"),
    (SORT, "chosen.argsort(stable=True, descending=True)", "in this order: sort ascending"),
    (SORT, "len(chosen) - 1 - chosen.flip(0).argsort(stable=True)", "not in the order of their choices: sort stably"),
    (TOKENS, "tokens[choices % len(tokens)]", "concatenated choice by choice"),
    (TOKENS, "tokens.repeat_interleave(experts.shape[1], dim=0)", "they are in the order of the tokens"),
    (
        f"{SORT}\n",
        "experts.T.flatten().argsort(stable=True)\n",
        "numbers the first choices of all tokens, then",
    ),
    ("rows_of_experts.tolist(), ", "rows_of_experts, ", "rows_of_experts is of type Tensor"),
    ("rows_of_experts.tolist()", "chosen.unique(return_counts=True)[1].tolist()", "must not move up"),
    (COUNTS, "experts[:, 0].bincount(minlength=num_experts)", "first choices alone"),
    (FOR_RANKS, "rows_of_experts.view(-1, num_ranks).sum(dim=0)", "neighbouring experts share a rank"),
    (FOR_RANKS, "chosen.new_full([num_ranks], len(chosen) // num_ranks)", "a router is never even"),
    (FACTORS, "1.0", "without weights: multiply"),
    (FACTORS, "weights.flatten().unsqueeze(1)", "with weights in the order of the tokens"),
    (FACTORS, FACTORS.replace("weights.", "(weights / weights.sum(1, keepdim=True))."), "divided by their sum"),
    (FACTORS, f"{FACTORS}.detach()", "the router learns through them alone"),
    (BACK, "weighted", "the sum of neighbouring rows"),
    (BACK, "weighted[choices]", "sorted a second time"),
    (RESULT, "by_choice.view(*weights.shape, -1).mean(dim=1)", "divided by k"),
    (
        RESULT,
        "outputs.new_zeros(len(weights), outputs.shape[1]).index_put((choices // weights.shape[1],), weighted)",
        "one output of each token",
    ),
)
