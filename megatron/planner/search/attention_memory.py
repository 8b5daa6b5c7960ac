"""What attention keeps and allocates, by the exchange of context parallelism (:mod:`megatron.core.context_parallel`).

Sizes are bytes: ``output`` a tensor of the query's shape in the model's dtype, ``pair`` keys and values together,
``wide`` the factor to fp32.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.search.ledger import Ledger


@dataclass(frozen=True)
class AttentionSizes:
    output: int
    pair: int
    log_sum_exp: int
    wide: int
    """Bytes of fp32 over bytes of the model's dtype."""

    @property
    def fused(self) -> int:
        return self.output + self.pair


class AttentionMemory(ABC):
    """The attention of a layer, between the fused projection and the output projection."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self.s = sizes

    @property
    def output(self) -> int:
        """Its output, which the projection saves too."""
        return self.s.output

    @property
    def kept(self) -> int:
        """All that it keeps, with the output."""
        return self.s.output + self.s.log_sum_exp

    @abstractmethod
    def forward(self, ledger: Ledger) -> None:
        """Leaves what it keeps."""

    @abstractmethod
    def backward(self, ledger: Ledger) -> None:
        """Leaves the gradient of the fused projection. The output's gradient and what it keeps stay."""


class WholeAttention(AttentionMemory):
    """All keys are on the rank. ``packs`` copies the rows of several sequences into one (documents); ``repeats`` keeps
    keys and values repeated for the query heads of a group (fp32)."""

    def __init__(self, sizes: AttentionSizes, packs: bool, repeats: bool) -> None:
        super().__init__(sizes)
        self.packs, self.repeated = packs, 2 * sizes.output if repeats else 0

    @property
    def kept(self) -> int:
        return super().kept + self.repeated

    def forward(self, ledger: Ledger) -> None:
        s = self.s
        if self.packs:
            ledger.pulse(s.fused, s.output, s.log_sum_exp)
            ledger.add(s.log_sum_exp, s.output)
            ledger.pulse(s.output)  # the kernel's output, and its copy
        else:
            ledger.add(self.repeated, s.output, s.log_sum_exp)

    def backward(self, ledger: Ledger) -> None:
        s = self.s
        ledger.add(s.fused)
        # Packed: gradient, query, key, value and output, then the gradients. Repeated: these are of all query heads.
        packed = s.fused + 2 * s.output if self.packs else 0
        ledger.pulse(packed, s.output, max(s.pair, self.repeated))


class RingAttention(AttentionMemory):
    """Keys and values, and the gradients of both, are sent around ``ranks``; sums are in fp32."""

    def __init__(self, sizes: AttentionSizes, ranks: int) -> None:
        super().__init__(sizes)
        self.ranks = ranks

    def forward(self, ledger: Ledger) -> None:
        s = self.s
        ledger.add(s.wide * s.output, s.log_sum_exp)
        # The first tile with the pair that arrives; later two pairs beside the one that arrives, and half a tile.
        ledger.pulse(2 * s.pair, s.output, 2 * s.log_sum_exp)
        if self.ranks > 2:
            ledger.pulse(3 * s.pair, s.output // 2)
        ledger.pulse(s.pair, s.output)
        ledger.drop(s.wide * s.output)
        ledger.add(s.output)
        ledger.pulse(s.output)  # in the order of the kernel, and of the projection

    def backward(self, ledger: Ledger) -> None:
        s, gradients = self.s, self.s.wide * self.s.pair
        ledger.add(s.fused)
        base = s.wide * s.output
        later = s.output // 2 + s.pair  # the gradients of a later tile, of half of the queries
        ledger.pulse(base, 2 * s.pair + gradients, s.output, s.pair)
        # Pairs; and gradients: those sent, those that arrive, the sum of this step; later those of the step before.
        steps = {2: [(1, 3)], 3: [(2, 3), (1, 4)]}.get(self.ranks, [(2, 4)])
        for pairs, sums in steps:
            ledger.pulse(base, pairs * s.pair, sums * gradients, later)


class GatheredAttention(AttentionMemory):
    """All keys and values are gathered over ``ranks``."""

    def __init__(self, sizes: AttentionSizes, ranks: int) -> None:
        super().__init__(sizes)
        self.ranks = ranks

    def forward(self, ledger: Ledger) -> None:
        s, everything = self.s, self.ranks * self.s.pair
        ledger.add(s.wide * s.output, s.log_sum_exp)
        ledger.pulse(s.pair, everything)
        ledger.pulse(everything, s.output)
        ledger.pulse(2 * everything, s.output // 2, 2 * s.log_sum_exp)  # by rank, and in the order of the sequence
        ledger.pulse(everything, s.output)
        ledger.drop(s.wide * s.output)
        ledger.add(s.output)
        ledger.pulse(max(everything, s.output))

    def backward(self, ledger: Ledger) -> None:
        s, everything = self.s, self.ranks * self.s.pair
        gradients = s.wide * s.pair
        ledger.add(s.fused)
        base = s.wide * s.output + 2 * everything + gradients + s.wide * everything
        part = s.output // 2 + everything * (2 * self.ranks - 1) // (2 * self.ranks)
        # The gradients of a tile, or all gradients by rank and the reduced ones.
        ledger.pulse(base, max(part, s.wide * everything + gradients))


class ExchangedAttention(AttentionMemory):
    """Positions are exchanged for heads; ``inner`` attends with these, whose sizes are the same."""

    def __init__(self, inner: AttentionMemory) -> None:
        super().__init__(inner.s)
        self.inner = inner

    @property
    def kept(self) -> int:
        return self.s.output + self.s.fused + self.inner.kept

    def forward(self, ledger: Ledger) -> None:
        s = self.s
        ledger.pulse(2 * s.fused)
        ledger.add(s.fused)
        self.inner.forward(ledger)
        ledger.pulse(3 * s.output)  # in the order of the sequence, by rank, received
        ledger.add(s.output)
        ledger.pulse(s.output)

    def backward(self, ledger: Ledger) -> None:
        s = self.s
        ledger.add(s.fused)
        ledger.pulse(2 * s.output)
        ledger.add(s.output)  # the gradient of the heads
        self.inner.backward(ledger)  # leaves gradients of the size of the projection
        ledger.pulse(3 * s.fused)  # in the order of the sequence, by rank, received
        ledger.drop(s.output, s.fused)


def build_attention_memory(levels: Sequence[tuple[str, int]], whole: AttentionMemory) -> AttentionMemory:
    """Attention by the exchanges ``levels``, each with its ranks; ``whole`` without one."""
    if not levels:
        return whole
    (exchange, ranks), *inner = levels
    if exchange == "a2a":
        return ExchangedAttention(build_attention_memory(inner, whole))
    return RingAttention(whole.s, ranks) if exchange == "p2p" else GatheredAttention(whole.s, ranks)
