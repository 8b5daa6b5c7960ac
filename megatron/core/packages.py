"""Packages that may be missing, or may not fit this machine."""

import importlib
from typing import Any


class Unavailable(Exception):
    """Why an implementation cannot be used here: half a sentence."""


def load(module: str, package: str) -> Any:
    """The ``module`` of ``package``; raises :class:`Unavailable`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise Unavailable(f"{package} is not installed (no module {module})") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"{package} is installed but cannot be imported ({error})") from error
