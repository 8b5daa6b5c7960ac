"""The copy of a tokenizer beside checkpoints: for every type, at a directory and at a URL, found by its digest."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.files import path_of
from megatron.checkpoint.schema import DataStage, SavedState
from megatron.checkpoint.tokenizer_files import COPY, keep_copy, tokenizer_of
from megatron.config.data import TokenizerConfig
from megatron.data.data_record import tokenizer_digest
from megatron.data.tokenizers import tokenizer_files
from megatron.training.checkpoints.saved_run import state_of_weights
from tests.checkpoint.models import LLAMA


def write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (directory / name).write_text(text)


def tokenizers(directory: Path) -> dict[str, TokenizerConfig]:
    write(directory, {"a.model": "pieces", "b.model": "ranks", "c.json": "{}", "tokenizer_config.json": '{"eos": 1}'})
    write(directory, {"v": "{}", "m": "merges"})
    return {
        "SentencePieceTokenizer": TokenizerConfig("SentencePieceTokenizer", str(directory / "a.model")),
        "TikTokenizer": TokenizerConfig("TikTokenizer", str(directory / "b.model")),
        "HuggingFaceTokenizer": TokenizerConfig("HuggingFaceTokenizer", str(directory / "c.json")),
        "GPT2BPETokenizer": TokenizerConfig(
            "GPT2BPETokenizer", vocab_file=str(directory / "v"), merge_file=str(directory / "m")
        ),
    }


def state_of(flags: TokenizerConfig, digest: str | None) -> SavedState:
    state = state_of_weights(3, LLAMA, {"tokenizer": asdict(flags)})
    return replace(state, data_stages=(DataStage("main", 0, 0, {"tokenizer_digest": digest}),))


@pytest.mark.parametrize("at_url", [False, True])
@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "TikTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"])
def test_the_copy_is_found_when_the_path_is_missing(tmp_path: Path, kind: str, at_url: bool) -> None:
    flags, save = tokenizers(tmp_path)[kind], tmp_path / "save"
    root = path_of(f"file://{save}" if at_url else str(save))
    digest = tokenizer_digest(flags)
    assert digest is not None
    contents = [Path(path).read_bytes() for path in tokenizer_files(flags)]
    keep_copy(root, flags)
    keep_copy(root, flags)  # it is there already
    state = state_of(flags, digest)
    assert tokenizer_of(state, root, 3) == flags
    # A relative path may be of another file where the tool runs.
    last = Path(tokenizer_files(flags)[-1])
    last.write_text("another")
    assert [Path(path).read_bytes() for path in tokenizer_files(tokenizer_of(state, root, 3))] == contents
    for path in tokenizer_files(flags):
        Path(path).unlink()
    found = tokenizer_of(state, root, 3)
    assert [Path(path).read_bytes() for path in tokenizer_files(found)] == contents
    assert (found.tokenizer_type, found.vocab_size) == (flags.tokenizer_type, flags.vocab_size)
    if kind == "HuggingFaceTokenizer":  # what is beside it says which token ends a document
        assert json.loads((Path(tokenizer_files(found)[0]).parent / "tokenizer_config.json").read_text()) == {"eos": 1}
    # Without a record of the digest, and for the digest of other files, there is no copy.
    for other in (None, "0" * 32):
        assert tokenizer_of(state_of(flags, other), root, 3) == flags
    # Nor is one used that has been changed.
    (main,) = (save / COPY / digest.replace("+", "-")).glob(Path(tokenizer_files(found)[-1]).name)
    main.write_text("other")
    assert tokenizer_of(state, root, 3) == flags


def test_a_run_with_another_tokenizer_leaves_the_copy_of_the_earlier_one(tmp_path: Path) -> None:
    flags = tokenizers(tmp_path)
    one, other = flags["SentencePieceTokenizer"], flags["TikTokenizer"]
    digests = [tokenizer_digest(one), tokenizer_digest(other)]
    keep_copy(tmp_path / "save", one)
    keep_copy(tmp_path / "save", other)
    Path(one.tokenizer_model or "").unlink()
    Path(other.tokenizer_model or "").unlink()
    texts = [
        Path(tokenizer_of(state_of(flag, digest), tmp_path / "save", 3).tokenizer_model or "").read_text()
        for flag, digest in zip((one, other), digests, strict=True)
    ]
    assert texts == ["pieces", "ranks"]


@pytest.mark.parametrize("flags", [TokenizerConfig(), TokenizerConfig("NullTokenizer", vocab_size=9)])
def test_without_files_there_is_no_copy(tmp_path: Path, flags: Any) -> None:
    keep_copy(tmp_path, flags)
    assert list(tmp_path.iterdir()) == []
    assert tokenizer_of(state_of(flags, None), tmp_path, 3) == flags
