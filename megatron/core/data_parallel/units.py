"""The modules of a model whose weights are gathered at once, before they run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.parameter import info_of


@dataclass(frozen=True)
class WeightUnit:
    """A module, and the parameters that are gathered for it."""

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    """All parameters of experts; or the dense ones, those of modules with experts in it aside."""


def weight_units(modules: Iterable[nn.Module]) -> Iterator[WeightUnit]:
    """Each of ``modules``, and after it the modules with experts in it, in the order of the forward pass."""
    for module in modules:
        yield WeightUnit(module, [one for one in module.parameters() if not info_of(one).is_expert])
        for experts in expert_modules(module):
            yield WeightUnit(experts, list(experts.parameters()))


def expert_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in ``module`` whose parameters all belong to experts; they must be run as a whole."""
    kinds = {info_of(parameter).is_expert for parameter in module.parameters()}
    if kinds == {True}:
        yield module
    elif True in kinds:
        assert not any(info_of(one).is_expert for one in module.parameters(recurse=False)), "mixed with dense weights"
        for child in module.children():
            yield from expert_modules(child)
