"""Flags that force the implementation of an operation."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.flags import changed_flags

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("te", "flash3", "cudnn", "flash", "sdpa", "cpu", "reference"),
    "rms_norm": ("eager", "compiled", "triton", "apex", "te"),
    "swiglu": ("eager", "compiled", "triton"),
    "rope": ("eager", "compiled", "triton"),
    "cross_entropy": ("eager", "compiled"),
    "weight_gradient": ("separate", "in_place", "apex"),
    "grouped_gemm": ("grouped_mm", "padded", "loop"),
    "fp8_quantization": ("eager", "triton"),
    "fp8_weight_gradient": ("separate", "triton"),
    "adam": ("torch", "apex", "te"),
    "l2_norm": ("torch", "apex", "te"),
}
"""Known implementations of every operation, whether installed or not (``docs/kernels.md``)."""

_MEANING_OF_NO = {
    "bias_swiglu_fusion": ("swiglu", "eager"),
    "rope_fusion": ("rope", "eager"),
    "gradient_accumulation_fusion": ("weight_gradient", "separate"),
}
"""Operation and implementation of ``--no-...`` by field."""


class Wanted(NamedTuple):
    """An implementation that a flag requires."""

    implementation: str
    flag: str
    """The flag with its value, as on the command line."""


@dataclass(frozen=True)
class KernelConfig:
    """Implementation of each operation: the fastest available one, unless a flag requires another."""

    kernel: tuple[str, ...] = ()
    """Required implementations, each as OPERATION=IMPLEMENTATION: attention={te,flash3,cudnn,flash,sdpa,cpu,
    reference}, rms_norm={eager,compiled,triton,apex,te}, swiglu and rope={eager,compiled,triton},
    cross_entropy={eager,compiled}, weight_gradient={separate,in_place,apex}, grouped_gemm={grouped_mm,padded,loop} (of
    experts), fp8_quantization={eager,triton}, fp8_weight_gradient={separate,triton} (triton is never chosen without
    this flag, because its speed is unmeasured), adam and l2_norm={torch,apex,te}. An unavailable one is an error."""
    bias_swiglu_fusion: bool = True
    """--no-bias-swiglu-fusion means --kernel swiglu=eager."""
    rope_fusion: bool = True
    """--no-rope-fusion means --kernel rope=eager."""
    gradient_accumulation_fusion: bool = True
    """--no-gradient-accumulation-fusion means --kernel weight_gradient=separate."""

    def check(self) -> None:
        seen: dict[str, Wanted] = {}
        for operation, wanted in self._all_wanted():
            known = IMPLEMENTATIONS.get(operation)
            if known is None:
                raise ConfigError(f"{wanted.flag} is not an operation: use one of {', '.join(IMPLEMENTATIONS)}.")
            if wanted.implementation not in known:
                raise ConfigError(f"{wanted.flag} is not an implementation of {operation}: use {' or '.join(known)}.")
            other = seen.setdefault(operation, wanted)
            if other.implementation != wanted.implementation:
                raise ConfigError(f"{other.flag} and {wanted.flag} contradict each other: remove one of them.")

    def wanted(self, operation: str) -> Wanted | None:
        """The implementation of ``operation`` that a flag requires; None without such a flag."""
        return dict(self._all_wanted()).get(operation)

    def _all_wanted(self) -> list[tuple[str, Wanted]]:
        wanted = [
            (operation, Wanted(implementation, flag))
            for name, (operation, implementation) in _MEANING_OF_NO.items()
            for flag in changed_flags(self, name)
        ]
        for entry in self.kernel:
            operation, _, implementation = entry.partition("=")
            wanted.append((operation, Wanted(implementation, f"--kernel {entry}")))
        return wanted
