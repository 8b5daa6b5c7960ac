"""GPT-2's tokenizer in two files, ``vocab.json`` and ``merges.txt``, as the content of a ``tokenizer.json``."""

import json
from typing import Any

from megatron.data.tokenizer_formats import special_tokens
from megatron.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_VERSION = "#version"  # begins the first line of a file of merges


def gpt2_description(vocabulary: bytes, merges: bytes, vocab_file: str, merge_file: str) -> bytes:
    """The ``tokenizer.json`` of byte-level BPE with the contents of the two files, whose names are for errors."""
    ids = _vocabulary(vocabulary, vocab_file)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": special_tokens([(ids[END_OF_TEXT], END_OF_TEXT)]),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": _merges(merges, merge_file, ids)},
    }
    return json.dumps(description).encode()


def _vocabulary(content: bytes, path: str) -> dict[str, int]:
    remedy = "set --vocab-file to the vocab.json of a GPT-2 tokenizer"
    try:
        ids = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): {remedy}.") from error
    if not isinstance(ids, dict) or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise DataError(f"{path} is not a JSON object of tokens and ids: {remedy}.")
    if END_OF_TEXT not in ids:
        raise DataError(f"{path} has no {END_OF_TEXT}, which ends documents: {remedy}.")
    return ids


def _merges(content: bytes, path: str, ids: dict[str, int]) -> list[list[str]]:
    remedy = "set --merge-file to the merges.txt that belongs to --vocab-file"
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): {remedy}.") from error
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or line.startswith(_VERSION):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise DataError(
                f"Line {number} of {path}, {line[:40]!r}, merges no two tokens of the vocabulary: {remedy}."
            )
        merges.append(pair)
    return merges
