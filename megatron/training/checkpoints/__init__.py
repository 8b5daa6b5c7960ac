"""The state of a run, saved and loaded."""
