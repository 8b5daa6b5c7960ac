"""The SLURM script on a real SLURM with two nodes: how jobs end, and what they have saved then."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.operation.attempts import failures_without_progress, read_attempts
from tests.end_to_end.run_process import REPOSITORY, iterations, wait_until
from tests.operation.hosts import Cluster, reason_not_to_have_slurm, slurm_cluster

REASON = reason_not_to_have_slurm()
pytestmark = [
    pytest.mark.slow(reason="starts a cluster, and waits for its limits"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
SCRIPT = REPOSITORY / "examples" / "slurm" / "pretrain.sbatch"
PATIENCE = 240.0
RECIPE = """
source {repository}/examples/launch.sh
FLAGS=(
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --split 90,10,0 --peak-tflops 1
    --device cpu --num-workers 1 --async-save --save-interval 1000000 --log-interval 20
)
launch "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """The script with a tiny recipe on both nodes."""

    def __init__(self, cluster: Cluster, directory: Path, *options: str, flags: str) -> None:
        self.cluster, self.log, self.output = cluster, directory / "log", directory / "run"
        recipe = directory / "tiny.sh"
        recipe.write_text(RECIPE.format(repository=REPOSITORY))
        knobs = {"OUTPUT": str(self.output), "GPUS_PER_NODE": "1", "VOCAB_SIZE": "1000", "PREFLIGHT": "0"}
        words = ["--nodes=2", f"--output={self.log}", f"--chdir={directory}", *options, str(SCRIPT), str(recipe)]
        self.number = cluster.submit(*words, *flags.split(), **knobs)

    @property
    def state(self) -> str:
        return self.cluster.state(self.number)["JobState"]

    @property
    def starts(self) -> int:
        """How often the job was requeued."""
        return int(self.cluster.state(self.number)["Restarts"])

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_until_trained(self, iteration: int) -> None:
        """Wait for the metrics of an iteration."""

        def has_trained() -> bool:
            records = iterations(self.output / "metrics.jsonl") if (self.output / "metrics.jsonl").exists() else []
            return bool(records) and records[-1]["iteration"] >= iteration

        self.wait(has_trained)

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        self.wait(lambda: re.search(pattern, self.text) is not None)
        found = re.search(pattern, self.text)
        assert found is not None
        return found

    def wait(self, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-6000:]}") from None

    def saved(self) -> int | None:
        tracker = self.output / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else None

    def failed_attempts(self) -> int:
        return failures_without_progress(read_attempts(self.output / "checkpoints"), self.saved() or 0)

    def cancel(self) -> None:
        """Also of a job that is being requeued, for which the first ``scancel`` has no effect."""

        def is_gone() -> bool:
            self.cluster.run("scancel", str(self.number))
            return not self.cluster.run("squeue", "-h")

        self.wait(is_gone)


def test_a_requeue_saves_and_is_no_failed_attempt(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM sends SIGTERM to all processes of the job, the shells of the script included, and SIGKILL 20 s later."""
    job = Job(cluster, tmp_path, flags="--train-iters 1000000")
    job.wait_until_trained(3)
    cluster.run("scontrol", "requeue", str(job.number))
    job.wait(lambda: job.saved() is not None)
    job.wait(lambda: job.failed_attempts() == 0)
    job.cancel()


def test_a_preempted_job_saves_within_its_grace_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM sends SIGTERM to the processes of the step, and not to the script."""
    job = Job(cluster, tmp_path, flags="--train-iters 1000000")
    job.wait_until_trained(3)
    other = cluster.submit("--nodes=2", "--partition=high", "--output=/dev/null", "--wrap=sleep 5")
    job.wait_for_log("requeueing: stopped on request, and saved")
    saved = job.saved()
    assert saved is not None and job.failed_attempts() == 0
    job.wait(lambda: cluster.state(other)["JobState"] == "COMPLETED")
    job.wait_until_trained(saved + 1)
    assert job.starts == 1
    job.cancel()
    assert job.failed_attempts() == 0


def test_a_job_whose_time_is_up_saves_and_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "--time=2", "--signal=B:USR1@60", flags="--train-iters 1000000")
    job.wait_for_log("requeueing: stopped on request, and saved")
    assert job.saved() is not None and job.failed_attempts() == 0
    job.cancel()


def test_a_job_that_loses_a_node_goes_on_when_the_node_is_back(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, flags="--train-iters 1000000 --save-interval 50")
    job.wait(lambda: job.saved() is not None)
    node = cluster.nodes[1]
    node.kill()
    job.wait(lambda: job.starts == 1)
    saved = job.saved()
    assert saved is not None
    cluster.start_node(node)
    job.wait(lambda: (job.saved() or 0) > saved)
    job.cancel()
