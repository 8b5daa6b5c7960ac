"""The kernels that Inductor generates for an H100, without one: their number, and the bytes that each reads and writes.

A function of tensors becomes a graph on CPU tensors without memory; the tensors of the graph are then said to be on a
GPU, and what Inductor asks about it is answered. Inductor writes its Triton code and runs nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.core.ops.fp8 import quantize_blocks, quantize_pieces
from megatron.core.ops.norm import normalise, normalise_backward
from megatron.core.ops.swiglu import swiglu_backward, swiglu_reference
from megatron.core.tensor_parallel import cross_entropy
from tests.triton_kernels.worker import TritonProcess

COMPILED = frozenset(
    (
        normalise,
        normalise_backward,
        swiglu_reference,
        swiglu_backward,
        cross_entropy._log_sum_exp,
        cross_entropy._write_gradient,
        quantize_blocks,
        quantize_pieces,
    )
)
"""The functions that a run on a GPU gives to Inductor; what else is one kernel is written in Triton."""
_H100 = {
    "multi_processor_count": 132,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}
_CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Strided:
    """A tensor without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class InductorKernels:
    """The bytes of each kernel of a compiled function; every function is compiled once for given shapes."""

    def __init__(self, process: TritonProcess) -> None:
        self._process = process
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Sequence[int] | None:
        """None for a function that Inductor does not compile."""
        if function not in COMPILED:
            return None
        key = (
            function,
            tuple(
                Strided(tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one
                for one in arguments
            ),
        )
        if key not in self._known:
            self._known[key] = self._process.run(bytes_of_kernels, *key)
        return self._known[key]


def bytes_of_kernels(function: Callable[..., Any], arguments: Sequence[Any]) -> list[int]:
    """The bytes that each kernel of ``function`` reads and writes, in the order of their launches."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with hopper():
        with mode:
            given = [
                torch.empty_strided(one.shape, one.stride, dtype=one.dtype) if isinstance(one, Strided) else one
                for one in arguments
            ]
            tensors = [one for one in given if isinstance(one, Tensor)]

            def of_tensors(*replaced: Tensor) -> Any:
                left = iter(replaced)
                return function(*(next(left) if isinstance(one, Tensor) else one for one in given))

            graph = make_fx(functionalize(of_tensors), decomposition_table=select_decomp_table())(*tensors)

        def on_gpu(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return FakeTensor(mode, meta, _CUDA)

        for node in graph.graph.nodes:
            value = node.meta.get("val")
            node.meta["val"] = tuple(map(on_gpu, value)) if isinstance(value, (tuple, list)) else on_gpu(value)
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": _CUDA}
        inputs = [on_gpu(tensor) for tensor in tensors]
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True)
        handlers = V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext())
        with ExitStack() as stack:
            for context in (*handlers, mode):
                stack.enter_context(context)
            lowering.run(*inputs)
            code = str(lowering.codegen()[0].value)
    return _bytes_in(code, {f"arg{number}_1": tensor for number, tensor in enumerate(inputs)})


def _bytes_in(code: str, tensors: Mapping[str, Tensor]) -> list[int]:
    """The bytes of each kernel that ``code`` calls, where ``tensors`` are its arguments: the tensors that it reads, and
    those that it writes."""
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    parameters = dict(re.findall(r"def (triton_\w+)\((.*?)\):", code))
    found = []
    for line in code[code.index("def call(") : code.index("return (", code.index("def call("))].splitlines():
        if made := re.search(r"(\w+) = empty_strided_cuda\(\(([\d, ]+)\), .*torch\.(\w+)\)", line):
            name, shape, dtype = made.groups()
            sizes[name] = prod(int(size) for size in shape.split(",") if size.strip()) * getattr(torch, dtype).itemsize
        elif reused := re.search(r"(\w+) = (\w+); del \2", line):
            sizes[reused[1]] = sizes[reused[2]]
        elif called := re.search(r"(triton_\w+)\.run\((.*), stream", line):
            pairs = zip(called[2].split(", "), parameters[called[1]].split(", "))
            found.append(
                sum(sizes[name] * (1 + parameter.startswith("in_out")) for name, parameter in pairs if name in sizes)
            )
        elif summed := re.search(r"(\w+) = (\w+)\[.*\.sum\(dim=0\)\.view\(\[(\d+)\]\)", line):
            # The sums of a kernel's programs, added by torch.
            sizes[summed[1]] = int(summed[3]) * torch.float32.itemsize
            found.append(sizes[summed[2]] + sizes[summed[1]])
        else:
            assert "=" not in line or re.search(r" = (args|get_raw_stream)|#|^def ", line), f"unknown: {line}"
    return found


@contextmanager
def hopper() -> Iterator[None]:
    """A context in which Triton and Inductor generate code for an H100."""
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime.driver import driver

    from tests.triton_kernels.compiled import Hopper

    properties = DeviceProperties(type="cuda", index=0, cc=90, **_H100)
    answers = {
        "torch._inductor.scheduler.has_triton": True,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": SimpleNamespace(
            name="NVIDIA H100", minor=0, total_memory=80 << 30, gcnArchName="", **_H100
        ),
    }
    driver.set_active(Hopper())
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *arguments, answer=answer: answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", lambda device: properties))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda *arguments: None))
        yield
