"""Where a run begins and where it does not: what --load may name, and ``--use-checkpoint-args``, with which a run goes
on without flags for its architecture, and never with another one."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megatron.checkpoint.files import RemotePath
from megatron.checkpoint.finding import missing_checkpoint
from megatron.checkpoint.manifest import read_checkpoint
from megatron.commands import checkpoints, evaluate
from megatron.commands.convert_checkpoint import ToHuggingFace, convert
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.core.topology import single_process
from megatron.errors import CheckpointError
from megatron.inference.loading import load_model
from tests.end_to_end.run_process import (
    Corpus,
    Flags,
    FlagValue,
    assert_close,
    bytes_under,
    call_training,
    checkpoint_of,
    flags_of,
    iterations,
    losses,
)


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose checkpoints are in ``checkpoints``."""
    directory = tmp_path_factory.mktemp("trained")
    call_training(flags_of(corpus, save=directory / "checkpoints", train_iters=2)).succeeded()
    return directory


def refusal(flags: list[str], *words: str) -> str:
    """The one sentence of a run that must not begin; it has these ``words``."""
    outcome = call_training(flags)
    assert outcome.exit_code == 2
    return outcome.refusal(*words)


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
def test_where_a_run_does_not_begin(corpus: Corpus, trained: Path, tmp_path: Path, place: str, changes: Flags) -> None:
    places = {"save": tmp_path, "pretrained_checkpoint": trained}
    given = {name: places[name] / str(value) if name in places else value for name, value in changes.items()}
    before = sorted(trained.rglob("*"))
    sentence = WRONG[place].format(trained)
    if place == "chekpoints" and "ckpt_step" in changes:
        sentence = f"{trained}/chekpoints has no checkpoint of iteration 2; it has: none"
    refusal(flags_of(corpus, train_iters=3, load=trained / place, **given), sentence)
    assert sorted(trained.rglob("*")) == before


def test_a_run_that_saves_to_load_begins_only_where_checkpoints_may_be(corpus: Corpus, trained: Path) -> None:
    """Not in the directory of a checkpoint, and not where it needs one."""
    one = trained / "checkpoints" / "iter_0000002"
    refusal(flags_of(corpus, load=one, save=one), WRONG["checkpoints/iter_0000002"].format(trained))
    new = trained / "new"
    for flag, remedy in {
        "finetune": "set it to the weights from which --finetune starts",
        "exit_on_missing_checkpoint": "check the path, or remove --exit-on-missing-checkpoint",
    }.items():
        flags = flags_of(corpus, load=new, save=new, **{flag: True})
        refusal(flags, f"--load {new} has no checkpoint: {remedy}")


def test_weights_of_another_run_are_looked_for_in_the_same_way(corpus: Corpus, trained: Path) -> None:
    place = f"{trained}/checkpoints"
    remedy = f"is the directory of one checkpoint: use --pretrained-checkpoint {place} instead"
    refusal(flags_of(corpus, pretrained_checkpoint=f"{place}/iter_0000002"), remedy)


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
        checkpoints.inspect(checkpoints.InspectConfig(load))


def test_a_url_of_one_checkpoint_names_its_directory() -> None:
    error = missing_checkpoint(RemotePath("s3://bucket/run/iter_0000002/"))
    assert "use --load s3://bucket/run --ckpt-step 2 instead" in str(error)


# --- --use-checkpoint-args ------------------------------------------------------------------------------------


HALF = 4
UNSAID: Flags = dict.fromkeys(
    ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
)
ARCHITECTURES: dict[str, Flags] = {
    "grouped queries": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "wide heads, turned otherwise": {
        "kv_channels": 12,
        "rotary_base": 10000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "rope_scaling_original_length": 16,
        "norm_epsilon": 1e-3,
    },
    "layers of two kinds": {
        "no_rope_freq": "2",
        "attention_chunk_size": 12,
        "qk_l2_norm": True,
        "attention_temperature_tuning": True,
        "attention_temperature_floor": 4,
        "window_size": "5,0",
        "window_attn_skip_freq": "2",
        "attn_logit_softcapping": 4.0,
    },
}


