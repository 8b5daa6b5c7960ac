"""The log says which layers have which attention."""

import pytest

from megatron.config.model import preset
from megatron.training.build.description import describe_attention

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
