"""JSON texts with a digest of themselves, so that damage is detected on reading."""

import xxhash


def seal(name: str, content: str) -> str:
    """A JSON object with the XXH3-128 digest of ``content``, and the JSON text ``content`` under ``name``."""
    return f"{_head(name, content)}{content}}}"


def is_sealed(name: str, text: str) -> bool:
    """Whether the digest in ``text`` matches its content."""
    length = len(_head(name, ""))
    return text[:length] == _head(name, text[length:-1]) and text[-1:] == "}"


def _head(name: str, content: str) -> str:
    return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}", "{name}": '
