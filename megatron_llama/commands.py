"""The tools from Python, in this process."""

import signal
import sys

from megatron.errors import ConfigError
from megatron_llama.commands import PROGRAM, VERBS, start, unknown


def command(verb: str, *words: str | float) -> None:
    """Run ``megatron-llama verb words`` in this process; raises :class:`RuntimeError` if it fails.

    Verbs that end their process (train, generate) or start others (launch) are refused with the alternative.
    """
    found = next((one for one in VERBS if one.name == verb), None)
    if found is None:
        raise ConfigError(unknown(verb))
    if found.function != "main":
        raise ConfigError(f"{PROGRAM} {verb} ends its process: use megatron_llama.Run, or start it in another process.")
    arguments, on_terminate = sys.argv, signal.getsignal(signal.SIGTERM)
    try:
        code: object = start([verb, *map(str, words)])
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = arguments
        if signal.getsignal(signal.SIGTERM) is not on_terminate:
            signal.signal(signal.SIGTERM, on_terminate)
    if code:
        raise RuntimeError(f"{PROGRAM} {verb} failed with exit code {code}: its output says why.")
