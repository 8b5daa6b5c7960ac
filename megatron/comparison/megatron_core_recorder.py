"""The recorder of megatron-core's GPT model with its local layers, on a CPU.

Its package is called ``megatron``, too, so it runs in a process and an environment of its own
(:func:`record_megatron_core`). That process imports this module from a directory with links to our folders without
``core``: without ``__init__.py`` both are parts of one namespace package. Its weights are ours with other rows of
``linear_qkv``: each query group has the rows of its queries, key and value, and the rotary pairs are halves of a head.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.architectures.transformer_config import TransformerConfig
from megatron.comparison.batch import PRECISIONS, Batch, Widened, finish, record_result
from megatron.errors import ConfigError
from megatron.features.record_tensors.recording import Recording, TensorName, load_recording, save_recording, whole

_AsMatrix = Callable[[Tensor], Tensor]
_PACKAGE = Path(__file__).resolve().parents[1]


def record_megatron_core(
    python: Path,
    config: TransformerConfig,
    batch: Path,
    weights: Path,
    directory: Path,
    precision: Literal["fp64", "fp32"] = "fp64",
) -> Recording:
    """What the model ``config`` with ``weights``, a safetensors file with our global names, computes for ``batch``.

    ``python`` is that of an environment with megatron-core, torch, numpy and safetensors; ``directory`` receives the
    files of the process. In fp64 everything is computed in fp64. Raises :class:`ConfigError` if the process fails.
    """
    if config.num_experts is not None:
        raise ConfigError("Experts of megatron-core cannot be recorded: compare a dense model.")
    packages, recording = directory / "packages" / "megatron", directory / "megatron_core.safetensors"
    packages.mkdir(parents=True)
    for path in _PACKAGE.iterdir():
        if path.name not in ("core", "__init__.py", "__pycache__"):
            (packages / path.name).symlink_to(path)
    job = {"config": asdict(config), "precision": precision, "recording": str(recording.resolve())}
    job |= {"batch": str(batch.resolve()), "weights": str(weights.resolve())}
    (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
    done = subprocess.run(
        [str(python), "-m", "megatron.comparison.megatron_core_recorder", str((directory / "job.json").resolve())],
        cwd=packages.parent,
        env={**os.environ, "PYTHONPATH": str(packages.parent.resolve())},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        (directory / "log.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"megatron-core does not run under {python}: {last}; read {directory}/log.txt, and install megatron-core, "
            "torch, numpy and safetensors in that environment."
        )
    return load_recording(recording)


# --- in the process of megatron-core --------------------------------------------------------------------------


def main(job: dict[str, Any]) -> None:
    config, batch, dtype = (
        TransformerConfig(**job["config"]),
        Batch.load(Path(job["batch"])),
        PRECISIONS[job["precision"]],
    )
    recording = batch.start_recording(dtype, head_size=config.kv_channels, kernels={"attention": "local"})
    weights = load_file(job["weights"])
    with Widened() if dtype == torch.float64 else nullcontext():
        model = _model(config, dtype)
        _load(model, weights, config)
        _watch(model, recording, config, batch)
        samples, length = batch.tokens.shape
        positions = torch.arange(length).expand(samples, -1)
        losses = model(batch.tokens, positions, _mask(batch), labels=batch.labels)  # [b, s]
        record_result(recording, "loss", losses, lambda one: one.reshape(-1, 1))
        loss = batch.mean(losses)
        loss.backward()
    for name, parameter in model.named_parameters():
        for direction, theirs in (("weight", parameter.detach()), ("weight_gradient", parameter.grad)):
            ours = torch.empty_like(theirs)
            ours[_our_rows(name, theirs, config)] = theirs
            recording.add(TensorName(direction, name.removeprefix("decoder.")), whole(ours))  # type: ignore[arg-type]
    finish(recording, loss)
    save_recording(Path(job["recording"]), recording)


def _model(config: TransformerConfig, dtype: torch.dtype) -> Any:
    """The model on a CPU, without kernels of other packages."""
    # An import statement would mean this repository's megatron.core to mypy.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    import_module("megatron.core.parallel_state").initialize_model_parallel(create_gloo_process_groups=False)
    # Attention asks for a tracker of random numbers, though its dropout is 0. This one does not read a GPU's generator.
    import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker(inference_rng_tracker=True)
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    theirs = import_module("megatron.core.transformer").TransformerConfig(
        **{name: getattr(config, name) for name in (*same, "qk_layernorm", "add_qkv_bias")},
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        transformer_impl="local",
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    return (
        import_module("megatron.core.models.gpt")
        .GPTModel(
            theirs,
            specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            rope_scaling=config.use_rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
        )
        .to(dtype)
    )


def _mask(batch: Batch) -> Tensor:
    """True where a query does not attend to a key, ``[b, 1, s, s]``: later tokens and other documents, in which
    megatron-core's rotations do not restart."""
    length = batch.tokens.shape[1]
    mask = torch.ones(len(batch.tokens), 1, length, length, dtype=torch.bool).triu(1)
    if batch.document_starts is not None:
        documents = batch.document_starts.cumsum(1)
        mask |= (documents.unsqueeze(2) != documents.unsqueeze(1)).unsqueeze(1)
    return mask


