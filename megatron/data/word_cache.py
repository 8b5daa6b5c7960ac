"""Token ids of words seen before, for tokenizers whose words do not influence each other.

Text repeats its words, so looking them up costs a part of tokenizing them. Whether the ids of a text are those of its
words one after the other depends on the tokenizer, which must prove it before it uses this.
"""

from array import array
from collections.abc import Callable, Sequence

_MAX_WORDS = 1 << 19  # some 100 MB
_MAX_WORD_LENGTH = 64  # longer ones hardly come back

_CUT = "\0"  # marks places to cut at while a text is prepared


def cut_at_blanks(text: str) -> list[str]:
    """``text`` cut before every run of blanks behind something else. Every word but the first begins with a blank."""
    if _CUT in text:
        return [text]
    return text.replace(" ", "\0 ").replace(" \0", " ").split(_CUT)


class WordCache:
    """Ids of words as int32 bytes; ``encode`` computes those of several that are not known yet. Bounded in memory."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], max_words: int = _MAX_WORDS) -> None:
        self._encode = encode
        self._max_words = max_words
        self._known: dict[str, bytes] = {}

    def __len__(self) -> int:
        """Number of words kept."""
        return len(self._known)

    def ids(self, texts: Sequence[Sequence[str]]) -> list[bytes]:
        """The ids of each text, given as its words, one after the other."""
        missing = list(set().union(*texts).difference(self._known))
        if len(self._known) + len(missing) > self._max_words:
            self._known.clear()  # words of today's text come back soon
            missing = list(set().union(*texts))
        for word, ids in zip(missing, self._encode(missing), strict=True):
            self._known[word] = array("i", ids).tobytes()
        joined = [b"".join(map(self._known.__getitem__, words)) for words in texts]
        for word in missing:
            if len(word) > _MAX_WORD_LENGTH:
                del self._known[word]
        return joined
