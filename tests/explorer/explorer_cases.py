"""Models whose layouts the tests of the explorer compose, and the data of a page for them."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.config.command_line import CommandLine
from megatron.explorer.page import page_data
from megatron.explorer.records import PRECISIONS, Choices
from megatron.planner.search.layout import Job
from megatron.planner.step_time.workload import read_cluster

CLUSTERS = ("h100", "h200", "b200")
FEW = Choices((1, 2), (1, 2), (1, 2), (1,), ("none", "layernorm+mlp_act", "full"))


def job_of(model: str, seq_length: int, precision: str, gpus: int, batch: int = 256) -> Job:
    words = f"--model {model} --seq-length {seq_length} --global-batch-size {batch} {PRECISIONS[precision]}"
    return Job.of(CommandLine.of_flags([]).over(words.split()), read_cluster("h100"), gpus)


@dataclass(frozen=True)
class Case:
    """Layouts of a model, among those of ``choices``."""

    model: str
    seq_length: int
    precision: str
    gpus: int
    num_layouts: int
    choices: Choices = FEW

    def job(self) -> Job:
        return job_of(self.model, self.seq_length, self.precision, self.gpus)


CASES = [
    Case("llama3.2-1b", 8192, "bf16", 16, 60),
    Case("mixtral-8x7b", 4096, "bf16", 128, 40, Choices((1, 2), (1,), (1, 4, 8), (1,), ("none", "full"))),
]


@cache
def data_of(case: Case) -> Any:
    """The data of a page, as it is read from the file."""
    return json.loads(json.dumps(page_data([case.job()], [read_cluster(name) for name in CLUSTERS], case.choices)))
