"""The closed form and the priced rehearsal agree: formulas follow when layers change."""

from dataclasses import dataclass

import pytest
from torch import Tensor

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.core.models.layer import MLP, SequencePositions, TransformerLayer
from megatron.planner.plan import Run
from megatron.planner.priced_rehearsal import PricedStep, price_rehearsal
from megatron.planner.step_time.cluster import read_cluster
from megatron.planner.step_time.fit import load_fitted
from megatron.planner.step_time.formulas import StepTimeModel
from megatron.planner.step_time.of_run import step_to_price
from megatron.planner.step_time.workload import TERMS, Workload
from megatron.training.build.vocabulary import planned_vocabulary

COMMON = "--mock-data --bf16 --seq-length 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-3 --overlap-grad-reduce "
ZERO = "--use-distributed-optimizer --overlap-param-gather"
FSDP = "--use-torch-fsdp2 --overlap-param-gather"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
PP4 = f"{TP4} --pipeline-model-parallel-size 4"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
FP8 = "--fp8-format hybrid --fp8-recipe"
EP = "--moe-token-dispatcher-type alltoall --rank-order tp-cp-ep-dp-pp --expert-model-parallel-size"
FULL = "--recompute-granularity full --recompute-method"
FOLDED = f"{ZERO} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
SCOUT = f"--model llama4-scout --num-layers 8 {FOLDED} {EP} 16"
MAVERICK = f"--model llama4-maverick --num-layers 8 --moe-layer-freq [0,1]*4 {FOLDED} {EP} 32"
TOLERANCE = 0.03


@dataclass(frozen=True)
class Case:
    flags: str
    num_gpus: int
    batch: int = 64
    cluster: str = "h100"
    term: float = 0.005
    """Largest difference of a term, as a share of the step."""

    @property
    def run(self) -> Run:
        config = parse_command_line(f"{COMMON} --global-batch-size {self.batch} {self.flags}".split())
        check_run(config, self.num_gpus)
        return Run.of(config, self.num_gpus, planned_vocabulary(config))


def model(name: str) -> str:
    return f"--model llama3-{name}"


