"""Flags for the search of a layout."""

from dataclasses import dataclass, fields

from megatron.flags import changed_flags, require_at_least, require_flag, require_positive, values_of
from megatron.urls import refuse_urls


@dataclass(frozen=True)
class PlanConfig:
    """Search the layout of a run; see docs/planner.md."""

    plan: bool = False
    """Do not train: search the fastest layouts that fit on --num-gpus GPUs, and print their flags, times and costs.
    Every flag of the layout that is given is a constraint. tools/plan_layout.py has more flags."""
    plan_cluster: str = "h100"
    """Plan: name of a cluster (a100-80gb, h100, h200, b200, gb200, ...), or the path of a TOML file."""
    plan_json: str | None = None
    """Plan: file for all layouts in JSON."""
    plan_html: str | None = None
    """Plan: file for the report, a page without references to other files."""

    plan_tokens: float = 1e12
    """Plan: tokens of the whole run, for days and price."""
    plan_price_per_gpu_hour: float | None = None
    """Plan: price of a GPU for an hour (default: the cluster's)."""
    plan_measured: str | None = None
    """Plan: --metrics-jsonl file of a real run on this cluster, whose step time corrects the level of all
    predictions."""

    def check(self) -> None:
        refuse_urls(values_of(self, "plan_cluster", "plan_json", "plan_html", "plan_measured"), "use a local file")
        require_positive(values_of(self, "plan_tokens"))
        require_at_least(0, values_of(self, "plan_price_per_gpu_hour"))
        names = (flag.name for flag in fields(self) if flag.name != "plan")
        require_flag("--plan", self.plan, changed_flags(self, *names))
