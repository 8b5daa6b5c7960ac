"""Tokenizers: text comes back unchanged, specials are never parsed out of it, bad files are named."""

import base64
import importlib.metadata
import importlib.util
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.config.data import TokenizerConfig
from megatron.config.errors import ConfigError, DataError, TokenizerMismatchError, UserError
from megatron.data.sentencepiece_ranks import SentencePieceRanks
from megatron.data.tokenizers import (
    LLAMA3_SPLIT,
    HuggingFaceTokenizer,
    Llama2Tokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    _LibraryTokenizer,
    build_tokenizer,
    describe_tokenizer,
)
from megatron.data.verified_encoder import Encode, VerifiedEncoder, fast_tiktoken, fast_tokenizer_json

ROOT = Path(__file__).resolve().parents[2]

AWKWARD_TEXTS = [
    "",
    " ",
    "  two before",
    "two after  ",
    "\tif x:\r\n\t\treturn 12345\n\n\n",
    "na\u00efve caf\u00e9 \u00a0 \u4e2d\u6587 \U0001f600\ufeff e\u0301",
    "nul \0 bell \a",
    "</s> <s> <unk> <0x0A> <|end_of_text|> <|begin_of_text|> <|endoftext|>",
]


def random_texts(count: int) -> Iterator[str]:
    generator = random.Random(0)
    alphabet = "ab  \n\t09_(:\u00e9\u4e2d\U0001f600"
    for _ in range(count):
        yield "".join(generator.choices(alphabet, k=generator.randrange(40)))


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


@pytest.fixture(scope="module")
def train_tokenizer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tokenizer", ROOT / "tools" / "train_tokenizer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def python_sources() -> list[str]:
    """Some 800 kB of source code."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))[:40]]


@pytest.fixture(scope="module")
def sentencepiece_model(
    tmp_path_factory: pytest.TempPathFactory, train_tokenizer: Any, python_sources: list[str]
) -> str:
    directory = tmp_path_factory.mktemp("sentencepiece")
    with open(directory / "sources.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"code": source}) + "\n" for source in python_sources)
    config = train_tokenizer.TrainTokenizerConfig(
        input=(str(directory / "sources.jsonl"),),
        model_prefix=str(directory / "deeper" / "python"),
        vocab_size=1000,
        json_key="code",
        num_threads=2,
    )
    path: str = train_tokenizer.train(config)
    assert [file.name for file in (directory / "deeper").iterdir()] == ["python.model"]
    return path


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


def unlikely_texts(count: int) -> Iterator[str]:
    """Mixtures of what tokenizers treat in special ways, and of any characters."""
    generator = random.Random(2)
    anything = [chr(code) for code in (*range(0x3000), *range(0xFE00, 0x10000), *range(0x1F300, 0x1F700), 0x20000)]
    special = [*"  \n\r\t'\u2019sStTlLdDmMveVErR0123456789abcXYZ.,!-_", "'\u017f", "\r\n", "\u3000", "\x85", "\u2028"]
    special += ["<|begin_of_text|>", "<s>", "</s>", "<unk>", "<0x0A>", "\u2581", "\0"]
    for _ in range(count):
        share = generator.choice([0, 0.05, 0.3, 0.9])
        length = generator.randrange(120)
        yield "".join(generator.choice(anything if generator.random() < share else special) for _ in range(length))


def assert_fast_ids_are_those_of_the_library(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert isinstance(tokenizer, _LibraryTokenizer) and tokenizer._encoder is not None
    tokens, lengths = tokenizer.tokenize_to_arrays(texts)
    expected = tokenizer.tokenize_batch(texts)
    assert lengths.tolist() == list(map(len, expected))
    assert tokens.tolist() == [token for ids in expected for token in ids]


def test_sentencepiece_by_ranks_of_bytes_gives_its_ids(sentencepiece_model: str, python_sources: list[str]) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    assert_fast_ids_are_those_of_the_library(tokenizer, [*python_sources, *unlikely_texts(5000)])


@pytest.mark.parametrize(
    ("pieces", "parts"),
    [((), 4), (("\ufffd",), 4), (("\U0001f600\U0001f600",), 4), (("7a",), 3), (("a:", "19"), 3), (("7a", "a:"), 2)],
)
def test_ranks_of_sentencepiece_cut_where_no_piece_reaches(
    sentencepiece_model: str, tmp_path: Path, pieces: tuple[str, ...], parts: int
) -> None:
    """Blanks at the end, and letters, digits and others as far as no piece has them side by side."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto.FromString(Path(sentencepiece_model).read_bytes())
    for number, piece in enumerate(pieces):
        model.pieces.add(piece=piece, score=-10_000 - number)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.SerializeToString())
    ranks = SentencePieceRanks.of(path.read_bytes())
    assert ranks is not None and len(re.sub(r"\[.*?[^\\]\]", "", ranks.split).split("|")) == parts
    assert_fast_ids_are_those_of_the_library(SentencePieceTokenizer(str(path)), list(unlikely_texts(1500)))


