"""Data parallelism: strategies for what the ranks with the same part of the model share, behind one interface."""
