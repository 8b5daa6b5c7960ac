"""What stands before the global name of a parameter in a checkpoint."""

MODEL = "model/"
"""The weights as the model computes with them."""
MASTER = "optimizer/master/"
"""Their fp32 copies, where the optimizer keeps any."""
