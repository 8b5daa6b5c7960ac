"""What many files share: a corpus, and a run that was trained on it."""

from pathlib import Path

import pytest

from tests.end_to_end.run_process import Corpus, call_training, flags_of, tiny_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Modules of Python's library, tokenized."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight iterations in fp64 with checkpoints after 4 and 8, evaluations, and its ``metrics.jsonl``: for
    tests that read it, or a copy."""
    directory = tmp_path_factory.mktemp("trained")
    evaluated = {"eval_interval": 4, "eval_iters": 2}
    metrics = directory / "metrics.jsonl"
    flags = flags_of(corpus, fp64=True, save=directory, save_interval=4, metrics_jsonl=metrics, **evaluated)
    call_training(flags).succeeded()
    return directory
