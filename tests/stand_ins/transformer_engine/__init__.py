"""Stands in for Transformer Engine."""
