"""The run directory says how to start the run again, and never holds a secret."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron.config.command_line import parse_command_line
from megatron.training.run_files import (
    COMMAND,
    EARLIER,
    ENVIRONMENT,
    FILES,
    FLAGS,
    PATCH,
    StartedCommand,
    command_script,
    environment_json,
    read_code,
    run_files,
    without_secrets,
    write_run_files,
)

SECRET = "wandb-s3cr3t'$(touch hacked)"
VARIABLES = {"WANDB_API_KEY": SECRET, "NCCL_DEBUG": "INFO", "NCCL_TOKEN": "another-secret", "PATH": "/usr/bin:/bin"}
SHOW = "import json, sys; print(json.dumps(sys.argv[1:]))"


def command(*words: str, directory: str = "/", **environment: str) -> StartedCommand:
    return StartedCommand(words, directory, 1, 1, VARIABLES | environment)


def test_the_script_starts_the_same_words_in_the_same_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a b'c"
    directory.mkdir()
    words = ["--lr", "3e-4", "--name", 'it\'s $HOME `x`; "q" *\n\\', "--empty", "", "--key", f"x{SECRET}y"]
    write_run_files(
        tmp_path, {COMMAND: command_script(command(sys.executable, "-c", SHOW, *words, directory=str(directory)))}
    )
    done = subprocess.run(
        [tmp_path / COMMAND], env=VARIABLES, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == words
    assert SECRET not in (tmp_path / COMMAND).read_text()
    assert not list(tmp_path.rglob("hacked"))
    # Without the variable it stops and says which one is missing.
    without = {name: value for name, value in VARIABLES.items() if name != "WANDB_API_KEY"}
    refused = subprocess.run([tmp_path / COMMAND], env=without, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "WANDB_API_KEY" in refused.stderr


def test_the_words_of_the_launcher_are_kept() -> None:
    flags = ["--lr", "1e-3"]
    own = ["python", "pretrain_llama.py", *flags]
    launcher = ["python", "bin/torchrun", "--nproc-per-node", "4", "pretrain_llama.py", *flags]
    world = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    started = StartedCommand.of(flags, own, launcher, world, "/work")
    text = command_script(started)
    assert started.words == tuple(launcher)
    assert "8 ranks, on each of 2 nodes" in text and "--nproc-per-node 4 pretrain_llama.py" in text
    # Another parent: a shell, or a launcher that does not name the flags.
    for parent in ([], ["bash"], ["srun", "job.sh"]):
        assert StartedCommand.of(flags, own, parent, world, "/work").words == tuple(own)
    assert StartedCommand.of(flags, own, launcher, {}, "/work").words == tuple(own)
    unknown = command_script(StartedCommand.of(flags, own, [], {"WORLD_SIZE": "8"}, "/work"))
    assert "The launcher is not known" in unknown


def test_no_file_holds_a_secret(tmp_path: Path) -> None:
    words = ("python", "--wandb-api-key", "given-in-a-flag", "--x-secret=given-too", "--save", "s3://user:pass@host/b")
    variables = {"HF_TOKEN": "hf_12345678", "NCCL_SOCKET_IFNAME": f"eth-{SECRET}"}
    started = command(*words, directory="/data/hf_12345678", **variables)
    config = parse_command_line(["--save", f"/checkpoints/{SECRET}"])
    contents = run_files(config, started, {}, tmp_path)
    text = "".join(contents.values())
    for secret in (SECRET, "given-in-a-flag", "given-too", "pass@", "another-secret", "hf_12345678"):
        assert secret not in text, secret
    assert "/checkpoints/$WANDB_API_KEY" in contents[FLAGS]
    assert 'cd /data/"${HF_TOKEN:?}"' in contents[COMMAND]
    assert without_secrets("s3://name:word@host/x and a@b", {}) == "s3://REDACTED@host/x and a@b"
    assert json.loads(contents[ENVIRONMENT])["variables"]["NCCL_DEBUG"] == "INFO"


def git(directory: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_what_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    assert read_code(code) == (None, "")
    git(code, "init", "-q")
    assert read_code(code) == (None, "")  # no commit
    (code / "a.py").write_text("a = 1\n")
    git(code, "add", ".")
    git(code, "commit", "-qm", "first")
    found, patch = read_code(code)
    assert found == {"commit": git(code, "rev-parse", "HEAD").strip(), "is_changed": False, "patch": None}
    assert patch == ""
    (code / "a.py").write_text("a = 2\n")
    found, patch = read_code(code)
    assert found is not None and found["is_changed"] and found["patch"] == PATCH and "+a = 2" in patch
    (code / "a.py").write_text("a = '" + "x" * 2**20 + "'\n")
    found, patch = read_code(code)
    assert found is not None and found["is_changed"] and found["patch"] is None and patch == ""
    # A directory inside of another repository is not that repository.
    (code / "site-packages").mkdir()
    assert read_code(code / "site-packages") == (None, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_code(code) == (None, "")  # without git


def test_files_of_an_earlier_attempt_are_kept_if_they_differ(tmp_path: Path) -> None:
    first = {COMMAND: "one", FLAGS: "lr: 1", ENVIRONMENT: "{}", PATCH: "+a"}
    write_run_files(tmp_path, first)
    write_run_files(tmp_path, first)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    write_run_files(tmp_path, {**first, FLAGS: "lr: 2", PATCH: ""})
    write_run_files(tmp_path, {**first, FLAGS: "lr: 3", PATCH: ""})
    assert {path.name: path.read_text() for path in (tmp_path / EARLIER / "0001").iterdir()} == first
    assert (tmp_path / EARLIER / "0002" / FLAGS).read_text() == "lr: 2"
    assert (tmp_path / FLAGS).read_text() == "lr: 3" and not (tmp_path / PATCH).exists()
    assert (tmp_path / COMMAND).stat().st_mode & 0o111


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of rank 0 makes the content while the run trains: at any moment a signal may end it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # no temporary file can be made
    contents = run_files(parse_command_line(["--lr", "3e-4"]), command("python"), {}, tmp_path)
    assert "lr: 0.0003" in contents[FLAGS]
    contents[PATCH] = "+a"
    (tmp_path / PATCH).mkdir()  # cannot be replaced by a file, so that the process ends here
    with pytest.raises(OSError, match=PATCH):
        write_run_files(tmp_path, contents)
    assert len(list(tmp_path.iterdir())) == len(FILES) + 1
    (tmp_path / PATCH).rmdir()
    write_run_files(tmp_path, {**contents, PATCH: ""})
    assert {path.name for path in tmp_path.iterdir()} == {COMMAND, FLAGS, ENVIRONMENT}


def test_versions_are_those_of_this_process() -> None:
    import torch

    found = json.loads(environment_json(command("python"), {"cuda": None}, None))
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["git"] is None and found["world_size"] == 1


def test_writing_costs_a_start_little_time(tmp_path: Path) -> None:
    config = parse_command_line(["--save", "x", "--lr", "1e-3"])
    # Processor time of this process: git runs beside it, in a thread that nothing waits for.
    costs = []
    for attempt in range(3):
        began = time.process_time()
        contents = run_files(config, command("python"), {}, Path(__file__).resolve().parents[2])
        write_run_files(tmp_path / str(attempt), contents)
        costs.append(time.process_time() - began)
    assert min(costs) < 0.05
