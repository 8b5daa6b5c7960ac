"""The data of an evaluation of whole texts."""

from collections.abc import Iterator
from dataclasses import dataclass

from tqdm import tqdm

from megatron.config.inference import EvaluateConfig
from megatron.core.control import run_on_all_ranks
from megatron.data.corpus_check import BlockComparison, Share
from megatron.data.evaluation_data import EvaluationText, WholePasses, Windows, names_of, read_text
from megatron.data.loader import Microbatch
from megatron.data.text_inputs import InputFormat
from megatron.training.build.data import build_run_loader
from megatron.training.build.plan import RunPlan
from megatron.training.build.vocabulary import Vocabulary
from megatron.training.context import RunContext
from megatron.training.loop.data import Data, DataCheck, EvaluationSet, Lookahead


@dataclass
class TextData:
    """Reads the texts of ``--input`` on every rank, and makes a set of each."""

    config: EvaluateConfig
    texts: list[EvaluationText] | None = None
    """The texts, once they are read."""

    def build(self, context: RunContext, vocabulary: Vocabulary, plan: RunPlan) -> Data:
        """The sets, and no training data."""
        run, control, config = context.config, context.control, self.config
        form = InputFormat(keys=(config.json_key,), separation=config.text_documents)
        cache = run.data.index_cache_path

        def read() -> list[EvaluationText]:
            return [read_text(name, run.tokenizer, form, cache) for name in config.input]

        self.texts = run_on_all_ranks(control, read)
        nothing = BlockComparison({}, Share(control.rank, control.size))
        return Data(
            train=Lookahead(iter(())),
            evaluated=[
                self._set(context, vocabulary, name, text)
                for name, text in zip(names_of(config.input), self.texts, strict=True)
            ],
            train_epochs={},
            check=DataCheck(nothing, [], 0.0, control, str),
        )

    def _set(self, context: RunContext, vocabulary: Vocabulary, name: str, text: EvaluationText) -> EvaluationSet:
        run = context.config
        windows = Windows(
            text.stream,
            run.seq_length,
            self.config.stride or run.seq_length,
            vocabulary.end_of_document,
            masked_token=vocabulary.end_of_document if run.data.eod_mask_loss else None,
            marks_documents=run.data.marks_documents,
        )
        unit = run.micro_batch_size * context.topology.grid.dp
        samples = WholePasses(windows, unit)
        microbatches = build_run_loader(context, vocabulary, samples, 0)
        count = samples.samples_per_pass // unit
        if context.topology.rank == 0:
            microbatches = _with_bar(microbatches, name, count, unit)
        return EvaluationSet("validation", microbatches, count, name, continues=False, num_bytes=text.num_bytes)


def _with_bar(microbatches: Iterator[Microbatch], name: str, count: int, unit: int) -> Iterator[Microbatch]:
    """Microbatches with a progress bar on a terminal, which counts the windows of all ranks."""
    with tqdm(total=count * unit, desc=name, unit="window", disable=None, leave=False) as bar:
        for number, microbatch in enumerate(microbatches, start=1):
            if number <= count:
                bar.update(unit)
            if number == count:
                bar.close()
            yield microbatch
