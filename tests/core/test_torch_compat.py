"""Each private name of torch does what this code needs, and none is used outside of ``megatron/torch_compat.py``.

What other tests compute with is theirs: the attention of CPUs, GEMMs (``test_ops.py``, ``test_fp8.py``), collectives,
the store of the ranks and timeouts (``test_communication.py``, ``test_control.py``).
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import torch_compat

REPOSITORY = Path(__file__).parents[2]


def test_the_history_of_gpu_memory_has_these_parameters() -> None:
    record = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "max_entries"} <= record.keys()
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"


def private_names(path: Path) -> Iterator[str]:
    """Names of torch with a leading underscore that a file imports or reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)] if re.fullmatch(r"[\w.]+", ast.unparse(node)) else []
        for name in names:
            root, *parts = name.split(".")
            # torch documents its _foreach_ functions.
            if root in ("torch", "dist", "F", "aten") and any(
                part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts
            ):
                yield name


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {path: set(private_names(path)) for path in (REPOSITORY / "megatron").rglob("*.py")}
    (here,) = [path for path in found if path.name == "torch_compat.py"]
    assert len(found.pop(here)) >= 15
    assert not {path: names for path, names in found.items() if names}


def test_the_store_of_a_single_process() -> None:
    store = torch_compat.ranks_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert not store.check(["another"])


