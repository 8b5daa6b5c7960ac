"""Mistakes in the answer to exercise 4: old text, new text, a part of the sentence."""

COPY = "x, lambda x: x.clone(), lambda dy: communicator.all_reduce(dy.clone())"
REDUCE = "x, lambda x: communicator.all_reduce(x.clone()), lambda dy: dy"
GATHER = "x, communicator.all_gather, communicator.reduce_scatter"
SCATTER = "x, communicator.reduce_scatter, communicator.all_gather"
SUM = "communicator.own_part(communicator.all_reduce(x.clone()))"
LAST = "    return x + (scatter_rows if sequence_parallel else reduce_from_ranks)(communicator, partial)"
PRODUCT = "    gate, up = (y @ gate_up.T).chunk(2, dim=-1)  # [s, f / n] each\n"
TWICE = """    if sequence_parallel:
        again = gather_rows(communicator, rms_norm(x, copy_to_ranks(communicator, norm)))
    else:
        again = copy_to_ranks(communicator, rms_norm(x, norm))
    gate, up = y @ gate_up.chunk(2)[0].T, again @ gate_up.chunk(2)[1].T
"""

MISTAKES = [
    (COPY, "x, lambda x: x.clone(), lambda dy: dy", "returns the rank's own gradient: each rank knows"),
    (COPY, COPY.replace("dy.clone()", "dy"), "overwrites the gradient that it gets"),
    (COPY, COPY.replace("x.clone()", "communicator.all_reduce(x.clone())"), "every rank has all of x already"),
    (REDUCE, REDUCE.replace("dy: dy", "dy: communicator.all_reduce(dy.clone())"), "4 times too large"),
    (REDUCE, REDUCE.replace("x.clone()", "x"), "overwrites its input"),
    (REDUCE, "x, lambda x: x.clone(), lambda dy: dy", "does not return the sum of all ranks"),
    (GATHER, GATHER.replace("reduce_scatter", "own_part"), "takes its rows of the rank's own gradient"),
    (
        GATHER,
        "x, communicator.all_gather, lambda dy: communicator.own_part(communicator.all_reduce(dy.clone()))",
        "to throw most of it away",
    ),
    (SCATTER, SCATTER.replace("reduce_scatter", "own_part"), "cuts its rows out of the rank's own summand"),
    (
        SCATTER,
        SCATTER.replace("communicator.all_gather", "lambda dy: torch.cat([dy] * communicator.size)"),
        "has summed into the rows of others",
    ),
    ("    return rows, ", "    return communicator.own_part(gate_up), ", "which are all gate or all up"),
    ("communicator.own_part(down.T).T", "communicator.own_part(down)", "The second part of shard is"),
    ("rms_norm(x, copy_to_ranks(communicator, norm))", "rms_norm(x, norm)", "that of the rank's own rows: the weight"),
    (
        "copy_to_ranks(communicator, rms_norm(x, norm))",
        "rms_norm(copy_to_ranks(communicator, x), norm)",
        "between the norm and",
    ),
    ("copy_to_ranks(communicator, rms_norm(x, norm))", "rms_norm(x, norm)", "and the residual passes by it"),
    (LAST, LAST.replace("x + (", "(").replace("partial)", "x + partial)"), "add the residual after the sum"),
    (PRODUCT, TWICE, "gate and up share their"),
    ("functional.silu(gate)", "functional.gelu(gate)", "is not that of its docstring"),
    (
        PRODUCT,
        PRODUCT.replace("y @ gate_up.T", "reduce_from_ranks(communicator, y @ gate_up.T)"),
        "is not that of one process",
    ),
    (
        "gather_rows(communicator, rms_norm(x, copy_to_ranks(communicator, norm)))",
        "rms_norm(gather_rows(communicator, x), copy_to_ranks(communicator, norm))",
        "the norm stands before gather_rows",
    ),
    (
        "copy_to_ranks(communicator, rms_norm(x, norm))",
        "copy_to_ranks(communicator, rms_norm(x, copy_to_ranks(communicator, norm)))",
        "second one that sums is too many",
    ),
]
