"""Update rules: how an optimizer turns gradients into updates. A rule is one file: its flags, its state, its formulas.

The command line is parsed without torch, so these files import torch inside functions only.
"""
