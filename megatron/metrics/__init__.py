"""Metrics records and their writers: one file a writer, with its flags; free of torch."""
