"""A rank of two that trains the ideas in six layouts, one after the other."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.research.ideas import train

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "zero-bubble": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "ZeRO-1": {"use_distributed_optimizer": True},
    "FSDP": {"use_torch_fsdp2": True},
}

if __name__ == "__main__":
    found = {name: train(**layout) for name, layout in LAYOUTS.items()}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
