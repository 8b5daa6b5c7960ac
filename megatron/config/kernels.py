"""Flags that force the implementation of an operation."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron.config.errors import ConfigError

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("te", "flash3", "cudnn", "flash", "sdpa", "cpu", "reference"),
    "rms_norm": ("eager", "compiled", "apex", "te"),
    "swiglu": ("eager", "compiled"),
    "rope": ("eager", "compiled"),
    "cross_entropy": ("eager", "compiled"),
    "weight_gradient": ("separate", "in_place", "apex"),
    "adam": ("torch", "apex", "te"),
    "l2_norm": ("torch", "apex", "te"),
}
"""The implementations of every operation, there or not (``docs/kernels.md``)."""


class Wanted(NamedTuple):
    """An implementation that was asked for."""

    implementation: str
    flag: str
    """As it was written."""


@dataclass(frozen=True)
class KernelConfig:
    """Which implementation computes what; chosen by itself unless a flag forces it."""

    kernel: tuple[str, ...] = ()
    """Forced implementations, each as OPERATION=IMPLEMENTATION: attention={te,flash3,cudnn,flash,sdpa,cpu,
    reference}, rms_norm={eager,compiled,apex,te}, swiglu, rope and cross_entropy={eager,compiled},
    weight_gradient={separate,in_place,apex}, adam and l2_norm={torch,apex,te}. What is not there is refused."""
    bias_swiglu_fusion: bool = True
    """The negative form is --kernel swiglu=eager; there is no bias."""
    rope_fusion: bool = True
    """The negative form is --kernel rope=eager."""
    gradient_accumulation_fusion: bool = True
    """The negative form is --kernel weight_gradient=separate."""
    bias_dropout_fusion: bool = True
    """Accepted in both forms: there is neither bias nor dropout to fuse."""
    masked_softmax_fusion: bool = True
    """Accepted in both forms: no kernel has a softmax apart; --attention-backend chooses the kernel."""
    persist_layer_norm: bool = True
    """Accepted in both forms: it is about a kernel for LayerNorm."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """Capture in CUDA graphs; only none."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on what does not exist, and on flags that contradict each other."""
        if self.cuda_graph_impl != "none":
            raise ConfigError(
                f"--cuda-graph-impl {self.cuda_graph_impl} is not supported, because nothing is captured in CUDA "
                "graphs: use none, or remove it."
            )
        seen: dict[str, Wanted] = {}
        for operation, wanted in self._all_wanted():
            known = IMPLEMENTATIONS.get(operation)
            if known is None:
                raise ConfigError(f"{wanted.flag} names no operation: use one of {', '.join(IMPLEMENTATIONS)}.")
            if wanted.implementation not in known:
                raise ConfigError(f"{wanted.flag} names no implementation of {operation}: use {' or '.join(known)}.")
            other = seen.setdefault(operation, wanted)
            if other.implementation != wanted.implementation:
                raise ConfigError(f"{other.flag} and {wanted.flag} contradict each other: remove one of them.")

    def wanted(self, operation: str) -> Wanted | None:
        """What is asked for, if anything."""
        return dict(self._all_wanted()).get(operation)

    def _all_wanted(self) -> list[tuple[str, Wanted]]:
        turned_off = {
            "swiglu": (self.bias_swiglu_fusion, Wanted("eager", "--no-bias-swiglu-fusion")),
            "rope": (self.rope_fusion, Wanted("eager", "--no-rope-fusion")),
            "weight_gradient": (
                self.gradient_accumulation_fusion,
                Wanted("separate", "--no-gradient-accumulation-fusion"),
            ),
        }
        wanted = [(operation, by_flag) for operation, (is_on, by_flag) in turned_off.items() if not is_on]
        for entry in self.kernel:
            operation, _, implementation = entry.partition("=")
            wanted.append((operation, Wanted(implementation, f"--kernel {entry}")))
        return wanted
