"""Update rules of the optimizer. A rule is one file: its flags, its state, its formulas.

The command line is parsed without torch, so these files import torch inside functions only.
"""
