"""The vocabulary of a run. torch is imported only to count the bytes of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.run import RunConfig
from megatron.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_files
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.data.evaluation_data import TokenBytes


@dataclass(frozen=True)
class Vocabulary:
    """The facts about the tokenizer that data and model need."""

    size: int
    end_of_document: int
    token_bytes: TokenBytes | None = None
    """The bytes of the tokens' text, if the run evaluates and the tokenizer has them."""


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The tokenizer's vocabulary; without a tokenizer (mock data) the last id ends a document."""
    vocabulary, tokenizer = _read(config)
    validation = config.validation
    if tokenizer is None or not (validation.skip_train or validation.eval_interval):
        return vocabulary
    from megatron.data.evaluation_data import count_token_bytes

    return replace(vocabulary, token_bytes=count_token_bytes(tokenizer, vocabulary.size))


def planned_vocabulary(config: RunConfig) -> Vocabulary:
    """The vocabulary of the tokenizer if its file exists, otherwise a vocabulary of the size in the flags."""
    tokenizer = config.tokenizer
    files = tokenizer_files(tokenizer)
    if tokenizer.tokenizer_type is None or (files and all(Path(path).exists() for path in files)):
        return _read(config)[0]
    if tokenizer.vocab_size is not None:
        size = tokenizer.vocab_size + (tokenizer.tokenizer_type == "NullTokenizer")
    elif config.model.preset_vocab_size is not None:
        size = config.model.preset_vocab_size
    else:
        raise ConfigError(
            f"--dry-run has no vocabulary size: {' or '.join(files)} does not exist, and no --model preset sets one: "
            "add --vocab-size."
        )
    return Vocabulary(size, size - 1)


def _read(config: RunConfig) -> tuple[Vocabulary, Tokenizer | None]:
    """The vocabulary without the bytes of its tokens, and the tokenizer, if there is one."""
    if config.tokenizer.tokenizer_type is None:
        size = config.mock_vocab_size
        if size is None:  # flags that no run has checked, such as a cut run.yaml
            raise ConfigError("The size of the vocabulary is not known: set --tokenizer-type, or --vocab-size.")
        return Vocabulary(size, size - 1), None
    tokenizer = build_tokenizer(config.tokenizer)
    size = tokenizer.vocab_size
    if config.tokenizer.tokenizer_type != "NullTokenizer" and config.tokenizer.vocab_size is not None:
        size = config.tokenizer.vocab_size  # at least the ids of the tokenizer
    return Vocabulary(size, tokenizer.eod), tokenizer
