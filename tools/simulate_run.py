#!/usr/bin/env python3
"""Runs ``megatron/commands/simulate_run.py``; ``--help`` says what it does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.commands.simulate_run import main

if __name__ == "__main__":
    sys.exit(main())
