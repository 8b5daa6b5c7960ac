"""Checks of the nodes of a job before it trains: disk, clocks, memory, GPUs, products, sums, links."""
