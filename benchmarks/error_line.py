"""Errors in a figure's place."""

MOST_CHARACTERS = 160


def error_line(error: Exception) -> str:
    """The first line of an error, cut to a length that a table can show."""
    line = str(error).strip().partition("\n")[0]
    # A KeyError's text is the key.
    return (line if " " in line else f"{type(error).__name__} {line}".strip())[:MOST_CHARACTERS]
