"""What the mixture-of-experts part of a layer keeps and allocates (:mod:`megatron.core.moe`)."""

from collections.abc import Collection
from dataclasses import dataclass

from megatron.planner.search.layer_memory import DensePart, LayerSizes, input_gradient, linear_output, norm_backward
from megatron.planner.search.ledger import Ledger

_INDEX = 8
"""Bytes of an int64."""
_WIDE = 4
"""Bytes of an fp32."""


@dataclass(frozen=True)
class MoESizes:
    """``n`` tokens of a rank, each with ``k`` choices of ``E`` experts; ``m`` rows of its experts. Sizes in bytes."""

    tokens: int
    choices: int
    """``n k``."""
    rows: int
    """``m``."""
    num_experts: int
    hidden: int
    """A token."""
    width: int
    """A token of the activation inside an expert, ``f / etp``."""
    wide: int
    """Bytes of fp32 over bytes of the model's dtype."""
    is_summed: bool
    """Whether a token has several choices."""
    weighs_input: bool
    """Whether the weights multiply the tokens before the experts, not the experts' outputs."""
    dispatcher: str
    """``"local"``, ``"alltoall"`` or ``"allgather"``."""
    etp: int
    ranks: int
    """``etp ep``."""
    sorts_again: bool
    """Whether rows from several ranks are for several experts."""
    shared: LayerSizes | None
    """Sizes of the shared expert."""

    @property
    def all_tokens(self) -> int:
        """Gathered tokens of the all-gather dispatcher."""
        return self.tokens * self.ranks

    @property
    def received(self) -> int:
        """The rows ``[m, h]``."""
        return self.rows * self.hidden

    @property
    def sent(self) -> int:
        """The rows of this rank's choices ``[n k, h]``."""
        return self.choices * self.hidden

    @property
    def activated(self) -> int:
        return self.rows * self.width