def _our_rows(name: str, theirs: Tensor, config: TransformerConfig) -> Tensor:
    """Our row for each row of one of megatron-core's parameters."""
    size, groups = config.kv_channels, config.num_query_groups
    halves = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))  # our places of both halves of a head
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return halves
    if ".linear_qkv." not in name:
        return torch.arange(len(theirs))
    heads = torch.arange(config.num_attention_heads + 2 * groups).unsqueeze(1) * size
    queries, keys, values = heads.split((config.num_attention_heads, groups, groups))
    parts = ((queries + halves).view(groups, -1), keys + halves, values + torch.arange(size))
    return torch.cat(parts, dim=1).flatten()


@torch.no_grad()
def _load(model: nn.Module, ours: dict[str, Tensor], config: TransformerConfig) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(ours[name.removeprefix("decoder.")][_our_rows(name, parameter, config)])


def _watch(model: Any, recording: Recording, config: TransformerConfig, batch: Batch) -> None:
    """Add the hooks of all modules, whose results are ``[s, b, columns]``."""
    size, queries, keys, ffn = config.kv_channels, config.query_size, config.key_value_size, config.ffn_hidden_size
    order = torch.argsort(_our_rows(".linear_qkv.", torch.empty(0), config))

    def matrix(result: Tensor) -> Tensor:
        return result.transpose(0, 1).reshape(batch.tokens.numel(), -1)

    def paired(result: Tensor) -> Tensor:
        """Both halves of every head as neighbouring columns."""
        return matrix(result).unflatten(1, (-1, 2, size // 2)).transpose(2, 3).flatten(1)

    def part(first: int, count: int, order: Tensor | slice = slice(None)) -> _AsMatrix:
        return lambda result: matrix(result)[:, order][:, first : first + count]

    def after(module: nn.Module, prefix: str = "", **parts: _AsMatrix) -> None:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            for name, as_matrix in parts.items():
                record_result(recording, prefix + name, result[0] if isinstance(result, tuple) else result, as_matrix)

        module.register_forward_hook(hook)

    def before(module: nn.Module, prefix: str, **parts: _AsMatrix) -> None:
        def hook(_: nn.Module, inputs: Any) -> None:
            for (name, as_matrix), one in zip(parts.items(), inputs):
                record_result(recording, prefix + name, one, as_matrix)

        module.register_forward_pre_hook(hook)

    after(model.embedding, embedding=matrix)
    for number, layer in enumerate(model.decoder.layers):
        own, attention, mlp = f"layers.{number}.", layer.self_attention, layer.mlp
        in_attention, in_mlp = f"{own}self_attention.", f"{own}mlp."
        after(layer.input_layernorm, own, input_layernorm=matrix)
        qkv = {"query": (0, queries), "key": (queries, keys), "value": (queries + keys, keys)}
        after(attention.linear_qkv, in_attention, **{name: part(*columns, order) for name, columns in qkv.items()})
        before(attention.core_attention, in_attention, rotated_query=paired, rotated_key=paired)
        before(attention.linear_proj, in_attention, core_attention=matrix)
        after(attention.linear_proj, in_attention, linear_proj=matrix)
        before(layer.pre_mlp_layernorm, own, attention_residual=matrix)
        after(layer.pre_mlp_layernorm, own, pre_mlp_layernorm=matrix)
        after(mlp.linear_fc1, in_mlp, gate=part(0, ffn), up=part(ffn, ffn))
        before(mlp.linear_fc2, in_mlp, activation=matrix)
        after(mlp, own, mlp=matrix)
        after(layer, own, output=matrix)
    after(model.decoder.final_layernorm, final_layernorm=matrix)
    after(model.output_layer, logits=matrix)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
