"""Comparison of the architecture of the flags with that of a checkpoint, or of a Hugging Face model; and the
architecture and the tokenizer of ``--load-hf`` as words of the command line.

Imports no torch: the flags must be complete before it is imported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron.architectures.transformer_config import YARN_FIELDS, TransformerConfig
from megatron.checkpoint.files import explained
from megatron.checkpoint.hugging_face.config import HuggingFaceDescription, describe_directory, tokenizers_in
from megatron.config.command_line import CommandLine
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.flags import changed_words, flag_of
from megatron.urls import refuse_urls

_REMEDY = "leave out what differs"


def check_architecture(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    remedy: str = "use the flags of the run that saved it",
    *,
    weights_only: bool = False,
) -> None:
    """Raise :class:`CheckpointError` with every flag whose value differs from ``saved``, found at ``where``.

    ``weights_only``: a new run begins with the weights, and may begin YaRN.
    """
    here, there = wanted.get("num_experts"), saved["num_experts"]
    if here and not there:
        raise CheckpointError(
            f"{where} is a dense model, but --num-experts is {here}: give it experts first "
            "(tools/convert_checkpoint.py upcycle), or load another."
        )
    if there and not here and "num_experts" in wanted:
        raise CheckpointError(
            f"{where} has {there} experts, but the flags describe a dense model: {remedy}, or load another."
        )
    # The padding depends on the layout; no weight depends on the longest sequence, the initialisation, or the
    # temperature, which a stage with longer sequences may turn on.
    free = {"padded_vocab_size", "max_position_embeddings", "init_method_std"}
    free |= {f"attention_temperature_{name}" for name in ("tuning", "floor", "scale")}
    if weights_only and wanted.get("position_embedding_type") == "yarn":
        free |= {"position_embedding_type", *YARN_FIELDS}
    different = [
        f"{flag_of(name)} is {value} here and {saved[name]} there"
        for name, value in wanted.items()
        if name not in free and saved[name] != value
    ]
    if different:
        raise CheckpointError(f"{where} has another architecture ({'; '.join(different)}): {remedy}, or load another.")


def given_architecture(model: ModelConfig) -> dict[str, Any]:
    """The values of flags of the architecture, for :func:`check_architecture`."""
    # A flag without a value follows from others, and is compared when the weights are loaded.
    known = {field.name for field in fields(TransformerConfig)}
    given = {name: value for name, value in asdict(model).items() if name in known and value is not None}
    given["no_rope_freq"] = model.canonical_nope_pattern
    given["window_attn_skip_freq"] = model.canonical_window_pattern
    if model.window_size is not None:
        given["window_size"] = model.canonical_window
    if model.num_experts:
        given["moe_layer_freq"] = model.canonical_layer_pattern
    else:
        given["num_experts"] = None
    return given


# --- --load-hf -----------------------------------------------------------------------------------------------


def with_hugging_face(line: CommandLine, config: RunConfig) -> CommandLine:
    """``line``, from which ``config`` was parsed, after the flags that describe the model of ``--load-hf``.

    Raises :class:`CheckpointError` with every flag of ``line`` that contradicts the directory, and for a directory that
    cannot be read.
    """
    checkpoint = config.checkpoint
    assert checkpoint.load_hf is not None
    refuse_urls({"--load-hf": checkpoint.load_hf}, "copy the model to a local directory, whose files can be mapped")
    source = Path(checkpoint.load_hf)
    description = describe_directory(source, checkpoint.load_hf_text_only, "--load-hf-text-only")
    model, origin = ModelConfig.of(description.architecture), f"--load-hf {source}"
    given, theirs = line.over_model(origin, model).model, description.architecture
    if given.model is not None:
        given = ModelConfig.of(given.resolve(theirs.vocab_size, tensor_parallel_size=1, seq_length=1))
    # Both forms of the weights of norms can be read from Hugging Face's gains.
    wanted = given_architecture(given) | {"apply_layernorm_1p": theirs.apply_layernorm_1p}
    check_architecture(wanted, asdict(theirs), f"The model in {source}", remedy=_REMEDY, weights_only=True)
    different = [
        f"{flag} is {here} here and {there} there"
        for flag, here, there in _tokenizer_differences(config.tokenizer, description, source)
    ]
    if different:
        raise CheckpointError(f"The model in {source} has another tokenizer ({'; '.join(different)}): {_REMEDY}.")
    if config.data.seq_length is not None and config.data.seq_length > (model.max_position_embeddings or 0):
        model = replace(model, max_position_embeddings=None)  # no weight depends on it
    return line.over([*changed_words(model), *_tokenizer_words(config.tokenizer, description, source)], origin)


def _tokenizer_differences(
    given: TokenizerConfig, description: HuggingFaceDescription, source: Path
) -> Iterator[tuple[str, object, object]]:
    """Flag, value here and value there."""
    theirs = dict(tokenizers_in(source))
    kind = given.canonical_type or description.tokenizer.canonical_type
    if theirs and given.tokenizer_type is not None and kind not in theirs:
        yield "--tokenizer-type", given.tokenizer_type, " or ".join(theirs)
    elif kind in theirs and given.tokenizer_model is not None:
        here = Path(given.tokenizer_model)
        here, there = here / theirs[kind].name if here.is_dir() else here, theirs[kind]
        # A file that does not exist is reported when the tokenizer is built.
        with explained("read", here):
            if here.is_file() and not here.samefile(there) and here.read_bytes() != there.read_bytes():
                yield "--tokenizer-model", here, there
    size = _vocab_size(given, description)
    if given.vocab_size not in (None, size):
        yield "--vocab-size", given.vocab_size, size


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
