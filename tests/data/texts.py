"""Texts that are hard for tokenizers, and texts to preprocess."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDataset

AWKWARD_TEXTS = (
    "",
    "import os",
    " import os",
    "  two before",
    "two after  ",
    "two  between   three",
    " ",
    "        ",
    "line\nline\r\n\n\n  indented\n",
    "\ttab\t\ttabs",
    "\tif x:\r\n\t\treturn 12345\n\n\n",
    "na\u00efve \u00bfqu\u00e9?",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u4e2d\u6587\u3002\u65e5\u672c\u8a9e",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e17\u0e35\u0e48",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "e\u0301 a\u0323\u0302 o\u0302\u0323 \ufb01 \uff21",
    "\u00a0 \u2003\u3000 \ufeff",
    "======================== aaaaaaaaaaaaaaaaa ------------- 12345678901234567890",
    "I'm they'LL it's we've don't \u017f's '\u017f 1,234.5e-6 \u0663\u0664 \u00bd \u2460",
    "nul \0 bell \a \x7f \x85 \u2028",
    "\u0120\u010a byte-level signs themselves \u00c2\u00a0",
    "#version: 0.2",
)
NAMES = ("<s>", "</s>", "<unk>", "<0x0A>", "<|end_of_text|>", "<|begin_of_text|>", "<|endoftext|>", "<|eot_id|>")
"""Names of special tokens, which transformers finds in a text unless it is told to split them."""


CHARACTERS = [chr(code) for code in range(0x33500) if not 0xD800 <= code < 0xE000]
"""What lies beyond has no kind that matters."""
CHARACTER_TEXTS = [
    "".join(f"{one},e {one}1234 the{one}'s\n{one}\n" for one in CHARACTERS[start : start + 500])
    for start in range(0, len(CHARACTERS), 500)
]
"""Every character in places where regular expressions of libraries might see its kind differently."""


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
