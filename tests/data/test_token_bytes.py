"""The bytes of tokens add up to the bytes of the text that they stand for."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.data.token_bytes import CountedBytes, TokenBytes, count_token_bytes
from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)
from tests.data.texts import random_texts


def counted(tokenizer: Tokenizer, text: str, table: TokenBytes) -> int:
    """The bytes of a document as the labels of one sequence, behind the end of another document."""
    ids = [tokenizer.eod, *tokenizer.tokenize(text), tokenizer.eod]
    tokens, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    return table.count({"tokens": tokens, "labels": labels, "loss_mask": torch.ones(labels.shape)})


def assert_bytes_add_up(tokenizer: Tokenizer) -> None:
    table = count_token_bytes(tokenizer, tokenizer.vocab_size)
    assert table is not None
    for text in [*random_texts(60), "  indented", " one", "no space", "\u4e2d\u6587 \U0001f600\n\n\tx"]:
        decoded = tokenizer.detokenize(tokenizer.tokenize(text))
        assert counted(tokenizer, text, table) == len(decoded.encode()), repr(text)


def test_sentencepiece(sentencepiece_model: str) -> None:
    assert_bytes_add_up(SentencePieceTokenizer(sentencepiece_model))


def test_sentencepiece_with_a_space_before_the_first_word(tmp_path: Path, python_sources: list[str]) -> None:
    """As Llama 2's model, which adds a space that is not in the text."""
    from sentencepiece import SentencePieceTrainer

    prefix = str(tmp_path / "dummy")
    SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(python_sources[:5]).splitlines()),
        model_prefix=prefix,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(prefix + ".model")
    assert_bytes_add_up(tokenizer)
    table = count_token_bytes(tokenizer, tokenizer.vocab_size)
    assert table is not None
    assert counted(tokenizer, "def f(x):", table) == len("def f(x):")


def test_tiktoken(llama3_model: str) -> None:
    assert_bytes_add_up(TikTokenizer(llama3_model))


def test_hugging_face_byte_level(hugging_face_directory: Path) -> None:
    assert_bytes_add_up(HuggingFaceTokenizer(str(hugging_face_directory)))


def test_hugging_face_with_byte_fallback(tmp_path: Path, python_sources: list[str]) -> None:
    """The kind of tokenizer.json that Llama 2 has."""
    fast = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    fast.train_from_iterator(python_sources[:3], trainer)
    path = tmp_path / "tokenizer.json"
    content = fast.to_str().replace('"special":true,"content":"<0x', '"special":false,"content":"<0x')
    path.write_text(content, encoding="utf-8")
    fast = FastTokenizer.from_file(str(path))
    assert_bytes_add_up(HuggingFaceTokenizer(str(path)))


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


@pytest.mark.parametrize("tokenizer", [NullTokenizer(10)])
def test_ids_alone_have_no_text(tokenizer: Tokenizer) -> None:
    assert count_token_bytes(tokenizer, tokenizer.vocab_size) is None
