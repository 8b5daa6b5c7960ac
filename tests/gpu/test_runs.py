"""Steps on the device equal those on a CPU in fp64: documents, recompute, offload, FP8; NCCL's operations; and the
history of GPU memory is one that torch's viewer reads."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron import torch_compat
from megatron.core.activations import OffloadedTensors
from megatron.core.transport.torch_distributed import Transport
from tests.parallel.comparison import one_process
from tests.parallel.layout_run import Layout, assemble, train
from tests.parallel.rows import Case
from tests.parallel.tasks import (
    ADAM_CLIPPED_HARD,
    CONTEXT_IN_DOCUMENTS,
    DELAYED,
    EMA,
    MUON,
    QWEN3,
    SGD,
    TENSORWISE,
    full,
    selective,
)

CASES: dict[str, Case] = {
    "Adam": (ADAM_CLIPPED_HARD, Layout(microbatches=2)),
    "documents": (CONTEXT_IN_DOCUMENTS, Layout(microbatches=2)),
    "Muon": (MUON, Layout()),
    "QK norm": (QWEN3, Layout()),
    "recompute of layers": (SGD, Layout(activations=full("uniform", 2))),
    "recompute of modules": (SGD, Layout(activations=selective("core_attn", "layernorm", "mlp_act"))),
    "offload": (SGD, Layout(activations=full("uniform", 1, cpu_offloading_num_layers=2), microbatches=2)),
    "offload of all": (SGD, Layout(activations=selective("mlp_act", cpu_offloading_num_layers=1))),
    "state on the host": (EMA, Layout(microbatches=2, offload=0.5)),
    "FP8 delayed": (DELAYED, Layout(microbatches=2)),
    "FP8 tensorwise": (TENSORWISE, Layout()),
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed on the device after its copy to the host is NaN, as if others had written to the memory."""
    free = OffloadedTensors.free_on_device

    def poison_and_free(saved: OffloadedTensors) -> None:
        if not saved._is_fetched:
            if saved._on_host is not None:
                saved._on_host.wait()
            for tensor in saved._tensors.values():
                assert tensor.on_device is not None
                if tensor.on_device.is_floating_point():
                    tensor.on_device.detach().fill_(torch.nan)
        free(saved)

    monkeypatch.setattr(OffloadedTensors, "free_on_device", poison_and_free)


@pytest.mark.rehearsed
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_of_a_cpu(device_name: str, name: str) -> None:
    task, layout = CASES[name]
    expected, found = one_process(task), train(task, replace(layout, device=device_name))
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-9)
    weights, wanted = assemble(found.weights[-1]), assemble(expected.weights[-1])
    for tensor, one in wanted.items():
        assert (weights[tensor] - one).abs().max() < 1e-9 * one.abs().max(), tensor


@pytest.fixture
def one_rank(device_name: str, tmp_path: Path) -> Iterator[Transport]:
    """A process group of one rank, over NCCL on a GPU."""
    backend = "nccl" if device_name == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Transport(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.rehearsed
def test_operations_of_a_group_of_one_rank(one_rank: Transport, device: torch.device) -> None:
    numbers = torch.arange(4.0, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        own, output = numbers.to(dtype), torch.zeros(4, dtype=dtype, device=device)
        one_rank.all_reduce(own, "sum").wait()
        for operation in (one_rank.all_gather, one_rank.reduce_scatter, one_rank.all_to_all):
            output.zero_()
            if dtype == torch.uint8 and operation == one_rank.reduce_scatter:
                continue
            operation(output, own).wait()
            assert torch.equal(output, numbers.to(dtype)), operation
        one_rank.broadcast(own, 0)
        assert torch.equal(own, numbers.to(dtype))
    assert one_rank.prefers_messages == (device.type == "cpu")


def test_a_rank_exchanges_with_itself(one_rank: Transport, device: torch.device) -> None:
    sent, received = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    for work in one_rank.exchange([("send", sent, 0), ("receive", received, 0)]):
        work.wait()
    assert torch.equal(received, sent)


def test_a_snapshot_has_the_allocations(tmp_path: Path) -> None:
    torch_compat.record_memory_history(1000)
    try:
        kept = torch.empty(12_345_678, dtype=torch.uint8, device="cuda")
        torch_compat.dump_memory_history(str(tmp_path / "snapshot.pickle"))
    finally:
        torch_compat.stop_memory_history()
    assert kept.is_cuda
    # Not unpickled: the size of the allocation is in the bytes of the file.
    assert (12_345_856).to_bytes(4, "little") in (tmp_path / "snapshot.pickle").read_bytes()
