"""Processes forked from one that has imported everything."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext


def fork_context() -> ForkServerContext:
    """Starts such processes; the session's first use starts the one that they are forked from."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context
