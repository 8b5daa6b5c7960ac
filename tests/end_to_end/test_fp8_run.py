"""Training in FP8 as a user starts it: it learns as bf16 does, goes on where it stopped, and says what it does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    Outcome,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    flags_of,
    losses,
    run_training,
    tiny_corpus,
)

LENGTH, STOP = 16, 8
RUN: dict[str, FlagValue] = {"bf16": True, "train_iters": LENGTH, "lr_decay_iters": LENGTH, "log_interval": 1}
DELAYED: dict[str, FlagValue] = {
    **RUN,
    "fp8_format": "hybrid",
    "fp8_amax_history_len": 4,
    "fp8_amax_compute_algo": "max",
}
RECIPES: dict[str, dict[str, FlagValue]] = {
    "delayed": DELAYED,
    "tensorwise": {**RUN, "fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def in_one_go(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with delayed scaling that evaluates in between, and saves half-way and at the end."""
    directory = tmp_path_factory.mktemp("whole")
    train(corpus, directory, **DELAYED, save=directory, save_interval=STOP, eval_interval=STOP // 2, eval_iters=1)
    return directory


def train(corpus: Corpus, directory: Path, **flags: FlagValue | Path) -> Outcome:
    return call_training(flags_of(corpus, **flags, metrics_jsonl=directory / "metrics.jsonl")).succeeded()


@pytest.mark.slow(reason="long runs; tests/parallel proves the numbers")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_as_in_bf16(corpus: Corpus, tmp_path: Path, recipe: str) -> None:
    found = {}
    for name, flags in {"bf16": RUN, recipe: RECIPES[recipe]}.items():
        directory = tmp_path / name
        directory.mkdir()
        train(corpus, directory, **flags)
        found[name] = losses(directory / "metrics.jsonl")
    assert found["bf16"][-1] < found["bf16"][0] - 1.0
    assert_close(found[recipe], found["bf16"], 0.01)
    assert found[recipe][0] != found["bf16"][0], "nothing was quantised"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            DELAYED,
            "> fp8: hybrid with delayed scaling (amax history of 4, max, margin 0): linear layers of 2 of 2 "
            "transformer layers, by fp32 products of the FP8 numbers; the rest in bf16",
        ),
        (
            {
                **RECIPES["tensorwise"],
                "num_layers": 4,
                "first_last_layers_bf16": True,
                "num_layers_at_end_in_bf16": 2,
            },
            "> fp8: e4m3 with current (per-tensor) scaling: linear layers of 1 of 4 transformer layers, by "
            "fp32 products of the FP8 numbers; the rest in bf16",
        ),
    ],
)
def test_the_start_says_what_is_in_fp8(
    corpus: Corpus, tmp_path: Path, flags: dict[str, FlagValue], sentence: str
) -> None:
    assert sentence in train(corpus, tmp_path, **{**flags, "train_iters": 1, "lr_warmup_iters": 0}).stdout


