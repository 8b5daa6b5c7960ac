"""Optional packages: Transformer Engine, apex and FlashAttention 3, each loaded only when a run uses it.

Nothing outside of this room imports it at the top of a file, so a run without these packages does not need the room
(``tests/kernels/test_backends.py``).
"""
