"""Texts that are hard to tokenize."""

import random
from collections.abc import Iterator

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