def test_a_resumed_run_is_the_run_that_never_stopped(corpus: Corpus, in_one_go: Path, tmp_path: Path) -> None:
    flags = {**DELAYED, "eval_interval": STOP // 2, "eval_iters": 1, "save": tmp_path}
    train(corpus, tmp_path, **flags, load=in_one_go, ckpt_step=STOP)
    whole = [record for record in computed(in_one_go / "metrics.jsonl") if record["iteration"] > STOP]
    assert computed(tmp_path / "metrics.jsonl") == whole
    names = ("model/", "optimizer/", "fp8/")
    assert_same_tensors(checkpoint_of(tmp_path, LENGTH), checkpoint_of(in_one_go, LENGTH), names)


def test_weights_in_fp8_resume_bit_for_bit_and_start_from_any_run(
    corpus: Corpus, in_one_go: Path, tmp_path: Path
) -> None:
    """Their checkpoints are those of a run with bf16 weights: fp32 master weights, and weights in bf16."""
    gathered: dict[str, FlagValue] = {"use_distributed_optimizer": True, "fp8_param_gather": True}
    flags: dict[str, FlagValue] = {
        **DELAYED,
        **gathered,
        "train_iters": STOP + 4,
        "eval_interval": 2,
        "eval_iters": 1,
        "save_interval": 2,
    }
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, load, iteration in ((first, in_one_go, STOP), (second, first, STOP + 2)):
        directory.mkdir()
        train(corpus, directory, **flags, load=load, ckpt_step=iteration, save=directory)
    assert_close(losses(first / "metrics.jsonl"), losses(in_one_go / "metrics.jsonl")[STOP : STOP + 4], 1e-2)
    rest = [record for record in computed(first / "metrics.jsonl") if record["iteration"] > STOP + 2]
    assert computed(second / "metrics.jsonl") == rest
    names = ("model/", "optimizer/", "fp8/")
    assert_same_tensors(checkpoint_of(second, STOP + 4), checkpoint_of(first, STOP + 4), names)
    found, plain = (formats(checkpoint_of(root, STOP + offset)) for root, offset in ((first, 4), (in_one_go, 0)))
    assert found == plain


def formats(checkpoint: Path) -> dict[str, torch.dtype]:
    """The dtype of every saved tensor of the model and the optimizer, by its global name."""
    tensors = load_file(checkpoint / "rank_00000.safetensors").items()
    return {name.partition("@")[0]: tensor.dtype for name, tensor in tensors if not name.startswith("random/")}


def test_recompute_changes_no_bit(corpus: Corpus, in_one_go: Path, tmp_path: Path) -> None:
    """Nor does an evaluation in between, which records magnitudes as what runs again does."""
    full: dict[str, FlagValue] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "cpu_offloading_num_layers": 1,
    }
    again = {**DELAYED, **full, "train_iters": STOP, "eval_interval": STOP // 2, "eval_iters": 1}
    train(corpus, tmp_path, **again)
    whole = [record for record in computed(in_one_go / "metrics.jsonl") if record["iteration"] <= STOP]
    assert computed(tmp_path / "metrics.jsonl")[: len(whole)] == whole
    assert {"lm_loss", "validation_loss"} <= {name for record in whole for name in record}


def fp8_state(directory: Path) -> dict[str, torch.Tensor]:
    files = (load_file(path) for path in sorted(directory.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items() if name.startswith("fp8/")}


def test_layers_at_the_ends_have_no_scales(corpus: Corpus, tmp_path: Path) -> None:
    ends: dict[str, FlagValue] = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
    once: dict[str, FlagValue] = {"num_layers": 4, "train_iters": 1, "lr_warmup_iters": 0}
    train(corpus, tmp_path, **{**DELAYED, **ends, **once}, save=tmp_path)
    assert {name.split(".")[1] for name in fp8_state(checkpoint_of(tmp_path, 1))} == {"1"}


@pytest.mark.slow(reason="two ranks")
def test_two_ranks_go_on_with_the_scales_of_one(corpus: Corpus, in_one_go: Path, tmp_path: Path) -> None:
    """Scales are those of whole tensors, by names that know of no layout."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    once = {**DELAYED, "load": in_one_go, "ckpt_step": STOP, "train_iters": STOP + 1}
    train(corpus, one, **once, save=one)
    layout: dict[str, FlagValue] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    where = {"save": two, "metrics_jsonl": two / "metrics.jsonl"}
    run_training(flags_of(corpus, **{**once, **layout, **where}), processes=2).succeeded()
    assert_close(losses(two / "metrics.jsonl"), losses(in_one_go / "metrics.jsonl")[STOP : STOP + 1], 1e-3)
    found, wanted = (fp8_state(checkpoint_of(root, STOP + 1)) for root in (two, one))
    assert found.keys() == wanted.keys()
    assert len(found) == 2 * 4 * 2
    # Of one step: after several, the largest gradient of a tensor depends on how numbers were rounded.
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0.05, atol=0.0), name
        if "amax_history" in name:
            assert torch.equal(found[name][:, 1:], tensor[:, 1:]), "what was loaded"


@pytest.mark.slow(reason="four runs")
def test_a_run_in_bf16_goes_on_in_fp8_and_back(corpus: Corpus, in_one_go: Path, tmp_path: Path) -> None:
    change = {"ckpt_step": STOP, "train_iters": STOP + 2}
    back, forth = tmp_path / "back", tmp_path / "forth"
    for directory, flags in ((back, {**RUN, "load": in_one_go}), (forth, {**RECIPES["tensorwise"], "load": in_one_go})):
        directory.mkdir()
        train(corpus, directory, **{**flags, **change}, save=directory)
        assert_close(losses(directory / "metrics.jsonl"), losses(in_one_go / "metrics.jsonl")[STOP : STOP + 2], 0.01)
    again = tmp_path / "again"
    again.mkdir()
    train(corpus, again, **{**DELAYED, "train_iters": STOP + 4}, load=back)
    assert_close(losses(again / "metrics.jsonl"), losses(in_one_go / "metrics.jsonl")[STOP + 2 : STOP + 4], 0.01)