@pytest.fixture(scope="module")
def saved(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains one of ``ARCHITECTURES``, given by flags, once: eight iterations, of which a checkpoint half-way stays."""

    @cache
    def train(name: str) -> Path:
        directory = tmp_path_factory.mktemp("saved")
        places: Flags = {"save": directory, "save_interval": HALF, "metrics_jsonl": directory / "metrics.jsonl"}
        call_training(flags_of(corpus, fp64=True, **places, **ARCHITECTURES[name])).succeeded()
        shutil.rmtree(checkpoint_of(directory, 2 * HALF))
        (directory / "latest_checkpointed_iteration.txt").write_text(str(HALF))
        return directory

    return train


def second_half(directory: Path) -> list[float]:
    """The losses after the checkpoint of a run of ``saved``."""
    return losses(directory / "metrics.jsonl")[HALF:]


def going_on(corpus: Corpus, load: Path, **changes: FlagValue) -> list[str]:
    """The command line that goes on from ``load`` without a flag for the architecture, but for ``changes``."""
    return flags_of(corpus, **{**UNSAID, "fp64": True, "load": load, "use_checkpoint_args": True, **changes})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes_may_be_left_out(corpus: Corpus, saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    directory, metrics = saved(name), tmp_path / "metrics.jsonl"
    outcome = call_training(going_on(corpus, directory, metrics_jsonl=metrics)).succeeded()
    assert f"> architecture: from the checkpoint of iteration {HALF} in {directory}" in outcome.stdout
    assert losses(metrics) == second_half(directory)


REFUSED: list[tuple[str, Flags, set[str]]] = [
    # Given, though it is what it would be by default.
    ("wide heads, turned otherwise", {"use_rope_scaling": False}, {"--use-rope-scaling is False here and True there"}),
    (
        "grouped queries",
        {"num_layers": 3, "norm_epsilon": 1e-6, "num_attention_heads": 4},
        {"--num-layers is 3 here and 2 there", "--norm-epsilon is 1e-06 here and 1e-05 there"},
    ),
    (
        "tied",
        {"model": "tiny", "num_layers": 2},
        {
            "--hidden-size is 128 here and 32 there",
            "--ffn-hidden-size is 384 here and 64 there",
            "--num-attention-heads is 8 here and 4 there",
            "--num-query-groups is 4 here and 2 there",
            "--untie-embeddings-and-output-weights is True here and False there",
        },
    ),
]


@pytest.mark.parametrize(("name", "given", "told"), REFUSED)
def test_every_flag_that_differs_is_named(
    corpus: Corpus, saved: Callable[[str], Path], name: str, given: Flags, told: set[str]
) -> None:
    directory = saved(name)
    before = bytes_under(directory)
    sentence = refusal(going_on(corpus, directory, save=directory, **given), str(directory), "leave out ")
    assert set(re.findall(r"--\S+ is \S+ here and \S+ there", sentence.replace(")", " "))) == told
    assert ("leave out --model tiny" in sentence) == ("model" in given)
    after = bytes_under(directory)
    assert {name: after[name] for name in before} == before


def test_flags_that_agree_or_are_free_may_be_given(
    corpus: Corpus, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """The run takes over neither the length nor the padding, which are its own."""
    directory, metrics = saved("grouped queries"), tmp_path / "metrics.jsonl"
    free: Flags = {"make_vocab_size_divisible_by": 100, "attention_backend": "local", "max_position_embeddings": 50}
    flags = going_on(corpus, directory, save=tmp_path, metrics_jsonl=metrics, hidden_size=32, **free)
    call_training(flags).succeeded()
    assert_close(losses(metrics), second_half(directory), 1e-9)
    architecture = read_checkpoint(tmp_path, 8).state["architecture"]
    assert (architecture["padded_vocab_size"], architecture["max_position_embeddings"]) == (400, 50)


def test_a_pattern_of_layers_may_be_rephrased(corpus: Corpus, saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory, metrics = saved("layers of two kinds"), tmp_path / "metrics.jsonl"
    flags = going_on(corpus, directory, metrics_jsonl=metrics, no_rope_freq="[0]+[1]", window_attn_skip_freq="[1,0]")
    call_training(flags).succeeded()
    assert losses(metrics) == second_half(directory)
    refusal(going_on(corpus, directory, no_rope_freq="[1,0]"), "--no-rope-freq is [1,0] here and 2 there")


@pytest.mark.parametrize(("seq_length", "longest"), [(16, 32), (48, 48)])
def test_the_longest_sequence_is_the_checkpoints_unless_the_run_has_longer_ones(
    corpus: Corpus, saved: Callable[[str], Path], tmp_path: Path, seq_length: int, longest: int
) -> None:
    tuned: Flags = {"finetune": True, "train_iters": 1, "lr_warmup_iters": None, "seq_length": seq_length}
    call_training(going_on(corpus, saved("grouped queries"), save=tmp_path, **tuned)).succeeded()
    assert read_checkpoint(tmp_path, 1).state["architecture"]["max_position_embeddings"] == longest


def test_a_layout_that_the_architecture_does_not_fit_is_refused(corpus: Corpus, saved: Callable[[str], Path]) -> None:
    flags = going_on(corpus, saved("grouped queries"), cp_comm_type=("p2p", "a2a", "p2p"))
    refusal(flags, "--cp-comm-type p2p a2a p2p", "3 types for 2 layers")


# --- where there is no such checkpoint -----------------------------------------------------------------------


def test_without_a_checkpoint_the_architecture_is_that_of_the_flags(corpus: Corpus, tmp_path: Path) -> None:
    """So that one command starts a run and goes on with it."""
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, use_checkpoint_args=True, load=tmp_path, save=tmp_path, metrics_jsonl=metrics)
    outcome = call_training([*flags, "--exit-interval", "1"]).succeeded()
    assert "> architecture: from the command line" in outcome.stdout
    call_training([*flags, "--exit-interval", "2"]).succeeded()
    assert [record["iteration"] for record in iterations(metrics)] == [1, 2]


def test_without_a_checkpoint_missing_flags_are_asked_for(corpus: Corpus, tmp_path: Path) -> None:
    outcome = call_training(going_on(corpus, tmp_path, save=tmp_path, num_layers=2))
    assert outcome.exit_code == 2
    outcome.refusal(str(tmp_path), "--use-checkpoint-args")
    assert "--hidden-size is missing" in outcome.stderr and "--model llama3-8b" in outcome.stderr


def test_no_older_model_replaces_a_damaged_one(corpus: Corpus, saved: Callable[[str], Path], tmp_path: Path) -> None:
    source, latest = saved("grouped queries"), checkpoint_of(tmp_path, HALF)
    call_training(flags_of(corpus, fp64=True, num_layers=3, train_iters=2, save=tmp_path)).succeeded()
    # With new times: what is older than the tracker counts as abandoned.
    shutil.copytree(checkpoint_of(source, HALF), latest, copy_function=shutil.copy)
    shard = latest / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    outcome = call_training(going_on(corpus, tmp_path))
    assert f"> architecture: from the checkpoint of iteration {HALF}" in outcome.stdout
    assert outcome.exit_code == 2
    outcome.refusal("--num-layers is 2 here and 3 there", "use the flags of the run that saved it")
