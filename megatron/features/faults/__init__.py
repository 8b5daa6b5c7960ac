"""Faults that a run injects into itself, to test its recovery."""
