"""The records of units are what whole simulated steps launch, and their prices add up to the price of the step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from torch import Tensor

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.models.layer import MLP, SequencePositions, TransformerLayer
from megatron.planner.launches import Launch, axis_of
from megatron.planner.plan import Run
from megatron.planner.rehearsal.price import PlannedStep, StepPrices, attention_kind, pass_times
from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
from megatron.planner.step_time.prices import load_fitted, optimizer_seconds
from megatron.planner.step_time.workload import TERMS, read_cluster
from megatron.training.build.vocabulary import planned_vocabulary
from megatron.training.initialize import rank_grid
from tests.covering import Factors, each_factor_by_default, flags_of
from tests.recorded_step import record_step

MICROBATCHES = 3
"""The first and the last also gather weights or reduce gradients; the one between is like every other one."""
COMMON = "--mock-data --bf16 --seq-length 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-3"
ZERO = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
PP2 = f"{TP4} --pipeline-model-parallel-size 2"
FP8 = "--fp8-format hybrid --fp8-recipe"
EP = "--moe-token-dispatcher-type alltoall --rank-order tp-cp-ep-dp-pp --expert-model-parallel-size"
FULL = "--recompute-granularity full --recompute-method"
MODULES = "--recompute-activations --recompute-modules"
LEVELS = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
TWO = "--num-layers 2"
LLAMA_8B, LLAMA_70B = (f"--model llama3-{size} {TWO}" for size in ("8b", "70b"))
FOLDED = f"{ZERO} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
SCOUT = f"--model llama4-scout --num-layers 4 {FOLDED} {EP} 16"
MAVERICK = f"--model llama4-maverick --num-layers 4 --moe-layer-freq [0,1]*2 {FOLDED} {EP} 32"


@dataclass(frozen=True)
class Case:
    flags: str
    num_gpus: int
    cluster: str = "h100"
    term: float = 0.003
    """Largest difference of a term of a pass, as a share of all passes."""

    def __str__(self) -> str:
        return self.flags.removeprefix("--model ")[:70]

    def factors(self) -> Factors:
        return {"cluster": self.cluster, **flags_of(self.flags)}

    @property
    def run(self) -> Run:
        config = parse_command_line(f"{COMMON} {self.flags} --global-batch-size 1".split())
        batch = MICROBATCHES * config.micro_batch_size * rank_grid(config.parallel, self.num_gpus).dp
        config = replace(config, training=replace(config.training, global_batch_size=batch))
        check_run(config, self.num_gpus)
        run = Run.of(config, self.num_gpus, planned_vocabulary(config))
        return replace(run, config=self.records(run).with_attention_kernel(run.config))

    def records(self, run: Run) -> UnitRecords:
        return UnitRecords(run.vocabulary.size, attention_kind(run.config, read_cluster(self.cluster)))

    @property
    def prices(self) -> StepPrices:
        return StepPrices(read_cluster(self.cluster), load_fitted())


CASES = [
    Case(f"--model tiny --vocab-size 1000 --max-position-embeddings 8192 {ZERO}", 2),
    Case(f"{LLAMA_8B} {ZERO}", 8),
    Case(f"{LLAMA_8B} {ZERO}", 8, cluster="a100-80gb"),
    Case(f"{LLAMA_8B} --data-parallel-sharding-strategy no_shard", 64),
    Case(f"{LLAMA_8B} {ZERO} --tensor-model-parallel-size 2", 8),
    Case(f"{LLAMA_8B} {ZERO} {TP4} --tp-comm-overlap", 8),
    Case(f"{LLAMA_8B} {ZERO} {TP4} --micro-batch-size 4 --grad-reduce-in-bf16", 8),
    Case(f"{LLAMA_8B} {ZERO} --grad-reduce-in-bf16 --no-gradient-accumulation-fusion", 8),
    Case(f"{LLAMA_8B} {ZERO} --transformer-impl transformer_engine --fp8-format hybrid", 8),
    Case(f"{LLAMA_8B} {ZERO} {PP2} --context-parallel-size 2 --rank-order tp-pp-cp-ep-dp", 64),
    Case(f"{LLAMA_8B} {ZERO} --context-parallel-size 4", 8),
    Case(f"{LLAMA_8B} {ZERO} {TP4} --context-parallel-size 2 --cp-comm-type a2a", 16),
    Case(f"{LLAMA_8B} {ZERO} --context-parallel-size 4 --cp-comm-type allgather", 8),
    Case(f"{LLAMA_8B} {ZERO} {LEVELS} 4 2", 16),
    Case(f"{LLAMA_8B} {ZERO} --context-parallel-size 2 --cp-comm-type p2p a2a", 8),
    Case(f"{LLAMA_8B} {ZERO} --loss-chunk-size 1024", 8),
    Case(f"{LLAMA_8B} {ZERO} --kernel attention=reference", 8),
    Case(f"{LLAMA_8B} {ZERO} {FP8} delayed", 8),
    Case(f"{LLAMA_8B} {ZERO} {TP4} {FP8} tensorwise", 8, cluster="b200"),
    Case(f"{LLAMA_8B} {ZERO} {TP4} --fp8-format e4m3 --fp8-recipe blockwise", 8),
    Case(f"--model llama3-8b --num-layers 3 {ZERO} {FP8} tensorwise --first-last-layers-bf16", 8),
    Case(f"--model qwen3-8b {TWO} {ZERO} {TP4}", 8),
    Case(f"{LLAMA_70B} {ZERO} {PP2} --context-parallel-size 2", 64),
    Case(f"--model llama3-8b --mtp-num-layers 2 {TWO} {ZERO} {PP2}", 64),
    Case(f"{LLAMA_70B} {ZERO} {PP2} --pipeline-schedule zb-h1", 64),
    Case(f"{LLAMA_70B} {ZERO} {FULL} block --recompute-num-layers 1", 64),
    Case(f"{LLAMA_70B} {ZERO} {FULL} uniform --recompute-num-layers 2", 64),
    Case(f"{LLAMA_70B} {ZERO} {TP4} {MODULES} core_attn layernorm mlp_act", 64),
    Case(f"{LLAMA_70B} {ZERO} {TP4} {MODULES} mlp", 64),
    Case(f"--model mixtral-8x7b {TWO} {ZERO} {EP} 8 {MODULES} moe_act", 16),
    Case(f"--model mixtral-8x7b {TWO} {ZERO} --expert-model-parallel-size 4 --rank-order tp-cp-ep-dp-pp", 16),
    Case(f"--model mixtral-8x7b {TWO} {ZERO} {EP} 4 --expert-tensor-parallel-size 1 {TP4}", 16),
    Case(f"{SCOUT} --pipeline-model-parallel-size 2", 64),
    Case(f"{SCOUT} --seq-length 16384 --micro-batch-size 2", 32),
    Case(f"{MAVERICK} --pipeline-model-parallel-size 2 --no-attention-temperature-tuning", 64),
    Case(f"{MAVERICK} --seq-length 65536 --context-parallel-size 4 --cp-comm-type a2a", 64),
]
REDUCED = [
    Case(f"{LLAMA_8B} {ZERO}", 8),
    Case(f"{LLAMA_8B} --data-parallel-sharding-strategy no_shard", 64),
    Case(f"{LLAMA_8B} {ZERO} {TP4} --grad-reduce-in-bf16", 64, cluster="h100-roce"),
    Case(f"{LLAMA_8B} {ZERO2}", 16),
    Case("--model llama3-8b --num-layers 8 --use-torch-fsdp2", 16),
    Case("--model llama3-8b --num-layers 8 --use-torch-fsdp2 --defer-grad-reduce", 16),
    Case("--model llama3-8b --num-layers 8 --use-torch-fsdp2 --num-distributed-optimizer-instances 2", 16),
    Case(f"--model mixtral-8x7b {TWO} {ZERO} {EP} 4", 16),
]


def planned(case: Case, run: Run) -> PlannedStep:
    return PlannedStep(UnitsOfRun(case.records(run), run.config, run.grid), run.global_batch_size)


def axis(launch: Launch) -> str:
    return "" if launch.group is None else axis_of(launch.group.axes)


def of_pass(launches: Iterable[Launch], name: str) -> list[Launch]:
    """The launches of a pass of the microbatch between the others."""
    return [one for one in launches if one.during.startswith(f"{name} pass, microbatch 1,")]


def differences(case: Case) -> dict[str, float]:
    """Terms of the passes of the first and the last stage by the units' records that differ from those of a recorded
    step, as a share of all passes."""
    run, prices = case.run, case.prices
    step = planned(case, run)
    by_stage, found = step.units.division.by_stage, {}
    for stage in dict.fromkeys((0, run.grid.pp - 1)):
        ours = np.sum([prices.passes(step, number) for number in by_stage[stage]], axis=0)
        rank = run.grid.group(run.rank_of_stage(stage), ("cp",))[-1]
        launches = record_step(run, rank, MICROBATCHES)
        for number, name in enumerate(("forward", "backward", "weight gradients")):
            theirs = prices.launch_prices(step).by_term(of_pass(launches, name))
            expected = np.array([theirs.get(term, 0.0) for term in TERMS])
            # Of the output layer all launches are one term.
            for term in ("gaps", "output layer"):
                assert expected[TERMS.index(term)] == 0
            has_output = step.units.division.stages[by_stage[stage][-1]].has_output_layer
            share = (ours[number] - expected) / ours.sum()
            for term, difference in zip(TERMS, share):
                if term not in ("gaps", "output layer") and not has_output and abs(difference) > case.term:
                    found[f"{name}: {term}"] = float(difference)
            gaps = ours[number, TERMS.index("gaps")]
            total = (ours[number].sum() - gaps - expected.sum()) / ours.sum()
            if abs(total) > case.term:
                found[name] = float(total)
    return found


@pytest.mark.parametrize("case", each_factor_by_default(CASES, Case.factors), ids=str)
def test_units_launch_what_a_step_launches(case: Case) -> None:
    assert differences(case) == {}


@pytest.mark.parametrize("case", each_factor_by_default(REDUCED, Case.factors), ids=str)
def test_reductions_gathers_and_the_update_are_those_of_a_step(case: Case) -> None:
    """Without overlap everything that is sent is exposed."""
    run, prices = case.run, StepPrices(read_cluster(case.cluster), {**load_fitted(), "growth": 0.0})
    step = planned(case, run)
    launches = record_step(run, 0, MICROBATCHES)
    terms = {name: float(seconds[0]) for name, seconds in prices.price([step]).terms.items()}
    seconds_of = prices.launch_prices(step)
    shared = sum(seconds_of.collective(one) for one in launches if axis(one) in ("dp", "edp"))
    between = [one for one in launches if "pass, microbatch" not in one.during]
    assert terms["data parallelism"] == pytest.approx(shared, rel=0.08)
    updated = sum(one.num_bytes for one in between if one.kind == "elementwise")
    expected = float(optimizer_seconds(seconds_of.machines, prices.constants, updated)[0])
    assert terms["optimizer"] == pytest.approx(expected, rel=0.1)
    others = [one for one in launches if "pass, microbatch" in one.during and not is_part_of_fsdp(one)]
    expected = sum(seconds_of.by_term(others).values())
    computed = sum(seconds for name, seconds in terms.items() if name not in ("gaps", "data parallelism", "optimizer"))
    assert computed == pytest.approx(expected, rel=0.02)


def is_part_of_fsdp(launch: Launch) -> bool:
    """Copies of FSDP2's gathers and reductions, which are part of the fitted contention of sharding."""
    return launch.name.startswith("fsdp::") or launch.name in ("aten::cat", "aten::_foreach_copy_")


