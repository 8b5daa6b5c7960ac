"""Ranks that are slower than others with the same work."""
