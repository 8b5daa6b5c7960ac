"""Distinguish URLs from local paths, and refuse URLs where a local path is required."""

import re
from collections.abc import Mapping
from pathlib import Path

from megatron.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
# pathlib collapses the two slashes into one; typed this way, the URL would become a directory named "s3:".
_COLLAPSED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".model", ".txt", ".safetensors")
# In http(s) URLs the text before the @ is a token even without a colon; in others it is a user name.
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|(?:(?<=http)|(?<=https))://[^/@]+@")


def is_url(place: str) -> bool:
    """Whether ``place`` is a URL for fsspec, such as s3://bucket/run; otherwise it is a local path."""
    return _URL.match(place) is not None


def same_place(one: str, other: str) -> bool:
    """Whether two directories or URLs are the same, however they are written."""
    if is_url(one) or is_url(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()


def is_hub_name(place: str) -> bool:
    """Whether ``place``, at which nothing is, looks like the name of a model on the Hub of Hugging Face."""
    return (
        _HUB_NAME.fullmatch(place) is not None
        and not place.endswith(_FILES)
        and not Path(place).exists()
        and not Path(place).parent.exists()
    )


def from_hub(name: str) -> str:
    """What to do about the path ``name``, which may be a name on the Hub."""
    return f"correct the path, or, since names of the Hub are not downloaded, run `hf download {name} --local-dir DIR`"


def refuse_urls(places: Mapping[str, str | Path | None], remedy: str) -> None:
    """Raise :class:`ConfigError` for the first flag with a URL, where only a local path is possible."""
    for flag, place in places.items():
        if place is not None and _COLLAPSED_URL.match(str(place)):
            shown = _PASSWORD.sub("://***@", str(place))
            raise ConfigError(f"{flag} {shown} is a URL, but the flag needs a local path: {remedy}.")


def check_place(flag: str, url: str) -> None:
    """Raise :class:`ConfigError` for a malformed URL, and for one with a password, since flags are logged and
    stored."""
    if not is_url(url) and _COLLAPSED_URL.match(url):
        raise ConfigError(f"{flag} {url} is not a path or a URL: write two slashes after the colon.")
    if _PASSWORD.search(url):
        raise ConfigError(
            f"{flag} {_PASSWORD.sub('://***@', url)} contains a password, which would be logged and stored: remove it "
            "from the URL, and set it in the environment variable that fsspec's file system for this scheme reads."
        )
