"""What stands before the global name of a parameter, or of a layer, in a checkpoint."""

MODEL = "model/"
"""The weights as the model computes with them."""
MASTER = "optimizer/master/"
"""Their fp32 copies, where the optimizer keeps any."""
FP8 = "fp8/"
"""Scales and amax histories of FP8 linear layers, by the name of the layer."""
