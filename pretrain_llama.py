#!/usr/bin/env python3
"""Pretrain a Llama: ``megatron/commands/pretrain_llama.py``. ``--help`` lists the flags."""

import sys

from megatron.commands.pretrain_llama import import_for_training, run

__all__ = ["import_for_training"]  # a process that stands by for a restart calls it

if __name__ == "__main__":
    run(sys.argv[1:])
