"""Mistakes in the answer to exercise 1: old text, new text, a part of the sentence."""

from pathlib import Path

SECOND_RUN = """        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random_state)
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)
"""
FIRST_RUN = """        ctx.save_for_backward(*inputs)
        return function(*inputs)
"""
GRAD = """        output = torch.autograd.grad(output, inputs[:2], gradient)
        return None, *output, None
"""
KEPT_GRAPH = """        ctx.save_for_backward(*inputs)
        with torch.enable_grad():
            ctx.output = function(*(one.detach().requires_grad_(one.requires_grad) for one in inputs))
        return ctx.output.detach()
"""
APPLY = "    output: Tensor = Checkpoint.apply(function, *inputs)\n"

_ANSWER = (Path(__file__).parent / "answers" / "1_memory_wall.py").read_text(encoding="utf-8")
SAVED = _ANSWER[_ANSWER.index("save_for_backward") : _ANSWER.index("]\n        with")]
"""From where the inputs are saved to where they are read."""

MISTAKES = [
    ("torch.enable_grad(), torch.random", "torch.random", "The second run has no graph"),
    ("            torch.set_rng_state(ctx.random_state)\n", "", "draws other random numbers than the first"),
    ("torch.enable_grad(), torch.random.fork_rng(devices=[])", "torch.enable_grad()", "moves the random state"),
    (
        "        torch.autograd.backward(output, gradient)\n        return None, *(one.grad for one in inputs)\n",
        GRAD,
        "also adds to those of the parameters",
    ),
    ("one.detach().requires_grad_(one.requires_grad)", "one", "connected to the graph above the inputs"),
    ("return None, *(one", "return tuple(one", "returns a wrong number of values"),
    ("backward(output, gradient)", "backward(output, torch.ones_like(gradient))", "are those of output.sum()"),
    (FIRST_RUN, KEPT_GRAPH, "let the first run record nothing"),
    (
        "save_for_backward(*inputs)",
        "save_for_backward(*(one.clone().requires_grad_(one.requires_grad) for one in inputs))",
        "as copies of them take",
    ),
    (
        "        return function(*inputs)\n",
        "        return function(*inputs).detach() * 2\n",
        "is not that of the function",
    ),
    ("ctx.function", "Checkpoint.function", "not in the class or in the module"),
    ("requires_grad_(one.requires_grad)", "requires_grad_()", "RuntimeError: only Tensors of floating"),
    ("*(one.grad for one in inputs)", "inputs[1].grad, inputs[0].grad, None", "in the order of the inputs"),
    (
        "        torch.autograd.backward(output, gradient)\n",
        "        torch.autograd.backward(output, gradient, retain_graph=True)\n"
        "        torch.autograd.backward(output, gradient)\n",
        "twice the right one",
    ),
    (
        SAVED,
        SAVED.replace("save_for_backward(*inputs)", "kept = inputs").replace("saved_tensors", "kept"),
        "not as attributes of ctx",
    ),
    (SECOND_RUN, SECOND_RUN.replace("output = ctx", "ctx.function(*inputs)\n            output = ctx"), "runs 3 times"),
    (
        "        torch.autograd.backward(output, gradient)\n        return None, *(one.grad for one in inputs)\n",
        "        return None, *torch.autograd.grad(output, inputs, gradient)\n",
        "that has none, such as token ids",
    ),
    ("one.detach().requires_grad_(one.requires_grad)", "one.detach()", "what detach() returns requires no gradient"),
    (
        "        return function(*inputs)\n",
        "        torch.manual_seed(0)\n        return function(*inputs)\n",
        "With dropout the output is another one",
    ),
    (APPLY, APPLY.replace("    output", "    torch.set_grad_enabled(True)\n    output"), "which evaluation would keep"),
]
