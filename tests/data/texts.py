"""Texts that are hard for tokenizers, and texts to preprocess."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDataset

AWKWARD_TEXTS = [
    "",
    " ",
    "  two before",
    "two after  ",
    "\tif x:\r\n\t\treturn 12345\n\n\n",
    "na\u00efve caf\u00e9 \u00a0 \u4e2d\u6587 \U0001f600\ufeff e\u0301",
    "nul \0 bell \a",
    "</s> <s> <unk> <0x0A> <|end_of_text|> <|begin_of_text|> <|endoftext|>",
]


def random_texts(count: int) -> Iterator[str]:
    generator = random.Random(0)
    alphabet = "ab  \n\t09_(:\u00e9\u4e2d\U0001f600"
    for _ in range(count):
        yield "".join(generator.choices(alphabet, k=generator.randrange(40)))


def unlikely_texts(count: int) -> Iterator[str]:
    """Mixtures of what tokenizers treat in special ways, and of any characters."""
    generator = random.Random(2)
    anything = [chr(code) for code in (*range(0x3000), *range(0xFE00, 0x10000), *range(0x1F300, 0x1F700), 0x20000)]
    special = [*"  \n\r\t'\u2019sStTlLdDmMveVErR0123456789abcXYZ.,!-_", "'\u017f", "\r\n", "\u3000", "\x85", "\u2028"]
    special += ["<|begin_of_text|>", "<s>", "</s>", "<unk>", "<0x0A>", "\u2581", "\0"]
    for _ in range(count):
        share = generator.choice([0, 0.05, 0.3, 0.9])
        length = generator.randrange(120)
        yield "".join(generator.choice(anything if generator.random() < share else special) for _ in range(length))


def read_model(path: str) -> tuple[Any, Any]:
    """A SentencePiece model, and the module of its messages."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    return proto.ModelProto.FromString(Path(path).read_bytes()), proto


TEXTS = [f"{number} {number + 1} {7 * number % 999}" for number in range(200)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
NULL = TokenizerConfig("NullTokenizer", vocab_size=999)


def documents_of(directory: Path, name: str) -> list[str]:
    dataset = IndexedDataset(str(directory / f"{name}_text_document"))
    return [" ".join(map(str, dataset.get(number)[:-1].tolist())) for number in range(len(dataset))]
