"""The architectures: each module defines ``ARCHITECTURE``."""