class MoEPart:
    """Norm, router, dispatcher, experts and shared expert."""

    def __init__(self, layer: LayerSizes, sizes: MoESizes, modules: Collection[str], defers: bool) -> None:
        self.s, self.e, self.defers = layer, sizes, defers
        self.recomputes_all = "moe" in modules
        self.recomputes_activation = "moe_act" in modules and not self.recomputes_all
        self.shared = None
        if sizes.shared is not None:
            hidden = {"mlp_act"} if {"shared_experts", "moe"} & set(modules) else set()
            self.shared = DensePart(sizes.shared, hidden, defers)
        self.experts_end = 0
        self.recomputes_shared = "shared_experts" in modules and not self.recomputes_all

    @property
    def _routing(self) -> int:
        """Logits and weights in fp32, the sorted experts, and the orders of the rows."""
        e = self.e
        own = e.tokens * e.num_experts * (_WIDE + _INDEX) + e.choices * _WIDE
        if e.dispatcher == "allgather":
            gathered = e.all_tokens * e.choices // e.tokens
            return own + gathered * (_WIDE + _INDEX) + 2 * e.rows * _INDEX
        again = 2 * e.rows * _INDEX if e.sorts_again else 0
        return own + 3 * e.choices * _INDEX + again

    @property
    def _returned(self) -> int:
        """The outputs of the experts whose weighted sum is the output of the layer."""
        return self.e.sent if self.e.dispatcher == "alltoall" else self.e.received

    @property
    def _shared_kept(self) -> int:
        return 0 if self.shared is None or self.recomputes_shared else 3 * self.shared.s.activated

    def forward(self, ledger: Ledger, saves: bool) -> None:
        """From ``x`` to ``x`` and the output; leaves what it keeps, and the output."""
        s, e, saves = self.s, self.e, saves and not self.recomputes_all
        before = ledger.now
        ledger.add(s.shard, s.statistics)
        ledger.pulse(e.wide * s.shard)  # tokens in fp32, for the router
        ledger.add(self._routing)
        if e.weighs_input:
            ledger.pulse(e.wide * s.shard, s.shard)  # tokens times weights in fp32, and their cast
        self._dispatch(ledger)
        ledger.add(2 * e.activated, e.activated)
        self._combine(ledger)  # leaves the experts' outputs and their sums
        if e.weighs_input:
            ledger.drop(self._returned)  # nothing reads them again
        if self.shared is not None:
            ledger.add(self.shared.s.gathered, 2 * self.shared.s.activated)
            ledger.drop(self.shared.s.gathered)
            ledger.add(self.shared.s.activated)
            linear_output(ledger, self.shared.s)
            ledger.pulse(s.shard)
        ledger.pulse(s.shard)
        ledger.now = before + s.shard
        if saves:
            ledger.now += self._kept

    @property
    def _kept(self) -> int:
        e = self.e
        activated = 0 if self.recomputes_activation else e.activated
        returned = 0 if e.weighs_input else self._returned
        experts = e.received + 2 * e.activated + activated + returned
        return self.s.shard + self.s.statistics + self._routing + experts + self._shared_kept

    def _dispatch(self, ledger: Ledger) -> None:
        """Leaves the rows of this rank's experts."""
        e, weighted = self.e, self.s.shard if self.e.weighs_input else 0
        if e.dispatcher == "alltoall":
            arrived = e.received // e.etp
            ledger.pulse(weighted, e.sent, arrived)
            if e.etp > 1:
                ledger.pulse(arrived, e.received)
            ledger.pulse(e.received if e.sorts_again else 0, e.received)
        elif e.dispatcher == "allgather":
            ledger.pulse(weighted, e.all_tokens * e.hidden, e.received)
        else:
            ledger.pulse(weighted, e.received)
        ledger.add(e.received)

    def _combine(self, ledger: Ledger) -> None:
        """From the activations to the sums of the tokens' choices; leaves the rows that are summed, and the sums."""
        s, e = self.s, self.e
        ledger.add(e.received)  # the experts' outputs
        if e.dispatcher == "alltoall":
            again = e.received if e.sorts_again else 0
            ledger.add(again)
            if e.etp > 1:
                ledger.pulse(e.received // e.etp * 2)
            ledger.add(e.sent)
            self._sum(ledger, s.shard, is_weighted=not e.weighs_input)
            ledger.drop(again, e.received)
        elif e.dispatcher == "allgather":
            whole = e.all_tokens * e.hidden
            ledger.add(e.received)  # with a row of zeros
            self._sum(ledger, whole, is_weighted=not e.weighs_input)
            ledger.drop(e.received)
            ledger.pulse(whole, s.shard)
        else:
            self._sum(ledger, s.shard, is_weighted=not e.weighs_input)
        ledger.add(s.shard)

    def _sum(self, ledger: Ledger, result: int, is_weighted: bool) -> None:
        """Sum the rows of each token; ``result`` is the sums' size."""
        if not (is_weighted or self.e.is_summed):
            ledger.pulse(result)  # one row for each token
            return
        wide = self.e.wide * result if is_weighted or (self.e.is_summed and self.e.wide > 1) else 0
        ledger.pulse(result, wide)
        ledger.pulse(wide, result, result)

    def rerun(self, ledger: Ledger) -> None:
        before = ledger.now
        recomputes, self.recomputes_all = self.recomputes_all, False
        self.forward(ledger, saves=True)
        self.recomputes_all = recomputes
        ledger.now = before + self._kept

    def backward(self, ledger: Ledger) -> int:
        """From the gradient of the output to the gradient of ``x``; returns the peak before the former is freed."""
        s, e = self.s, self.e
        if self.recomputes_all:
            self.rerun(ledger)
        if self.shared is not None:
            self._shared_backward(ledger)
        whole = e.all_tokens * e.hidden if e.dispatcher == "allgather" else 0
        ledger.add(whole, self._returned)
        if not e.weighs_input:
            ledger.pulse(self._returned)  # gradient times row, for the weights
            ledger.drop(self._returned)  # what was summed
        ledger.drop(whole)
        self._gradient_of_outputs(ledger)  # leaves the gradient of the experts' outputs instead
        if self.recomputes_activation:
            ledger.add(e.activated)
        ledger.add(e.activated)
        if not self.defers:
            ledger.drop(e.received, e.activated)
        ledger.add(2 * e.activated)
        ledger.drop(e.activated, 2 * e.activated)
        self._gradient_of_tokens(ledger)
        self._router_backward(ledger)
        norm_backward(ledger, s)
        early = ledger.restart()
        ledger.drop(s.shard)
        return early

    def _gradient_of_outputs(self, ledger: Ledger) -> None:
        e = self.e
        if e.dispatcher == "alltoall":
            ledger.pulse(e.received // e.etp)
            ledger.drop(e.sent)
            if e.etp > 1:
                ledger.pulse(e.received // e.etp, e.received)
            ledger.pulse(e.received if e.sorts_again else 0, e.received)
            ledger.add(e.received)

    def _gradient_of_tokens(self, ledger: Ledger) -> None:
        """The gradient of the rows, sent back and summed."""
        s, e = self.s, self.e
        held = 0 if self.defers else 2 * e.activated + e.received  # for fc1's weight gradient
        self.experts_end = ledger.now + (e.sent if e.dispatcher == "alltoall" else e.received)
        if e.dispatcher == "alltoall":
            ledger.pulse(e.received, e.received if e.sorts_again else 0)
            ledger.pulse(e.received, e.sent)
            ledger.drop(held)
            ledger.add(e.sent)
            self._sum(ledger, s.shard, is_weighted=False)
            ledger.drop(e.sent)
        elif e.dispatcher == "allgather":
            whole = e.all_tokens * e.hidden
            ledger.add(2 * e.received)
            self._sum(ledger, whole, is_weighted=False)
            ledger.drop(2 * e.received)
            ledger.pulse(whole, s.shard)
            ledger.drop(held)
        else:
            ledger.drop(held)
            ledger.add(e.received)
            self._sum(ledger, s.shard, is_weighted=False)
            ledger.drop(e.received)
        ledger.add(s.shard)

    def _router_backward(self, ledger: Ledger) -> None:
        s, e = self.s, self.e
        if e.weighs_input:
            # In fp32: the gradient of the weighted tokens, of the tokens, and its product with them for the weights.
            ledger.pulse(3 * e.wide * s.shard)
        ledger.drop(self._routing)
        ledger.pulse(e.wide * s.shard, s.shard)
        ledger.add(s.shard)
        ledger.pulse(e.wide * s.shard)
        ledger.drop(s.shard)  # the norm's output
        ledger.pulse(s.shard)
        ledger.drop(s.shard)  # the sum of both gradients instead of each

    def _shared_backward(self, ledger: Ledger) -> None:
        """Leaves the gradient of its input on the norm's output; counted with the gradients of the router."""
        assert self.shared is not None
        s = self.shared.s
        if self.recomputes_shared:
            ledger.add(s.gathered, 3 * s.activated)
            ledger.drop(s.gathered)
        ledger.add(s.gathered, s.activated)
        ledger.drop(s.gathered)
        if not self.defers:
            ledger.drop(s.activated)
        ledger.add(2 * s.activated)
        ledger.drop(3 * s.activated)
        input_gradient(ledger, s)
        ledger.drop(s.shard)
        if not self.defers:
            ledger.drop(2 * s.activated)
