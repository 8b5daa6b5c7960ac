"""The choice of the implementation of each operation: made once, passed down as objects, and logged."""
