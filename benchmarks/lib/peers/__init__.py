"""The same training step by other systems, each in an environment and processes of its own (benchmarks/peers.py)."""
