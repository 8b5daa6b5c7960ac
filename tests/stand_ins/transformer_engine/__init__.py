"""What this project calls of Transformer Engine, in plain torch, for CPUs and any dtype.

It has the signatures of version 2.20.2 as far as they are used, and does what the real package does where others can
see it: who gathers and reduces, when weight gradients are added to ``main_grad``, when magnitudes become scales.
"""
