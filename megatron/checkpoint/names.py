"""Prefixes of parameter and layer names in a checkpoint."""

MODEL = "model/"
"""Weights in the precision of the model."""
MASTER = "optimizer/master/"
"""fp32 master weights, if the optimizer keeps any."""
FP8 = "fp8/"
"""Scales and amax histories of FP8 linear layers, by layer name."""