@pytest.fixture
def llama2_model(tmp_path: Path) -> str:
    """Llama 2's pieces, which splintr has with it, with scores as Llama 2's model has them: in their order."""
    import splintr
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    types = proto.ModelProto.SentencePiece
    model = proto.ModelProto()
    vocabulary = splintr.Tokenizer.from_pretrained("llama2")
    for number in range(32_000):
        text = vocabulary.decode_token_bytes(number).decode(errors="replace").replace(" ", "\u2581")
        if number < 3:
            piece, kind = ("<unk>", "<s>", "</s>")[number], (types.UNKNOWN, types.CONTROL, types.CONTROL)[number]
        else:
            piece, kind = (f"<0x{number - 3:02X}>", types.BYTE) if number < 259 else (text, types.NORMAL)
        model.pieces.add(piece=piece, type=kind, score=float(min(0, 259 - number)))
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    return str(tmp_path / "tokenizer.model")


def test_fast_ids_are_those_of_llama2(llama2_model: str, python_sources: list[str]) -> None:
    tokenizer = SentencePieceTokenizer(llama2_model)
    # As its publishers tokenize it.
    assert tokenizer.tokenize("Hello world") == [15043, 3186]
    assert_fast_ids_are_those_of_the_library(tokenizer, [*python_sources, *unlikely_texts(5000)])


@pytest.mark.parametrize(
    "change",
    [
        lambda model, proto: setattr(model.pieces.add(), "piece", "of\u2581the"),
        lambda model, proto: setattr(model.pieces.add(), "piece", "qxqxqx"),  # that no merges come to
        lambda model, proto: setattr(model.pieces[600], "score", model.pieces[500].score),
        lambda model, proto: setattr(model.pieces[600], "type", proto.ModelProto.SentencePiece.USER_DEFINED),
        lambda model, proto: setattr(model.pieces[5], "type", proto.ModelProto.SentencePiece.NORMAL),
        lambda model, proto: setattr(model.normalizer_spec, "remove_extra_whitespaces", True),
        lambda model, proto: setattr(model.normalizer_spec, "add_dummy_prefix", False),
        lambda model, proto: setattr(model.normalizer_spec, "precompiled_charsmap", b"1"),
        lambda model, proto: setattr(model.trainer_spec, "model_type", proto.TrainerSpec.UNIGRAM),
    ],
)
def test_other_sentencepiece_models_are_left_to_the_library(
    sentencepiece_model: str, change: Callable[[Any, Any], None]
) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto.FromString(Path(sentencepiece_model).read_bytes())
    change(model, proto)
    assert SentencePieceRanks.of(model.SerializeToString()) is None


@pytest.mark.parametrize("kind", ["huggingface", "tiktoken"])
def test_trained_byte_level_tokenizers_keep_text(
    tmp_path: Path, train_tokenizer: Any, python_sources: list[str], kind: str
) -> None:
    (tmp_path / "folder").mkdir()
    for number, source in enumerate(python_sources[:10]):
        (tmp_path / "folder" / f"{number}.txt").write_text(source, encoding="utf-8")
    config = train_tokenizer.TrainTokenizerConfig((str(tmp_path / "folder"),), str(tmp_path / "bpe"), 700, kind=kind)
    path = train_tokenizer.train(config)
    tokenizer = HuggingFaceTokenizer(path) if kind == "huggingface" else TikTokenizer(path)
    specials = 256 if kind == "tiktoken" else 0
    assert tokenizer.vocab_size == 700 + specials
    assert_text_survives(tokenizer)
    assert len(tokenizer.tokenize(python_sources[0])) < len(python_sources[0]) / 2
    assert tokenizer.encoded_by == "splintr"
    with pytest.raises(DataError, match="choose another --vocab-size, above 256, or give more text"):
        train_tokenizer.train(replace(config, vocab_size=90_000))
    with pytest.raises(ConfigError, match="--input-sentence-size is for --kind sentencepiece"):
        train_tokenizer.train(replace(config, input_sentence_size=5))


