"""The text model in a directory in Hugging Face's format, alone or in a multimodal model."""

from collections import Counter
from pathlib import Path

from megatron.architectures.config_json import Fields
from megatron.architectures.spec import MultimodalModel
from megatron.checkpoint.hugging_face_config import multimodal_model, text_model_fields, transformer_config_of
from megatron.checkpoint.hugging_face_files import CONFIG, HuggingFaceWeights, read_json_object
from megatron.errors import CheckpointError


class HuggingFaceModel:
    """The architecture and the tensors of the text model in ``source``.

    A multimodal model is refused without ``text_only``, the value of the flag ``text_only_flag``. Raises
    :class:`CheckpointError`.
    """

    def __init__(self, source: Path, text_only: bool = False, text_only_flag: str = "--text-only") -> None:
        self.weights = HuggingFaceWeights(source)
        config = source / CONFIG
        fields: Fields = read_json_object(config)
        self.left_out: list[str] = []
        """Names of the tensors beside the text model."""
        multimodal = multimodal_model(fields)
        if multimodal is not None:
            if not text_only:
                raise CheckpointError(
                    f"{config} describes a multimodal model ({multimodal.hugging_face_class}), of which only the text "
                    f"model can be used: add {text_only_flag} to leave out {_starred(multimodal)}."
                )
            fields = text_model_fields(fields, str(config))
            self.left_out = self.weights.keep_text_model(multimodal)
        self.architecture = transformer_config_of(fields, str(config))

    def describe_left_out(self) -> str:
        """The tensors that were left out, counted by the first part of their names; empty if there are none."""
        if not self.left_out:
            return ""
        counts = Counter(name.partition(".")[0] for name in self.left_out)
        groups = ", ".join(f"{count} of {first}.*" for first, count in counts.items())
        return f"left out {len(self.left_out)} tensors that are not of the text model: {groups}"


def _starred(multimodal: MultimodalModel) -> str:
    return " and ".join(f"{prefix}*" for prefix in multimodal.other_prefixes)
