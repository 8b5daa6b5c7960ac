"""The lines of benchmarks/first_contact.py and benchmarks/gpu_day.py: each runs in a process of its own."""
