"""Runs a shell script with stubs in place of the programs that start a training, and records what they receive."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.config.bash.evaluation import Started, started_by
from megatron.config.recipes import Recipes, recipe_of
from megatron.errors import ConfigError

STUBS = ("torchrun", "python", "python3", "srun", "sbatch", "mpirun", "nsys", "ft_launcher", "uv")
_RECORDS = "EXPLAINED_COMMANDS"
"""Variable with the directory of the records."""
_STUB = f"""#!/bin/bash
# A script may compute a value with python -c.
case "${{0##*/}} $1" in python*" -c" | python*" -V" | python*" --version")
    PATH=${{PATH#*:}} exec "${{0##*/}}" "$@" ;;
esac
number=$(ls "${_RECORDS}" | wc -l)
# A batch job is part of the script.
case "${{0##*/}}" in sbatch)
    for word in "$@"; do [ -f "$word" ] && exec bash "$word"; done
    exec bash ;;
esac
printf '%s\\0' "${{0##*/}}" "$@" > "${_RECORDS}/$(printf %06d $number)-$$"
"""
LIMIT_S = 120


def recorded(path: Path, environment: Mapping[str, str]) -> Recipes:
    """Run the script ``path`` with bash, and return the recipe of the training that it would start.

    Raises :class:`ConfigError` if it starts none, or does not end.
    """
    if not path.is_file() or path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--explain-run-script runs a shell script, which {path} is not: remove it.")
    with TemporaryDirectory() as folder:
        stubs, records = Path(folder, "bin"), Path(folder, "records")
        stubs.mkdir()
        records.mkdir()
        for name in STUBS:
            (stubs / name).write_text(_STUB)
            (stubs / name).chmod(0o755)
        inherited = environment.get("PATH", os.defpath)
        variables = {**environment, "PATH": f"{stubs}{os.pathsep}{inherited}", _RECORDS: str(records)}
        try:
            ended = subprocess.run(
                ["bash", str(path)], env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{path} has not ended after {LIMIT_S} s: remove --explain-run-script.") from None
        calls = [file.read_bytes().decode(errors="replace").split("\0")[:-1] for file in sorted(records.iterdir())]
    started = [Started(0, one.words) for call in calls for one in started_by(call, environment)]
    if not started:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"{path} ended with {ended.returncode} and started no Python file by {', '.join(STUBS)}"
            f"{f' ({last[0]})' if last else ''}: remove --explain-run-script, or correct the script."
        )
    return Recipes({path.name: recipe_of(started)}, [])
