"""The history of GPU memory is one that torch's viewer reads.

pytest tests/gpu/test_recorded_memory.py --device cuda
"""

from pathlib import Path

import pytest
import torch

from megatron import torch_compat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
