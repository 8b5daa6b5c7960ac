"""Errors in a figure's place."""

MOST_CHARACTERS = 160


def error_line(error: Exception) -> str:
    """The first line of an error, cut to a length that a table can show."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:MOST_CHARACTERS]
