"""The checkpoints that ``write_megatron_core.py`` wrote with megatron-core 0.16.1."""

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("megatron_core.tar.xz")
TOKENS = [5, 17, 3, 2, 26, 8, 8, 21, 0, 28, 23, 11]
"""Their input, with which ``logits.npy`` was computed."""
ITERATION = "iter_0000007"


def unpack_fixtures(target: Path) -> Path:
    """The directory with a directory for every fixture."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(target, filter="data")
    return target
