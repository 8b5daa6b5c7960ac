"""Runs whose checkpoints are copied to an S3 server, and that resume from it."""

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.commands.convert_checkpoint import ToHuggingFace, convert
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError
from megatron.training.checkpoints.saved_run import find_saved_run
from tests.checkpoint.fault_run import ALONE
from tests.end_to_end.run_process import (
    START_TIMEOUT,
    Corpus,
    Flags,
    FlagValue,
    RunningTraining,
    bytes_under,
    call_training,
    checkpoint_of,
    free_port,
    iterations,
    run_tool,
    saving_run,
    wait_until,
)
from tests.s3_server import BUCKET, S3Server

URL = f"s3://{BUCKET}/run"

# Several runs in a test, each with processes that import much, on machines that may be slow.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def running_server() -> Iterator[S3Server]:
    """One server for the module."""
    server = S3Server(authenticates=True)
    yield server
    server.kill()


@pytest.fixture
def server(running_server: S3Server) -> Iterator[S3Server]:
    """The server with an empty bucket."""
    running_server.empty()
    with running_server.in_environment():
        yield running_server


def command(corpus: Corpus, run: Path, **changes: FlagValue) -> list[str]:
    """A run of four iterations that saves the last, and copies it to the server."""
    settings: Flags = {"lr_decay_iters": 10, "save_interval": 4, "redundant_save": [URL]}
    return saving_run(corpus, run, **{**settings, **changes})


def iterations_at(server: S3Server, prefix: str = "run") -> list[int]:
    """The iterations that have a manifest on the server."""
    matches = (re.fullmatch(rf"{prefix}/iter_(\d+)/manifest.json", key) for key in server.names(prefix))
    return [int(match[1]) for match in matches if match]


def data_keys(server: S3Server, iteration: int) -> list[str]:
    """The objects of an iteration that hold tensors."""
    return [key for key in server.names(f"run/iter_{iteration:07d}/") if key.endswith(".safetensors")]


def test_the_run_goes_on_from_the_url_when_the_first_place_is_lost(
    corpus: Corpus, tmp_path: Path, server: S3Server
) -> None:
    """No secret is stored, there or here; the tools read the URL as a directory."""
    said = [call_training(command(corpus, tmp_path)).succeeded()]
    shown = json.loads(run_tool("tools/inspect_checkpoint.py", "--load", URL, "--verify", "--json"))
    assert (shown["iteration"], shown["damage"], shown["directory"]) == (4, [], f"{URL}/iter_0000004")
    for source, target in ((URL, "theirs"), (str(tmp_path / "first"), "ours")):
        convert(ToHuggingFace(source, str(tmp_path / target)))
    assert bytes_under(tmp_path / "theirs") == bytes_under(tmp_path / "ours")
    shutil.rmtree(tmp_path / "first")
    said.append(call_training(command(corpus, tmp_path, train_iters=5)).succeeded())
    assert f"loaded checkpoint {URL}, continuing after iteration 4" in said[-1].stdout
    assert iterations_at(server) == [4, 5]
    weights = call_training(
        command(corpus, tmp_path / "b", load=None, redundant_save=None, pretrained_checkpoint=URL, train_iters=1)
    ).succeeded()
    assert f"loaded checkpoint {URL}, continuing after iteration 0" in weights.stdout
    secret = server.credentials["AWS_SECRET_ACCESS_KEY"].encode()
    texts = [*bytes_under(tmp_path).values(), *map(server.read, server.names())]
    texts += [text.encode() for outcome in said for text in (outcome.stdout, outcome.stderr)]
    assert len(texts) > 12
    assert not [text for text in texts if secret in text]