def test_training_reports_its_errors(tmp_path: Path, train_tokenizer: Any) -> None:
    def train(content: bytes, vocab_size: int = 300) -> None:
        (tmp_path / "in.jsonl").write_bytes(content)
        prefix = str(tmp_path / "out")
        train_tokenizer.train(train_tokenizer.TrainTokenizerConfig((str(tmp_path / "in.jsonl"),), prefix, vocab_size))

    with pytest.raises(DataError, match=r"in\.jsonl, line 2 is not valid JSON"):
        train(b'{"text": "a"}\n{"text')
    with pytest.raises(DataError, match=r"in\.jsonl, line 1 has no key 'text': name the right key with --json-key,"):
        train(b'{"content": "a"}')
    with pytest.raises(DataError, match=r"cannot train 300 pieces on this text .*choose another --vocab-size"):
        train(b'{"text": "a b"}')
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def llama3_model() -> str:
    """Llama 3's tokenizer.model from the llama-models package, which is not imported."""
    try:
        files = importlib.metadata.files("llama-models") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llama-models is not installed")
    (model,) = (file for file in files if file.as_posix() == "llama_models/llama3/tokenizer.model")
    return str(model.locate())


def test_llama3_tokenizer() -> None:
    tokenizer = TikTokenizer(llama3_model())
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
    with pytest.raises(ConfigError, match="--tiktoken-num-special-tokens 5 leaves no room"):
        TikTokenizer(llama3_model(), 5)


def test_fast_ids_are_those_of_tiktoken() -> None:
    """For every character in places where its kind matters (what lies beyond U+32000 has none), and for mixtures."""
    tokenizer = TikTokenizer(llama3_model())
    characters = [chr(code) for code in range(0x32000) if not 0xD800 <= code < 0xE000]
    around = [f"{one},e {one}1234 the{one}'s\n{one}\n" for one in characters]
    texts = ["".join(around[start : start + 500]) for start in range(0, len(around), 500)]
    assert_fast_ids_are_those_of_the_library(tokenizer, [*texts, *unlikely_texts(5000)])


