"""The log says which layers have which attention, and which kernels a person should know of."""

from dataclasses import replace

import pytest

from megatron.config.model import preset
from megatron.core.kernels.choice import Choice
from megatron.training.build.description import describe_attention, describe_kernels, describe_mup

ROPE = "layers with rotary position embedding"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny", ""),
        ("tiny-moe", ""),
        (
            "llama4-scout",
            f"36 of 48 {ROPE}, in chunks of 8192, with normed queries and keys; 12 without, with a temperature from "
            "position 8191 on",
        ),
        (
            "llama4-maverick",
            f"36 of 48 {ROPE}, in chunks of 8192; 12 without, with a temperature from position 8191 on",
        ),
    ],
)
def test_attention_is_described_where_it_is_not_whole_or_not_alike(name: str, words: str) -> None:
    assert describe_attention(preset(name).resolve(1000, 1, 64)) == words


def test_a_terminal_shows_the_kernels_that_were_forced_or_stand_in() -> None:
    plain = [Choice(name, "eager", "fits") for name in ("rope", "swiglu")]
    forced = Choice("attention", "reference", "asked for by --attention-backend", is_forced=True)
    stand_in = Choice("adam", "torch", "plain (not apex: it is not installed)", is_stand_in=True)
    choices = [*plain, forced, stand_in]
    assert describe_kernels(plain, True, False) == "kernels: eager for 2 operations"
    on_gpu = describe_kernels(choices, True, False).splitlines()
    assert on_gpu[0] == "kernels: eager for 2 operations"
    assert [line.split()[0] for line in on_gpu[1:]] == ["attention", "adam"]
    on_cpu = describe_kernels(choices, True, True).splitlines()
    assert on_cpu[0] == "kernels: eager for 2, torch for 1 operations" and len(on_cpu) == 2
    assert "asked for by --attention-backend" in on_cpu[1]
    assert len(describe_kernels(choices, False, True).splitlines()) == 5


def test_mup_is_described_with_its_factors() -> None:
    model = replace(preset("tiny"), use_mup=True, mup_base_hidden_size=32, mup_base_head_dim=8.0)
    resolved = replace(model, hidden_size=128, num_attention_heads=4, kv_channels=32).resolve(1000, 1, 64)
    found = describe_mup(resolved)
    assert found == "4 times the width of the base model (32), logits x 0.25, attention scores x 0.5"
