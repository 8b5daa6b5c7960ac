"""The text of ids that come one by one."""

from collections.abc import Sequence

from megatron.data.tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
"""What an unfinished character is decoded to."""


class TextStream:
    """The text of growing ids, in parts that add up to the text of all ids.

    Every part is the difference of two short texts, those of the last ids without the new ones and with them, because
    the text of an id may depend on the id before it (a space at the beginning).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        """How many of the ids have been returned as text."""

    def add(self, ids: Sequence[int], is_last: bool = False) -> str:
        """The text that ``ids`` add. The text of an unfinished character comes with a later id, or with the last."""
        self._ids += ids
        text = self._tokenizer.detokenize(self._ids)
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        part = text[len(self._tokenizer.detokenize(self._ids[: self._shown])) :]
        if part:
            # From here on the ids of this part stand for all ids before.
            del self._ids[: self._shown]
            self._shown = len(self._ids)
        return part
