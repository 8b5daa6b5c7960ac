"""The check that each layout overfits a few samples: what it runs, and what passes."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.commands import overfit_check
from megatron.commands.overfit_check import Outcome, OverfitCheck, command_of, main, split_arguments, write_samples
from megatron.data.indexed_dataset import IndexedDataset

UNIFORM = math.log(257)
"""The loss of a model that knows nothing, for 256 ids and the end of a document."""


@pytest.mark.parametrize(
    ("words", "mine", "common", "layouts"),
    [
        ("", [], ["--model", "tiny"], []),
        ("--lr 1", ["--lr", "1"], ["--model", "tiny"], []),
        ("-- --bf16", [], ["--bf16"], []),
        ("--lr 1 -- -- --a 2 -- --b", ["--lr", "1"], ["--model", "tiny"], [["--a", "2"], ["--b"]]),
    ],
)
def test_flags_are_divided_at_dashes(words: str, mine: list[str], common: list[str], layouts: list[list[str]]) -> None:
    assert split_arguments(words.split()) == (mine, common, layouts)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((UNIFORM, 1.0, 0.01), "pass"),
        ((UNIFORM * 1.05, 0.05), "pass"),
        ((), "FAIL: the run failed"),
        ((UNIFORM * 1.2, 0.01), "FAIL: the first loss is not about ln(vocabulary) = 5.549"),
        ((UNIFORM, 0.06), "FAIL: the last loss is above --threshold 0.05"),
        ((UNIFORM, math.nan), "FAIL: the last loss is above --threshold 0.05"),
    ],
)
def test_a_run_passes_from_the_uniform_loss_to_nearly_zero(losses: tuple[float, ...], words: str) -> None:
    assert Outcome("x", losses, "").verdict(OverfitCheck()) == words


def test_the_corpus_has_a_document_for_each_sample(tmp_path: Path) -> None:
    config = OverfitCheck(samples=8, seq_length=5, vocab_size=7)
    write_samples(config, tmp_path / "samples")
    corpus = IndexedDataset(str(tmp_path / "samples"))
    documents = [corpus.get(number) for number in range(len(corpus))]
    assert len(documents) == 8 and all(document.size == 6 and document.max() < 7 for document in documents)
    assert len({document.tobytes() for document in documents}) == 8


def test_one_process_and_a_layout_train_on_the_same_batches(tmp_path: Path) -> None:
    one, two = (command_of(OverfitCheck(), ["--bf16"], count, tmp_path) for count in (1, 2))
    differing = {first for first, second in zip(one, two, strict=True) if first != second}
    assert differing == {"1", str(tmp_path / "1.jsonl")}
    assert one[one.index("--micro-batch-size") + 1] == "16" and one[one.index("--global-batch-size") + 1] == "32"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--samples 33", "--samples 33 is not divisible by --processes 2: change one."),
        ("--iterations 0", "--iterations 0"),
        ("--lr 0", "--lr 0"),
    ],
)
def test_a_wrong_flag_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("last", "status", "words"), [(0.01, 0, "pass"), (1.0, 1, "FAIL: the last loss is above")])
def test_one_layout_that_does_not_overfit_fails_the_check(
    last: float, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: OverfitCheck, common: Sequence[str], layout: Sequence[str], processes: int) -> Outcome:
        assert processes == (2 if layout else 1) and common == ["--bf16"]
        return Outcome("one layout" if layout else "one process", (UNIFORM, last if layout else 0.01), "")

    monkeypatch.setattr(overfit_check, "run", run)
    assert main(["--", "--bf16", "--", "--use-torch-fsdp2"]) == status
    first, second = capsys.readouterr().out.splitlines()
    assert first == "pass: one process: loss 5.5491 to 0.0100"
    assert second.startswith(words) and "differs from one process by up to 0.0e+00 in the first 1 iterations" in second


@pytest.mark.processes
def test_a_run_that_is_too_short_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"]
    assert main(["--iterations", "3", "--samples", "4", "--", *model]) == 1
    assert "FAIL: the last loss is above --threshold 0.05: one process: loss 5.5" in capsys.readouterr().out


@pytest.mark.slow(reason="trains twice")
def test_tensor_parallelism_overfits_as_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = "-- --model tiny --fp64 -- --tensor-model-parallel-size 2 --sequence-parallel"
    assert main(["--iterations", "120", *words.split()]) == 0
    assert capsys.readouterr().out.count("pass: ") == 2
