"""The SLURM script goes back into the queue when another start can help, and only then; the manifest of Kubernetes has
no field that the API does not know, and treats exit codes as the launcher does."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.errors import FINAL, ExitCode
from megatron.operation.attempts import failures_without_progress, read_attempts
from megatron.operation.launch import parse
from tests.end_to_end.run_process import wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "slurm" / "pretrain.sbatch"
COMMANDS = Path(__file__).with_name("slurm_commands")
"""Commands of SLURM that write down how they were called."""
KILLED = 'shift; "$@"; rm -f "$CODES"; exit 143'
"""An srun whose node fails before it can say how the run ended."""
RECIPE = """
trap 'sleep 0.2; exit 75' USR1 TERM   # the run saves
touch started
while true; do sleep 0.05; done
"""
REQUEUE = "scontrol requeue 10042\n"


def submit(
    directory: Path, srun: str | None = None, recipe: str = "recipe.sh", **changes: str
) -> subprocess.Popen[str]:
    """Start the script as SLURM would, with its commands, or with another ``srun``."""
    shutil.copytree(COMMANDS, directory, dirs_exist_ok=True)
    if srun is not None:
        (directory / "srun").write_text(f"#!/usr/bin/env bash\n{srun}\n", encoding="utf-8")
    job = {"SLURM_JOB_ID": "10042", "SLURM_JOB_NODELIST": "node[4-5]", "STATUS": ""}
    return subprocess.Popen(
        ["bash", str(SCRIPT), recipe, "--seed", "7"],
        cwd=directory,
        env={"PATH": f"{directory}:{os.environ['PATH']}", **job, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def failures(directory: Path) -> Path:
    return directory / "pretrain-10042.failures"


def record(directory: Path) -> str:
    path = directory / "record"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_a_job_whose_time_is_up_saves_and_is_queued_again(tmp_path: Path) -> None:
    failures(tmp_path).write_text("failed\n" * 20)
    (tmp_path / "recipe.sh").write_text(RECIPE)
    job = submit(tmp_path)
    wait_until(lambda: (tmp_path / "started").exists(), 120)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) == 75
    assert record(tmp_path) == f"scancel --signal=USR1 10042\n{REQUEUE}"
    assert not failures(tmp_path).exists()
    words = (tmp_path / "step").read_text(encoding="utf-8").split("\n")
    assert words[-7:] == ["recipe.sh", "--exit-signal-handler", "--exit-signal", "SIGUSR1", "--seed", "7", ""]


def preempt(directory: Path) -> None:
    """Send SIGTERM to all processes of the step, as at the beginning of the grace of a preemption."""
    subprocess.run([directory / "signal_step", "TERM"], cwd=directory, check=True)


def test_a_preempted_job_is_queued_again_with_the_code_of_its_run(tmp_path: Path) -> None:
    """The shell of the step gets SIGTERM, too, and must outlive the save: srun kills the other nodes when it ends."""
    (tmp_path / "recipe.sh").write_text(RECIPE)
    job = submit(tmp_path)
    wait_until(lambda: (tmp_path / "started").exists(), 120)
    preempt(tmp_path)
    assert job.wait(timeout=120) == 75
    assert record(tmp_path) == REQUEUE and not failures(tmp_path).exists()


@pytest.mark.parametrize(
    ("status", "is_queued"), [("0", False), ("2", False), ("93", False), ("75", True), ("1", True), ("137", True)]
)
def test_the_exit_code_says_whether_to_start_again(tmp_path: Path, status: str, is_queued: bool) -> None:
    job = submit(tmp_path, STATUS=status)
    assert job.wait(timeout=120) == int(status)
    assert record(tmp_path) == (REQUEUE if is_queued else "")


@pytest.mark.parametrize(
    ("codes", "final", "is_queued"),
    [([2, 143], 2, False), ([93, 137], 93, False), ([75, 143], 143, True), ([1, 143], 143, True), ([1, 2], 2, False)],
)
def test_the_code_of_a_node_counts_although_srun_returns_that_of_one_it_has_killed(
    tmp_path: Path, codes: Sequence[int], final: int, is_queued: bool
) -> None:
    """srun returns the highest."""
    nodes = "".join(f"echo {code} >> $CODES; " for code in codes)
    job = submit(tmp_path, srun=f"{nodes} exit {max(codes)}")
    assert job.wait(timeout=120) == final
    assert record(tmp_path) == (REQUEUE if is_queued else "")
    assert not (tmp_path / "pretrain-10042.codes").exists()


@pytest.mark.parametrize(
    ("failed_before", "seconds", "is_queued", "failed"),
    [
        (0, 0, True, 1),
        (18, 0, True, 19),
        (19, 0, False, 20),
        # It ran for an hour before it failed.
        (19, 3600, True, 1),
    ],
)
def test_starts_that_fail_before_the_run_can_count_them_end_too(
    tmp_path: Path, failed_before: int, seconds: int, is_queued: bool, failed: int
) -> None:
    """However often the job was started before: SLURM counts the starts that went well, too."""
    if failed_before:
        failures(tmp_path).write_text("failed\n" * failed_before)
    job = submit(tmp_path, STATUS="1", SLURM_RESTART_COUNT="99", SECONDS=str(seconds))
    assert job.wait(timeout=120) == 1
    assert ("scontrol requeue 10042" in record(tmp_path)) is is_queued
    assert len(failures(tmp_path).read_text().splitlines()) == failed


# --- starts that do something --------------------------------------------------------------------------------

ATTEMPT = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from megatron.errors import UserError
from megatron.operation.attempt_recorder import AttemptRecorder, Beginning, outcome_of
from megatron.operation.attempts import check_progress

start = len(Path("starts").read_text()) if Path("starts").exists() else 0
Path("starts").write_text("x" * (start + 1))
newest, code = {life}
recorder = AttemptRecorder(Path("run"), Beginning.now(age_s=1.0), 1, ["a"], print, counts_from=newest)
try:
    check_progress(Path("run"), recorder.attempt.start, newest, 3)
except UserError as error:
    code = int(error.exit_code)
    recorder.set_counts_from(None, None)
recorder.finish(None, outcome_of([code]), code)
sys.exit(code)
"""
"""An attempt that begins at the checkpoint of an iteration and ends with a code, as ``life`` says for a ``start``."""


