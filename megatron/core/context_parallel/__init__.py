"""Context parallelism: several ranks share a sequence, and attention goes over all of it."""
