"""Virtual environments of the peers of benchmarks/peers.py."""

import shutil
import subprocess
import sys
from pathlib import Path

from megatron.errors import ConfigError

TORCH = "torch==2.13.0"
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers==5.23.0",),
    "torchtitan": ("torchtitan==0.3.0", "triton"),  # its import needs triton
    "olmo_core": ("ai2-olmo-core==3.0.0",),
    "megatron_core": ("megatron-core==0.16.1",),
}
"""What the environment of each peer has beside torch, numpy and safetensors."""
_FINISHED = "finished"


def make_environment(peer: str, cache: Path) -> Path:
    """The python of the environment of ``peer``, which is made under ``cache`` unless it is there; ours is this one.

    transformers is used from this environment if it has the package. Raises :class:`ConfigError` if pip fails.
    """
    if peer == "ours" or (peer == "transformers" and _has_transformers()):
        return Path(sys.executable)
    directory = cache / peer
    python = directory / "bin" / "python"
    # Another list of packages is another environment.
    wanted = "\n".join((TORCH, "numpy", "safetensors", *PACKAGES[peer]))
    finished = directory / _FINISHED
    if not finished.exists() or finished.read_text() != wanted:
        if directory.exists():
            shutil.rmtree(directory)
        cache.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted.split("\n")])
        finished.write_text(wanted)
    return python


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{' '.join(command[:4])} failed: {last}")
