"""Processes that import Triton in one of two modes, for tests of kernels on machines without a GPU.

``TRITON_INTERPRET`` is read when Triton and the module of a kernel are imported, so each mode has a process:

* With it, kernels run on CPU tensors. The interpreter's own conversions round wrongly and are replaced by torch's
  (:mod:`tests.triton_kernels.interpreter`), so a kernel can convert to FP8 by ``.to``, which is one instruction on a
  GPU, and needs no integer arithmetic for the tests. The interpreter adds and multiplies the bits of bf16 numbers as if
  they were integers, so a kernel converts them to fp32 first, as its precision requires anyway.
* Without it, kernels are compiled for Hopper and not run (:mod:`tests.triton_kernels.compiled`).
"""

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock


class TritonProcess:
    """A process that the first case starts, with or without ``TRITON_INTERPRET``."""

    def __init__(self, interprets: bool) -> None:
        self._interprets = interprets
        self._pipe: Connection | None = None
        self._process: mp.process.BaseProcess | None = None

    def run(self, case: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> Any:
        """The result of the module-level function ``case(*arguments)`` in the process.

        Raises :class:`AssertionError` with the traceback of a case that failed.
        """
        pipe = self._pipe or self._start()
        try:
            pipe.send((case, arguments))
            if not pipe.poll(timeout):
                raise TimeoutError(f"{case.__name__} took more than {timeout} s")
            error, result = pipe.recv()
        except BaseException:
            # A late answer must not be taken for that of the next case.
            self.close()
            raise
        assert not error, error
        return result

    def _start(self) -> Connection:
        # Not forked: the process that others are forked from may have imported Triton.
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._interprets, theirs), daemon=True)
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1" if self._interprets else "0"):
            self._process.start()
        theirs.close()
        return self._pipe

    def close(self) -> None:
        """End the process; the next case starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def __enter__(self) -> "TritonProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(interprets: bool, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    if interprets:
        from tests.triton_kernels.interpreter import repair_interpreter

        repair_interpreter()
    while True:
        try:
            case, arguments = pipe.recv()  # imports the module of the case
            pipe.send((None, case(*arguments)))
        except EOFError:
            return
        except BaseException:
            pipe.send((traceback.format_exc(), None))
