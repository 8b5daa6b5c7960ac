"""Transformer Engine as an optional backend: linear layers, the norms before them, attention, and FP8 recipes.

Written against the sources of versions 2.9.0, the oldest that is accepted, and 2.20.2. ``tests/transformer_engine`` has
the signatures of everything that is used.
"""
