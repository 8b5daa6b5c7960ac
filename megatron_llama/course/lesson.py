"""What the checks of the course share."""


class Wrong(Exception):
    """A wrong answer, in one sentence: what the answer did, why that is wrong, and what to look at."""
