"""What a layer and a step launch, counted on tensors without memory and in the code that Inductor writes for an H100,
and the budgets of these counts.

    python -m tests.budgets.launch_budgets

writes ``tests/budgets/launches.md`` again from the code.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from megatron.config.command_line import parse_command_line
from megatron.planner.launches import CompiledKernels, Launch
from megatron.planner.plan import Run
from tests.budgets.inductor import InductorKernels
from tests.planner.planned_run import planned_run
from tests.recorded_step import passes_of, record_step
from tests.triton_kernels.worker import TritonProcess

BUDGETS = Path(__file__).with_name("launches.md")
HEADER = (
    "| model | precision | part | GEMMs | attention | elementwise | MB | collectives | host copies | host syncs |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)
MODELS = {
    "8B": "--model llama3-8b",
    "70B, TP4": "--model llama3-70b --tensor-model-parallel-size 4 --sequence-parallel",
    "405B, TP8": "--model llama3.1-405b --tensor-model-parallel-size 8 --sequence-parallel",
}
EXPERTS = {
    "8x7B": "--model mixtral-8x7b",
    "8x7B, TP2 EP2": "--model mixtral-8x7b --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
}
"""In bf16 alone. The counts of rows are assumed, so the host sync for the real ones is not in the table."""
PRECISIONS = {
    "bf16": "",
    "FP8 delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "FP8 tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
}
OF_8B = {
    "FP8 delayed, gathered": "--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather",
    "bf16 moments and gradients": "--grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 --adam-beta2 0.95",
}
"""Weights that are quantised before they are all-gathered, and an AdamW that converts."""
IN_BLOCKS = {"FP8 blockwise": "--fp8-format e4m3 --fp8-recipe blockwise"}
"""Of 70B alone, whose rows are quantised again in blocks of tokens before they are all-gathered."""
DOCUMENT_LENGTH = 1024
"""Eight documents in a sequence, in the rows with documents."""
_COMMON = (
    "--mock-data --bf16 --seq-length 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-3 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)

_WITHOUT_DOCUMENTS = "--kernel attention=cudnn"


@dataclass(frozen=True)
class LaunchCounts:
    """The launches of a pass or a step."""

    gemms: int
    attention: int
    elementwise: int
    elementwise_megabytes: int
    """Read and written, 10^6 bytes."""
    collectives: int
    host_copies: int
    """Copies between host and device for which the host does not wait."""
    host_syncs: int

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> "LaunchCounts":
        launches = list(launches)
        count = Counter(launch.kind for launch in launches)
        moved = sum(launch.num_bytes for launch in launches if launch.kind == "elementwise")
        return cls(
            count["gemm"],
            count["attention"],
            count["elementwise"],
            round(moved / 1e6),
            count["collective"],
            count["host copy"],
            count["host sync"],
        )


@dataclass(frozen=True)
class Row:
    """A run of which a layer and a step are counted."""

    model: str
    precision: str
    has_documents: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}{', documents' if self.has_documents else ''}"

    def run(self, num_stages: int, data_parallel_size: int) -> Run:
        """One layer per stage, two microbatches."""
        # torch's flash attention takes all documents in one call.
        documents = "--reset-attention-mask --kernel attention=flash" if self.has_documents else _WITHOUT_DOCUMENTS
        precision = (PRECISIONS | OF_8B | IN_BLOCKS)[self.precision]
        flags = (
            f"{_COMMON} {(MODELS | EXPERTS)[self.model]} {precision} {documents} --num-layers {num_stages} "
            f"--pipeline-model-parallel-size {num_stages} --global-batch-size {2 * data_parallel_size}"
        )
        tensor_parallel_size = parse_command_line(flags.split()).parallel.tensor_model_parallel_size
        return planned_run(flags, tensor_parallel_size * num_stages * data_parallel_size)

    def counts(self, kernels_of: CompiledKernels) -> dict[str, LaunchCounts]:
        """The counts of each part."""
        length = DOCUMENT_LENGTH if self.has_documents else None
        # A stage between two others has one layer and nothing else.
        stages = self.run(num_stages=3, data_parallel_size=1)
        passes = record_step(stages, stages.rank_of_stage(1), 2, length, kernels_of)
        step = record_step(self.run(num_stages=1, data_parallel_size=2), 0, 2, length, kernels_of)
        return {
            "layer, first microbatch": LaunchCounts.of(passes_of(passes, 0)),
            "layer, later microbatch": LaunchCounts.of(passes_of(passes, 1)),
            "step": LaunchCounts.of(step),
        }

    def lines(self, kernels_of: CompiledKernels) -> Iterator[str]:
        """The row in the table, one line for each part."""
        for part, counts in self.counts(kernels_of).items():
            numbers = " | ".join(f"{number:,}" for number in astuple(counts))
            yield f"| {self.name} | {self.precision} | {part} | {numbers} |"


ROWS = (
    *(Row(model, precision) for model in MODELS for precision in PRECISIONS),
    *(Row("8B", precision) for precision in OF_8B),
    *(Row("70B, TP4", precision) for precision in IN_BLOCKS),
    Row("8B", "bf16", True),
    *(Row(model, "bf16") for model in EXPERTS),
)


def write_budgets() -> None:
    with TritonProcess(interprets=False) as process:
        kernels_of = InductorKernels(process)
        lines = [*HEADER, *(line for row in ROWS for line in row.lines(kernels_of))]
    BUDGETS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_budgets()
