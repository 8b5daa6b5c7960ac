"""Flags that recipes of Megatron-LM carry do what they say, seen in what a run leaves behind."""

from pathlib import Path

import pytest

from tests.end_to_end.run_process import (
    Corpus,
    call_training,
    flags_of,
    iterations,
    losses,
    tiny_corpus,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.getbasetemp())


def test_a_run_starts_from_the_weights_of_another_and_goes_on_from_its_own(corpus: Corpus, tmp_path: Path) -> None:
    base, run, metrics = tmp_path / "base", tmp_path / "run", tmp_path / "metrics.jsonl"
    call_training(flags_of(corpus, save=base, train_iters=3)).succeeded()

    def flags(train_iters: int) -> list[str]:
        return flags_of(
            corpus,
            pretrained_checkpoint=base,
            load=run,
            save=run,
            train_iters=train_iters,
            lr_decay_iters=8,
            metrics_jsonl=metrics,
        )

    call_training(flags(2)).succeeded()
    first = losses(metrics)
    fine_tuned = tmp_path / "fine_tuned.jsonl"
    finetune = flags_of(corpus, load=base, finetune=True, train_iters=2, lr_decay_iters=8, metrics_jsonl=fine_tuned)
    call_training(finetune).succeeded()
    assert first == losses(fine_tuned)
    call_training(flags(3)).succeeded()
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2, 3]

    nowhere = call_training(flags_of(corpus, pretrained_checkpoint=tmp_path / "nowhere"))
    assert "--pretrained-checkpoint" in nowhere.errors[0] and "holds no checkpoint" in nowhere.errors[0]
