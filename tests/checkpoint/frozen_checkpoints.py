"""Checkpoints kept in the tree as a past version of the code wrote them, and the runs that they belong to.

    tests/checkpoint/frozen/corpus.bin, corpus.idx        the corpus of all runs
    tests/checkpoint/frozen/v2/CASE/iter_0000003/         the checkpoint, by checkpoint format version
    tests/checkpoint/frozen/v2/CASE/expected.json         the metrics of the iterations after it, in the same run

Frozen checkpoints are never written again. A new format version gets a folder of its own beside the others:

    python -m tests.checkpoint.frozen_checkpoints
"""

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.schema import FORMAT_VERSION
from megatron.data.corpus_writer import IndexedDatasetWriter
from tests.checkpoint.models import LLAMA, random_model
from tests.end_to_end.run_process import (
    TINY_RUN,
    FlagValue,
    Record,
    checkpoint_of,
    computed,
    fork_training,
    run_tool,
    words_of,
)

FROZEN = Path(__file__).parent / "frozen"
VOCABULARY = 64
SAVED_AT, LENGTH = 3, 6


@dataclass(frozen=True)
class Case:
    """A run of :data:`LENGTH` iterations, of which the checkpoint after :data:`SAVED_AT` is kept."""

    flags: Mapping[str, FlagValue]
    processes: int = 1
    first_flags: Mapping[str, FlagValue] = field(default_factory=dict)
    """Flags of the process that starts from the frozen checkpoint, but of none that resumes it."""
    tolerance: float = 1e-12
    """Relative; of losses and gradient norms on another processor than the one that made them."""


SMALL: dict[str, FlagValue] = {
    **TINY_RUN,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": LENGTH,
    "seed": 7,
    "clip_grad": 1.0,
    "weight_decay": 0.1,
}
FP32, HALF, FP8 = 1e-4, 2e-2, 5e-2
CONVERTED = "from_hugging_face"

CASES = {
    "one_process_fp64": Case({"fp64": True}),
    "bf16_masters": Case({"bf16": True, "lr_decay_style": "cosine", "lr_decay_iters": 5}, tolerance=HALF),
    "fp16_loss_scale": Case(
        {"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 1}, tolerance=HALF
    ),
    "fp8_history": Case(
        {
            "bf16": True,
            "fp8_format": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 4,
            "hidden_size": 64,
            "ffn_hidden_size": 64,
            "num_layers": 1,
            "num_query_groups": 4,
        },
        tolerance=FP8,
    ),
    "tp2_dp2_zero1": Case(
        {
            "fp64": True,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "rampup_batch_size": (2, 2, 4),
        },
        processes=4,
    ),
    "pp2_interleaved_tied": Case(
        {
            "fp64": True,
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "untie_embeddings_and_output_weights": False,
        },
        processes=2,
    ),
    "fsdp2_async": Case({"use_torch_fsdp2": True, "async_save": True}, processes=2, tolerance=FP32),
    "cp2_documents": Case({"fp64": True, "context_parallel_size": 2, "reset_attention_mask": True}, processes=2),
    # Its checkpoint is not that of a run: tools/convert_checkpoint.py wrote it, with iteration 0.
    CONVERTED: Case(
        {"fp64": True, "train_iters": LENGTH - SAVED_AT, "max_position_embeddings": 16},
        first_flags={"load_optim": False},
    ),
    "experts": Case(
        {
            "fp64": True,
            "num_experts": 4,
            "moe_ffn_hidden_size": 16,
            "moe_layer_freq": "[0,1]",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-2,
            "moe_shared_expert_intermediate_size": 16,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "expert_model_parallel_size": 2,
            "use_distributed_optimizer": True,
        },
        processes=2,
    ),
    "sgd_wsd": Case({"fp64": True, "optimizer": "sgd", "lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}),
}


def flags_of_case(case: Case, directory: Path, corpus: Path = FROZEN / "corpus", **changes: FlagValue) -> list[str]:
    """The command line of a case, saving in ``directory``."""
    places: dict[str, FlagValue | Path] = {
        "data_path": str(corpus),
        "data_cache_path": directory / "cache",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "save": directory / "save",
        "load": directory / "save",
        "metrics_jsonl": directory / "metrics.jsonl",
    }
    return words_of({**SMALL, **places, **case.flags, **changes})


def computed_iterations(metrics: Path) -> list[Record]:
    """The records of iterations, without what depends on the clock."""
    return [record for record in computed(metrics) if "lm_loss" in record]


def this_machine() -> dict[str, Any]:
    """What decides about the last bits of a result."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    # Virtual machines give processors of several generations one name, so what a processor can do is compared, too.
    known = ("model name", "cpu family", "model", "stepping", "flags")
    facts = sorted({line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in known})
    processor = hashlib.sha256("\n".join(facts).encode()).hexdigest() if facts else platform.processor()
    return {"processor": processor, "torch": torch.__version__, "numpy": np.__version__}


def write_corpus() -> None:
    """Write the corpus that all cases train on."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(str(FROZEN / "corpus"), VOCABULARY) as writer:
        for _ in range(60):
            start, length = random.integers(VOCABULARY - 1), random.integers(20, 60)
            writer.add_document(np.append((start + np.arange(length)) % (VOCABULARY - 1), VOCABULARY - 1))


def freeze(name: str, folder: Path) -> None:
    """Train the case ``name``; keep its checkpoint of iteration :data:`SAVED_AT`, and what came after it."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="frozen-") as temporary:
        directory = Path(temporary)
        first = start_of(name)
        first_flags: Mapping[str, FlagValue] = {}
        if name == CONVERTED:
            convert_from_hugging_face(directory / "save")
            first_flags = case.first_flags
        # The manifest names the corpus: not by its place in somebody's working tree.
        for kind in (".bin", ".idx"):
            shutil.copy(FROZEN / f"corpus{kind}", directory)
        flags = flags_of_case(case, directory, directory / "corpus", save_interval=str(SAVED_AT), **first_flags)
        fork_training(flags, case.processes).succeeded()
        records = computed_iterations(directory / "metrics.jsonl")
        expected = {"machine": this_machine(), "records": [record for record in records if record["iteration"] > first]}
        assert len(expected["records"]) == LENGTH - SAVED_AT
        kept = checkpoint_of(directory / "save", first)
        shutil.copytree(kept, folder / kept.name)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def start_of(name: str) -> int:
    """The iteration of a case's checkpoint."""
    return 0 if name == CONVERTED else SAVED_AT


def convert_from_hugging_face(save: Path) -> None:
    """Convert a small random model of transformers; this needs the package, tests of the result do not."""
    config = replace(
        LLAMA,
        hidden_size=16,
        ffn_hidden_size=32,
        kv_channels=4,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        max_position_embeddings=16,
    )
    with tempfile.TemporaryDirectory(prefix="hf-") as source:
        random_model(config).save_pretrained(source)
        run_tool("tools/convert_checkpoint.py", "from-hf", "--hf", source, "--save", save)


def main() -> None:
    """Freeze what the code of today writes, unless its format version is there already."""
    FROZEN.mkdir(exist_ok=True)
    if not (FROZEN / "corpus.idx").exists():
        write_corpus()
    for name in CASES:
        folder = FROZEN / f"v{FORMAT_VERSION}" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            freeze(name, folder)
            print(f"froze {folder}")


if __name__ == "__main__":
    main()
