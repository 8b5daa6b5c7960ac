#!/usr/bin/env python3
"""Runs ``megatron_llama/course/command.py``; ``--help`` says what it does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_llama.course.command import main

if __name__ == "__main__":
    sys.exit(main())
