"""``pretrain_llama.py`` whose rank R injects a fault when the file ``fault.R`` of a directory asks for it; the first
argument is the directory. The file has a kind of ``--inject-fault``, the section of the heartbeat in which the rank
injects it (a run injects its own faults only at the end of a step, a loading or a save), how often the process enters
the section before, and the first attempt of the launcher in which it does so."""

import os
import sys
import time
from collections import Counter
from pathlib import Path

from megatron.commands import pretrain_llama
from megatron.features.faults.flags import parse_faults
from megatron.operation.heartbeat import Heartbeat, Section

DIRECTORY = Path(sys.argv.pop(1))
REQUEST = DIRECTORY / f"fault.{os.environ['RANK']}"
(DIRECTORY / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
enter, import_for_training = Heartbeat.enter, pretrain_llama.import_for_training
entered: Counter[str] = Counter()


def reach(label: str) -> None:
    """Inject the fault if it is wanted here."""
    entered[label] += 1
    if not REQUEST.exists():
        return
    kind, wanted, before, attempt = REQUEST.read_text().split()
    is_due = entered[label] > int(before) and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= int(attempt)
    if wanted == label and is_due:
        from megatron.features.faults.listener import EVENT_FAULTS, ITERATION_FAULTS

        REQUEST.unlink()
        (DIRECTORY / "began").write_text(repr(time.time()))
        (fault,) = parse_faults(f"{kind}@1")
        if kind in EVENT_FAULTS:
            EVENT_FAULTS[kind](fault)
        else:  # stoploader, which acts on no part of the run
            ITERATION_FAULTS[kind](fault, None)  # type: ignore[arg-type]


def enter_and_break(heartbeat: Heartbeat, section: Section) -> Section:
    left = enter(heartbeat, section)
    reach(section.label)
    return left


def import_and_break() -> None:
    reach(Section.START.label)
    import_for_training()


if __name__ == "__main__":
    setattr(Heartbeat, "enter", enter_and_break)  # noqa: B010 (mypy takes an assignment for a mistake)
    pretrain_llama.import_for_training = import_and_break
    pretrain_llama.die_with_launcher()
    code = pretrain_llama.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
