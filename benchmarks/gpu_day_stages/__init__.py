"""The stages of benchmarks/gpu_day.py: each runs in a process of its own and appends a line per check."""
