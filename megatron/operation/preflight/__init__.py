"""Checks of the nodes of a job before it trains: disk, clocks, memory, GPUs, products, sums, links.

``run.py`` runs them, ``table.py`` lists them, and each has a file of its own.
"""
