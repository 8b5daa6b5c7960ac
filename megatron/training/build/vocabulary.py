"""The vocabulary of a run."""

from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.data.token_bytes import TokenBytes, count_token_bytes
from megatron.data.tokenizers import build_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The facts about the tokenizer that data and model need."""

    size: int
    end_of_document: int
    token_bytes: TokenBytes | None = None
    """The bytes of the tokens' text, if the run evaluates and the tokenizer has them."""


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The tokenizer's vocabulary; without a tokenizer (mock data) the last id ends a document."""
    if config.tokenizer.tokenizer_type is None:
        size = config.mock_vocab_size
        assert size is not None
        return Vocabulary(size, size - 1)
    tokenizer = build_tokenizer(config.tokenizer)
    size = tokenizer.vocab_size
    if config.tokenizer.tokenizer_type != "NullTokenizer" and config.tokenizer.vocab_size is not None:
        size = config.tokenizer.vocab_size  # at least the ids of the tokenizer
    validation = config.validation
    token_bytes = count_token_bytes(tokenizer, size) if validation.skip_train or validation.eval_interval else None
    return Vocabulary(size, tokenizer.eod, token_bytes)
