"""Runs checks, and reports all that they find at once."""

import re
from collections.abc import Callable, Iterable

from megatron.errors import ConfigError


def flags_in(text: str) -> list[str]:
    """The flags that a text names, in order."""
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)


def run_all(stages: Iterable[Iterable[Callable[[], None]]]) -> None:
    """Run every check; raises one :class:`ConfigError` with all their sentences.

    A check of a later stage may rely on earlier ones. So its sentence is left out if it names the flag with which an
    earlier sentence begins, and another exception of it if there is any sentence.
    """
    found: list[ConfigError] = []
    for stage in stages:
        wrong = {flag for error in found for sentence in error.sentences for flag in flags_in(sentence)[:1]}
        for check in stage:
            try:
                check()
            except ConfigError as error:
                found += without_sentences_on(error, wrong)
            except Exception:
                if not found:
                    raise
    if found:
        raise ConfigError.of(found)


def without_sentences_on(error: ConfigError, flags: set[str]) -> list[ConfigError]:
    """``error`` without the sentences that name one of ``flags``; empty if none is left."""
    kept = [sentence for sentence in error.sentences if not flags & set(flags_in(sentence))]
    if len(kept) == len(error.sentences):
        return [error]
    return [ConfigError(*kept)] if kept else []
