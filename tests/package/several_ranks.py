"""A rank of torchrun that builds runs of several layouts, one after the other."""

import json
import sys
from pathlib import Path

import megatron_llama as ml


def main(directory: Path, flags: str) -> None:
    found: dict[str, list[float] | str] = {}
    layouts = {"data": "", "tensor": "--tensor-model-parallel-size 2 --sequence-parallel"}
    for name, layout in layouts.items():
        with ml.Run.from_flags(f"{flags} {layout}") as run:
            found[name] = [step.loss for step in run.steps()]
            found[f"{name} text"] = run.generate("1 2 3", max_new_tokens=4, temperature=0)
            run.export(directory / name)
            rank = run.rank
    (directory / f"found.{rank}").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