@pytest.fixture
def byte_ranks(tmp_path: Path) -> str:
    """A model of single bytes and a few merges, in Llama 3's format."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"  ", b"    ", b"ab"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(lines))
    return str(path)


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


def test_ids_that_differ_stop_the_run_and_halves_of_characters_are_left_to_the_library() -> None:
    def encode(text: str) -> bytes:
        return text.encode("utf-32-le", "replace")

    def wrong_for_z(text: str) -> bytes:
        return text.encode("utf-32-le").replace(b"z", b"y")

    class PanicException(BaseException):
        """As libraries in Rust raise it."""

    def failing(text: str) -> bytes:
        raise PanicException

    encoder = VerifiedEncoder(wrong_for_z, encode, "tiktoken")
    assert encoder.encode_batch([]) == []
    assert encoder.encode_batch(["abc", "z"]) == [encode("abc"), encode("y")]  # the first is compared, then the second
    with pytest.raises(TokenizerMismatchError, match="splintr and tiktoken give different ids for the text 'z'"):
        encoder.encode_batch(["abc", "z"])
    assert encoder.encode_batch(["\ud800"]) == [encode("\ud800")]
    assert VerifiedEncoder(failing, encode, "tiktoken").encode_batch(["z"]) == [encode("z")]
    long = "a" * 100_000
    at_end = VerifiedEncoder(wrong_for_z, encode, "tiktoken")
    with pytest.raises(TokenizerMismatchError):  # not only the beginning of a long text is compared
        for _ in range(200):
            at_end.encode_batch([long + "z" * 2000])


def test_without_splintr_the_libraries_do_all(
    byte_ranks: str, sentencepiece_model: str, hugging_face_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "splintr", None)
    texts = list(unlikely_texts(50))
    for tokenizer in (
        TikTokenizer(byte_ranks),
        SentencePieceTokenizer(sentencepiece_model),
        HuggingFaceTokenizer(str(hugging_face_directory)),
    ):
        assert tokenizer._encoder is None
        expected = [token for ids in tokenizer.tokenize_batch(texts) for token in ids]
        assert tokenizer.tokenize_to_arrays(texts).tokens.tolist() == expected


@pytest.fixture
def hugging_face_directory(tmp_path: Path) -> Path:
    """A byte-level BPE that would add <s>, truncate and pad if it were asked to."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["a loop over words in a list of words"] * 3, trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.enable_truncation(5)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_hugging_face_tokenizer(hugging_face_directory: Path) -> None:
    for path in (hugging_face_directory, hugging_face_directory / "tokenizer.json"):
        tokenizer = HuggingFaceTokenizer(str(path))
        assert (tokenizer.bos, tokenizer.eod) == (0, 1)
        assert_text_survives(tokenizer)
    (hugging_face_directory / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (hugging_face_directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    assert HuggingFaceTokenizer(str(hugging_face_directory)).eod == 2
    (hugging_face_directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        HuggingFaceTokenizer(str(hugging_face_directory))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_fast_ids_are_those_of_hugging_face(hugging_face_directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(hugging_face_directory))
    assert_fast_ids_are_those_of_the_library(tokenizer, list(unlikely_texts(3000)))


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
    assert fast_tokenizer_json(json.dumps(content).encode(), LLAMA3_SPLIT) is not None
    changed = content | change | {"model": content["model"] | change.get("model", {})}
    assert fast_tokenizer_json(json.dumps(changed).encode(), LLAMA3_SPLIT) is None


def test_merges_in_another_order_than_their_ids_are_left_to_the_library(hugging_face_directory: Path) -> None:
    content = json.loads((hugging_face_directory / "tokenizer.json").read_text())
    content["model"]["merges"].reverse()
    assert fast_tokenizer_json(json.dumps(content).encode(), LLAMA3_SPLIT) is None


def test_a_library_that_differs_is_not_used(byte_ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TikTokenizer(byte_ranks).encoded_by == "splintr"

    def wrong_for_crlf(content: bytes, split: str) -> Encode:
        encode = fast_tiktoken(content, split)
        assert encode is not None
        return lambda text: encode(text.replace("\r\n", "\n"))

    monkeypatch.setattr("megatron.data.tokenizers.fast_tiktoken", wrong_for_crlf)
    assert TikTokenizer(byte_ranks).encoded_by == "tiktoken"


def test_hugging_face_tokenizer_needs_an_end_of_document(hugging_face_directory: Path) -> None:
    path = hugging_face_directory / "tokenizer.json"
    path.write_text(path.read_text().replace("</s>", "<end>").replace("<|end_of_text|>", "<stop>"))
    with pytest.raises(DataError, match="names no end-of-document token: put eos_token"):
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
    with pytest.raises(DataError, match="reads ids separated by blanks, but the text is 'def f'"):
        tokenizer.tokenize("def f")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "HuggingFaceTokenizer"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: give the tokenizer's file"),
        (b"", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (b"{}", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (b"IQ== 0\nIQ== 7\n", r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
        (bytes(range(256)), r"is not .*check that --tokenizer-model and --tokenizer-type belong together"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path: Path, kind: Any, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path)))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_tokenizers_are_built_from_flags(sentencepiece_model: str, byte_ranks: str) -> None:
    def build(kind: Any, model: str | None = None, **other: Any) -> Tokenizer:
        return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model, **other))

    assert isinstance(build("Llama2Tokenizer", sentencepiece_model), Llama2Tokenizer)
    assert isinstance(build("SentencePieceTokenizer", sentencepiece_model, vocab_size=1000), SentencePieceTokenizer)
    assert build("TikTokenizer", byte_ranks, tiktoken_num_special_tokens=30).vocab_size == 289
    assert build("NullTokenizer", vocab_size=10).eod == 10


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "A tokenizer is needed: give --tokenizer-type"),
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


def test_vocabulary_size_must_be_the_tokenizer_s_own(sentencepiece_model: str) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 32000 differs from the 1000 ids of"):
        build_tokenizer(TokenizerConfig("SentencePieceTokenizer", sentencepiece_model, vocab_size=32_000))


def test_description_tells_tokenizers_apart() -> None:
    null = describe_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=999))
    assert list(null.items())[1:] == [("tokenizer_path", None), ("vocab_size", "1000")]
    others = [
        describe_tokenizer(TokenizerConfig(kind, "model"))
        for kind in ("SentencePieceTokenizer", "TikTokenizer", "HuggingFaceTokenizer")
    ]
    assert len({tuple(description) for description in others}) == 3
    assert all(description["tokenizer_path"] == "model" for description in others)
