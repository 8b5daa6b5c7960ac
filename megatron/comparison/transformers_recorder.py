"""The recorder of models of transformers: a forward and backward pass, under the names and in the order of this code.

Modules are found by their names, which the architectures of the catalog share. Queries and keys after the rotation are
no result of a module: they are what a registered attention function receives, which then calls that of transformers.
Queries and keys are brought into our order of rotary pairs, and parameters into our tensors, by the mapping of
conversions.
"""

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.boxes import strided
from megatron.checkpoint.hugging_face.config import describe_directory
from megatron.checkpoint.hugging_face.mapping import HuggingFaceMapping, Section, copies_of_section
from megatron.checkpoint.hugging_face.weights import HuggingFaceWeights
from megatron.comparison.batch import Batch, Widened, finish, record_result
from megatron.core.ops.documents import Documents
from megatron.errors import ConfigError, DataError
from megatron.features.record_tensors.recording import Direction, Recording, TensorName, whole

_ATTENTION = "megatron_llama_recorded"
"""The name under which transformers knows the attention function that records."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.?(.*)")
_INPUTS = {
    "self_attn.o_proj": "self_attention.core_attention",
    "post_attention_layernorm": "attention_residual",
    "mlp.down_proj": "mlp.activation",
}
"""The operations that compute the inputs of modules of a layer, whose names are those of transformers."""
_RESULTS = {
    "input_layernorm": "input_layernorm",
    "self_attn.q_proj": "self_attention.query",
    "self_attn.k_proj": "self_attention.key",
    "self_attn.v_proj": "self_attention.value",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate": "mlp.router",
    "mlp.router": "mlp.router",  # Llama 4
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.shared_expert": "mlp.shared_experts",
    "mlp": "mlp",
    "": "output",
}
_OUTER = {"model.embed_tokens": "embedding", "model.norm": "final_layernorm", "lm_head": "logits"}


def record_transformers(
    directory: Path,
    batch: Batch,
    *,
    dtype: torch.dtype,
    weights: Path | None = None,
    attention: Literal["sdpa", "eager"] = "sdpa",
    device: torch.device | str = "cpu",
) -> Recording:
    """What the model in ``directory`` computes for ``batch`` in ``dtype``.

    ``weights`` is a safetensors file with weights under our global names; then ``directory`` needs ``config.json``
    alone. In fp64 everything is computed in fp64. Raises :class:`ConfigError` without transformers,
    :class:`CheckpointError` for a model that conversions refuse, and :class:`DataError` for ``weights`` of another
    model.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError("To run a model of Hugging Face, transformers is needed: pip install transformers.") from None
    architecture = describe_directory(directory).architecture
    mapping = HuggingFaceMapping.of(architecture)
    if weights is None:
        mapping.check(HuggingFaceWeights(directory).shapes, str(directory))
    facts = {"head_size": architecture.kv_channels, "kernels": {"attention": attention, "experts": "eager"}}
    recording = batch.start_recording(dtype, **facts)
    recorder = _Recorder(recording, mapping, batch)
    masks, functions = transformers.AttentionMaskInterface, transformers.AttentionInterface
    masks.register(_ATTENTION, masks()[attention])
    functions.register(_ATTENTION, partial(recorder.attend, attention, functions()))
    with Widened() if dtype == torch.float64 else nullcontext():
        model_class = getattr(transformers, mapping.architecture.hugging_face_class)
        model = model_class.from_pretrained(
            None if weights else directory,
            config=model_class.config_class.from_pretrained(directory),
            state_dict=None if weights is None else _published(weights, mapping),
            dtype=dtype,
            attn_implementation=_ATTENTION,
            experts_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
        ).to(device)
        recorder.watch(model)
        positions = None
        if batch.document_starts is not None:
            documents = Documents(batch.document_starts, True, True, torch.device("cpu"))
            positions = documents.positions().t().to(device)
        # transformers keeps attention inside documents where positions restart.
        logits = model(batch.tokens.to(device), position_ids=positions, use_cache=False).logits.flatten(0, 1)  # [n, v]
        wide = torch.promote_types(dtype, torch.float32)
        losses = F.cross_entropy(logits.to(wide), batch.labels.flatten().to(device), reduction="none")  # [n]
        record_result(recording, "loss", losses, lambda one: one.unsqueeze(1))
        loss = batch.mean(losses)
        loss.backward()
    parameters = dict(model.named_parameters())
    recorder.add_parameters(model, "weight", {name: one.detach() for name, one in parameters.items()})
    recorder.add_parameters(model, "weight_gradient", {name: one.grad for name, one in parameters.items()})
    finish(recording, loss)
    return recording


