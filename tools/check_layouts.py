#!/usr/bin/env python3
"""Runs ``megatron/commands/compare_runs.py``; ``--help`` says what it does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.commands.compare_runs import main_check

if __name__ == "__main__":
    sys.exit(main_check())
