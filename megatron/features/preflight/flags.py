"""The flag for the checks of the nodes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreflightFlags:
    """Checks of the nodes."""

    preflight: bool = False
    """Before the model is built, check the nodes: disk, clocks, memory, GPUs, a product and a sum of known bits, and
    the links between the nodes (docs/preflight.md). Takes up to 60 s; a failure ends the run with exit code 2."""

    def check(self) -> None:
        """Either value is valid."""
