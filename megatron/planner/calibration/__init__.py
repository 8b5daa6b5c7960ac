"""Measures a machine, and fits the constants of a cluster file to it."""
