"""The dry run: memory, communication and layout of a run, computed before it starts."""