CASES = [
    Case(f"--model tiny --vocab-size 1000 --max-position-embeddings 8192 {ZERO}", 2),
    Case(f"--model tiny --vocab-size 1000 --max-position-embeddings 8192 {ZERO} --pipeline-model-parallel-size 2", 8),
    Case(f"{model('8b')} {ZERO}", 8),
    Case(f"{model('8b')} {ZERO}", 8, cluster="a100-80gb"),
    Case(f"{model('8b')} --data-parallel-sharding-strategy no_shard", 64),
    Case(f"{model('8b')} --data-parallel-sharding-strategy optim_grads --overlap-param-gather", 16, term=0.01),
    Case(f"{model('8b')} {FSDP}", 16, term=0.01),
    Case(f"{model('8b')} {FSDP} --num-distributed-optimizer-instances 2 --defer-grad-reduce", 16, term=0.01),
    Case(f"{model('8b')} {ZERO} --tensor-model-parallel-size 2", 8),
    Case(f"{model('8b')} {ZERO} {TP4}", 8),
    Case(f"{model('8b')} {ZERO} {TP4} --micro-batch-size 4 --grad-reduce-in-bf16", 8),
    Case(f"{model('8b')} {ZERO} {TP4} --tp-comm-overlap", 8),
    Case(f"{model('70b')} {ZERO} {PP4} --tp-comm-overlap --pipeline-schedule zb-v", 64),
    Case(f"{model('8b')} {ZERO} --context-parallel-size 4", 8),
    Case(f"{model('8b')} {ZERO} {TP4} --context-parallel-size 2 --cp-comm-type a2a", 16),
    Case(f"{model('8b')} {ZERO} --context-parallel-size 4 --cp-comm-type allgather", 8),
    Case(
        f"{model('8b')} {ZERO} --context-parallel-size 8 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 4 2",
        16,
    ),
    Case(f"{model('8b')} {ZERO} {FP8} delayed", 8),
    Case(f"{model('8b')} {ZERO} {TP4} {FP8} tensorwise", 8, cluster="b200"),
    Case(f"{model('8b')} {ZERO} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 16),
    Case(f"--model qwen3-8b {ZERO} {TP4}", 8),
    Case(f"{model('70b')} {ZERO} {PP4} --num-virtual-stages-per-pipeline-rank 5 --context-parallel-size 2", 64, 128),
    Case(f"{model('70b')} {ZERO} {PP4} --pipeline-schedule zb-h1", 64, 8),
    Case(f"{model('70b')} {ZERO} {PP4} --pipeline-schedule zb-v", 64),
    Case(f"{model('70b')} {ZERO} {PP4} --grad-reduce-in-bf16", 256, cluster="h100-roce"),
    Case(
        f"{model('70b')} {ZERO} {PP4} --recompute-granularity full --recompute-method block --recompute-num-layers 7",
        64,
    ),
    Case(f"{model('70b')} {ZERO} {PP4} --recompute-activations --recompute-modules core_attn layernorm mlp_act", 64),
    Case(f"{model('70b')} {ZERO} {PP4} --recompute-activations --recompute-modules mlp", 64),
    Case(f"{model('70b')} {FSDP} {FULL} uniform --recompute-num-layers 1", 64),
    Case(
        "--model llama3.1-405b --use-distributed-optimizer --overlap-param-gather --tensor-model-parallel-size 8 "
        f"--sequence-parallel --pipeline-model-parallel-size 8 {ENDS} --num-virtual-stages-per-pipeline-rank 4",
        512,
    ),
    Case(f"--model mixtral-8x7b {ZERO} {EP} 8", 16),
    Case(f"--model qwen3-30b-a3b {ZERO} {EP} 8", 16),
    Case(f"--model mixtral-8x7b {ZERO} --expert-model-parallel-size 4 --rank-order tp-cp-ep-dp-pp", 16),
    Case(f"--model mixtral-8x7b {ZERO} {EP} 4 --expert-tensor-parallel-size 1 {TP4}", 16),
    Case(f"{SCOUT} --pipeline-model-parallel-size 2", 64),
    Case(f"{SCOUT} --seq-length 16384 --micro-batch-size 2", 32),
    Case(f"{MAVERICK} --pipeline-model-parallel-size 2 --no-attention-temperature-tuning", 64),
    Case(f"{MAVERICK} --seq-length 65536 --context-parallel-size 4 --cp-comm-type a2a", 64),
]


def closed_form(case: Case, run: Run) -> dict[str, float]:
    step = step_to_price(run.architecture, run.config, run.grid, run.global_batch_size, read_cluster(case.cluster))
    terms = StepTimeModel(Workload([step])).price(load_fitted()).terms
    return {name: float(seconds[0]) for name, seconds in terms.items()}


def rehearsal(case: Case, run: Run) -> PricedStep:
    return price_rehearsal(run, read_cluster(case.cluster), load_fitted())


def differences(case: Case) -> dict[str, float]:
    """Terms of the closed form that differ too much, and the total, each as a share of the rehearsal's step."""
    run = case.run
    closed, rehearsed = closed_form(case, run), rehearsal(case, run)
    assert set(closed) == set(rehearsed.terms) == set(TERMS)
    assert sum(rehearsed.terms.values()) == pytest.approx(rehearsed.seconds, rel=1e-9)
    found = {name: (closed[name] - rehearsed.terms[name]) / rehearsed.seconds for name in TERMS}
    found = {name: share for name, share in found.items() if abs(share) > case.term}
    total = sum(closed.values()) / rehearsed.seconds - 1
    return found | ({"total": total} if abs(total) > TOLERANCE else {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.flags.removeprefix("--model ")[:60])
def test_both_prices_agree(case: Case) -> None:
    assert differences(case) == {}


def test_there_are_more_than_thirty_layouts() -> None:
    assert len(CASES) == len(set(CASES)) == 38


DENSE = Case(f"{model('8b')} {ZERO}", 8)


def test_a_further_product_in_a_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: MLP, x: Tensor) -> Tensor:
        self.norm_fc1(x)
        output: Tensor = self.swiglu_fc2(self.norm_fc1(x))
        return output

    monkeypatch.setattr(MLP, "forward", forward)
    assert {"total", "products"} <= set(differences(DENSE))


def test_a_further_pass_over_the_activations_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: TransformerLayer, x: Tensor, positions: SequencePositions) -> Tensor:
        x = x + self.self_attention(x, positions)
        return (x + self.mlp(x)).mul(1.0)

    monkeypatch.setattr(TransformerLayer, "forward", forward)
    assert set(differences(DENSE)) == {"between products"}


def test_a_rehearsal_is_short_but_counts_all_layers_and_microbatches() -> None:
    """Twice the layers or microbatches take twice the time but for what a step has once."""
    case = Case(f"{model('8b')} {ZERO} --num-layers 8", 8)
    twice = (Case(f"{model('8b')} {ZERO} --num-layers 16", 8), Case(case.flags, 8, 128))
    one, deeper, longer = (rehearsal(each, each.run).terms for each in (case, *twice))
    assert deeper["products"] == pytest.approx(2 * one["products"], rel=1e-9)
    assert deeper["output layer"] == pytest.approx(one["output layer"], rel=1e-9)
    assert longer["products"] == pytest.approx(2 * one["products"], rel=1e-9)
    assert longer["optimizer"] == pytest.approx(one["optimizer"], rel=1e-9)


def test_products_are_listed_with_their_shapes_and_time() -> None:
    found = rehearsal(DENSE, DENSE.run)
    assert {(one.m, one.n, one.k) for one in found.products} >= {(8192, 28672, 4096), (8192, 4096, 14336)}
    flops = sum(2 * one.m * one.n * one.k * one.count for one in found.products)
    per_token = 6 * (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256)
    assert flops == pytest.approx(per_token * 8192 * 64 / 8, rel=1e-3)
    seconds = sum(one.seconds for one in found.products)
    assert seconds < found.terms["products"] + found.terms["output layer"]
