"""Checks exercise 1: activation checkpointing as an autograd function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron.planner.memory import MemoryTracker
from megatron_llama.course.lesson import Wrong, require_tensor

ROWS, WIDTH, HIDDEN = 64, 32, 256
RANDOM_STATE = 8192
"""Bytes of a random state, rounded up."""
Checkpointed = Callable[..., Tensor]
ERRORS = {
    "incorrect number of gradients": "Checkpoint.backward returns a wrong number of values: return one for each "
    "argument of forward, and None for the function, which is the first.",
    "One of the differentiated Tensors does not require grad": "torch.autograd.grad was asked for the gradient of an "
    "input that has none, such as token ids: torch.autograd.backward adds to the grad of those that have one.",
    "does not require grad": "The second run has no graph: autograd calls backward with gradients disabled, so run the "
    "function under torch.enable_grad().",
    "graph a second time": "The second run is connected to the graph above the inputs, and its backward pass runs "
    "there, too: detach the inputs before it.",
}
"""Part of an error of autograd, and what is wrong."""


class Block:
    """An MLP with a residual, ``(x, shift, ids) -> x``; dropout draws from the random state."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (10, WIDTH))
        self.weights = [torch.randn(*size, dtype=torch.float64, generator=generator) / 8 for size in sizes]
        for weight in self.weights:
            weight.requires_grad_()
        self.dropout, self.runs = dropout, 0

    def __call__(self, x: Tensor, shift: Tensor, ids: Tensor) -> Tensor:
        self.runs += 1
        up, down, table = self.weights
        hidden = functional.dropout(functional.silu((x * shift) @ up), self.dropout)  # [rows, hidden]
        return x + hidden.sin() @ down + table[ids]


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass."""

    output: Tensor
    gradients: dict[str, Tensor | None]
    """Of inputs and weights, by name."""
    input_bytes: int
    kept_bytes: int
    """What the forward pass allocated, and what is there after it beside outputs."""
    saved_bytes: int
    """What passed through :class:`saved_tensors_hooks`."""
    keeps_random_state: bool
    """Whether the random state is the same before and after the backward pass."""

    def differs(self, other: "Step") -> str:
        """The name of a gradient that is not that of ``other``."""
        for name, wanted in other.gradients.items():
            found = self.gradients[name]
            if wanted is not None and (found is None or not torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)):
                return name
        return ""


def plain(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


def step(function: Checkpointed, blocks: Sequence[Block], with_ones: bool = False) -> Step:
    """Run ``blocks`` one after the other, each by ``function``; the gradients of a weighted sum of the output."""
    generator = torch.Generator().manual_seed(1)
    leaf, shift, weighting = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3))
    leaf.requires_grad_(), shift.requires_grad_()
    ids, saved = torch.randint(10, [ROWS], generator=generator), 0
    x = leaf.exp()  # there is a graph above the input
    x.retain_grad()

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    torch.manual_seed(4)
    output = x
    with MemoryTracker() as tracker, saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in blocks:
            output = require_tensor(function(block, output, shift, ids), "The output of checkpointed", x.shape, x.dtype)
        kept = tracker.now.total - output.nbytes * len(blocks)
    if not output.requires_grad:
        raise Wrong("The output of checkpointed has no gradient: return what Checkpoint.apply returns.")
    torch.rand(1)  # others draw before the backward pass
    state = torch.get_rng_state()
    try:
        output.backward(torch.ones_like(output) if with_ones else weighting)
    except RuntimeError as error:
        for part, sentence in ERRORS.items():
            if part in str(error):
                raise Wrong(sentence) from error
        raise
    gradients = {"the input x": x.grad, "the input shift": shift.grad, "what is above the input x": leaf.grad}
    for number, block in enumerate(blocks):
        gradients |= {f"weight {place} of block {number}": one.grad for place, one in enumerate(block.weights)}
    inputs = (x.nbytes + shift.nbytes + ids.nbytes) * len(blocks)
    return Step(output.detach(), gradients, inputs, kept, saved, torch.equal(torch.get_rng_state(), state))


def check(answer: ModuleType) -> str:
    """Compare gradients with those of the plain function, and look at what the graph keeps; raises :class:`Wrong`."""
    checkpointed: Checkpointed = answer.checkpointed
    wanted, block = step(plain, [Block(0)]), Block(0)
    found = step(checkpointed, [block])
    check_gradients(found, wanted, step(plain, [Block(0)], with_ones=True))
    check_memory(found, block.runs)
    check_random_state(checkpointed)
    if step(checkpointed, [Block(0), Block(1)]).differs(step(plain, [Block(0), Block(1)])):
        raise Wrong(
            "Two calls in one graph have wrong gradients, where one call has right ones: keep what belongs to a call "
            "in ctx, not in the class or in the module."
        )
    inputs = torch.ones(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        output = checkpointed(block, inputs, inputs, torch.zeros(ROWS, dtype=torch.int64))
    if output.requires_grad:
        raise Wrong(
            "Under torch.no_grad() the output of checkpointed has a graph, which evaluation would keep: enable "
            "gradients in the second run alone."
        )
    return (
        "Gradients of inputs and weights are those of the plain function, with dropout and in two calls, too; the "
        f"graph keeps {found.saved_bytes:,} bytes, the inputs, instead of {wanted.kept_bytes + wanted.input_bytes:,}."
    )


def check_gradients(found: Step, wanted: Step, of_ones: Step) -> None:
    """The output, and every gradient; ``of_ones`` are those of a plain sum of the output."""
    if not torch.equal(found.output, wanted.output):
        raise Wrong("The output is not that of the function: return what function(*inputs) returns.")
    name = found.differs(wanted)
    if not name:
        return
    absent = [name for name, gradient in found.gradients.items() if gradient is None]
    if any(name.startswith("weight") for name in absent):
        raise Wrong(
            f"The gradient of {absent[-1]} is missing: torch.autograd.grad returns the gradients of inputs alone, and "
            "torch.autograd.backward also adds to those of the parameters that the function uses."
        )
    if absent:
        raise Wrong(
            f"The gradient of {absent[0]} is missing: what detach() returns requires no gradient, so set "
            "requires_grad_ as the input has it, and return the grad of each."
        )
    if not found.differs(of_ones):
        raise Wrong(
            "The gradients are those of output.sum(): the second run must continue with the gradient that backward "
            "receives, which the layers above have computed."
        )
    gradient, right = found.gradients[name], wanted.gradients[name]
    assert gradient is not None and right is not None
    if torch.allclose(gradient, 2 * right):
        raise Wrong(f"The gradient of {name} is twice the right one: run one backward pass through the second run.")
    other = next(
        (other for other, one in wanted.gradients.items() if one is not None and torch.equal(one, gradient)), ""
    )
    if other:
        raise Wrong(f"The gradient of {name} is that of {other}: return the gradients in the order of the inputs.")
    raise Wrong(f"The gradient of {name} is wrong: the second run must compute what the first has computed.")


def check_memory(found: Step, runs: int) -> None:
    """The graph must keep the inputs, themselves, and nothing that the function has computed."""
    if found.kept_bytes > found.input_bytes + RANDOM_STATE:
        raise Wrong(
            f"The graph keeps {found.kept_bytes:,} bytes that the function has allocated: let the first run record "
            "nothing, and save none of its results."
        )
    if found.kept_bytes > RANDOM_STATE:
        raise Wrong(
            f"The graph keeps {found.kept_bytes:,} bytes beside the inputs, as many as copies of them take: save the "
            "inputs themselves, whose memory is there anyway."
        )
    if found.saved_bytes != found.input_bytes:
        raise Wrong(
            f"ctx.save_for_backward has {found.saved_bytes:,} bytes, and the inputs {found.input_bytes:,}: save all "
            "inputs by it, not as attributes of ctx, so that hooks see them (offload) and torch notices changes."
        )
    if runs != 2:
        raise Wrong(
            f"The function runs {runs} times: once in the forward pass and once more in the backward pass is enough."
        )


def check_random_state(checkpointed: Checkpointed) -> None:
    """Dropout must draw the same numbers again, and nothing must change for who draws next."""
    found, wanted = (step(function, [Block(0, 0.5)]) for function in (checkpointed, plain))
    if not torch.equal(found.output, wanted.output):
        raise Wrong(
            "With dropout the output is another one than without checkpoints: the first run draws from the "
            "random state as it is, so read the state before it, and set no seed."
        )
    if found.differs(wanted):
        raise Wrong(
            "With dropout the gradients differ: the second run draws other random numbers than the first, so save the "
            "random state in forward and set it before the second run."
        )
    if not found.keeps_random_state:
        raise Wrong(
            "The backward pass moves the random state, so that later masks differ from those without checkpoints: run "
            "the function again inside torch.random.fork_rng, which restores the state."
        )
