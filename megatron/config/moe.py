"""Flags for mixture of experts beside the architecture: balance of the load, dispatch and logging."""

from dataclasses import dataclass
from typing import Literal

from megatron.flags import require_at_least, require_positive, values_of

LoadBalancingType = Literal["none", "aux_loss", "seq_aux_loss"]
TokenDispatcherType = Literal["allgather", "alltoall"]


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: balance of the load and exchange of tokens. The architecture has --num-experts and sizes."""

    moe_router_load_balancing_type: tuple[LoadBalancingType, ...] = ("aux_loss",)
    """Auxiliary loss that balances the load of the experts, with the coefficient --moe-aux-loss-coeff: of every
    sequence (seq_aux_loss), or of every microbatch (aux_loss), whose result depends on --micro-batch-size. Several need
    as many coefficients."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Coefficient of every --moe-router-load-balancing-type (1e-2 is common). 0 is no auxiliary loss."""
    moe_z_loss_coeff: float | None = None
    """Coefficient of the router's z-loss, the square of the logits' log-sum-exp (ST-MoE: 1e-3)."""
    moe_router_bias_update_rate: float = 1e-3
    """Amount by which a step changes the bias of --moe-router-enable-expert-bias: up for an expert with fewer tokens
    than the mean, down for one with more."""
    moe_router_force_load_balancing: bool = False
    """Benchmarks only: choose the experts in turn, not by their scores. The model does not learn to route."""
    moe_token_dispatcher_type: TokenDispatcherType = "allgather"
    """Exchange of tokens between expert-parallel ranks: all tokens to all ranks (allgather), or every token to the
    ranks of its experts (alltoall), which sends less if --moe-router-topk is below --expert-model-parallel-size."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while the tokens are exchanged."""
    moe_per_layer_logging: bool = False
    """Report the balance of the load of every MoE layer."""
    overlap_dispatch_backward_with_experts_wgrad: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The gradients of the tokens are always sent back
    during a weight gradient of the experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Accepted for Megatron-LM compatibility; no effect. The router computes in fp32, and in fp64 under --fp64."""
    moe_grouped_gemm: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""
    moe_permute_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""
    moe_router_fusion: bool = True
    """Accepted for Megatron-LM compatibility in both forms; no effect. The kernel is chosen and logged."""

    def check(self) -> None:
        require_at_least(0, values_of(self, "moe_z_loss_coeff"))
        for coefficient in self.moe_aux_loss_coeff:
            require_at_least(0, {"--moe-aux-loss-coeff": coefficient})
        require_positive(values_of(self, "moe_router_bias_update_rate"))
