"""Flags for the search of a layout."""

from dataclasses import dataclass

from megatron.flags import changed_flags, require_flag, values_of
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

    def check(self) -> None:
        refuse_urls(values_of(self, "plan_cluster", "plan_json", "plan_html"), "use a local file")
        require_flag("--plan", self.plan, changed_flags(self, "plan_cluster", "plan_json", "plan_html"))
