"""The progress bar of a terminal."""

from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from megatron.metrics.record import EvaluationRecord, IterationRecord
from megatron.metrics.writer import MetricsWriter, ReportedRun, WriterFlags


@dataclass(frozen=True)
class ProgressBarFlags(WriterFlags):
    """The progress bar."""

    progress_bar: bool | None = None
    """Show a progress bar (default: only on a terminal)."""

    def open_writer(self, run: ReportedRun) -> MetricsWriter | None:
        is_shown = run.stream.isatty() if self.progress_bar is None else self.progress_bar
        return ProgressBar(run.stream, run.train_iters, run.resume_iteration) if is_shown else None


class ProgressBar:
    """A bar over iterations with the last loss and tokens/s, drawn at most twice a second."""

    def __init__(self, stream: TextIO, train_iters: int, resume_iteration: int) -> None:
        self._bar = tqdm(
            total=train_iters,
            initial=resume_iteration,
            file=stream,
            unit="it",
            dynamic_ncols=True,
            mininterval=0.5,
            delay=1e-9,  # no frame before the first record: the lines that describe the run come first
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def write_iteration(self, record: IterationRecord) -> None:
        loss = record.metrics["lm_loss"]
        rate = f"{record.metrics['tokens_per_s_per_gpu']:,.0f}/GPU"
        self._bar.set_postfix({"loss": "skipped" if loss is None else f"{loss:.4f}", "tokens/s": rate}, refresh=False)
        self._bar.update(record.iteration - self._bar.n)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        pass  # The console writer prints it.

    def close(self) -> None:
        self._bar.close()
