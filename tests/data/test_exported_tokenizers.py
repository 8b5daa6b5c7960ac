"""transformers' AutoTokenizer reads the exported files, and its ids are those of training."""

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.tokenizer_files import write_tokenizer
from megatron.config.data import TokenizerConfig
from megatron.data.tokenizer_formats import sentencepiece_description
from megatron.data.tokenizers import SentencePieceTokenizer, Tokenizer, build_tokenizer
from tests.data.texts import AWKWARD_TEXTS, CHARACTER_TEXTS, NAMES, read_model, unlikely_texts

transformers: Any = pytest.importorskip("transformers")

TEXTS = (*AWKWARD_TEXTS, "\u2581 \u2581\u2581")


SENTENCEPIECE_MODELS: Mapping[str, dict[str, Any]] = {
    "our BPE": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    | {"byte_fallback": True, "allow_whitespace_only_pieces": True, "split_digits": True},
    "BPE, blanks removed, no bytes": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "BPE without a prefix": {"model_type": "bpe", "normalization_rule_name": "identity", "add_dummy_prefix": False},
    "BPE of normalised text": {"model_type": "bpe", "byte_fallback": True},
    "BPE with symbols": {"model_type": "bpe", "user_defined_symbols": ["import", "<mask>"]},
    "unigram": {"model_type": "unigram"},
    "unigram of plain text": {"model_type": "unigram", "normalization_rule_name": "identity", "byte_fallback": True},
}


@pytest.fixture(scope="module", params=SENTENCEPIECE_MODELS)
def any_sentencepiece(
    request: pytest.FixtureRequest, python_sources: list[str], tmp_path_factory: pytest.TempPathFactory
) -> TokenizerConfig:
    from sentencepiece import SentencePieceTrainer

    lines = (line for source in python_sources[:10] for line in source.splitlines(keepends=True))
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=content,
        vocab_size=700,
        minloglevel=2,
        num_threads=1,
        **SENTENCEPIECE_MODELS[request.param],
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "trained.model"
    path.write_bytes(content.getvalue())
    return TokenizerConfig("SentencePieceTokenizer", str(path))


