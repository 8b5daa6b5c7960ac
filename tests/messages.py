"""What a message to the user must have, whatever its wording: flags with their values, one sentence, a remedy."""

import re

REMEDY_VERBS = (
    "add change choose continue copy create delete did drop give install keep leave lower make move name "
    "pass point raise remove rename restore run set start train use wait write"
)
"""How a remedy begins; "did" is for "did you mean"."""


def assert_names(message: str, named: str) -> None:
    """``message`` contains each of the comma-separated names: a flag, a flag with its value, or a value or figure."""
    for name in named.split(", "):
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message), f"{name} is not named: {message}"


def assert_helpful(message: str, named: str) -> None:
    """``message`` names the flags and values, is one sentence, and gives a remedy.

    The remedy is an instruction after a colon, a bound ("must be …") or the flag that is missing ("needs --…").
    Messages of the parser of the command line are its own words and point to --help.
    """
    assert_names(message, named)
    assert "\n" not in message
    if message.endswith("; see --help."):
        return
    assert message[-1] in ".?", message
    assert not re.search(r"[.?!] +[A-Z]", message), f"more than one sentence: {message}"
    remedy = rf": .*\b({REMEDY_VERBS.replace(' ', '|')})\b|\bmust |\bneeds (--|it)"
    assert re.search(remedy, message), f"no remedy: {message}"
