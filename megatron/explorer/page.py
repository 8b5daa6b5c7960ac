"""The explorer's page: one file with its records, which needs neither a server nor the network."""

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.explorer.records import Choices, Json, Shared, cluster_data, job_data
from megatron.planner.search.accuracy import OWN_ERROR, UNKNOWN_ERROR
from megatron.planner.search.enumeration import modules_in
from megatron.planner.search.layout import Job
from megatron.planner.search.search import Report, no_report
from megatron.planner.step_time.workload import Cluster
from megatron.reports.page import page

_HERE = Path(__file__).parent
COMPOSITION = ("schedules.js", "composition.js", "checks.js", "collectives.js")
"""The scripts that compute; they need no browser."""
_SCRIPTS = (*COMPOSITION, "lessons.js", "explorer.js")


def script_of(names: Sequence[str]) -> str:
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def page_data(jobs: Sequence[Job], clusters: Sequence[Cluster], choices: Choices, report: Report = no_report) -> Json:
    """The records of all ``jobs``, and what the controls offer."""
    parameters, passes = Shared(), Shared()
    found = [job_data(job, choices, parameters, passes, report) for job in jobs]
    by_model = {job.name: [modules_in(job.architecture, one) for one in choices.recompute] for job in jobs}
    return {
        # Experts are not computed in FP8.
        "jobs": {f"{one['name']},{one['seq_length']},{one['precision']}": one for one in found if one["layers"]},
        "clusters": {cluster.name: cluster_data(cluster) for cluster in clusters},
        "choices": {**vars(choices), "recompute": by_model},
        "shared": {"parameters": parameters.values, "passes": passes.values},
    }


def explorer_page(data: Json) -> str:
    """The whole file."""
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    constant = f'\nconst PACKED = "{base64.b64encode(packed).decode()}";\n'
    body = (_HERE / "explorer.html").read_text(encoding="utf-8")
    return page(
        "Explorer",
        "Move a control: memory, step time, traffic and cost of a training run, from records of this project's layers.",
        [body],
        f"Times are the planner's: at best +-{OWN_ERROR:.0%}, because no GPU has measured this project's kernels yet; "
        f"+-{UNKNOWN_ERROR:.0%} for experts, FP8 and whatever else published runs do not show.",
        (_HERE / "explorer.css").read_text(encoding="utf-8"),
        constant + script_of(_SCRIPTS),
    )
