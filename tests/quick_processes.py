"""Processes that start quickly: forked from one that has imported torch and what they need."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

# One list for all tests: the process that is forked imports it once, when the first test of a session needs it.
MODULES = ["tests.checkpoint.test_checkpointing", "tests.checkpoint.fault_run"]


def quick_context() -> ForkServerContext:
    """The context of ``multiprocessing`` that starts them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context
