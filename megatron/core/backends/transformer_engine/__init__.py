"""Transformer Engine as an optional backend: linear layers, the norms before them, attention, and FP8 recipes.

Written against the sources of versions 2.9.0 and 2.20.2, the oldest that is accepted and the newest then. Everything
that is used of the package is named in this room; ``tests/transformer_engine`` holds the signatures.
"""