@pytest.fixture(scope="module")
def saved_objects(
    corpus: Corpus, running_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The objects of a run that was copied at iterations 4 and 6."""
    run = tmp_path_factory.mktemp("saved")
    running_server.empty()
    with running_server.in_environment():
        call_training(command(corpus, run)).succeeded()
        call_training(command(corpus, run, train_iters=6)).succeeded()
        return {key: running_server.read(key) for key in running_server.names("run/")}


@pytest.fixture
def saved_at_url(server: S3Server, saved_objects: dict[str, bytes]) -> S3Server:
    """The server with what that run has left."""
    for key, content in saved_objects.items():
        server.write(key, content)
    assert iterations_at(server) == [4, 6]
    return server


def test_damage_is_named_and_passed_over(saved_at_url: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """``tests/checkpoint/test_finding.py`` has other damages, of local files."""
    keys = [data_keys(saved_at_url, iteration)[0] for iteration in (6, 4)]

    def cut(key: str) -> None:
        content = saved_at_url.read(key)
        saved_at_url.write(key, content[: len(content) // 2])

    cut(keys[0])
    found = find_saved_run(CheckpointConfig(load=URL), ALONE)
    assert found is not None and found.iteration == 4
    assert f"s3://{BUCKET}/{keys[0]}" in caplog.text
    with pytest.raises(CheckpointError, match=f"s3://{BUCKET}/{keys[0]}"):
        find_saved_run(CheckpointConfig(load=URL, checkpoint_fallback=False), ALONE)
    cut(keys[1])
    # Never a fresh start.
    with pytest.raises(CheckpointError, match=r"load another|no readable checkpoint|check the file system"):
        find_saved_run(CheckpointConfig(load=URL), ALONE)


def test_a_partial_upload_is_no_checkpoint_and_is_removed(corpus: Corpus, tmp_path: Path, server: S3Server) -> None:
    theirs = ["run/iter_0000008/tokenizer/tokenizer.model", "run/notes.txt"]
    left = ["run/iter_0000008/rank_00000.0123abcd.safetensors", "run/iter_0000008/.written-0123abcd/rank_00000.json"]
    for key in theirs + left:
        server.write(key, b"0")
    outcome = call_training(command(corpus, tmp_path, load=URL)).succeeded()
    assert f"{URL} has no checkpoint yet" in outcome.stdout
    assert iterations_at(server) == [4]
    assert [key for key in theirs + left if key in server.names()] == theirs


def test_a_run_that_goes_back_replaces_what_it_abandoned(corpus: Corpus, tmp_path: Path, server: S3Server) -> None:
    """An iteration that is saved again has the files of one attempt."""
    # A copy may be left out while the one before is under way, but not the last of a run.
    call_training(command(corpus, tmp_path, save_interval=2)).succeeded()
    call_training(command(corpus, tmp_path, train_iters=6)).succeeded()
    (before,) = data_keys(server, 4)
    server.write(f"{before}.mine", b"not ours")
    changes: Flags = {"lr": 5e-3, "override_opt_param_scheduler": True}
    call_training(command(corpus, tmp_path, ckpt_step=2, train_iters=4, **changes)).succeeded()
    (after,) = data_keys(server, 4)
    assert after != before
    assert server.read(after) == (checkpoint_of(tmp_path / "first", 4) / "rank_00000.safetensors").read_bytes()
    assert f"{before}.mine" in server.names()
    assert iterations_at(server)[-1] == 6
    shutil.rmtree(tmp_path / "first")
    outcome = call_training(command(corpus, tmp_path, train_iters=5, **changes)).succeeded()
    assert f"loaded checkpoint {URL}, continuing after iteration 4" in outcome.stdout


def test_retention_applies_at_the_url(corpus: Corpus, tmp_path: Path, server: S3Server) -> None:
    for last in range(1, 4):
        outcome = call_training(
            command(corpus, tmp_path, train_iters=last, save_retain_last=2, save_retain_interval=1000)
        ).succeeded()
        assert f"mirrored checkpoint {URL}/iter_{last:07d}" in outcome.stdout
    assert iterations_at(server) == [2, 3]
    assert f"deleted checkpoint {URL}/iter_0000001" in outcome.stdout
    assert not server.names("run/iter_0000001/")


@pytest.mark.parametrize("wrong", ["key", "secret", "none", "bucket"])
def test_what_a_person_must_mend_is_refused_at_the_start(
    corpus: Corpus, tmp_path: Path, server: S3Server, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    secret = "wrong-secret-2f6d"
    if wrong in ("key", "none"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    if wrong in ("key", "secret"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    if wrong == "none":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    url = "s3://no-such-bucket/run" if wrong == "bucket" else URL
    s3fs.S3FileSystem.clear_instance_cache()
    outcome = call_training(command(corpus, tmp_path, redundant_save=[url]))
    outcome.refusal(f"--redundant-save cannot be used: Cannot write {url}/", "check the")
    found = bytes_under(tmp_path)
    for text in (outcome.stdout, outcome.stderr, *map(repr, found.values())):
        assert secret not in text and server.credentials["AWS_SECRET_ACCESS_KEY"] not in text
    assert not any("iter_" in name for name in found)


class DeadlyProxy:
    """Forwards connections to a server, which it kills when half of an upload of ``fatal`` has arrived."""

    def __init__(self, server: S3Server, fatal: str) -> None:
        self._server, self._fatal = server, f"PUT /{BUCKET}/{fatal}".encode()
        self.has_killed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._server.port)) as server:
            threading.Thread(target=self._forward, args=(server, client), daemon=True).start()
            while content := client.recv(1 << 16):
                if self._fatal in content and not self.has_killed.is_set():
                    server.sendall(content[: len(content) // 2])
                    self._server.kill()
                    self.has_killed.set()
                    return
                server.sendall(content)

    @staticmethod
    def _forward(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while content := server.recv(1 << 16):
                client.sendall(content)
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.slow(reason="waits for time limits of a network")
def test_an_upload_that_breaks_off_is_a_warning(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server()
    proxy = DeadlyProxy(server, "run/iter_0000020/rank_00000")
    with server.in_environment():
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        flags = {"train_iters": 1_000_000, "lr_decay_iters": 1_000_000, "save_interval": 20, "save_retain_last": 2}
        run = RunningTraining(command(corpus, tmp_path, **flags))
        try:
            wait_until(proxy.has_killed.is_set, START_TIMEOUT)
            wait_until(lambda: "iteration 20 is not mirrored to s3" in run.stderr_so_far(), START_TIMEOUT)
            reached = len(iterations(tmp_path / "metrics.jsonl"))
            run.wait_for_records(tmp_path / "metrics.jsonl", reached + 5)
            server.start()
            wait_until(lambda: bool(iterations_at(server)), START_TIMEOUT)
            os.kill(run.process.pid, signal.SIGTERM)
            outcome = run.finish()
        finally:
            proxy.close()
            server.kill()
    assert outcome.exit_code in (0, 75), outcome
    failed = re.findall(r"iteration (\d+) is not mirrored to s3://bucket/run: rank 0: Cannot", outcome.stderr)
    assert failed[0] == "20" and len(set(failed)) == len(failed), "one warning for each checkpoint that has no copy"
    assert "Traceback" not in outcome.stderr
    last = max(int(path.name[5:]) for path in (tmp_path / "first").glob("iter_*"))
    assert f"mirrored checkpoint {URL}/iter_{last:07d}" in outcome.stdout


@pytest.mark.slow(reason="waits for time limits of a network")
def test_a_server_that_does_not_answer_at_the_start_is_a_warning(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    call_training(command(corpus, tmp_path, redundant_save=None)).succeeded()
    outcome = call_training(command(corpus, tmp_path, train_iters=5)).succeeded()
    assert "continuing after iteration 4" in outcome.stdout
    assert f"--redundant-save {URL} may not be writable: Cannot write {URL}" in caplog.text
    assert f"iteration 5 is not mirrored to {URL}: rank 0: Cannot write" in caplog.text
    # But where only the store knows whether there is a checkpoint, the run must not start afresh.
    for places in ({"load": URL, "redundant_save": None}, {"redundant_save": [URL]}):
        call_training(command(corpus, tmp_path / "b", **places)).refusal(f"Cannot read {URL}")
