"""Writes the explorer: one page in which a layout can be moved."""

import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.architectures.catalog import PRESETS
from megatron.commands.planning import progress_bar
from megatron.commands.tool import run_tool, write_file
from megatron.config.command_line import CommandLine
from megatron.errors import ConfigError
from megatron.flags import require_at_least
from megatron.planner.search.layout import Job
from megatron.planner.step_time.workload import Cluster, read_cluster
from megatron.urls import refuse_urls

DESCRIPTION = """\
Write the explorer: one page, opened from a file, in which controls change the model, the GPUs and the layout of a run,
and memory, step time, traffic and cost follow at once.

python tools/explore.py --out explorer.html
python tools/explore.py --out explorer.html --models qwen3-8b --seq-lengths 4096 8192 --clusters h100 b200-roce

The layers of every model are rehearsed first, some seconds for each hundred of their variants. docs/explorer.md says
what the page shows, and how scripts use it.
"""
MODELS = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.2-1b", "qwen3-32b", "mixtral-8x7b")
_USUAL_LENGTHS = {"mixtral-8x7b": 4096, "mixtral-8x22b": 4096}
_LENGTH = 8192
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class ExploreConfig:
    """The page, and what can be chosen on it."""

    out: str
    """File for the page."""
    models: tuple[str, ...] = MODELS
    """Presets on the page."""
    seq_lengths: tuple[int, ...] | None = None
    """Sequence lengths of every model (default: 8192, 4096 for Mixtral)."""
    clusters: tuple[str, ...] = ("h100", "h200", "b200")
    """Clusters on the page, by name or as the path of a TOML file; their nodes have equal numbers of GPUs."""
    precisions: tuple[str, ...] = ("bf16", "fp8")
    """Precisions of the linear layers: bf16, fp8."""

    png: str | None = None
    """File for a picture of the page, made by an installed Chromium."""

    def check(self) -> None:
        for place in (None, *self.clusters):
            refuse_urls({"--out": self.out, "--png": self.png, "--clusters": place}, "name a local file")
        if self.png is not None and not any(map(shutil.which, _BROWSERS)):
            raise ConfigError(f"--png needs one of {', '.join(_BROWSERS)}, and none is installed: install one.")
        for length in self.seq_lengths or ():
            require_at_least(1, {"--seq-lengths": length})
        for flag, values, known in (
            ("--models", self.models, tuple(PRESETS)),
            ("--precisions", self.precisions, ("bf16", "fp8")),
        ):
            wrong = [one for one in values if one not in known]
            if wrong or not values:
                found = f"has {wrong[0]}, which does not exist" if wrong else "has no value"
                raise ConfigError(f"{flag} {found}: use one or more of {', '.join(known)}.")

    def read_clusters(self) -> list[Cluster]:
        clusters = [read_cluster(place) for place in self.clusters]
        if not clusters:
            raise ConfigError("--clusters has no value: add one, such as h100.")
        kinds = {(one.node_size, one.generation == "ampere") for one in clusters}
        if len(kinds) > 1 or any(one.generation == "cpu" for one in clusters):
            raise ConfigError(
                f"--clusters {' '.join(self.clusters)} differ in what their layers launch: use clusters of GPUs with "
                "equal numbers in a node, and Ampere apart from later ones."
            )
        return clusters


def take_picture(page: Path, picture: str) -> None:
    """Write what a browser shows of the page."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1340"]
    with tempfile.TemporaryDirectory() as directory:
        taken = Path(directory, "page.png")
        command += [f"--user-data-dir={directory}/profile", "--virtual-time-budget=9000", f"--screenshot={taken}"]
        done = subprocess.run([*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=120)
        if done.returncode or not taken.is_file():
            raise ConfigError(f"--png {picture} was not made ({done.stderr.strip()[-200:]}): leave it out.")
        write_file("--png", picture, taken.read_bytes())


def explore(config: ExploreConfig) -> None:
    """Rehearse the layers, and write the page."""
    config.check()
    clusters = config.read_clusters()
    from megatron.explorer.page import explorer_page, page_data  # imports torch
    from megatron.explorer.records import PRECISIONS, Choices

    started, jobs = time.monotonic(), []
    for model in config.models:
        for length in config.seq_lengths or (_USUAL_LENGTHS.get(model, _LENGTH),):
            for precision in config.precisions:
                words = f"--model {model} --seq-length {length} --global-batch-size 1 {PRECISIONS[precision]}"
                jobs.append(Job.of(CommandLine.of_flags([]).over(words.split()), clusters[0], 1))
    with progress_bar() as report:
        data = page_data(jobs, clusters, Choices(), report)
    page = explorer_page(data)
    write_file("--out", config.out, page)
    if config.png is not None:
        take_picture(Path(config.out), config.png)
    minutes, size = (time.monotonic() - started) / 60, len(page) / 1e6
    print(f"Wrote {config.out}, {size:.1f} MB, in {minutes:.1f} minutes: open it in a browser.")


main = partial(run_tool, ExploreConfig, explore, DESCRIPTION)
