"""The training room: the loop, its metrics and their writers, evaluation, and faults."""
