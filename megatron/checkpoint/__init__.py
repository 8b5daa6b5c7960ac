"""Checkpoints: written by any layout of ranks, read by any other, bit for bit, and never torn."""
