"""benchmarks/peers.py: the protocol with ours and transformers on a tiny model, and the arithmetic of its table."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.lib.peers.megatron_core import megatron_weights
from benchmarks.lib.peers.processes import ContenderError, RankProcesses
from benchmarks.lib.peers.worker import build_step
from benchmarks.peers import (
    CHECKED_STEPS,
    MEDIUM,
    SMALL,
    TINY,
    BenchmarkConfig,
    Contender,
    Result,
    compare_losses,
    contenders_of,
    interval,
    measure,
    relative_speed,
    report,
    start_weights,
    table,
    write_inputs,
)
from megatron.errors import ConfigError

OURS = Contender("ours", "one", TINY, 4)
TRANSFORMERS = replace(OURS, peer="transformers")


@pytest.mark.processes
@pytest.mark.slow(reason="a benchmark: six processes with all their imports")
def test_contenders_in_processes_of_their_own_train_with_equal_losses() -> None:
    pytest.importorskip("transformers")
    config = BenchmarkConfig(model="tiny", only="TP2", repeats=2, peers=("transformers",), timeout=300)
    (contenders,) = config.groups
    names = [f"tiny, fp32, {layout}, {peer}" for layout in ("one rank", "TP2") for peer in ("ours", "transformers")]
    assert [one.name for one in contenders] == names
    results = measure(config, contenders)
    assert [one.contender.name for one in results] == names
    assert not any(one.error for one in results)
    assert all(len(one.losses) == CHECKED_STEPS and len(one.seconds) == 2 for one in results)
    assert len(set(results[0].losses)) == CHECKED_STEPS


@pytest.mark.processes
@pytest.mark.slow(reason="a benchmark: two processes with all their imports")
def test_an_error_of_a_rank_is_reported_and_ends_the_other_ranks(tmp_path: Path) -> None:
    write_inputs(TINY, tmp_path / "inputs")
    broken = replace(OURS, layout="tp", workload=replace(TINY, model=TINY.model | {"hidden_act": "relu"}))
    jobs = [broken.job(rank, "cpu", str(tmp_path / "inputs"), str(tmp_path / "store")) for rank in range(2)]
    with pytest.raises(ContenderError, match="relu"):
        RankProcesses(Path(sys.executable), jobs, threads=1, directory=tmp_path, timeout=300)


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (3.003, "the losses differ from ours by 1.0e-03 (relative), more than 1e-04"),
        (float("nan"), "the losses differ from ours by nan (relative), more than 1e-04"),
        (3.0 * (1 + 5e-5), None),
        (3.0 * (1 - 5e-5), None),
    ],
)
def test_different_losses_are_an_error(loss: float, error: str | None) -> None:
    results = [Result(OURS, [4.0, 3.0], [1.0]), Result(TRANSFORMERS, [4.0, loss], [1.0])]
    compare_losses(results)
    assert [one.error for one in results] == [None, error]


def test_the_interval_is_of_the_turns() -> None:
    assert interval([float(value) for value in range(11)]) == (1.0, 5.0, 9.0)


def test_speeds_are_compared_turn_by_turn() -> None:
    # Both are twice as slow in the second turn: the ratio is the same.
    assert relative_speed([1.0, 2.0], [3.0, 6.0]) == (3.0, 3.0, 3.0)
    assert relative_speed([], [3.0]) is None


def test_the_table_has_speeds_and_names_errors() -> None:
    failed = Result(replace(OURS, layout="cp"), [], [], "RuntimeError: no ring")
    rows = report([Result(OURS, [3.0], [0.1, 0.1]), Result(TRANSFORMERS, [3.0], [0.2, 0.2]), failed])
    _, ours, transformers, last = table(rows)
    assert ours.split("ours")[1].split() == ["100.0", "(100.0-100.0)", "2.00", "(2.00-2.00)", "1.00", "(1.00-1.00)"]
    assert "0.50 (0.50-0.50)" in transformers
    assert last.split("CP2, ours")[1].strip() == "RuntimeError: no ring"


def test_the_rows_of_every_contender_are_the_stored_ones() -> None:
    """With a star where losses may differ in bf16: only under autocast, in the medium model, on one rank."""
    rows = [
        one for size in (SMALL, MEDIUM) for one in contenders_of(["transformers", "torchtitan", "megatron_core"], size)
    ]
    found = [one.name + " *" * (one.tolerance > 1e-3) for one in rows]
    assert found == Path(__file__).with_name("contenders.txt").read_text().splitlines()


def test_fused_weights_of_megatron_core_are_in_the_order_of_query_groups_and_ranks() -> None:
    model = TINY.model | {"num_key_value_heads": 2}  # two queries of 8 rows for each key
    source = start_weights(model)
    fused = megatron_weights(source, model, tp=2)
    q, k, v = (source[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    qkv = torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
    assert torch.equal(fused["decoder.layers.1.self_attention.linear_qkv.weight"], qkv)
    gate, up = (source[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    fc1 = torch.cat([gate[:32], up[:32], gate[32:], up[32:]])
    assert torch.equal(fused["decoder.layers.1.mlp.linear_fc1.weight"], fc1)
    assert sum(one.numel() for one in fused.values()) == sum(one.numel() for one in source.values())


def test_a_group_has_the_rows_of_one_layout() -> None:
    groups = BenchmarkConfig(peers=("transformers",)).groups
    layouts = ["one", "dp", "fsdp", "tp", "pp", "cp", "one"]
    assert [{one.layout for one in group} for group in groups] == [{"one", layout} for layout in layouts]
    names = [one.name for group in groups for one in group]
    every = [one.name for workload in (SMALL, MEDIUM) for one in contenders_of(["transformers"], workload)]
    assert set(names) == set(every)


@pytest.mark.parametrize("peer", ["torchtitan", "olmo_core"])
def test_a_peer_is_built_by_the_module_of_its_name(peer: str) -> None:
    if find_spec(peer) is not None:
        pytest.skip(f"{peer} is installed here")
    job = replace(OURS, peer=peer).job(rank=0, device="cpu", weights="", store="")
    with pytest.raises(ModuleNotFoundError, match=peer) as error:
        build_step(job)
    assert Path(error.traceback[-1].path).stem == peer


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BenchmarkConfig(repeats=1), "--repeats"),
        (BenchmarkConfig(peers=("nobody",)), "--peers nobody"),
        (BenchmarkConfig(model="huge"), "--model huge"),
        (BenchmarkConfig(json="s3://bucket/x"), "--json"),
    ],
)
def test_wrong_flags_are_named(config: BenchmarkConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check()
