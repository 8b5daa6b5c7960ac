"""The architecture and the tokenizer of ``--load-hf`` as words of the command line.

Imports no torch: the flags must be complete before it is imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron.checkpoint.files import explained
from megatron.checkpoint.hugging_face.config import HuggingFaceDescription, describe_directory, tokenizers_in
from megatron.config.command_line import parse_command_line
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.flags import changed_words
from megatron.training.checkpoints.comparison import check_architecture, given_architecture
from megatron.urls import refuse_urls

_REMEDY = "leave out what differs"


def with_hugging_face(arguments: Sequence[str], config: RunConfig) -> list[str]:
    """``arguments``, from which ``config`` was parsed, after the flags that describe the model of ``--load-hf``.

    Raises :class:`CheckpointError` with every flag in ``arguments`` that contradicts the directory, and for a directory
    that cannot be read.
    """
    checkpoint = config.checkpoint
    assert checkpoint.load_hf is not None
    refuse_urls({"--load-hf": checkpoint.load_hf}, "copy the model to a local directory, whose files can be mapped")
    source = Path(checkpoint.load_hf)
    description = describe_directory(source, checkpoint.load_hf_text_only, "--load-hf-text-only")
    model = ModelConfig.of(description.architecture)
    _check_architecture(parse_command_line(arguments, model).model, description, source)
    _check_tokenizer(config.tokenizer, description, source)
    if config.data.seq_length is not None and config.data.seq_length > (model.max_position_embeddings or 0):
        model = replace(model, max_position_embeddings=None)  # no weight depends on it
    return [*changed_words(model), *_tokenizer_words(config.tokenizer, description, source), *arguments]


def _check_architecture(given: ModelConfig, description: HuggingFaceDescription, source: Path) -> None:
    theirs = description.architecture
    if given.model is not None:
        given = ModelConfig.of(given.resolve(theirs.vocab_size, tensor_parallel_size=1, seq_length=1))
    wanted = given_architecture(given)
    # Both forms of the weights of norms can be read from Hugging Face's gains.
    wanted["apply_layernorm_1p"] = theirs.apply_layernorm_1p
    check_architecture(wanted, asdict(theirs), f"The model in {source}", remedy=_REMEDY, weights_only=True)


def _check_tokenizer(given: TokenizerConfig, description: HuggingFaceDescription, source: Path) -> None:
    different = [
        f"{flag} is {here} here and {there} there" for flag, here, there in _differences(given, description, source)
    ]
    if different:
        raise CheckpointError(f"The model in {source} has another tokenizer ({'; '.join(different)}): {_REMEDY}.")


def _differences(
    given: TokenizerConfig, description: HuggingFaceDescription, source: Path
) -> Iterator[tuple[str, object, object]]:
    """Flag, value here and value there."""
    theirs = dict(tokenizers_in(source))
    kind = given.canonical_type or description.tokenizer.canonical_type
    if theirs and given.tokenizer_type is not None and kind not in theirs:
        yield "--tokenizer-type", given.tokenizer_type, " or ".join(theirs)
    elif kind in theirs and given.tokenizer_model is not None:
        here = Path(given.tokenizer_model)
        here = here / theirs[kind].name if here.is_dir() else here
        if not _is_same_file(here, theirs[kind]):
            yield "--tokenizer-model", here, theirs[kind]
    size = _vocab_size(given, description)
    if given.vocab_size not in (None, size):
        yield "--vocab-size", given.vocab_size, size


def _is_same_file(here: Path, there: Path) -> bool:
    """Whether the contents are equal; a file that does not exist is reported when the tokenizer is built."""
    if not here.is_file():
        return True
    with explained("read", here):
        return here.samefile(there) or here.read_bytes() == there.read_bytes()


def _tokenizer_words(given: TokenizerConfig, description: HuggingFaceDescription, source: Path) -> list[str]:
    """The flags that complete ``given``, which does not contradict the directory."""
    found = description.tokenizer
    if given.canonical_type is not None and given.tokenizer_model is None:
        file = dict(tokenizers_in(source)).get(given.canonical_type)
        found = replace(found, tokenizer_type=None, tokenizer_model=None if file is None else str(file))
    return changed_words(replace(found, vocab_size=_vocab_size(given, description)))


def _vocab_size(given: TokenizerConfig, description: HuggingFaceDescription) -> int:
    """``--vocab-size`` for the vocabulary of the model; NullTokenizer adds one id."""
    return description.architecture.vocab_size - (given.tokenizer_type == "NullTokenizer")
