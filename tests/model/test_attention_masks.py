"""Windows and caps of attention: as in transformers, and as counted."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.model import preset
from megatron.core.parameter import info_of
from megatron.core.topology import single_process
from tests.model.reference import (
    architecture,
    batch,
    compare_on_rank,
    expected,
    gradient_errors,
    largest_error,
    our_model,
    relative_error,
    transformers,
)
from tests.whole_model import token_losses_of

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


def use_eagerly(monkeypatch: pytest.MonkeyPatch, family: str, attend: Any) -> None:
    """Attention of a family of transformers by ``attend``."""
    monkeypatch.setattr(f"transformers.models.{family}.modeling_{family}.eager_attention_forward", attend)
    kind = type(transformers.AutoConfig.for_model(family))
    setting = kind._attn_implementation
    monkeypatch.setattr(kind, "_attn_implementation", property(lambda self: "eager", setting.fset))


def test_capped_scores_are_those_of_gemma2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's attention of transformers in Llama's layers."""
    gemma2: Any = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    config = architecture(scaling=False, tied=False, tp=1)

    def capped(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = gemma2.eager_attention_forward(*arguments, softcap=0.8, **options)
        return found

    use_eagerly(monkeypatch, "llama", capped)
    wanted = expected(config)
    model = our_model(replace(config, attn_logit_softcapping=0.8), wanted.weights, single_process())
    assert largest_error(model, wanted, batch(config), single_process()) < EXACT
    uncapped = our_model(config, wanted.weights, single_process())
    assert largest_error(uncapped, wanted, batch(config), single_process()) > 1e-3


@pytest.mark.parametrize("window", [None, "6,0"])
def test_sinks_are_those_of_gpt_oss(monkeypatch: pytest.MonkeyPatch, window: str | None) -> None:
    """GPT-OSS's attention of transformers in the layers of Llama, and in those of Qwen3 with a window."""
    gpt_oss: Any = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    family = "llama" if window is None else "qwen3"
    config = replace(architecture(scaling=False, tied=False, tp=1, family=family), window_size=window)
    sinks = torch.linspace(-2.0, 1.5, 2 * 8, dtype=torch.float64).view(2, 8)

    def with_sinks(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        module.sinks = sinks[module.layer_idx]
        found: tuple[Tensor, Tensor] = gpt_oss.eager_attention_forward(module, *arguments, **options)
        return found

    use_eagerly(monkeypatch, family, with_sinks)
    wanted = expected(config)
    offsets = {f"layers.{n}.self_attention.softmax_offset": sinks[n].unsqueeze(1) for n in range(2)}
    model = our_model(replace(config, softmax_type="learnable"), wanted.weights | offsets, single_process())
    model.requires_grad_()
    tokens, labels = batch(config)
    losses = token_losses_of(model, tokens, labels)
    losses.sum().backward()
    assert relative_error(losses.detach(), wanted.losses) < EXACT
    gradients = {info_of(one).name: cast(Tensor, one.grad) for one in model.parameters()}
    of_sinks = {name: gradients[name] for name in offsets}
    assert max(gradient_errors(model, single_process(), wanted.gradients | of_sinks)) < EXACT
    # The sinks' own gradients, by differences.
    for name, offset in offsets.items():
        (parameter,) = (one for one in model.parameters() if info_of(one).name == name)
        for head in range(8):
            sums = []
            for step in (1e-4, -1e-4):
                with torch.no_grad():
                    parameter.copy_(offset)
                    parameter[head] += step
                    sums.append(token_losses_of(model, tokens, labels).sum())
                    parameter.copy_(offset)
            difference = (sums[0] - sums[1]) / 2e-4
            assert gradients[name][head].item() == pytest.approx(difference.item(), rel=1e-5, abs=1e-6)


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
