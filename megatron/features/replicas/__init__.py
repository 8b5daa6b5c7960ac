"""Ranks that hold the same tensors must hold the same bits."""
