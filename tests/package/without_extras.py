"""A process in which the packages of the extras cannot be imported: it trains, and asks for each of them."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from io import BytesIO
from pathlib import Path

EXTRAS = ("datasets", "pyarrow", "gigatoken", "wandb", "tensorboard", "matplotlib", "resvg_py", "transformer_engine")


class Absent:
    """Finds nothing for the packages of the extras, before any other finder."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def say(label: str, outcome: object) -> None:
    print(f"{label}: {outcome}", flush=True)


def main(directory: Path, flags: Sequence[str]) -> None:
    """Train with ``flags``, and with each flag that needs a package."""
    from megatron.commands import datasets, loss_curves, pipeline_schedule, pretrain_llama
    from megatron.data.storage import decompressed
    from megatron.data.text_inputs import InputFormat, SourceRange, _open_dataset, _read_parquet
    from megatron.errors import UserError

    say("plain", pretrain_llama.main(flags))
    say("wandb", pretrain_llama.main([*flags, "--wandb-project", "p"]))
    say("tensorboard", pretrain_llama.main([*flags, "--tensorboard-dir", str(directory / "events")]))
    sys.argv = ["plot", "--metrics", str(directory / "metrics.jsonl"), "--output", str(directory / "loss.png")]
    say("plot", loss_curves.main_plot())
    import numpy as np

    for label, attempt in {
        "schedule": lambda: pipeline_schedule._to_png(""),
        "histogram": lambda: datasets.draw_histogram(np.ones(1, dtype=np.int64), "title", directory / "x.png"),
        "zst": lambda: decompressed("corpus.jsonl.zst", BytesIO()),
        "parquet": lambda: list(_read_parquet(SourceRange("corpus.parquet", 0, 1), BytesIO(), InputFormat(("text",)))),
        "datasets": lambda: _open_dataset("name", InputFormat(("text",))),
    }.items():
        try:
            attempt()
        except UserError as error:
            say(label, error)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    main(Path(sys.argv[1]), sys.argv[2:])