def exported(flags: TokenizerConfig, directory: Path, model_type: str = "llama") -> tuple[Tokenizer, Any]:
    """Our tokenizer, and the one that AutoTokenizer makes of its export beside a model's config.json."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = build_tokenizer(flags)
    write_tokenizer(directory, flags, tokenizer, model_type)
    return tokenizer, transformers.AutoTokenizer.from_pretrained(directory)


def assert_same_ids(ours: Tokenizer, theirs: Any, **how: Any) -> None:
    for text in TEXTS:
        assert theirs(text, **how)["input_ids"] == ours.tokenize(text), text
    for text in [*TEXTS, *NAMES, "a" + "".join(NAMES) + " b", *unlikely_texts(1500)]:
        assert theirs(text, split_special_tokens=True, **how)["input_ids"] == ours.tokenize(text), text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod, ours.bos)
    # No token was added, but the padding that a tokenizer.json asks for.
    assert len(theirs) == ours.vocab_size + (theirs.pad_token is not None)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_ids_of_any_sentencepiece_model(any_sentencepiece: TokenizerConfig, tmp_path: Path, model_type: str) -> None:
    assert_same_ids(*exported(any_sentencepiece, tmp_path / "hf", model_type))
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == Path(
        any_sentencepiece.tokenizer_model or ""
    ).read_bytes()


def test_ids_and_text_of_llama2(llama2_model: str, tmp_path: Path) -> None:
    ours, theirs = exported(TokenizerConfig("Llama2Tokenizer", llama2_model), tmp_path / "hf")
    assert_same_ids(ours, theirs)
    assert theirs("Hello world")["input_ids"] == [15043, 3186]
    # A document follows the end of another.
    assert theirs("a</s>Hello world")["input_ids"] == [*ours.tokenize("a"), ours.eod, 15043, 3186]
    for text in TEXTS:
        assert theirs.decode(ours.tokenize(text)) == ours.detokenize(ours.tokenize(text))


@pytest.mark.slow(reason="loads a large vocabulary twice")
def test_ids_and_text_of_llama3(llama3_model: str, tmp_path: Path) -> None:
    ours, theirs = exported(TokenizerConfig("TikTokenizer", llama3_model), tmp_path / "hf")
    assert_same_ids(ours, theirs)
    assert theirs("Hello world!")["input_ids"] == [9906, 1917, 0]
    assert theirs("<|eot_id|>")["input_ids"] == [128_009]
    for text in TEXTS:
        assert theirs.decode(ours.tokenize(text)) == text
    for text in CHARACTER_TEXTS:
        assert theirs(text)["input_ids"] == ours.tokenize(text)


def test_ids_of_few_special_tokens(byte_ranks: str, tmp_path: Path) -> None:
    assert_same_ids(
        *exported(TokenizerConfig("TikTokenizer", byte_ranks, tiktoken_num_special_tokens=20), tmp_path / "hf")
    )


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3", "llama4_text"])
def test_ids_of_gpt2(gpt2_files: TokenizerConfig, tmp_path: Path, model_type: str) -> None:
    assert_same_ids(*exported(gpt2_files, tmp_path / "hf", model_type))


@pytest.mark.parametrize("declared", [None, "LlamaTokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("name", ["tokenizer.json", "python.json"])
def test_ids_of_a_tokenizer_json(hugging_face_directory: Path, tmp_path: Path, declared: str | None, name: str) -> None:
    """Under any name, and although a class that is declared beside it would replace parts of it."""
    config: dict[str, Any] = {"eos_token": "<|end_of_text|>", "bos_token": "<s>", "chat_template": "{{ 1 }}"}
    config |= {} if declared is None else {"tokenizer_class": declared, "auto_map": {"AutoTokenizer": ["code.A", None]}}
    (hugging_face_directory / "tokenizer_config.json").write_text(json.dumps(config))
    path = (hugging_face_directory / "tokenizer.json").rename(hugging_face_directory / name)
    ours, theirs = exported(TokenizerConfig("HuggingFaceTokenizer", str(path)), tmp_path / "hf")
    assert_same_ids(ours, theirs, add_special_tokens=False)
    assert theirs.chat_template == "{{ 1 }}"
    assert "auto_map" not in json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())  # it names code
    # What the file adds to a text stays as its author has it.
    assert theirs("a")["input_ids"] == [0, *ours.tokenize("a")]


@pytest.mark.parametrize(
    "change",
    [
        lambda model, proto: setattr(model.pieces[600], "type", proto.ModelProto.SentencePiece.USER_DEFINED),
        lambda model, proto: setattr(model.pieces[600], "type", proto.ModelProto.SentencePiece.UNUSED),
        lambda model, proto: setattr(model.pieces[600], "score", model.pieces[500].score),
        lambda model, proto: model.pieces.add(piece="\U0001f600\U0001f600", score=-1e6),
        lambda model, proto: setattr(model.normalizer_spec, "escape_whitespaces", False),
        lambda model, proto: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True),
        lambda model, proto: setattr(model.trainer_spec, "model_type", proto.TrainerSpec.UNIGRAM),
    ],
)
def test_a_model_that_tokenizers_cannot_express_is_left_to_sentencepiece(
    sentencepiece_model: str, tmp_path: Path, change: Callable[[Any, Any], None]
) -> None:
    model, proto = read_model(sentencepiece_model)
    assert sentencepiece_description(model.SerializeToString()) is not None
    change(model, proto)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.SerializeToString())
    assert SentencePieceTokenizer(str(path)).tokenizer_json() is None
    assert_same_ids(*exported(TokenizerConfig("SentencePieceTokenizer", str(path)), tmp_path / "hf"))


def test_a_description_that_gives_other_ids_is_not_used(
    sentencepiece_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_prefix(content: bytes) -> dict[str, Any]:
        description = sentencepiece_description(content)
        assert description is not None
        return description | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}

    assert SentencePieceTokenizer(sentencepiece_model).tokenizer_json() is not None
    monkeypatch.setattr("megatron.data.tokenizers.sentencepiece_description", without_prefix)
    assert SentencePieceTokenizer(sentencepiece_model).tokenizer_json() is None


@pytest.mark.parametrize(
    ("model_type", "kind", "declared", "words"),
    [
        ("llama", "bpe", None, ()),
        ("llama", "unigram", None, ("spiece.model",)),
        ("mixtral", "bpe", None, ()),
        ("mixtral", "unigram", None, ("spiece.model", "transformers.BertGenerationTokenizer.from_pretrained")),
        ("qwen2", "bpe", None, ("transformers.PreTrainedTokenizerFast.from_pretrained",)),
        ("qwen2", "json", "Qwen2Tokenizer", ()),
        ("qwen2", "json", None, ("transformers.PreTrainedTokenizerFast.from_pretrained",)),
    ],
)
def test_where_autotokenizer_uses_another_class_the_user_is_told(
    sentencepiece_model: str,
    hugging_face_directory: Path,
    tmp_path: Path,
    model_type: str,
    kind: str,
    declared: str | None,
    words: tuple[str, ...],
) -> None:
    flags = TokenizerConfig("SentencePieceTokenizer", str(tmp_path / "tokenizer.model"))
    if kind == "json":
        flags = TokenizerConfig("HuggingFaceTokenizer", str(hugging_face_directory))
        config = {} if declared is None else {"tokenizer_class": declared}
        (hugging_face_directory / "tokenizer_config.json").write_text(json.dumps(config))
    model, proto = read_model(sentencepiece_model)
    model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM if kind == "unigram" else proto.TrainerSpec.BPE
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "hf").mkdir()
    tokenizer = build_tokenizer(flags)
    notes = write_tokenizer(tmp_path / "hf", flags, tokenizer, model_type)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
    if notes and "from_pretrained" in notes[-1]:  # and what it is told is right
        (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = getattr(transformers, words[-1].split(".")[1]).from_pretrained(tmp_path / "hf")
        assert theirs("import os", add_special_tokens=False)["input_ids"] == tokenizer.tokenize("import os")
