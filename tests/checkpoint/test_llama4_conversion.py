"""Llama 4's stacked experts in any part, as a rank reads them, and the text model in a multimodal one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint import conversion
from megatron.checkpoint.hugging_face_config import config_fields
from megatron.checkpoint.hugging_face_files import HuggingFaceWeights
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.commands.weight_checkpoints import model_flags
from megatron.core.parameter import Box, ParameterInfo
from megatron.errors import CheckpointError
from tests.checkpoint.models import (
    MAVERICK,
    SCOUT,
    assert_equal,
    import_of,
    place_of,
    random_model,
    randomized,
    weights_under,
)
from tests.end_to_end.run_process import call_training

transformers: Any = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def multimodal_model(config: TransformerConfig) -> Any:
    fields = config_fields(config, "float32")
    del fields["architectures"], fields["torch_dtype"]
    settings = transformers.Llama4Config(text_config=fields, vision_config=VISION)
    return randomized(transformers.Llama4ForConditionalGeneration(settings))


# --- experts of a rank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [range(4), range(2, 4)], ids=["all experts", "half of them"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_reads_its_part_of_the_experts_and_no_more(
    experts: range, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its experts the rows of gate and up, and the columns of fc2, that tensor parallelism gives it; and of these a
    range that a data-parallel rank owns, which begins and ends inside a row."""
    random_model(SCOUT).save_pretrained(tmp_path)
    ours = import_of(tmp_path)
    hidden, ffn, name = SCOUT.hidden_size, 6, "layers.1.mlp.experts"
    width = ffn // tp
    last = (tp - 1) * width
    halves = [
        Box((half * ffn + last, 0), (number * width, 0), (width, hidden))
        for number, half in enumerate(range(2 * experts.start, 2 * experts.stop))
    ]
    downs = [
        Box((expert * hidden, last), (number * hidden, 0), (hidden, width)) for number, expert in enumerate(experts)
    ]
    read = record_reads(monkeypatch)
    for kind, boxes, columns in (("fc1", halves, hidden), ("fc2", downs, width)):
        rows = sum(box.shape[0] for box in boxes)
        whole = ours[f"model/{name}.linear_{kind}.weight"]
        wanted = torch.cat([whole[place_of(box.global_offset, box.shape)] for box in boxes]).flatten()
        info = ParameterInfo(
            f"{name}.linear_{kind}.weight", tuple(whole.shape), (rows, columns), tuple(boxes), None, True, tp > 1
        )
        for start, stop in ((0, rows * columns), (columns // 2 + 1, rows * columns - columns // 2)):
            found, before = torch.full((stop - start,), float("nan")), sum(read)
            weights = HuggingFaceWeights(tmp_path)
            conversion.fill_from_hugging_face(tmp_path, weights, SCOUT, [(info, start, found)])
            assert torch.equal(found, wanted[start:stop])
            assert sum(read) - before == stop - start


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of elements of every part that is read from a file."""
    read, elements = HuggingFaceWeights.read, []

    def recorded(weights: HuggingFaceWeights, name: str, place: tuple[slice, ...]) -> Tensor:
        tensor = read(weights, name, place)
        elements.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HuggingFaceWeights, "read", recorded)
    return elements


def test_a_part_of_stacked_experts_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    whole = torch.randn(4, 16, 12)
    save_file({"experts": whole}, tmp_path / "model.safetensors")
    found = HuggingFaceWeights(tmp_path).read("experts", (slice(2, 3), slice(0, 16), slice(5, 9)))
    assert torch.equal(found, whole[2:3, :, 5:9])
    assert found.stride() == whole.stride()


# --- multimodal models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SCOUT, MAVERICK], ids=["scout", "maverick"])
def test_the_text_model_of_a_multimodal_model_is_taken_out_on_request(
    config: TransformerConfig, tmp_path: Path
) -> None:
    model = multimodal_model(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    request = FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"))
    with pytest.raises(CheckpointError) as refusal:
        convert(request)
    assert str(refusal.value) == (
        f"{tmp_path / 'hf' / 'config.json'} describes a multimodal model (Llama4ForConditionalGeneration), of which "
        "only the text model can be used: add --text-only to leave out vision_model.* and multi_modal_projector.*."
    )
    assert not (tmp_path / "ours").exists()
    told = convert(replace(request, text_only=True))
    others = len([name for name in weights_under(tmp_path / "hf") if name.startswith("vision_model.")])
    assert (
        f"left out {others + 1} tensors that are not of the text model: 1 of multi_modal_projector.*, "
        f"{others} of vision_model.*" in told
    )
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), tokenizer=False))
    text = model.language_model
    assert_equal(weights_under(tmp_path / "back"), dict(text.state_dict()))
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (fields["architectures"], fields["model_type"]) == (["Llama4ForCausalLM"], "llama4_text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(34).remainder(config.vocab_size).view(2, 17)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, text(tokens).logits)


def test_a_run_starts_from_the_text_model_of_a_multimodal_model_on_request(tmp_path: Path) -> None:
    """In bf16, with master weights, and in a step that changes no weight."""
    model = multimodal_model(MAVERICK)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    step = (
        "--mock-data --vocab-size 17 --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --num-workers 0 "
        "--device cpu --lr 0 --train-iters 1 --bf16"
    )
    flags = [*model_flags(MAVERICK), *step.split(), "--load-hf", str(tmp_path / "hf")]
    (sentence,) = call_training(flags).errors
    assert sentence.endswith("add --load-hf-text-only to leave out vision_model.* and multi_modal_projector.*.")
    outcome = call_training([*flags, "--load-hf-text-only", "--save", str(tmp_path / "run")])
    outcome.succeeded()
    assert "tensors that are not of the text model: 1 of multi_modal_projector.*" in outcome.stdout
    convert(ToHuggingFace(str(tmp_path / "run"), str(tmp_path / "back"), dtype="fp32", tokenizer=False))
    assert_equal(weights_under(tmp_path / "back"), dict(model.language_model.state_dict()))


def test_a_text_model_can_be_asked_for_its_text_model(tmp_path: Path) -> None:
    random_model(SCOUT).save_pretrained(tmp_path / "hf")
    assert "left out" not in convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
        (
            {"architectures": ["Llama4ForSequenceClassification"]},
            "only Llama4ForConditionalGeneration can be converted",
        ),
        ({"text_config": [1]}, "text_config is [1], not an object"),
        ({"text_config": {"model_type": "gemma"}}, "model_type is 'gemma'"),
    ],
)
def test_a_multimodal_model_of_another_kind_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    multimodal_model(SCOUT).save_pretrained(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError) as refusal:
        convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))
    assert words in str(refusal.value)


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    multimodal_model(SCOUT).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {"audio_model.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"audio_model\.weight, which a Llama4ForConditionalGeneration does not"):
        convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "ours"), text_only=True))
