"""Which implementation computes each operation: chosen once, passed down as objects, and logged."""
