"""``pretrain_llama.py`` whose rank R injects a fault when the file ``fault.R`` of a directory asks for it; the first
argument is the directory. The file has a kind of ``--inject-fault``, and the section of the heartbeat in which the rank
injects it (a run injects its own faults only at the end of a step, a loading or a save)."""

import os
import sys
import time
from pathlib import Path

from megatron.commands import pretrain_llama
from megatron.features.faults.flags import parse_faults
from megatron.operation.heartbeat import Heartbeat, Section

DIRECTORY = Path(sys.argv.pop(1))
REQUEST = DIRECTORY / f"fault.{os.environ['RANK']}"
enter = Heartbeat.enter


def enter_and_break(heartbeat: Heartbeat, section: Section) -> Section:
    """Inject the fault if it is wanted in this section."""
    left = enter(heartbeat, section)
    kind, wanted = REQUEST.read_text().split() if REQUEST.exists() else ("", "")
    if wanted == section.label:
        from megatron.features.faults.listener import EVENT_FAULTS, ITERATION_FAULTS

        REQUEST.unlink()
        (DIRECTORY / "began").write_text(repr(time.time()))
        (fault,) = parse_faults(f"{kind}@1")
        if kind in EVENT_FAULTS:
            EVENT_FAULTS[kind](fault)
        else:  # stoploader, which acts on no part of the run
            ITERATION_FAULTS[kind](fault, None)  # type: ignore[arg-type]
    return left


if __name__ == "__main__":
    setattr(Heartbeat, "enter", enter_and_break)  # noqa: B010 (mypy takes an assignment for a mistake)
    pretrain_llama.die_with_launcher()
    code = pretrain_llama.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
