"""The command ``megatron-llama``, also as ``python -m megatron_llama``."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_llama import __version__
from megatron_llama.commands import PROGRAM, start


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb of the command line, and end the process with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        sys.exit()
    sys.exit(start(words))


if __name__ == "__main__":
    main()
