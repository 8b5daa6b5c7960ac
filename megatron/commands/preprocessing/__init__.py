"""Tokenizing of inputs in processes and partitions."""
