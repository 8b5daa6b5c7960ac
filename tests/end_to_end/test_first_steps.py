"""The first command of a newcomer, examples/quickstart.sh, and the commands of docs/tutorial.md.

They run in copies of the repository with a small corpus and few iterations. What they would do without any of that (the
virtual environment, 12 MB of corpus, a loss well under ln(vocabulary)) takes minutes, and is not repeated here.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.end_to_end.run_process import (
    REPOSITORY,
    bytes_under,
    environment,
    free_port,
    heed_interrupts,
    losses,
    records,
    run_tool,
    wait_until,
    write_documents,
)

pytestmark = pytest.mark.slow(reason="the whole quickstart, several times, and every command of the tutorial")

ITERATIONS = 14
LOGGED = 10
"""The script logs every tenth iteration: the interrupt comes right after the first line."""
VOCABULARY = 512
TIMEOUT = 120.0


Process: TypeAlias = "subprocess.Popen[bytes]"


@dataclass
class Quickstart:
    """The script in its copy of the repository."""

    clone: Path
    started: list[Process] = field(default_factory=list)

    @property
    def run_directory(self) -> Path:
        """Where the script writes everything."""
        return self.clone / "run"

    @property
    def log(self) -> Path:
        """Output of the last start."""
        return self.clone / "quickstart.log"

    def start(self, command: Sequence[str] = ("examples/quickstart.sh",), **settings: object) -> Process:
        """Start the quickstart, or another script, in a session of its own, as on a terminal of its own."""
        settings = {"RUN": self.run_directory, "ITERATIONS": ITERATIONS, **settings}
        settings |= {"VOCABULARY": VOCABULARY, "MASTER_PORT": free_port()}
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                ["bash", *command],
                cwd=self.clone,
                env=environment() | {name: str(value) for name, value in settings.items()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_interrupts,
            )
        self.started.append(process)
        return process

    def run(self, *command: str, **settings: object) -> str:
        """Run a script, which must succeed, to its end; the output."""
        process = self.start(command, **settings) if command else self.start()
        process.wait(TIMEOUT)
        output = self.log.read_text()
        assert process.returncode == 0, output
        return output

    def kill(self) -> None:
        """End what a failed test has left running; it would slow all tests behind it."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks, which are not in the group
                process.wait(TIMEOUT)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole corpus of the quickstart."""
    path = tmp_path_factory.mktemp("source") / "corpus.jsonl"
    run_tool("examples/gather_python_source.py", path)
    return path


def copy_programs(clone: Path) -> None:
    for name in ("examples", "megatron", "tools"):
        shutil.copytree(REPOSITORY / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pretrain_llama.py", clone)


@pytest.fixture(scope="module")
def quickstart(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quickstart]:
    """A copy of the repository whose virtual environment is that of the tests, with a small corpus in place."""
    clone = tmp_path_factory.mktemp("clone")
    copy_programs(clone)
    for path in (*REPOSITORY.glob("p*.*"), *REPOSITORY.glob("requirements*.txt")):
        shutil.copy(path, clone)
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    # tools/environment.sh finds this note of what is installed and installs nothing.
    command = f"cat requirements*.txt pyproject.toml | cksum > {programs.parent}/.installed-plots,tensorboard"
    subprocess.run(command, shell=True, cwd=clone, check=True)
    quickstart = Quickstart(clone)
    quickstart.run_directory.mkdir()
    documents = source.read_text(encoding="utf-8").splitlines(keepends=True)
    (quickstart.run_directory / "corpus.jsonl").write_text(
        "".join(documents[:: len(documents) // 25]), encoding="utf-8"
    )
    yield quickstart
    quickstart.kill()


def test_corpus_is_megabytes_of_real_text(source: Path) -> None:
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    assert sum(map(len, texts)) > 5_000_000
    assert sum("import " in text for text in texts) > 0.5 * len(texts)


def test_interrupted_quickstart_goes_on_where_it_was_and_then_has_nothing_left_to_do(quickstart: Quickstart) -> None:
    process = quickstart.start()
    first = f"\n{LOGGED}/{ITERATIONS}  loss"
    wait_until(lambda: first in quickstart.log.read_text() or process.poll() is not None, TIMEOUT)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(TIMEOUT)
    output = quickstart.log.read_text()
    assert "stopped: signal SIGINT" in output, output
    assert "== Tokenizer" in output
    assert "== Data" in output
    checkpoints = quickstart.run_directory / "checkpoints"
    done = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert LOGGED <= done < ITERATIONS
    assert not (quickstart.run_directory / "loss.png").exists()

    output = quickstart.run()
    assert f"continuing after iteration {done}" in output
    assert "== Tokenizer" not in output
    assert "== Data" not in output
    assert_finished(quickstart, output)

    before = bytes_under(quickstart.run_directory)
    output = quickstart.run()
    assert "== Training" not in output
    assert_finished(quickstart, output)
    after = bytes_under(quickstart.run_directory)
    assert {name: content for name, content in after.items() if before.get(name) != content}.keys() <= {"loss.png"}


def assert_finished(quickstart: Quickstart, output: str) -> None:
    """Loss curve, validation loss in words, and a sample."""
    assert (quickstart.run_directory / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    (final,) = [
        record["validation_loss"]
        for record in records(quickstart.run_directory / "metrics.jsonl")
        if "validation_loss" in record
    ]
    assert f"validation loss {final:.3f}, that is" in output
    assert re.search(r"== A sample\nimport os\n\ndef read_file\(path\):\n.", output, re.DOTALL)
    assert output.count(f"validation at iteration {ITERATIONS}") == ("== Training" in output)
    assert "== What next" in output


def test_what_it_proposes_next_works(quickstart: Quickstart) -> None:
    commands = re.findall(r"^  \w+:  (python .*)$", quickstart.log.read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        output = quickstart.run("-c", f"source .venv/bin/activate; {command}")
    assert output.startswith("class Queue:")
    assert (quickstart.run_directory / "report.html").stat().st_size > 10_000


def test_precisions_are_compared_on_the_data_of_the_quickstart(quickstart: Quickstart) -> None:
    """Two of them, for two iterations of one layer."""
    settings = {"RUN": quickstart.clone / "precisions", "DATA": quickstart.run_directory, "ITERATIONS": 2}
    script = ("examples/compare_precisions.sh", "--num-layers", "1", "--eval-iters", "1")
    output = quickstart.run(*script, PRECISIONS="fp32 fp8-tensorwise", **settings)
    assert re.search(r"^\| fp32 \| [0-9.]+ \| [0-9.]+ \| 0 \| - \| - \| - \|$", output, re.MULTILINE), output
    assert re.search(r"^\| fp8-tensorwise \| .*% to [+-][0-9.]+% \| 1 % \|$", output, re.MULTILINE), output
    assert (quickstart.clone / "precisions" / "precisions.png").read_bytes().startswith(b"\x89PNG\r\n")
    found = {name: losses(quickstart.clone / "precisions" / f"{name}.jsonl") for name in ("fp32", "fp8-tensorwise")}
    assert len(found["fp32"]) == 2 and found["fp32"] != found["fp8-tensorwise"]


# --- the tutorial ---------------------------------------------------------------------------------------------

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
TUTORIAL_TIMEOUT = 300.0


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


def test_the_commands_lead_from_text_to_a_model_for_transformers(tmp_path: Path) -> None:
    copy_programs(tmp_path)
    outputs: dict[str, str] = {}
    for heading, code in blocks().items():
        if heading == "Text":  # a small corpus instead of the whole library
            (tmp_path / "runs/tutorial").mkdir(parents=True)
            write_documents(tmp_path / "runs/tutorial/corpus.jsonl", documents=60)
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", shortened(code)],
            cwd=tmp_path,
            env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
            input="class Reader:\n\n",
            capture_output=True,
            text=True,
            timeout=TUTORIAL_TIMEOUT,
        )
        assert done.returncode == 0, f"{heading}: {done.stdout}{done.stderr}"
        outputs[heading] = done.stdout
    run = tmp_path / "runs/tutorial"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(outputs["Loss"].splitlines()) >= 2, "validation losses"
    texts = [json.loads(line) for line in outputs["Text from the model"].splitlines() if line.startswith("{")]
    assert [text["prompt"] for text in texts] == ["    def close(self):", '    """Return the', "raise ValueError("]
    (before,) = re.findall(r"unseen.txt: (.*)", outputs["Evaluation"])
    (after,) = re.findall(r"unseen.txt: (.*)", outputs["To Hugging Face"])
    assert before == after
    assert "> class Reader:\n" in outputs["A chat in transformers"]
