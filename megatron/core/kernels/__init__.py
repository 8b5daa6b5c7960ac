"""Which implementation computes each operation: chosen once, handed down as objects, and told."""