class _Recorder:
    """Records what the modules of a model compute."""

    def __init__(self, recording: Recording, mapping: HuggingFaceMapping, batch: Batch) -> None:
        self._recording, self._mapping, self._rows = recording, mapping, batch.tokens.numel()

    def watch(self, model: nn.Module) -> None:
        """Add the hooks of all modules."""
        for path, module in model.named_modules():
            match = _LAYER.fullmatch(path)
            if path in _OUTER:
                module.register_forward_hook(partial(self._on_result, _OUTER[path], path))
            if match is None:
                continue
            prefix, inside = f"layers.{match[1]}.", match[2].replace("feed_forward", "mlp")  # Llama 4's name
            if inside in _RESULTS:
                module.register_forward_hook(partial(self._on_result, prefix + _RESULTS[inside], path))
            if inside in _INPUTS:
                module.register_forward_pre_hook(partial(self._on_input, prefix + _INPUTS[inside]))

    def _on_input(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        record_result(self._recording, name, inputs[0], self._matrix)

    def _on_result(self, name: str, path: str, module: nn.Module, inputs: Any, result: Any) -> None:
        as_matrix: Callable[[Tensor], Tensor] = self._matrix
        if name.endswith("mlp.router"):
            if len(result) == 3:  # logits [n, E], weights and experts [n, k]
                logits, result, experts = result
                as_matrix = partial(_scattered, experts, logits.shape[1])
            else:  # weights [n, E] and logits
                result = result[0]
                as_matrix = partial(torch.mul, result.detach() != 0)
        elif name.endswith((".query", ".key")):
            as_matrix = partial(self._reordered, f"{path}.weight")
        record_result(self._recording, name, result[0] if isinstance(result, tuple) else result, as_matrix)

    def attend(
        self, name: str, known: Mapping[str, Any], module: Any, query: Tensor, key: Tensor, *others: Any, **more: Any
    ) -> Any:
        """The attention function ``name`` of transformers, on queries and keys ``[b, heads, s, d]``."""
        for what, projection, heads in (("query", "q_proj", query), ("key", "k_proj", key)):
            layer = module.layer_idx
            as_matrix = partial(self._reordered, f"model.layers.{layer}.self_attn.{projection}.weight", swaps=True)
            record_result(self._recording, f"layers.{layer}.self_attention.rotated_{what}", heads, as_matrix)
        # A model's own module has its function without kernels.
        function = known.get(name) or sys.modules[type(module).__module__].eager_attention_forward
        return function(module, query, key, *others, **more)

    def _matrix(self, result: Tensor) -> Tensor:
        return result.reshape(self._rows, -1)

    def _reordered(self, weight: str, result: Tensor, swaps: bool = False) -> Tensor:
        """The matrix with columns in our order of the rows of ``weight``."""
        theirs, section = self._matrix(result.transpose(1, 2) if swaps else result), self._mapping.theirs[weight]
        ours = torch.empty_like(theirs)
        for run in section.runs():
            columns = strided(run.ours - section.first_row, run.length, run.step)
            ours[:, columns] = theirs[:, run.theirs : run.theirs + run.length]
        return ours

    def add_parameters(self, model: Any, direction: Direction, tensors: dict[str, Tensor]) -> None:
        """Record the parameters or their gradients as our tensors."""
        from transformers.core_model_loading import revert_weight_conversion

        published = revert_weight_conversion(model, tensors)
        for name, tensor in self._mapping.ours.items():
            ours = torch.empty(tensor.shape, dtype=model.dtype, device=model.device)
            for copy in tensor.copies((0,) * len(tensor.shape), tensor.shape):
                ours[copy.place] = copy.across(published[copy.source][copy.source_place])
            self._recording.add(TensorName(direction, name), whole(ours))


def _scattered(experts: Tensor, num_experts: int, weights: Tensor) -> Tensor:
    """The weights ``[n, k]`` of the chosen ``experts`` as ``[n, E]``."""
    return weights.new_zeros(len(weights), num_experts).scatter(1, experts, weights)


def _published(path: Path, mapping: HuggingFaceMapping) -> dict[str, Tensor]:
    """The weights in ``path`` under Hugging Face's names."""
    ours = load_file(path)
    wanted = {name: one.shape for name, one in mapping.ours.items()}
    if {name: tuple(one.shape) for name, one in ours.items()} != wanted:
        raise DataError(f"{path} has weights of another model than config.json describes: name those of this model.")

    def tensor_of(section: Section) -> Tensor:
        found = torch.empty(section.shape, dtype=ours[section.ours].dtype)
        for copy in copies_of_section(section, (0,) * len(section.shape), section.shape):
            found[copy.place] = copy.across(ours[copy.source][copy.source_place])
        return found

    return {name: tensor_of(section) for name, section in mapping.theirs.items()}
