"""Context parallelism: the ranks that share a sequence, and attention over all of it."""
