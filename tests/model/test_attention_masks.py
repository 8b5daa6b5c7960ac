"""Windows and caps of attention: as in transformers, and as counted."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import preset
from megatron.core.topology import single_process
from tests.model.reference import (
    architecture,
    batch,
    compare_on_rank,
    expected,
    largest_error,
    our_model,
    transformers,
)

EXACT = 1e-12


@pytest.mark.parametrize(("family", "skip"), [("qwen2", "0"), ("qwen3", "2"), ("qwen3", "[0,1]")])
@pytest.mark.parametrize("window", [2, 7])
def test_windows_are_those_of_transformers(family: str, skip: str, window: int) -> None:
    """``layer_types`` by the mapping of conversions; a window of transformers counts a query's own key."""
    config = architecture(scaling=False, tied=False, tp=1, family=family)
    windowed = replace(config, window_size=f"{window - 1},0", window_attn_skip_freq=skip)
    assert compare_on_rank(windowed, 1, False) < EXACT
    # Otherwise this would prove less than it seems to.
    assert (expected(config).logits - expected(windowed).logits).abs().max() > 1e-3


def test_capped_scores_are_those_of_gemma2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's attention of transformers in Llama's layers."""
    gemma2: Any = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    config = architecture(scaling=False, tied=False, tp=1)

    def capped(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = gemma2.eager_attention_forward(*arguments, softcap=0.8, **options)
        return found

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", capped)
    setting = transformers.LlamaConfig._attn_implementation
    eager = property(lambda self: "eager", setting.fset)
    monkeypatch.setattr(transformers.LlamaConfig, "_attn_implementation", eager)
    wanted = expected(config)
    model = our_model(replace(config, attn_logit_softcapping=0.8), wanted.weights, single_process())
    assert largest_error(model, wanted, batch(config), single_process()) < EXACT
    uncapped = our_model(config, wanted.weights, single_process())
    assert largest_error(uncapped, wanted, batch(config), single_process()) > 1e-3


def visible_keys(config: TransformerConfig, layer: int, length: int) -> int:
    """Twice the visible scores of a sequence, one by one; where the mask is a triangle, without half of its diagonal
    (:meth:`TransformerConfig.flops_of_layers` counts s^2 / 2 for a sequence)."""
    window, chunk = config.windows()[layer], config.attention_chunk_size
    if not config.rope_layers()[layer]:
        chunk = None
    count = 0
    for query in range(length):
        start = 0 if chunk is None else query // chunk * chunk
        first = start if window is None else max(start, query - window)
        is_triangle = window is None or query - start <= window
        count += 2 * (query - first + 1) - is_triangle
    return count


@pytest.mark.parametrize("chunk", [None, 5, 16])
@pytest.mark.parametrize("window", [None, 0, 3, 4, 20])
def test_flops_count_the_visible_keys(chunk: int | None, window: int | None) -> None:
    window_size = None if window is None else f"{window},0"
    config = replace(
        architecture(scaling=False, tied=False, tp=1),
        attention_chunk_size=chunk,
        no_rope_freq="2",
        window_size=window_size,
    )
    for layer, (has_rope, seen) in enumerate(zip(config.rope_layers(), config.windows())):
        assert 16 * config.attention_length(has_rope, seen, 16) == visible_keys(config, layer, 16)


def test_parentheses_and_spaces_of_megatron_lm_are_read() -> None:
    resolved = replace(preset("tiny"), window_size="( 12 , 0 )").resolve(300, 1, 64)
    assert resolved.window_size == "12,0" and resolved.windows() == (12,) * resolved.num_layers
