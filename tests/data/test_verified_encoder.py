"""Ids in bulk: those of the trusted libraries, whatever the text; and what is not known to be equal is left to them."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokenizer_formats import LLAMA3_SPLIT
from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    _LibraryTokenizer,
)
from megatron.data.verified_encoder import (
    Encode,
    TokenizedTexts,
    VerifiedEncoder,
    fast_sentencepiece,
    fast_tiktoken,
    fast_tokenizer_json,
)
from megatron.errors import TokenizerMismatchError
from tests.data.texts import CHARACTER_TEXTS, CHARACTERS, read_model, unlikely_texts


def assert_fast_ids_are_those_of_the_library(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert isinstance(tokenizer, _LibraryTokenizer) and tokenizer._encoder is not None
    tokens, lengths = tokenizer.tokenize_to_arrays(texts)
    expected = tokenizer.tokenize_batch(texts)
    assert lengths.tolist() == list(map(len, expected))
    assert tokens.tolist() == [token for ids in expected for token in ids]


@pytest.mark.parametrize("model", ["sentencepiece_model", "llama2_model"])
def test_fast_ids_are_those_of_sentencepiece(
    request: pytest.FixtureRequest, model: str, python_sources: list[str]
) -> None:
    tokenizer = SentencePieceTokenizer(request.getfixturevalue(model))
    if model == "llama2_model":  # as its publishers tokenize it
        assert tokenizer.tokenize("Hello world") == [15043, 3186]
    assert_fast_ids_are_those_of_the_library(tokenizer, [*python_sources, *unlikely_texts(5000)])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: [model.pieces.add(piece=piece, score=-1e6) for piece in ("\ufffd", "\U0001f600\U0001f600", "7a")],
        lambda model: model.pieces.add(piece="of\u2581the", score=-1e6),
        lambda model: setattr(model.pieces.add(), "piece", "qxqxqx"),  # that no merges come to
        lambda model: setattr(model.pieces[600], "score", model.pieces[500].score),
    ],
    ids=["other characters", "a piece over a blank", "a piece that no merge gives", "equal scores"],
)
def test_fast_ids_are_those_of_unusual_sentencepiece_models(
    sentencepiece_model: str, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    model, _ = read_model(sentencepiece_model)
    change(model)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    tokenizer = SentencePieceTokenizer(str(tmp_path / "tokenizer.model"))
    texts = ["of the of  the", "qxqxqx", *unlikely_texts(1500)]
    assert_fast_ids_are_those_of_the_library(tokenizer, texts)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, proto: setattr(model.trainer_spec, "byte_fallback", False),
        lambda model, proto: setattr(model.normalizer_spec, "remove_extra_whitespaces", True),
        lambda model, proto: setattr(model.normalizer_spec, "add_dummy_prefix", False),
        lambda model, proto: setattr(model.normalizer_spec, "precompiled_charsmap", b"1"),
        lambda model, proto: setattr(model.trainer_spec, "model_type", proto.TrainerSpec.UNIGRAM),
    ],
)
def test_other_sentencepiece_models_are_left_to_the_library(
    sentencepiece_model: str, change: Callable[[Any, Any], None]
) -> None:
    model, proto = read_model(sentencepiece_model)
    assert fast_sentencepiece(model.SerializeToString()) is not None
    change(model, proto)
    assert fast_sentencepiece(model.SerializeToString()) is None


def test_fast_ids_are_those_of_tiktoken(llama3_model: str) -> None:
    assert_fast_ids_are_those_of_the_library(TikTokenizer(llama3_model), [*CHARACTER_TEXTS, *unlikely_texts(5000)])


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}, BYTE_LEVEL]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_at(r"\h+"), BYTE_LEVEL | {"use_regex": False}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_at(LLAMA3_SPLIT), BYTE_LEVEL]}},
        {"added_tokens": [{"id": 3, "content": "words", "special": False}]},
        {"model": {"type": "Unigram"}},
        {"model": {"byte_fallback": True}},
        {"model": {"dropout": 0.1}},
        {"model": {"unk_token": "<s>"}},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"model": {"continuing_subword_prefix": "##"}},
        {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}},
    ],
)
def test_other_tokenizer_json_are_left_to_the_library(hugging_face_directory: Path, change: dict[str, Any]) -> None:
    content = json.loads((hugging_face_directory / "tokenizer.json").read_text())
    assert fast_tokenizer_json(json.dumps(content).encode()) is not None
    changed = content | change | {"model": content["model"] | change.get("model", {})}
    assert fast_tokenizer_json(json.dumps(changed).encode()) is None


QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.mark.parametrize("case", ["GPT-2's split", LLAMA3_SPLIT, QWEN2_SPLIT, "merges in another order than ids"])
def test_fast_ids_are_those_of_hugging_face(hugging_face_directory: Path, case: str) -> None:
    path = hugging_face_directory / "tokenizer.json"
    content = json.loads(path.read_text())
    if case in (LLAMA3_SPLIT, QWEN2_SPLIT):
        cuts = [split_at(case), BYTE_LEVEL | {"use_regex": False}]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    elif case.startswith("merges"):
        content["model"]["merges"].reverse()
    path.write_text(json.dumps(content))
    texts = ["".join(f"{one},e {one}1234\n" for one in CHARACTERS[start::500]) for start in range(500)]
    assert_fast_ids_are_those_of_the_library(HuggingFaceTokenizer(str(path)), [*texts, *unlikely_texts(1500)])


def test_runs_of_blanks_are_cut_as_for_tiktoken(byte_ranks: str) -> None:
    """tiktoken fails on long runs of blanks, so both libraries get the same parts."""
    texts = ["a" + " " * 250_000 + "b", "", "ab", "\n" * 100_001]
    assert_fast_ids_are_those_of_the_library(TikTokenizer(byte_ranks), texts)


def test_a_library_that_differs_is_not_used(byte_ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TikTokenizer(byte_ranks).encoded_by == "gigatoken"

    def wrong_for_crlf(ranks: Mapping[bytes, int], split: str) -> Encode:
        encode = fast_tiktoken(ranks, split)
        assert encode is not None
        return lambda texts: encode([text.replace("\r\n", "\n") for text in texts])

    monkeypatch.setattr("megatron.data.tokenizers.fast_tiktoken", wrong_for_crlf)
    assert TikTokenizer(byte_ranks).encoded_by == "tiktoken"


def test_ids_that_differ_stop_the_run_and_halves_of_characters_are_left_to_the_library() -> None:
    def encode(texts: Sequence[str]) -> TokenizedTexts:
        tokens = np.frombuffer("".join(texts).encode("utf-32-le", "replace"), np.int32)
        return TokenizedTexts(tokens, np.array([*map(len, texts)], np.int32))

    def wrong_for_z(texts: Sequence[str]) -> TokenizedTexts:
        for text in texts:
            text.encode()
        return encode([text.replace("z", "y") for text in texts])

    class PanicException(BaseException):
        """As libraries in Rust raise it."""

    def panicking(texts: Sequence[str]) -> TokenizedTexts:
        raise PanicException

    def failing(texts: Sequence[str]) -> TokenizedTexts:
        raise TypeError("another interface")

    def assert_equal(found: TokenizedTexts, texts: list[str]) -> None:
        assert all(map(np.array_equal, found, encode(texts)))

    encoder = VerifiedEncoder(wrong_for_z, encode, "tiktoken")
    assert_equal(encoder.encode_batch([]), [])
    assert_equal(encoder.encode_batch(["abc", "z"]), ["abc", "y"])  # the first is compared, then the second
    with pytest.raises(TokenizerMismatchError, match="gigatoken and tiktoken give different ids for the text 'z'"):
        encoder.encode_batch(["abc", "z"])
    assert_equal(encoder.encode_batch(["\ud800"]), ["\ud800"])
    assert_equal(VerifiedEncoder(panicking, encode, "tiktoken").encode_batch(["z"]), ["z"])
    with pytest.raises(TypeError, match="another interface"):
        VerifiedEncoder(failing, encode, "tiktoken").encode_batch(["z"])
    long = "a" * 100_000
    at_end = VerifiedEncoder(wrong_for_z, encode, "tiktoken")
    with pytest.raises(TokenizerMismatchError):  # not only the beginning of a long text is compared
        for _ in range(200):
            at_end.encode_batch([long + "z" * 2000])


def test_texts_of_other_lengths_differ() -> None:
    """Equal ids in all, divided in another way."""

    def divided(*lengths: int) -> Encode:
        return lambda texts: TokenizedTexts(np.arange(3, dtype=np.int32), np.array(lengths, np.int32))

    assert VerifiedEncoder(divided(1, 2), divided(1, 2), "tiktoken").agree_on(["a", "b"])
    assert not VerifiedEncoder(divided(2, 1), divided(1, 2), "tiktoken").agree_on(["a", "b"])


def test_without_gigatoken_the_libraries_do_all(
    byte_ranks: str, sentencepiece_model: str, hugging_face_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    texts = list(unlikely_texts(50))
    for tokenizer in (
        TikTokenizer(byte_ranks),
        SentencePieceTokenizer(sentencepiece_model),
        HuggingFaceTokenizer(str(hugging_face_directory)),
    ):
        assert tokenizer._encoder is None
        expected = [token for ids in tokenizer.tokenize_batch(texts) for token in ids]
        assert tokenizer.tokenize_to_arrays(texts).tokens.tolist() == expected
