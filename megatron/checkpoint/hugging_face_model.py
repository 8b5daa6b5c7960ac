"""The text model in a directory in Hugging Face's format, alone or in a multimodal model."""

from collections import Counter
from pathlib import Path

from megatron.checkpoint.hugging_face.config import describe_directory
from megatron.checkpoint.hugging_face.read import HuggingFaceWeights


class HuggingFaceModel:
    """The description and the tensors of the text model in ``source``.

    A multimodal model is refused without ``text_only``, the value of the flag ``text_only_flag``. Raises
    :class:`CheckpointError`.
    """

    def __init__(self, source: Path, text_only: bool = False, text_only_flag: str = "--text-only") -> None:
        self.weights = HuggingFaceWeights(source)
        self.description = describe_directory(source, text_only, text_only_flag)
        self.architecture = self.description.architecture
        self.left_out: list[str] = []
        """Names of the tensors beside the text model."""
        if self.description.multimodal is not None:
            self.left_out = self.weights.keep_text_model(self.description.multimodal)

    def describe_left_out(self) -> str:
        """The tensors that were left out, counted by the first part of their names; empty if there are none."""
        if not self.left_out:
            return ""
        counts = Counter(name.partition(".")[0] for name in self.left_out)
        groups = ", ".join(f"{count} of {first}.*" for first, count in counts.items())
        return f"left out {len(self.left_out)} tensors that are not of the text model: {groups}"
