"""Profiles of iterations and of the pipeline."""
