"""The parts of a text that is decoded token by token add up to the text of all tokens."""

import random
from pathlib import Path

import pytest

from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)
from megatron.inference.generator import TextStream

TEXTS = ("  def f(x):\n\treturn x ", "naïve façade: 東京 🙂🙃\n", " leading and  double spaces", "x", "\n\n", "5 7 11")


@pytest.fixture(params=["sentencepiece", "tiktoken", "tokenizers", "null"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    match request.param:
        case "sentencepiece":
            return SentencePieceTokenizer(request.getfixturevalue("sentencepiece_model"))
        case "tiktoken":
            return TikTokenizer(request.getfixturevalue("byte_ranks"))
        case "tokenizers":
            directory: Path = request.getfixturevalue("hugging_face_directory")
            return HuggingFaceTokenizer(str(directory))
        case _:
            return NullTokenizer(60)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: int) -> list[str]:
    """The parts of a text whose first ``prompt`` ids come together."""
    stream = TextStream(tokenizer)
    parts = [stream.add(ids[:prompt], is_last=prompt == len(ids))]
    return parts + [stream.add([ids[place]], is_last=place == len(ids) - 1) for place in range(prompt, len(ids))]


@pytest.mark.parametrize("prompt", [0, 1, 4])
def test_parts_add_up_to_the_text(tokenizer: Tokenizer, prompt: int) -> None:
    for text in TEXTS if not isinstance(tokenizer, NullTokenizer) else TEXTS[-1:]:
        ids = tokenizer.tokenize(text)
        assert "".join(streamed(tokenizer, ids, min(prompt, len(ids)))) == tokenizer.detokenize(ids)


def test_parts_of_random_ids_add_up(tokenizer: Tokenizer, chance: random.Random) -> None:
    """Also special tokens, and bytes that are no characters."""
    for _ in range(50):
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(1, 30))]
        assert "".join(streamed(tokenizer, ids, 1)) == tokenizer.detokenize(ids), ids


def test_text_comes_with_its_tokens_and_characters_are_whole(byte_ranks: str) -> None:
    tokenizer = TikTokenizer(byte_ranks)
    ids = tokenizer.tokenize("aé🙂!")
    assert len(ids) == 8, "one token for each byte"
    assert streamed(tokenizer, ids, 1) == ["a", "", "é", "", "", "", "🙂", "!"]
    # What is cut comes at the end.
    assert streamed(tokenizer, ids[:5], 1) == ["a", "", "é", "", "\ufffd"]
