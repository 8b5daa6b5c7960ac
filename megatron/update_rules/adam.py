"""AdamW (arXiv 1711.05101): torch's or another library's, also with moments and gradients in bf16."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_fraction, values_of
from megatron.update_rules.rule import Flags, Group, ParameterFacts, Shard, UpdateContext, UpdateRule, batches

if TYPE_CHECKING:
    from torch import Tensor

BF16_SPACING = 2.0**-7
"""Largest relative distance between neighbouring bf16 numbers."""


@dataclass(frozen=True)
class AdamFlags(Flags):
    """Flags of ``--optimizer adam``."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment (Llama: 0.95)."""
    adam_eps: float = 1e-8
    """Adam's epsilon, added to the denominator (Llama 2: 1e-5)."""
    use_precision_aware_optimizer: bool = False
    """Allow --main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype; updates are computed in fp32. Their fp16 and
    fp8, which need a scale for each tensor, are not supported."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of adam's second moment."""

    def check(self, optimizer: str) -> None:
        require_at_least(0, values_of(self, "adam_eps"))
        require_fraction(values_of(self, "adam_beta1", "adam_beta2"))
        if self.use_precision_aware_optimizer and optimizer != "adam":
            raise ConfigError(
                f"--use-precision-aware-optimizer does not support --optimizer {optimizer}: use adam, or remove one of "
                "them."
            )
        formats = changed_flags(self, "exp_avg_dtype", "exp_avg_sq_dtype")
        require_flag("--use-precision-aware-optimizer", self.use_precision_aware_optimizer, formats)
        for flag, name, beta_flag, beta in (
            ("--exp-avg-dtype", self.exp_avg_dtype, "--adam-beta1", self.adam_beta1),
            ("--exp-avg-sq-dtype", self.exp_avg_sq_dtype, "--adam-beta2", self.adam_beta2),
        ):
            if name == "bf16" and 1.0 - beta < BF16_SPACING:
                raise ConfigError(
                    f"{flag} bf16 is too coarse for {beta_flag} {beta}: the decay of one step is below the spacing of "
                    f"bf16 numbers and would be rounded away: use {beta_flag} of at most {1.0 - BF16_SPACING:.3f}, or "
                    f"{flag} fp32."
                )


class Adam(UpdateRule):
    name = "adam"
    flags = AdamFlags

    def __init__(self, flags: AdamFlags) -> None:
        self._flags = flags
        self._betas = (flags.adam_beta1, flags.adam_beta2)

    def learning_rate_factor(self, info: ParameterFacts) -> float:
        """An element changes by about the learning rate, and an output is a sum over the fan-in."""
        return 1.0 / info.fan_in_mult

    def _epsilon(self, info: ParameterFacts) -> float:
        """Epsilon falls with the gradients of hidden matrices, as the learning rate does (arXiv 2203.03466, B.3)."""
        return self._flags.adam_eps / info.fan_in_mult

    def state(self, weight: "Tensor") -> "dict[str, Tensor]":
        import torch

        formats = {"exp_avg": weight.dtype, "exp_avg_sq": weight.dtype}
        if self._flags.use_precision_aware_optimizer:
            names = {"fp32": torch.float32, "bf16": torch.bfloat16}
            formats = {"exp_avg": names[self._flags.exp_avg_dtype], "exp_avg_sq": names[self._flags.exp_avg_sq_dtype]}
        return {kind: torch.zeros_like(weight, dtype=dtype) for kind, dtype in formats.items()}

    def bind(self, groups: Sequence[Group], context: UpdateContext) -> Callable[[int], None]:
        groups = [group for group in groups if group.shards]
        shards = [shard for group in groups for shard in group.shards]
        if self._flags.use_precision_aware_optimizer or any(s.gradient.dtype != s.weight.dtype for s in shards):
            of_groups = [(group, batch) for group in groups for batch in batches(group.shards)]

            def update_converted(step: int) -> None:
                for group, batch in of_groups:
                    self._update_converted(batch, group, step)

            return update_converted
        import torch

        if not groups:
            # The rank's shard is padding; torch refuses an empty list.
            return lambda step: None
        # Shards of a group have the same learning rate, and therefore the same fan-in.
        parameters = [
            {"params": [shard.weight for shard in group.shards], "eps": self._epsilon(group.shards[0].info)}
            for group in groups
        ]
        optimizer = context.adam(parameters, self._betas, self._flags.adam_eps)
        steps = []
        for shard in shards:
            # Other libraries read the step on the host; on the CPU it needs no synchronisation.
            device = shard.weight.device if isinstance(optimizer, torch.optim.AdamW) else "cpu"
            steps.append(torch.zeros((), dtype=torch.float32, device=device))
            optimizer.state[shard.weight] = {"step": steps[-1], **shard.state}
            shard.weight.grad = shard.gradient

        def update(step: int) -> None:
            for parameter_group, group in zip(optimizer.param_groups, groups):
                parameter_group["lr"], parameter_group["weight_decay"] = group.learning_rate, group.weight_decay
            # The optimizer increments its steps.
            torch._foreach_zero_(steps)
            torch._foreach_add_(steps, step - 1)
            optimizer.step()

        return update

    def _update_converted(self, shards: Sequence[Shard], group: Group, step: int) -> None:
        """Torch's fused AdamW of all ``shards`` at once, with gradients and moments in the dtype of the weights."""
        import torch

        from megatron.torch_compat import fused_adamw_

        weights = [shard.weight for shard in shards]

        def converted(narrow: "list[Tensor]") -> "list[Tensor]":
            if narrow[0].dtype == weights[0].dtype:
                return narrow
            wide = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(wide, narrow)
            return wide

        gradients = converted([shard.gradient for shard in shards])
        moments = [[shard.state[kind] for shard in shards] for kind in ("exp_avg", "exp_avg_sq")]
        wide = [converted(moment) for moment in moments]
        number = torch.full((), float(step), device=weights[0].device)
        fused_adamw_(
            weights,
            gradients,
            wide[0],
            wide[1],
            [],
            [number] * len(weights),
            lr=group.learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._epsilon(shards[0].info),  # a group has one learning rate, and therefore one fan-in
            amsgrad=False,
            maximize=False,
        )
        for moment, updated in zip(moments, wide):
            if updated is not moment:
                torch._foreach_copy_(moment, updated)
