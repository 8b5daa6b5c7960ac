"""Where a run goes back to, which samples it leaves out, and in which data stage it resumes."""

from dataclasses import replace

import pytest

from megatron.checkpoint.schema import DataStage
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.data_record import DataRecord
from megatron.errors import CheckpointError
from megatron.training.batch_schedule import build_batches, samples_of_tokens
from megatron.training.checkpoints.saved_run import ResolvedStages, earlier_lengths, first_stage, resolve_data_stages

# --- data stages, as a function of the checkpoint and the flags -----------------------------------------------

SHORT: DataRecord = {"sequence_length": 8, "seed": 1}
OTHER: DataRecord = {"sequence_length": 8, "seed": 2}
LONG: DataRecord = {"sequence_length": 64, "seed": 1}

MAIN = DataStage("main", 0, 0, SHORT)
TWO = (MAIN, DataStage("long", 10, 160, LONG))


def settle(saved: tuple[DataStage, ...], name: str | None, now: DataRecord, iteration: int = 20) -> ResolvedStages:
    return resolve_data_stages(saved, name, now, iteration, 16 * iteration, "the checkpoint")


def test_a_fresh_run_is_in_its_first_stage() -> None:
    assert first_stage(None, SHORT).stages == (DataStage("first", 0, 0, SHORT),)
    assert first_stage("main", SHORT).stages == (MAIN,)


UNKNOWN = DataStage("first", 0, 0, {"sequence_length": 8})
CONTINUES = "data stage long continues after 160 of its samples"


@pytest.mark.parametrize(
    ("saved", "name", "now", "iteration", "stages", "notices"),
    [
        # The same data continue with and without the name, also in a later stage.
        ((MAIN,), None, SHORT, 20, (MAIN,), ["continues"]),
        ((MAIN,), "main", SHORT, 20, (MAIN,), ["continues"]),
        (TWO, None, LONG, 20, TWO, [CONTINUES]),
        (TWO, "long", LONG, 20, TWO, [CONTINUES]),
        # A new name begins a stage where the run is, also on the same data, which then come from the beginning again.
        ((MAIN,), "next", OTHER, 20, (MAIN, DataStage("next", 20, 320, OTHER)), ["next begins after iteration 20"]),
        ((MAIN,), "next", SHORT, 20, (MAIN, DataStage("next", 20, 320, SHORT)), ["next begins after iteration 20"]),
        # After a fallback behind the beginning of the stage, it begins again where the older checkpoint is.
        ((MAIN,), "long", LONG, 5, (MAIN, DataStage("long", 5, 80, LONG)), ["long begins", "8 times the tokens"]),
        # A checkpoint without a record is taken at its word once.
        ((UNKNOWN,), None, SHORT, 20, (replace(UNKNOWN, data=SHORT),), ["continues", "has no record"]),
        ((replace(UNKNOWN, data=SHORT),), None, SHORT, 20, (replace(UNKNOWN, data=SHORT),), ["continues"]),
        ((UNKNOWN,), "long", LONG, 20, (UNKNOWN, DataStage("long", 20, 320, LONG)), ["begins", "had 8"]),
    ],
)
def test_a_run_resumes_in_a_stage(
    saved: tuple[DataStage, ...],
    name: str | None,
    now: DataRecord,
    iteration: int,
    stages: tuple[DataStage, ...],
    notices: list[str],
) -> None:
    settled = settle(saved, name, now, iteration)
    assert settled.stages == stages and settled.current == stages[-1]
    assert len(settled.notices) == len(notices)
    assert all(words in notice for words, notice in zip(notices, settled.notices))


@pytest.mark.parametrize(
    ("name", "saved", "stage"), [(None, (MAIN,), "main"), ("main", (MAIN,), "main"), ("long", TWO, "long")]
)
def test_other_data_in_a_stage_are_refused(name: str | None, saved: tuple[DataStage, ...], stage: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        settle(saved, name, {"sequence_length": saved[-1].seq_length, "seed": 2})
    sentence = str(refusal.value)
    assert f"of stage {stage} of the checkpoint (--seed: 1 in the checkpoint, 2 now): use the same flags" in sentence
    assert "--new-data-stage and a new name" in sentence and "--finetune" in sentence


def test_a_stage_that_is_over_does_not_come_back() -> None:
    with pytest.raises(CheckpointError, match="--new-data-stage main is over: the checkpoint is in data stage long"):
        settle(TWO, "main", SHORT)


def test_what_is_saved_are_the_paths_of_now() -> None:
    corpus = {"index_bytes": 1, "index_xxh3_128": "", "token_bytes": 2, "block_xxh3_128": [], "all_blocks": None}

    def at(path: str) -> DataRecord:
        entries = [{"corpus": 0, "weight": None}]
        return {**SHORT, "corpora": [{**corpus, "path": path}], "blends": {"train": entries, "valid": entries}}

    saved = DataStage("main", 0, 0, at("old"))
    assert settle((saved,), None, at("new")).stages == (replace(saved, data=at("new")),)


def test_many_differences_are_cut() -> None:
    corpora = [
        {"path": f"c{n}", "index_bytes": n, "index_xxh3_128": "", "token_bytes": 2, "block_xxh3_128": []}
        for n in range(30)
    ]
    blend = [{"corpus": n, "weight": 1.0} for n in range(30)]
    now = [{**entry, "weight": entry["corpus"] + 1.0} for entry in blend]
    saved, other = ({**SHORT, "corpora": corpora, "blends": {"train": part}} for part in (blend, now))
    with pytest.raises(CheckpointError) as refusal:
        settle((DataStage("main", 0, 0, saved),), None, other)
    assert str(refusal.value).count(" in the checkpoint, ") == 20
    assert "; and 9 more): use" in str(refusal.value)


# --- tokens ---------------------------------------------------------------------------------------------------


def tokens_one_by_one(samples: int, stages: tuple[DataStage, ...]) -> int:
    """Tokens in the first ``samples`` samples of a run."""
    total = 0
    for sample in range(samples):
        total += [stage.seq_length for stage in stages if stage.first_sample <= sample][-1]
    return total


def test_tokens_of_earlier_stages_count_with_their_own_length() -> None:
    stages = (MAIN, DataStage("long", 10, 16, LONG), DataStage("short", 12, 20, SHORT))
    assert earlier_lengths(stages) == [(16, 8), (4, 64)]
    for tokens in range(700):
        samples = samples_of_tokens(tokens, stages[-1].seq_length, earlier_lengths(stages))
        assert tokens_one_by_one(samples, stages) <= tokens < tokens_one_by_one(samples + 1, stages)


def test_a_step_schedule_counts_the_tokens_of_every_stage() -> None:
    stages = (MAIN, DataStage("long", 10, 16, LONG))
    training = TrainingConfig(micro_batch_size=1, step_batch_size_schedule="0:2 64:4 192:8")
    config = RunConfig(data=DataConfig(seq_length=64), training=training)
    schedule = build_batches(config, data_parallel_size=1, earlier_lengths=earlier_lengths(stages))
    assert schedule.steps == ((0, 2), (8, 4), (17, 8))
    for samples in range(40):
        tokens = tokens_one_by_one(samples, stages)
        assert schedule.global_batch_size(samples) == (2 if tokens < 64 else 4 if tokens < 192 else 8)
