"""matplotlib is an extra: training does not need it."""

from megatron.errors import ConfigError


def check_matplotlib(flag: str) -> None:
    """Raise :class:`ConfigError` if matplotlib, with which ``flag`` draws, is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib.") from error
