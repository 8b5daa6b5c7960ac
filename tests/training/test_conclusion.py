"""The end of a run says what was trained, which validation loss was best, and where everything is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from megatron.checkpoint.schema import DataStage
from megatron.config.command_line import parse_command_line
from megatron.metrics.jsonl import ValidationHistory
from megatron.operation.attempts import EffectiveTimeMeter
from megatron.training.loop.listeners import Conclusion, tokens_of
from megatron.training.loop.trainer import Trainer
from tests.training.reported_run import evaluation_record


def stage(first_sample: int, length: int) -> DataStage:
    return DataStage("", 0, first_sample, {"sequence_length": length})


class _Meter:
    def seconds(self, snapshot: object, now_ns: int) -> tuple[float, float]:
        return 7200.0, 5400.0


def test_the_summary_of_a_run_with_earlier_processes(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"iteration": 1, "lm_loss": 5.0},
        {"iteration": 2, "validation_loss": 2.5},
        {"iteration": 3, "test_loss": 1.0},
    ]
    torn = ['{"validation_loss": ' + "[" * 100_000, '{"iteration": 4, "validation_loss": 1']
    metrics.write_text("\n".join([*map(json.dumps, rows), *torn]))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8\n")
    history = ValidationHistory(str(metrics))
    for iteration, loss in ((6, 2.75), (8, float("nan"))):
        history.write_evaluation(evaluation_record(iteration, loss))
    history.write_evaluation(evaluation_record(8, 0.5, split="test"))
    lines: list[str] = []
    trainer = cast(
        Trainer,
        SimpleNamespace(
            context=SimpleNamespace(
                topology=SimpleNamespace(rank=0),
                log_rank0=lines.append,
                heartbeat=SimpleNamespace(snapshot=lambda: None),
            ),
            state=SimpleNamespace(
                progress=SimpleNamespace(iteration=8, consumed_samples=64), data_stages=[stage(0, 16), stage(24, 32)]
            ),
            stop=SimpleNamespace(train_iters=1000),
            writers=[history],
            started=0.0,
        ),
    )
    words = ["--save", str(tmp_path), "--metrics-jsonl", str(metrics), "--seq-length", "32"]
    Conclusion(parse_command_line(words), cast(EffectiveTimeMeter, _Meter())).on_end(trainer, "the run is complete")
    assert lines == [
        "trained: iteration 8 of 1,000, 1,664 tokens, 2.0 h, effective time 75.0 %",
        "best validation loss: 2.5000 (perplexity 12.18) at iteration 2",
        f"last checkpoint: {tmp_path}/iter_0000008",
        f"report: python tools/report_run.py {tmp_path} --metrics {metrics} --html report.html",
    ]


def test_tokens_count_each_stage_with_its_length() -> None:
    assert tokens_of([], 10, 8) == 80
    assert tokens_of([stage(0, 4)], 10, 8) == 80
    assert tokens_of([stage(0, 4), stage(6, 8)], 10, 8) == 6 * 4 + 4 * 8
