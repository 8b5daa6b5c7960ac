"""The vocabulary of a run."""

from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.data.tokenizers import build_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The facts about the tokenizer that data and model need."""

    size: int
    end_of_document: int


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The tokenizer's vocabulary; without a tokenizer (mock data) the last id ends a document."""
    if config.tokenizer.tokenizer_type is None:
        size = config.mock_vocab_size
        assert size is not None
        return Vocabulary(size, size - 1)
    tokenizer = build_tokenizer(config.tokenizer)
    return Vocabulary(tokenizer.vocab_size, tokenizer.eod)
