"""The command ``megatron-llama``, also as ``python -m megatron_llama``."""

import sys
from typing import NoReturn

from megatron.commands.verbs import start


def main() -> NoReturn:
    """Run the verb of the command line, and end the process with its exit code."""
    sys.exit(start(sys.argv[1:]))


if __name__ == "__main__":
    main()
