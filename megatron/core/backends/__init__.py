"""Optional packages: Transformer Engine, apex and Triton, each loaded only when a run uses it.

No file outside this package imports it at module level, so a run without these backends works without the package
(``tests/kernels/test_backends.py``).
"""