FLASH_KEPT = "cum_seq_q cum_seq_k max_q max_k"
SIGNATURES = {
    "flash_attention": "query key value dropout_p is_causal",
    "flash_attention_backward": f"grad_out query key value out logsumexp {FLASH_KEPT} dropout_p is_causal philox_seed "
    "philox_offset",
    "varlen_flash_attention": f"query key value {FLASH_KEPT} dropout_p is_causal return_debug_mask",
    "varlen_flash_attention_backward": f"grad_out query key value out logsumexp {FLASH_KEPT} dropout_p is_causal "
    "rng_state unused",
    "cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal",
    "cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset attn_bias "
    f"{FLASH_KEPT} dropout_p is_causal",
    "varlen_cudnn_attention": f"query key value attn_bias {FLASH_KEPT} compute_log_sumexp dropout_p is_causal",
    "varlen_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset attn_bias "
    f"{FLASH_KEPT} dropout_p is_causal",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_attention_on_gpus_takes_what_we_pass(name: str) -> None:
    wanted = SIGNATURES[name].split()
    arguments = [argument.name for argument in getattr(torch_compat, name).default._schema.arguments]
    assert arguments[: len(wanted)] == wanted
    returned = [value.name for value in getattr(torch_compat, name).default._schema.returns]
    if name == "varlen_flash_attention":
        assert returned[:4] == ["output", "softmax_logsumexp", "rng_state", "unused"]
    elif not name.endswith("backward"):
        assert returned[:8] == f"output logsumexp {FLASH_KEPT}".split() + returned[6:8]


def test_symmetric_memory_operators() -> None:
    operators = torch_compat.symmetric_memory_operators()
    for name, wanted in (
        ("fused_all_gather_matmul", ["A", "Bs", "gather_dim", "group_name"]),
        ("fused_matmul_reduce_scatter", ["A", "B", "reduce_op", "scatter_dim", "group_name"]),
    ):
        names = [argument.name for argument in getattr(operators, name).default._schema.arguments]
        assert names[: len(wanted)] == wanted


class Calls(torch_compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_operations_and_can_be_disabled() -> None:
    with Calls() as calls:
        torch.ones(2).sum().item()
        assert calls.seen[-1] is torch_compat.local_scalar
        count = len(calls.seen)
        with torch_compat.disable_dispatch_modes():
            torch.ones(2)
        assert len(calls.seen) == count


def test_the_schema_of_an_operator_says_what_it_writes() -> None:
    add, copy = (torch_compat.operator_schema(one) for one in (torch.ops.aten.add.out, torch.ops.aten.copy_.default))
    assert (add.name, copy.name) == ("aten::add", "aten::copy_")
    for schema, written in ((add, [("out", True)]), (copy, [("self", False)])):
        arguments = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        assert [(one.name, one.is_out) for one in arguments] == written
    assert torch.ops.aten.t.default.is_view and not torch.ops.aten.copy_.default.is_view


def test_state_dicts_are_saved_and_loaded_with_our_planner() -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    for function in (state_dict_saver._save_state_dict, state_dict_loader._load_state_dict):
        names = list(inspect.signature(function).parameters)
        assert names[0] == "state_dict" and {"process_group", "no_dist", "planner"} < set(names)


@pytest.mark.parametrize("rows, ranks", [(8, 4), (10, 4), (3, 4), (1, 1), (9, 5)])
def test_lazy_chunks_of_fsdp_equal_its_own(rows: int, ranks: int) -> None:
    module = torch_compat.fsdp_parameters()
    tensor = torch.arange(rows * 2).view(rows, 2)
    original = module._chunk_with_empty
    expected = original(tensor, ranks, dim=0)
    with torch_compat.lazy_fsdp_chunks():
        found = module._chunk_with_empty(tensor, ranks, dim=0)
        for rank in range(ranks):
            assert torch.equal(found[rank], expected[rank])
    assert not isinstance(found, list) and module._chunk_with_empty is original


def test_a_fake_group_has_as_many_ranks_as_asked_for() -> None:
    dist.init_process_group("fake", store=torch_compat.fake_store(), rank=7, world_size=1000)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (7, 1000)
        dist.all_reduce(torch.ones(1))
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import distribute_tensor

        mesh = DeviceMesh("cpu", list(range(1000)))
        distribute_tensor(torch.ones(2), mesh, src_data_rank=None) + 1
    finally:
        torch_compat.release_meshes()
        dist.destroy_process_group()


OPTIMIZERS_WITHOUT_COMPILER = """
import sys, torch
from megatron.core.optimizer import torch_adam
weight = torch.ones(2, requires_grad=True)
optimizer = torch_adam([{"params": [weight]}], (0.9, 0.95), 1e-8)
weight.grad = torch.ones(2)
optimizer.param_groups[0]["lr"] = 0.5
optimizer.step()
assert not weight.detach().equal(torch.ones(2))
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.processes
def test_an_optimizer_does_not_load_the_compiler() -> None:
    """In a process of its own, since other tests load it."""
    subprocess.run([sys.executable, "-c", OPTIMIZERS_WITHOUT_COMPILER], cwd=REPOSITORY, check=True)


def test_a_rendezvous_has_a_store_of_its_own_each_time_and_can_be_left() -> None:
    """Otherwise ranks of a node that joins later would look for the store at another address than the others."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "job", 1, 1, local_addr="127.0.0.1", is_host=True)
    handler = get_rendezvous_handler(parameters)
    ports = set()
    for _ in range(2):
        torch_compat.renew_store_address(handler)
        address = handler.next_rendezvous().bootstrap_store_info
        assert address is not None and address.master_addr == "127.0.0.1"
        ports.add(address.master_port)
        assert len(vars(handler)["_state_holder"].state.participants) == 1
        torch_compat.leave_rendezvous(handler, 60.0)
        assert not vars(handler)["_state_holder"].state.participants
    assert len(ports) == 2
    handler.shutdown()


def test_ranks_are_started_by_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their command, environment and output files."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, api, start_processes

    monkeypatch.setitem(vars(api), "get_subprocess_handler", vars(api)["get_subprocess_handler"])  # restored
    seen = []

    def start(handler: Any, words: Sequence[str], environment: Mapping[str, str]) -> Popen[Any]:
        seen.append((handler.local_rank_id, tuple(words), environment["NAME"], *torch_compat.redirected_to(handler)))
        return torch_compat.start_rank(handler, words, environment)

    torch_compat.start_ranks_by(start)
    context = start_processes(
        name="test",
        entrypoint="sh",
        args={0: ("-c", "echo $NAME")},
        envs={0: {"NAME": "rank"}},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.OUT),
    )
    assert context.wait(60, period=0.01) is not None
    ((rank, words, name, stdout, stderr),) = seen
    assert (rank, words, name, stderr) == (0, ("sh", "-c", "echo $NAME"), "rank", None)
    assert stdout is not None and Path(stdout).read_text() == "rank\n"
