"""The commands, one module each: ``main`` is called by ``tools/``, ``pretrain_llama.py`` and ``megatron-llama``."""
