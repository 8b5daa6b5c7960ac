"""Mistakes in the answer to exercise 3: old text, new text, a part of the sentence."""

NORM = "communicator.all_reduce(shard.square().sum()).sqrt().item()"
REDUCE = "communicator.reduce_scatter(padded)"
UPDATE = "    state.master.sub_(adam.learning_rate * mean / (square.sqrt() + adam.eps))\n"
DECAY = "    state.master.mul_(1 - adam.learning_rate * adam.weight_decay)\n"
GATHER = "weights.copy_(communicator.all_gather(state.master.to(weights.dtype))[: len(weights)])"
OWN = """for place, one in enumerate(communicator.own_part(torch.arange(len(padded)))[: len(state.master)]):
        if one < len(weights):
            weights[one] = state.master[place]
    communicator.all_gather(state.master)"""

MISTAKES = [
    (".to(state.master.dtype) / communicator.size", ".to(state.master.dtype)", "which Adam and clipping would hide"),
    (".to(state.master.dtype) / communicator.size", " / communicator.size**2", "divided twice"),
    (REDUCE, "communicator.own_part(padded * communicator.size)", "that of the rank's own samples"),
    (REDUCE, "communicator.own_part(communicator.all_reduce(padded))", "the gradients need one reduce_scatter"),
    (NORM, "shard.norm().item()", "or each rank clips otherwise"),
    (NORM, "communicator.all_reduce(shard.norm()).item()", "the sum of the norms of the shards"),
    (NORM, "communicator.all_reduce(shard.square().sum()).item()", "its square, so take the root"),
    (NORM, "communicator.all_reduce(shard.square()).sum().sqrt().item()", "only the squared norm, one number"),
    (
        "min(1.0, adam.max_norm / (norm + 1e-6))",
        "adam.max_norm / (norm + 1e-6)",
        "is enlarged to the norm of the limit",
    ),
    ("shard * min(1.0, adam.max_norm / (norm + 1e-6))", "shard", "is not clipped"),
    ("(norm + 1e-6)", "norm", "is clipped without the 1e-6"),
    ("(norm + 1e-6)", "(shard.norm().item() + 1e-6)", "is clipped by the norm of the rank's own shard"),
    ("mul_(adam.beta1).add_(shard, alpha=1 - adam.beta1)", "lerp_(shard, adam.beta1)", "has the weight beta1"),
    (REDUCE, "communicator.own_part(padded)", "is a part of the rank's own samples"),
    (
        f".to(state.master.dtype) / communicator.size\n    norm = {NORM}\n",
        f".to(state.master.dtype)\n    norm = {NORM}\n    shard = shard / communicator.size\n",
        "before its norm is taken",
    ),
    ("state.exp_avg_sq / (1 - adam.beta2**state.step)", "state.exp_avg_sq", "correction of exp_avg alone"),
    (DECAY, DECAY.replace("adam.learning_rate * ", ""), "decay by weight_decay in each step"),
    ("all_gather(state.master.to(weights.dtype))", "all_gather(state.master)", "round the master weights before"),
    (DECAY, "", "have no weight decay"),
    (DECAY + UPDATE, UPDATE + DECAY, "are decayed after the update"),
    (
        "    state.step += 1\n",
        "    shard = shard + adam.weight_decay * state.master\n    state.step += 1\n",
        "has the weight decay in it",
    ),
    (
        "state.exp_avg / (1 - adam.beta1**state.step), state.exp_avg_sq / (1 - adam.beta2**state.step)",
        "state.exp_avg, state.exp_avg_sq",
        "have no bias correction",
    ),
    ("    state.step += 1\n", "", "have NaN"),
    ("(square.sqrt() + adam.eps)", "(square + adam.eps).sqrt()", "have eps inside of the root"),
    (
        "torch.zeros_like(master), torch.zeros_like(master)",
        "torch.zeros_like(weights), torch.zeros_like(weights)",
        "or nothing is saved",
    ),
    ("(0, -len(weights) % communicator.size)", "(0, 0)", "and not [3] in float64"),
    (GATHER, OWN, "gather the shards of the other ranks"),
    (
        GATHER,
        GATHER.replace("weights.copy_", "weights = (", 1).replace("((", "(", 1),
        "write into the tensor of the caller",
    ),
    ("state.step += 1", "state.step = 1", "must last in state"),
    (
        "    master = communicator.own_part(padded).clone()",
        "    master = communicator.own_part(padded).to(weights.dtype).clone()",
        "[2] in bfloat16",
    ),
    (
        "    state.step += 1\n",
        "    state.step += 1\n    whole = torch.nn.functional.pad(weights, (0, len(padded) - len(weights)))\n"
        "    state.master.copy_(communicator.own_part(whole))\n",
        "below their spacing of 1/256",
    ),
]
