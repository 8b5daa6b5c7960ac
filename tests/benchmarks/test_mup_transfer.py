"""muP on small models: activations keep their size over widths, and so does the best learning rate its place."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.mup_transfer import Transfer, activation_sizes, best_exponent, describe, sweep


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def growth(config: Transfer, use_mup: bool) -> dict[str, float]:
    """How many times larger the activations of the widest model are than those of the base model."""
    base, widest = (activation_sizes(config, width, use_mup) for width in (config.widths[0], config.widths[-1]))
    return {name: size / base[name] for name, size in widest.items()}


@pytest.mark.parametrize(
    "widths",
    [(64, 256), pytest.param((64, 512), marks=pytest.mark.slow(reason="wide models; 256 runs by default"))],
    ids=str,
)
def test_activations_keep_their_size_over_widths_only_with_mup(widths: tuple[int, ...]) -> None:
    config = Transfer(widths=widths, batch_size=8)
    with_mup, without = growth(config, True), growth(config, False)
    assert set(with_mup) == {"layer 0", "layer 1", "logits"}
    assert all(0.3 < ratio < 2 for ratio in with_mup.values()), with_mup
    assert without["layer 0"] > 20 and without["layer 1"] > 20 and without["logits"] > 2, without


def test_the_best_learning_rate_of_a_wide_model_is_that_of_the_base_model_only_with_mup() -> None:
    config = Transfer(widths=(32, 128), exponents=(-8, -6, -3), steps=30, batch_size=8)
    losses = sweep(config)
    best = {run: best_exponent(config, row) for run, row in losses.items()}
    assert best == {(False, 32): -6, (True, 32): -6, (True, 128): -6, (False, 128): -8}
    assert "with muP        128" in describe(config, losses, {run: {"logits": 1.0} for run in losses})


@pytest.mark.slow(reason="25 runs; two models with three learning rates run by default")
@pytest.mark.timeout(1800)
def test_the_best_learning_rate_is_the_same_for_all_widths_on_a_fine_grid_only_with_mup() -> None:
    config = Transfer(exponents=(-10, -9, -8, -7, -6))
    best = {run: best_exponent(config, row) for run, row in sweep(config).items()}
    assert best[True, 64] == best[True, 128] == best[True, 256] == -7
    assert best[False, 64] > best[False, 128] > best[False, 256]