def starts(directory: Path, life: str, srun: str | None = None, at_most: int = 60) -> tuple[int, int]:
    """Queue the job as long as it asks for that: its starts, and the last exit code."""
    (directory / "attempt.py").write_text(ATTEMPT.format(repository=str(REPOSITORY), life=life))
    (directory / "recipe.sh").write_text(f"exec {sys.executable} attempt.py\n")
    return queue(directory, srun, at_most)


def queue(directory: Path, srun: str | None = None, at_most: int = 60) -> tuple[int, int]:
    for number in range(1, at_most + 1):
        before = record(directory)
        code = submit(directory, srun, MAX_FAILURES="1000").wait(timeout=60)
        if record(directory) != before + REQUEUE:
            return number, code
    return at_most, code


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        # The fourth start finds three that have failed at the same step.
        ("40, 1", (4, 93)),
        # After every checkpoint, or by preemption, even where no start comes as far as a checkpoint: it goes on.
        ("start * 10, 1 if start < 8 else 0", (9, 0)),
        ("None, 75 if start < 8 else 0", (9, 0)),
    ],
)
def test_a_job_ends_after_three_attempts_that_die_at_the_same_step(
    tmp_path: Path, life: str, expected: tuple[int, int]
) -> None:
    assert starts(tmp_path, life) == expected


def test_a_node_that_fails_without_an_exit_code_is_queued_again_and_counted(tmp_path: Path) -> None:
    assert starts(tmp_path, "40, 1", KILLED, at_most=2) == (2, 143)
    assert failures_without_progress(read_attempts(tmp_path / "run"), 40) == 2
    assert starts(tmp_path, "40, 1") == (2, 93)


def test_a_mistyped_flag_is_one_start(tmp_path: Path) -> None:
    (tmp_path / "recipe.sh").write_text(f'exec {sys.executable} {REPOSITORY}/pretrain_llama.py --no-such-flag "$@"\n')
    assert queue(tmp_path) == (1, 2)


# --- Kubernetes ----------------------------------------------------------------------------------------------

MANIFEST = REPOSITORY / "examples/kubernetes/pretrain.yaml"
MODELS = {"Job": "V1Job", "Service": "V1Service"}


@cache
def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def through_the_models(document: dict[str, Any]) -> Any:
    """The document as the client's models write what they have read: unknown fields are gone."""
    client = pytest.importorskip("kubernetes.client").ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    return client.sanitize_for_serialization(client.deserialize(response, MODELS[document["kind"]]))


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_of_the_client_know_every_field(kind: str) -> None:
    assert through_the_models(documents()[kind]) == documents()[kind]


def test_a_misspelt_field_is_found() -> None:
    job = json.loads(json.dumps(documents()["Job"]))
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    rule["onExitCode"] = rule.pop("onExitCodes")
    assert through_the_models(job) != job


def action(job: dict[str, Any], code: int, conditions: tuple[str, ...] = ()) -> str:
    """What the controller does with a pod whose container has ended with ``code``: the first rule that matches."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and codes["operator"] == "In" and code in codes["values"]:
            return str(rule["action"])
        if any(one["type"] in conditions and one["status"] == "True" for one in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


def test_exit_codes_are_respected() -> None:
    """Where the launcher does not restart, neither does the job, but for a run that has stopped and saved."""
    job = documents()["Job"]
    assert action(job, ExitCode.STOPPED) == "Ignore"
    for code in set(ExitCode) - {ExitCode.STOPPED, ExitCode.COMPLETE}:
        assert action(job, code) == ("FailJob" if code in FINAL else "Count"), code
    assert action(job, 137) == "Count"
    assert action(job, 143, ("DisruptionTarget",)) == "Ignore"
    assert action(job, ExitCode.ACTION_REQUIRED, ("DisruptionTarget",)) == "FailJob"
    containers = {container["name"] for container in job["spec"]["template"]["spec"]["containers"]}
    rules = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["containerName"] for rule in rules} == containers
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # the API demands it of such a policy


def test_the_nodes_of_the_job_are_those_of_the_launcher_and_meet_at_the_service() -> None:
    job, service = documents()["Job"]["spec"], documents()["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "megatron.operation.launch"]
    options = parse(container["args"])
    assert int(options.nnodes) == job["completions"] == job["parallelism"]
    assert int(options.nproc_per_node) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options.module and options.training_script == "megatron.commands.pretrain_llama"
    name = documents()["Job"]["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["terminationGracePeriodSeconds"] > options.shutdown_timeout


def test_the_flags_of_the_job_are_accepted_and_its_directories_are_volumes() -> None:
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    options = parse(container["args"])
    config = parse_command_line(options.training_script_args)
    check_run(config, int(options.nnodes) * int(options.nproc_per_node))
    assert config.operation.preflight and config.checkpoint.save == config.checkpoint.load
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = documents()["Job"]["spec"]["template"]["spec"]["volumes"]
    assert mounted.keys() == {volume["name"] for volume in volumes}
    assert config.checkpoint.save is not None and config.checkpoint.save.startswith(mounted["checkpoints"] + "/")