DENSE = Case(f"{LLAMA_8B} {ZERO}", 8)


def test_a_further_product_or_pass_in_a_layer_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the code says what a layer does."""

    def price() -> dict[str, float]:
        return {name: float(one[0]) for name, one in DENSE.prices.price([planned(DENSE, DENSE.run)]).terms.items()}

    def twice(self: MLP, x: Tensor) -> Tensor:
        self.norm_fc1(x)
        output: Tensor = self.swiglu_fc2(self.norm_fc1(x))
        return output

    def scaled(self: TransformerLayer, x: Tensor, positions: SequencePositions) -> Tensor:
        x = x + self.self_attention(x, positions)
        return (x + self.mlp(x)).mul(1.0)

    before = price()
    with monkeypatch.context() as patched:
        patched.setattr(MLP, "forward", twice)
        assert price()["products"] > 1.1 * before["products"]
    monkeypatch.setattr(TransformerLayer, "forward", scaled)
    after = price()
    assert after["between products"] > 1.02 * before["between products"]
    assert after["products"] == before["products"]


def test_time_is_proportional_to_layers_and_microbatches_but_for_what_a_step_has_once() -> None:
    def terms(flags: str, microbatches: int) -> dict[str, float]:
        case = Case(f"--model llama3-8b {ZERO} {flags}", 8)
        step = planned(case, case.run)
        step = replace(step, global_batch_size=step.global_batch_size * microbatches)
        return {name: float(seconds[0]) for name, seconds in case.prices.price([step]).terms.items()}

    one, deeper, longer = terms("--num-layers 8", 1), terms("--num-layers 16", 1), terms("--num-layers 8", 2)
    assert deeper["products"] == pytest.approx(2 * one["products"], rel=1e-9)
    assert deeper["output layer"] == pytest.approx(one["output layer"], rel=1e-9)
    assert longer["products"] == pytest.approx(2 * one["products"], rel=1e-9)
    assert longer["optimizer"] == pytest.approx(one["optimizer"], rel=1e-9)


def test_products_are_listed_with_their_shapes_and_time() -> None:
    step = planned(DENSE, DENSE.run)
    price = DENSE.prices.price([step])
    products = pass_times(DENSE.prices, step, float(price.total[0])).products
    assert {(one.m, one.n, one.k) for one in products} >= {(8192, 28672, 4096), (8192, 4096, 14336)}
    flops = sum(2 * one.m * one.n * one.k * one.count for one in products)
    per_token = 6 * (2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256)
    assert flops == pytest.approx(per_token * 8192 * MICROBATCHES, rel=1e-3)
    seconds = sum(one.seconds for one in products)
    assert seconds < float(price.terms["products"][0] + price.terms["output layer"][0])
