"""Flags that ``tools/evaluate.py`` adds to the flags of ``pretrain_llama.py``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EvaluateConfig:
    """Texts to evaluate, and windows over them."""

    input: tuple[str, ...] = ()
    """Texts: files (.jsonl, .txt, .md, .parquet, also .gz and .zst), directories, globs, or prefixes of tokenized
    corpora (P for P.bin and P.idx). Every input has results of its own."""
    json_key: str = "text"
    """Key of the text in .jsonl files, or column of .parquet files."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """Documents of plain text: the whole file, paragraphs between blank lines, or lines."""
    stride: int | None = None
    """Tokens between the beginnings of two windows of --seq-length tokens (default: --seq-length). A smaller stride
    evaluates more windows: after the first window every token has at least --seq-length minus --stride tokens of
    context."""
    json: str | None = None
    """File for the results."""
