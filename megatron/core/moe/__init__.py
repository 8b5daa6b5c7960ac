"""Mixture of experts: routers, their balance, dispatchers and experts."""
