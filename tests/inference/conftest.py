"""The tokenizer files of the tests of data, and memory in which a read before a write shows."""

from collections.abc import Iterator

import pytest
import torch

from tests.data.conftest import (  # noqa: F401
    byte_ranks,
    hugging_face_directory,
    llama3_model,
    python_sources,
    sentencepiece_model,
)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
