"""The commands of docs/tutorial.md, one after the other in a copy of the repository, with a small corpus and few
iterations."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.run_process import REPOSITORY, environment, write_documents

pytestmark = pytest.mark.slow(reason="every command of the tutorial, in processes of its own")

PAGE = (REPOSITORY / "docs/tutorial.md").read_text(encoding="utf-8")
NOT_RUN = ("pip install", "hf upload")
"""What needs the network."""
SHORTER = {
    "--train-iters 300": "--train-iters 6",
    "--lr-warmup-iters 25": "--lr-warmup-iters 1",
    "--eval-interval 100 --eval-iters 8": "--eval-interval 3 --eval-iters 1",
    "--save-interval 100": "--save-interval 6",
    "--log-interval 10": "--log-interval 1",
    "--vocab-size 2048": "--vocab-size 512",
}
TIMEOUT = 300.0


def blocks() -> dict[str, str]:
    """The commands of every section by its heading; of several blocks together."""
    found: dict[str, str] = {}
    for section in PAGE.split("\n## ")[1:]:
        parts = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        code = "".join(part for part in parts if not any(words in part for words in NOT_RUN))
        if code:
            found[section.partition("\n")[0]] = code
    return found


def shortened(code: str) -> str:
    """The commands with few iterations."""
    for long, short in SHORTER.items():
        assert long in PAGE
        code = code.replace(long, short)
    return code


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("examples", "megatron", "tools"):
        shutil.copytree(REPOSITORY / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pretrain_llama.py", clone)
    return clone


def test_the_commands_lead_from_text_to_a_model_for_transformers(clone: Path) -> None:
    outputs: dict[str, str] = {}
    for heading, code in blocks().items():
        if heading == "Text":  # a small corpus instead of the whole library
            (clone / "runs/tutorial").mkdir(parents=True)
            write_documents(clone / "runs/tutorial/corpus.jsonl", documents=60)
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", shortened(code)],
            cwd=clone,
            env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
            input="class Reader:\n\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{heading}: {done.stdout}{done.stderr}"
        outputs[heading] = done.stdout
    run = clone / "runs/tutorial"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(outputs["Loss"].splitlines()) >= 2, "validation losses"
    texts = [json.loads(line) for line in outputs["Text from the model"].splitlines() if line.startswith("{")]
    assert [text["prompt"] for text in texts] == ["    def close(self):", '    """Return the', "raise ValueError("]
    (before,) = re.findall(r"unseen.txt: (.*)", outputs["Evaluation"])
    (after,) = re.findall(r"unseen.txt: (.*)", outputs["To Hugging Face"])
    assert before == after
    assert "> class Reader:\n" in outputs["A chat in transformers"]
