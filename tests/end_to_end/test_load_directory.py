"""Where a run begins and where it does not: what --load may name."""

import re
from pathlib import Path

import pytest

from megatron.checkpoint.finding import missing_checkpoint
from megatron.checkpoint.remote_path import RemotePath
from megatron.commands import evaluate, inspect_checkpoint
from megatron.commands.convert_checkpoint import ToHuggingFace, convert
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.core.topology import single_process
from megatron.errors import CheckpointError
from megatron.inference.loading import load_model
from tests.end_to_end.run_process import Corpus, FlagValue, call_training, flags_of


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose checkpoints are in ``checkpoints``."""
    directory = tmp_path_factory.mktemp("trained")
    call_training(flags_of(corpus, save=directory / "checkpoints", train_iters=2)).succeeded()
    return directory


def refusal(flags: list[str]) -> str:
    """What a run that must not begin says."""
    outcome = call_training(flags)
    assert outcome.exit_code == 2
    (sentence,) = outcome.errors
    return sentence


def test_a_run_begins_where_it_saves(corpus: Corpus, tmp_path: Path) -> None:
    """However the directory is written, so that one command starts a run and resumes it."""
    save = tmp_path / "save"
    outcome = call_training(flags_of(corpus, train_iters=2, save=save, load=f"{save}/")).succeeded()
    assert "WARNING" not in outcome.stdout
    assert f"> {save}/ has no checkpoint yet: starting from random weights" in outcome.stdout
    outcome = call_training(flags_of(corpus, train_iters=2, save=tmp_path, load=tmp_path)).succeeded()
    assert f"> {tmp_path} has no checkpoint yet: starting from random weights" in outcome.stdout
    assert (
        f"WARNING: {save} has checkpoints: to resume from them, stop this run and use --load {save}." in outcome.stdout
    )


WRONG = {
    "checkpoints/iter_0000002": (
        "{0}/checkpoints/iter_0000002 is the directory of one checkpoint: "
        "use --load {0}/checkpoints --ckpt-step 2 instead"
    ),
    ".": "{0} has no checkpoint, but {0}/checkpoints has: use --load {0}/checkpoints instead",
    "chekpoints": "{0}/chekpoints has no checkpoint: ",
}
"""What --load says, and what the error says."""


@pytest.mark.parametrize("place", WRONG)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ckpt_step": 2},
        {"finetune": True},
        {"use_checkpoint_args": True},
        {"pretrained_checkpoint": "checkpoints"},
        {"save": "elsewhere"},
    ],
    ids=str,
)
def test_a_run_does_not_begin_where_load_names_no_checkpoints(
    corpus: Corpus, trained: Path, tmp_path: Path, place: str, changes: dict[str, FlagValue]
) -> None:
    places = {"save": tmp_path, "pretrained_checkpoint": trained}
    given = {name: places[name] / str(value) if name in places else value for name, value in changes.items()}
    before = sorted(trained.rglob("*"))
    message = refusal(flags_of(corpus, train_iters=3, load=trained / place, **given))
    sentence = WRONG[place].format(trained)
    if place == "chekpoints" and "ckpt_step" in changes:
        sentence = f"{trained}/chekpoints has no checkpoint of iteration 2; it has: none"
    assert sentence in message
    assert sorted(trained.rglob("*")) == before


def test_a_run_that_saves_to_load_begins_only_where_checkpoints_may_be(corpus: Corpus, trained: Path) -> None:
    """Not in the directory of a checkpoint, and not where it needs one."""
    one = trained / "checkpoints" / "iter_0000002"
    assert WRONG["checkpoints/iter_0000002"].format(trained) in refusal(flags_of(corpus, load=one, save=one))
    new = trained / "new"
    finetune = refusal(flags_of(corpus, load=new, save=new, finetune=True))
    assert f"--load {new} has no checkpoint: set it to the weights from which --finetune starts" in finetune
    refused = refusal(flags_of(corpus, load=new, save=new, exit_on_missing_checkpoint=True))
    assert f"--load {new} has no checkpoint: check the path, or remove --exit-on-missing-checkpoint" in refused


def test_weights_of_another_run_are_looked_for_in_the_same_way(corpus: Corpus, trained: Path) -> None:
    place = f"{trained}/checkpoints"
    message = refusal(flags_of(corpus, pretrained_checkpoint=f"{place}/iter_0000002"))
    assert f"is the directory of one checkpoint: use --pretrained-checkpoint {place} instead" in message


@pytest.mark.parametrize("place", WRONG)
def test_tools_name_the_directory_that_was_meant(trained: Path, tmp_path: Path, place: str) -> None:
    load, sentence = str(trained / place), re.escape(WRONG[place].format(trained))
    with pytest.raises(CheckpointError, match=sentence):
        convert(ToHuggingFace(load, str(tmp_path)))
    with pytest.raises(CheckpointError, match=sentence):
        load_model(load, single_process())
    with pytest.raises(CheckpointError, match=sentence):
        evaluate.read_saved_state(RunConfig(checkpoint=CheckpointConfig(load=load)))
    with pytest.raises(CheckpointError, match=sentence):
        inspect_checkpoint.inspect(inspect_checkpoint.InspectConfig(load))


def test_a_url_of_one_checkpoint_names_its_directory() -> None:
    error = missing_checkpoint(RemotePath("s3://bucket/run/iter_0000002/"))
    assert "use --load s3://bucket/run --ckpt-step 2 instead" in str(error)
