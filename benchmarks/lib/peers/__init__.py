"""One training step by several systems, each in an environment and processes of its own (benchmarks/peers.py)."""
