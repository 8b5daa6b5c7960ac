"""Stands in for Transformer Engine's, whose arguments that we give are apex's."""

from amp_C import multi_tensor_l2norm
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam

__all__ = ["FusedAdam", "multi_tensor_applier", "multi_tensor_l2norm"]
