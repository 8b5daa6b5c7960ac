"""Tokenizers: text comes back unchanged, specials are never parsed out of it, bytes add up, bad files are named."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.commands.train_tokenizer import TrainTokenizerConfig, train
from megatron.config.data import TokenizerConfig
from megatron.config.run import RunConfig
from megatron.data.evaluation_data import CountedBytes, TokenBytes, count_token_bytes
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    build_tokenizer,
    describe_tokenizer,
)
from megatron.errors import ConfigError, DataError
from megatron.training.build.vocabulary import Vocabulary, load_vocabulary
from tests.data.texts import AWKWARD_TEXTS, NAMES, random_texts
from tests.end_to_end.run_process import call_training


def assert_text_survives(tokenizer: Tokenizer) -> None:
    texts = [*AWKWARD_TEXTS, " ".join(NAMES), *random_texts(200)]
    batch = tokenizer.tokenize_batch(texts)
    for _ in range(2):  # words that are not known, and words that are
        tokens, lengths = tokenizer.tokenize_to_arrays(texts)
        assert tokens.tolist() == [*chain(*batch)] and lengths.tolist() == [*map(len, batch)]
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
    names = ["<|finetune_right_pad_id|>", "<|eot_id|>", "<|reserved_special_token_247|>"]
    assert [tokenizer.detokenize([token]) for token in (128_004, 128_009, 128_255)] == names
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
    ["SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer", "TikTokenizer", "HuggingFaceTokenizer"],
)
@pytest.mark.parametrize("content", [None, b"", b"{}", b"IQ== 0\nIQ== 7\n", bytes(range(256)), TWICE])
def test_bad_file_is_one_sentence(tmp_path: Path, kind: Any, content: bytes | None) -> None:
    path = tmp_path / "model"
    sentence = "does not exist: set --tokenizer-model to the tokenizer file"
    if content is not None:
        sentence = "is not .*check that --tokenizer-model and --tokenizer-type belong together"
        path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path)))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.1-8B"
    with pytest.raises(DataError, match=rf"^{name} does not exist: .*`hf download {name} --local-dir DIR` and set"):
        HuggingFaceTokenizer(name)
    (tmp_path / "runs").mkdir()  # then it is a path
    for path in ("runs/one", "elsewhere/tokenizer.model", "/meta-llama/Llama-3.1-8B", "one"):
        with pytest.raises(DataError, match="does not exist: set --tokenizer-model to the tokenizer file"):
            HuggingFaceTokenizer(path)


def test_tokenizers_are_built_from_flags(sentencepiece_model: str, byte_ranks: str) -> None:
    def build(kind: Any, model: str | None = None, **other: Any) -> Tokenizer:
        return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model, **other))

    assert isinstance(build("Llama2Tokenizer", sentencepiece_model), SentencePieceTokenizer)
    assert isinstance(build("GPTSentencePieceTokenizer", sentencepiece_model), SentencePieceTokenizer)
    assert isinstance(build("SentencePieceTokenizer", sentencepiece_model, vocab_size=1000), SentencePieceTokenizer)
    assert build("TikTokenizer", byte_ranks, tiktoken_num_special_tokens=30).vocab_size == 289
    assert build("NullTokenizer", vocab_size=10).eod == 10
    with pytest.raises(ConfigError, match="--tokenizer-type TikTokenizer needs --tokenizer-model"):
        build("TikTokenizer")


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


# --- GPT-2's two files ---------------------------------------------------------------------------------------


def test_ids_of_gpt2_s_files_are_those_of_transformers(gpt2_files: TokenizerConfig) -> None:
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(Path(gpt2_files.vocab_file or "").parent)
    ours = build_tokenizer(gpt2_files)
    assert (ours.vocab_size, ours.eod, ours.bos) == (len(theirs), theirs.eos_token_id, theirs.bos_token_id)
    texts = [*AWKWARD_TEXTS, *random_texts(300)]
    ids = theirs(texts)["input_ids"]
    assert [list(ours.tokenize(text)) for text in texts] == ids
    # The faster library, if it is installed, too.
    assert ours.tokenize_to_arrays(texts).tokens.tolist() == [*chain(*ids)]
    assert_text_survives(ours)


TINY_RUN = (
    "--model tiny --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --num-workers 0 --lr 1e-3 "
    "--device cpu "
)


def test_a_corpus_is_preprocessed_and_trained_on(gpt2_files: TokenizerConfig, tmp_path: Path) -> None:
    source, prefix = tmp_path / "text.jsonl", str(tmp_path / "corpus")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*AWKWARD_TEXTS[1:], *random_texts(300))))
    preprocess(PreprocessConfig((str(source),), prefix, tokenizer=gpt2_files, append_eod=True))
    tokenizer = build_tokenizer(gpt2_files)
    first = IndexedDataset(f"{prefix}_text_document").get(0).tolist()
    assert first == [*tokenizer.tokenize(AWKWARD_TEXTS[1]), tokenizer.eod]
    places = ["--data-path", f"{prefix}_text_document", "--data-cache-path", str(tmp_path / "cache")]
    files = ["--vocab-file", str(gpt2_files.vocab_file), "--merge-file", str(gpt2_files.merge_file)]
    call_training([*TINY_RUN.split(), *places, "--tokenizer-type", "GPT2BPETokenizer", *files]).succeeded()


def test_beside_another_tokenizer_the_flags_are_named_and_change_nothing() -> None:
    words = f"{TINY_RUN} --mock-data --vocab-size 99".split()
    outcome = call_training([*words, "--vocab-file", "no/vocab.json", "--merge-file", "no/merges.txt"]).succeeded()
    assert "> no effect here: --vocab-file, --merge-file" in outcome.stdout
    assert "no effect" not in call_training(words).succeeded().stdout
    null = TokenizerConfig("NullTokenizer", vocab_size=9, vocab_file="no", merge_file="no")
    null.check()
    assert describe_tokenizer(null) == describe_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=9))


@pytest.mark.parametrize(
    ("vocabulary", "merges", "sentence"),
    [
        ("[", "", r"vocab\.json is not JSON"),
        ("[" * 100_000, "", r"vocab\.json is not JSON"),
        ("[1]", "", r"vocab\.json is not a JSON object of tokens and ids"),
        ('{"a": 0, "b": "1"}', "", r"vocab\.json is not a JSON object of tokens and ids"),
        ('{"a": 0}', "", r"vocab\.json has no <\|endoftext\|>"),
        ('{"a": 0, "b": 1, "<|endoftext|>": 2}', "#version: 0.2\na b\n", r"Line 2 of .*merges\.txt, 'a b', merges no"),
        ('{"a": 0, "<|endoftext|>": 2}', "a\n", r"Line 1 of .*merges\.txt"),
        (None, "", r"vocab\.json does not exist: set --vocab-file"),
        ('{"a": 0, "<|endoftext|>": 2}', None, r"merges\.txt does not exist: set --merge-file"),
    ],
)
def test_a_bad_file_of_gpt2_is_one_sentence(
    tmp_path: Path, vocabulary: str | None, merges: str | None, sentence: str
) -> None:
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for path, content in zip(files, (vocabulary, merges)):
        if content is not None:
            path.write_text(content)
    with pytest.raises(DataError, match=sentence):
        build_tokenizer(TokenizerConfig("GPT2BPETokenizer", vocab_file=str(files[0]), merge_file=str(files[1])))


# --- bytes of tokens -----------------------------------------------------------------------------------------


def counted(tokenizer: Tokenizer, text: str, table: TokenBytes) -> int:
    """The bytes of a document as the labels of one sequence, behind the end of another document."""
    ids = [tokenizer.eod, *tokenizer.tokenize(text), tokenizer.eod]
    tokens, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    return table.count({"tokens": tokens, "labels": labels, "loss_mask": torch.ones(labels.shape)})


MODELS: dict[str, Callable[[Any], Tokenizer]] = {
    "sentencepiece_model": SentencePieceTokenizer,
    "llama2_model": SentencePieceTokenizer,  # which adds a space that is not in the text
    "llama3_model": TikTokenizer,
    "hugging_face_directory": lambda directory: HuggingFaceTokenizer(str(directory)),
    "gpt2_files": build_tokenizer,
}


@pytest.mark.parametrize("model", [*MODELS, "tokenizer.json of llama2_model"])
def test_bytes_of_tokens_add_up(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    name = model.rpartition(" ")[2]
    tokenizer = MODELS[name](request.getfixturevalue(name))
    if name != model:  # byte fallback
        content = tokenizer.tokenizer_json()
        assert content is not None
        (tmp_path / "tokenizer.json").write_bytes(content)
        tokenizer = HuggingFaceTokenizer(str(tmp_path))
    table = count_token_bytes(tokenizer, tokenizer.vocab_size)
    assert table is not None
    for text in [*random_texts(60), "  indented", " one", "no space", "\u4e2d\u6587 \U0001f600\n\n\tx"]:
        decoded = tokenizer.detokenize(tokenizer.tokenize(text))
        assert counted(tokenizer, text, table) == len(decoded.encode()), repr(text)
    assert counted(tokenizer, "def f(x):", table) == len("def f(x):")


def test_masked_labels_and_special_tokens_have_no_bytes(llama3_model: str) -> None:
    tokenizer = TikTokenizer(llama3_model)
    table = count_token_bytes(tokenizer, tokenizer.vocab_size + 5)
    assert table is not None and tokenizer.bos is not None
    ids = torch.tensor([[tokenizer.bos, *tokenizer.tokenize("abc"), tokenizer.eod]])
    mask = torch.ones(ids.shape)
    assert table.count({"tokens": ids, "labels": ids, "loss_mask": mask}) == 3
    assert table.count({"tokens": ids, "labels": ids, "loss_mask": mask * 0}) == 0
    counter = CountedBytes(iter([{"tokens": ids, "labels": ids, "loss_mask": mask}] * 2), table)
    assert len(list(counter)) == 2 and counter.num_bytes == 6


def test_ids_alone_have_no_text() -> None:
    assert count_token_bytes(NullTokenizer(10), 11) is None
