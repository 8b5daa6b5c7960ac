"""Tokenizers: text comes back unchanged, specials are never parsed out of it, bad files are named."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.commands.train_tokenizer import TrainTokenizerConfig, train
from megatron.config.data import TokenizerConfig
from megatron.config.run import RunConfig
from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    Llama2Tokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    build_tokenizer,
    describe_tokenizer,
)
from megatron.errors import ConfigError, DataError, UserError
from megatron.training.build.vocabulary import Vocabulary, load_vocabulary
from tests.data.texts import AWKWARD_TEXTS, random_texts


def assert_text_survives(tokenizer: Tokenizer) -> None:
    texts = [*AWKWARD_TEXTS, *random_texts(200)]
    batch = tokenizer.tokenize_batch(texts)
    for _ in range(2):  # words that are not known, and words that are
        tokens, lengths = tokenizer.tokenize_to_arrays(texts)
        assert tokens.tolist() == [token for ids in batch for token in ids] and lengths.tolist() == list(
            map(len, batch)
        )
    for text, ids in zip(texts, batch, strict=True):
        assert list(ids) == list(tokenizer.tokenize(text))
        assert tokenizer.detokenize(ids) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.eod not in ids and tokenizer.bos not in ids
    with pytest.raises(DataError, match=f"Token id {tokenizer.vocab_size} has no text"):
        tokenizer.detokenize([tokenizer.vocab_size])


def test_trained_sentencepiece_keeps_source_code(sentencepiece_model: str, python_sources: list[str]) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (1000, 1, 2)
    assert_text_survives(tokenizer)
    batch = tokenizer.tokenize_batch(python_sources)
    assert [tokenizer.detokenize(ids) for ids in batch] == python_sources
    assert sum(map(len, python_sources)) / sum(map(len, batch)) > 2.0
    # Newlines, indents and single digits are what Llama 2's settings make of code.
    pieces = [tokenizer.detokenize([token]) for token in tokenizer.tokenize("x\n        return 123\n")]
    assert pieces[-4:-1] == ["1", "2", "3"] and len(pieces) < 11


@pytest.mark.parametrize("kind", ["huggingface", "tiktoken"])
def test_trained_byte_level_tokenizers_keep_text(
    tmp_path: Path, python_sources: list[str], kind: Literal["huggingface", "tiktoken"]
) -> None:
    (tmp_path / "folder").mkdir()
    for number, source in enumerate(python_sources[:10]):
        (tmp_path / "folder" / f"{number}.txt").write_text(source, encoding="utf-8")
    config = TrainTokenizerConfig((str(tmp_path / "folder"),), str(tmp_path / "bpe"), 700, kind=kind)
    path = train(config)
    tokenizer = HuggingFaceTokenizer(path) if kind == "huggingface" else TikTokenizer(path)
    specials = 256 if kind == "tiktoken" else 0
    assert tokenizer.vocab_size == 700 + specials
    assert_text_survives(tokenizer)
    assert len(tokenizer.tokenize(python_sources[0])) < len(python_sources[0]) / 2
    assert tokenizer.encoded_by == "gigatoken"
    with pytest.raises(DataError, match="choose another --vocab-size, above 256, or give more text"):
        train(replace(config, vocab_size=90_000))
    with pytest.raises(ConfigError, match="--input-sentence-size is for --kind sentencepiece"):
        train(replace(config, input_sentence_size=5))


def test_training_reports_its_errors(tmp_path: Path) -> None:
    def train_on(content: bytes, vocab_size: int = 300) -> None:
        (tmp_path / "in.jsonl").write_bytes(content)
        prefix = str(tmp_path / "out")
        train(TrainTokenizerConfig((str(tmp_path / "in.jsonl"),), prefix, vocab_size))

    with pytest.raises(DataError, match=r"in\.jsonl, line 2 is not valid JSON"):
        train_on(b'{"text": "a"}\n{"text')
    with pytest.raises(DataError, match=r"in\.jsonl, line 1 has no key 'text': name the right key with --json-key,"):
        train_on(b'{"content": "a"}')
    with pytest.raises(DataError, match=r"cannot train 300 pieces on this text .*choose another --vocab-size"):
        train_on(b'{"text": "a b"}')
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_llama3_tokenizer(llama3_model: str) -> None:
    tokenizer = TikTokenizer(llama3_model)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (128_256, 128_000, 128_001)
    assert_text_survives(tokenizer)
    # Published ids of Llama 3.
    assert tokenizer.tokenize("Hello world!") == [9906, 1917, 0]
    assert tokenizer.tokenize("This is a test sentence.") == [2028, 374, 264, 1296, 11914, 13]
    names = {
        128_004: "<|finetune_right_pad_id|>",
        128_009: "<|eot_id|>",
        128_255: "<|reserved_special_token_247|>",
    }
    assert {token: tokenizer.detokenize([token]) for token in names} == names
    with pytest.raises(ConfigError, match="--tiktoken-num-special-tokens 5 is too small"):
        TikTokenizer(llama3_model, 5)


def test_tiktoken_format(byte_ranks: str) -> None:
    tokenizer = TikTokenizer(byte_ranks, 20)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (279, 259, 260)
    assert_text_survives(tokenizer)
    assert tokenizer.tokenize("ab") == [258]


@pytest.mark.parametrize("text", [" " * 1_000_000, "x" + "\t" * 350_000 + "y " * 200_000, "x" * 300_000])
def test_endless_runs_do_not_crash_the_engines(byte_ranks: str, sentencepiece_model: str, text: str) -> None:
    for tokenizer in (TikTokenizer(byte_ranks), SentencePieceTokenizer(sentencepiece_model)):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
        assert tokenizer.tokenize_to_arrays([text]).tokens.tolist() == tokenizer.tokenize(text)


def test_hugging_face_tokenizer(hugging_face_directory: Path) -> None:
    for path in (hugging_face_directory, hugging_face_directory / "tokenizer.json"):
        tokenizer = HuggingFaceTokenizer(str(path))
        assert (tokenizer.bos, tokenizer.eod) == (0, 1)
        assert_text_survives(tokenizer)
    (hugging_face_directory / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (hugging_face_directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    assert HuggingFaceTokenizer(str(hugging_face_directory)).eod == 2
    for text in ("{", "[" * 100_000):
        (hugging_face_directory / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
            HuggingFaceTokenizer(str(hugging_face_directory))


def test_hugging_face_tokenizer_needs_an_end_of_document(hugging_face_directory: Path) -> None:
    path = hugging_face_directory / "tokenizer.json"
    path.write_text(path.read_text().replace("</s>", "<end>").replace("<|end_of_text|>", "<stop>"))
    with pytest.raises(DataError, match="has no end-of-document token: add eos_token"):
        HuggingFaceTokenizer(str(path))


def test_null_tokenizer() -> None:
    tokenizer = NullTokenizer(999)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (1000, 999, None)
    assert tokenizer.tokenize(" 0 7\n999 ") == [0, 7, 999]
    assert tokenizer.detokenize([0, 7, 999]) == "0 7 999"
    assert tokenizer.tokenize("") == []
    for text in ("1000", "-1"):
        with pytest.raises(DataError, match=f"Token id {text} in the text is outside 0..999: raise --vocab-size"):
            tokenizer.tokenize(text)
    with pytest.raises(DataError, match="reads ids separated by spaces, but the text is 'def f'"):
        tokenizer.tokenize("def f")


TWICE = b"".join(
    b"\n%c\n%c%s\x15\0\0\x80\xbf\x18%c" % (len(piece) + 9, len(piece), piece, kind)
    for piece, kind in ((b"<unk>", 2), (b"\xff", 1), (b"\xff", 1))
)
"""A SentencePiece model with a piece that is no UTF-8 twice: the library names it in its error."""


@pytest.mark.parametrize(
    "kind",
    [
        "SentencePieceTokenizer",
        "Llama2Tokenizer",
        "GPTSentencePieceTokenizer",
        "TikTokenizer",
        "HuggingFaceTokenizer",
    ],
)
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: set --tokenizer-model to the tokenizer file"),
        (b"", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (b"{}", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (b"IQ== 0\nIQ== 7\n", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (bytes(range(256)), r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (TWICE, r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path: Path, kind: Any, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path)))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.1-8B"
    with pytest.raises(
        DataError, match=rf"^{name} does not exist: .*`hf download {name} --local-dir DIR` and set --tok"
    ):
        HuggingFaceTokenizer(name)
    (tmp_path / "runs").mkdir()  # then it is a path
    for path in ("runs/one", "elsewhere/tokenizer.model", "/meta-llama/Llama-3.1-8B", "one"):
        with pytest.raises(DataError, match="does not exist: set --tokenizer-model to the tokenizer file"):
            HuggingFaceTokenizer(path)


def test_tokenizers_are_built_from_flags(sentencepiece_model: str, byte_ranks: str) -> None:
    def build(kind: Any, model: str | None = None, **other: Any) -> Tokenizer:
        return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model, **other))

    assert isinstance(build("Llama2Tokenizer", sentencepiece_model), Llama2Tokenizer)
    assert isinstance(build("GPTSentencePieceTokenizer", sentencepiece_model), SentencePieceTokenizer)
    assert isinstance(build("SentencePieceTokenizer", sentencepiece_model, vocab_size=1000), SentencePieceTokenizer)
    assert build("TikTokenizer", byte_ranks, tiktoken_num_special_tokens=30).vocab_size == 289
    assert build("NullTokenizer", vocab_size=10).eod == 10


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "A tokenizer is required: set --tokenizer-type"),
        ({"tokenizer_type": "NullTokenizer"}, "needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size 0 must be at least 1"),
        ({"tokenizer_type": "TikTokenizer"}, "needs --tokenizer-model"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "trust_remote_code": True},
            "--trust-remote-code",
        ),
    ],
)
def test_bad_flags_are_one_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_tokenizer(TokenizerConfig(**flags))


def test_a_model_has_no_fewer_ids_than_its_tokenizer(sentencepiece_model: str) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 999 is below the 1000 ids of"):
        build_tokenizer(TokenizerConfig("SentencePieceTokenizer", sentencepiece_model, vocab_size=999))
    tokenizer = TokenizerConfig("SentencePieceTokenizer", sentencepiece_model, vocab_size=1100)
    assert build_tokenizer(tokenizer).vocab_size == 1000
    assert load_vocabulary(RunConfig(tokenizer=tokenizer)) == Vocabulary(1100, build_tokenizer(tokenizer).eod)


def test_llama_4_s_file_is_refused_because_of_its_pattern(llama4_model: str) -> None:
    with pytest.raises(DataError, match="Llama 4 or of another model: use --tokenizer-type HuggingFaceTokenizer"):
        build_tokenizer(TokenizerConfig("TikTokenizer", llama4_model))


def test_description_tells_tokenizers_apart() -> None:
    null = describe_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=999))
    assert list(null.items())[1:] == [("tokenizer_path", None), ("vocab_size", "1000")]
    others = [
        describe_tokenizer(TokenizerConfig(kind, "model"))
        for kind in ("SentencePieceTokenizer", "TikTokenizer", "HuggingFaceTokenizer")
    ]
    assert len({tuple(description) for description in others}) == 3
    assert all(description["tokenizer_path"] == "model" for description in others)
