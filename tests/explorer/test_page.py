"""The explorer's page: what it holds, and what it does in a browser when controls move."""

import json
from functools import cache

import pytest

from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.explorer.options import fragment_of
from megatron.explorer.page import explorer_page
from megatron.planner.search.layout import Layout
from tests.explorer.explorer_cases import CASES, data_of
from tests.reports.load_page import WIDTHS, assert_loads_nothing, needs_browser, run_in

READY = """
  for (let tries = 0; !window.explorer && tries < 400; tries++) await new Promise((done) => setTimeout(done, 20));
  const text = (id) => document.getElementById(id).textContent;
  const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  const move = (name, value) => {
    const input = document.getElementById(`control-${name}`);
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
    input.dispatchEvent(new Event(input.type === "range" ? "input" : "change"));
  };
"""


@cache
def page() -> str:
    return explorer_page(data_of(CASES[0]))


def test_the_page_is_one_file_that_loads_nothing() -> None:
    assert len(page()) < 4e6
    assert_loads_nothing(page())


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_controls_move_the_figures_and_the_schedule_plays(width: int) -> None:
    found = run_in(
        page(),
        width,
        READY
        + """
        const base = {model: "llama3.2-1b", num_gpus: 8, seq_length: 8192, global_batch_size: 512};
        const seen = {overflow: [], verdict: [], figures: []};
        const look = () => {
          seen.overflow.push(document.documentElement.scrollWidth - innerWidth);
          seen.verdict.push(text("verdict"));
          seen.figures.push(text("figures"));
        };
        look();
        move("tensor_model_parallel_size", 1);
        look();
        move("pipeline_model_parallel_size", 1);
        await pause(200);
        look();
        seen.address = location.hash;
        seen.rects = document.querySelectorAll("#timeline rect").length;
        seen.live = [];
        document.getElementById("moment").value = 5;
        document.getElementById("moment").oninput();
        seen.live.push(text("live"));
        seen.later = document.querySelectorAll("#timeline rect.later").length;
        document.getElementById("play").click();
        await pause(2000);
        seen.live.push(text("live"));
        const before = text("verdict");
        document.querySelector("#changes tbody tr").click();
        seen.applied = text("verdict") !== before;
        document.querySelector("#step details summary").click();
        seen.formula = text("step");
        seen.traffic = text("traffic");
        document.querySelector("#lesson-ring summary").click();
        document.getElementById("ring-play").click();
        await pause(9000);
        seen.ring = text("ring-says");
        seen.lessons = ["zero", "products", "triangle", "folding"].map((id) => text(id).length);
        move("num_gpus", 0);
        seen.impossible = text("verdict");
        document.querySelector("#verdict button").click();
        seen.nearest = text("verdict");
        const start = performance.now();
        for (let number = 0; number < 20; number++) move("global_batch_size", 4 + number % 5);
        seen.milliseconds = (performance.now() - start) / 20;
        seen.evaluated = window.explorer.evaluate({...base, num_gpus: 16, tensor_model_parallel_size: 2});
        delete seen.evaluated.layout;
        return seen;
        """,
    )
    assert max(found["overflow"]) <= 0
    assert len(set(found["figures"])) == 3
    assert "pipeline_model_parallel_size=2" in found["address"] and "tensor_model_parallel_size=2" in found["address"]
    assert found["rects"] > 8 and 0 < found["later"] < found["rects"]
    assert found["live"][0] != found["live"][1]
    assert found["applied"]
    assert "microbatches x" in found["formula"] and "NVIDIA H100 data sheet" in found["formula"]
    assert "parameters of the largest stage x" in found["traffic"]
    assert found["ring"].startswith("every rank has the sum.") and "= 30.1 ms" in found["ring"]
    assert min(found["lessons"]) > 20
    assert found["impossible"].startswith("1 processes are not a multiple of --tensor-model-parallel-size")
    assert found["nearest"].startswith(("Fits", "Does not fit"))
    assert found["milliseconds"] < 100
    evaluated = found["evaluated"]
    assert evaluated["fits"] and evaluated["reason"] is None
    assert {"memory_bytes", "step_time_s", "parts", "mfu", "bubble_fraction", "bytes_sent"} <= evaluated.keys()


@needs_browser
def test_an_address_opens_its_layout_or_says_what_is_impossible_and_unknown() -> None:
    job = CASES[0].job()
    layout = Layout(2, 2, 1, 4, 1, "zb-h1", "optim", 1, "layernorm+mlp_act")
    script = READY + "return {verdict: text('verdict'), problems: text('problems'), command: text('command')};"
    for fragment, verdict, problem in (
        (fragment_of(job, layout), "Fits: stage", ""),
        (fragment_of(job, layout).replace("num_gpus=16", "num_gpus=6"), "6 processes are not a multiple of", ""),
        ("#model=llama9&tensor_parallel=2", "", "tensor_parallel in the address is not an option of this page"),
    ):
        opened = f"<script>history.replaceState(null, '', {json.dumps(fragment)});</script>"
        found = run_in(page().replace("<body>", f"<body>{opened}"), 1280, script)
        assert found["verdict"].startswith(verdict)
        assert problem in found["problems"]
        if verdict.startswith("Fits"):
            # The flags to copy are those of the layout.
            words = found["command"].removesuffix("copy").split()[1:]
            config = CommandLine.of([*words, "--train-iters", "1", "--lr", "1e-4", "--mock-data"]).parse().checked()
            wanted = layout.apply(job.config, job.given)
            check_run(config, layout.num_gpus)
            assert config.pipeline.schedule(16, 2) == "zb-h1"
            for name in ("sharding_strategy", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather"):
                assert getattr(config.parallel, name) == getattr(wanted.parallel, name), name
            assert config.parallel.data_parallel_size(layout.num_gpus) == layout.dp
            assert config.activations.modules == wanted.activations.modules
    assert "llama9 is not on this page: use one of llama3.2-1b." in found["problems"]
