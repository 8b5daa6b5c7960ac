"""megatron-core's GPT model with its local layers (no Transformer Engine) as a contender of benchmarks/peers.py.

Data parallelism, schedules, gradient clipping and the optimizer's main weights are megatron-core's. Its Adam would be a
fused kernel of another package for GPUs; torch's fused AdamW stands for it. The local layers have no sequence
parallelism (torch's RMSNorm refuses it) and no context parallelism.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.lib.peers.job import MAX_NORM, Job, Step, adamw


def build(job: Job) -> Step:
    """A step of megatron-core's schedule."""
    if job.device == "cpu":
        _allow_cpu()
    _module("parallel_state").initialize_model_parallel(
        job.size("tp"),
        job.size("pp"),
        context_parallel_size=job.size("cp"),
        create_gloo_process_groups=False,
    )
    # Attention asks for a tracker of random numbers, though its dropout is 0. This one does not read a GPU's generator.
    _module("tensor_parallel").get_cuda_rng_tracker(inference_rng_tracker=True)
    config = _config(job)
    model = _model(job, config)
    wrapped = _wrap(job, config, model)
    optimizer = _optimizer(job, wrapped)
    run = _module("pipeline_parallel").get_forward_backward_func()
    if job.layout != "fsdp":  # FSDP2 has reduced the gradients, and its wrapper lacks an argument of this function
        config.finalize_model_grads_func = _module("distributed").finalize_model_grads
    length = job.model["max_position_embeddings"]
    positions = torch.arange(length, device=job.torch_device).unsqueeze(0)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=job.torch_device).triu(1)  # true: not attended to

    def forward(texts: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        text = next(texts)
        return chunk(text[:, :-1], positions, mask, labels=text[:, 1:]), _mean_loss

    def step(batch: Tensor) -> float:
        texts = job.microbatches(batch)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward,
            data_iterator=iter(texts),
            model=[wrapped],
            num_microbatches=len(texts),
            seq_length=length,
            micro_batch_size=job.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        # Ranks of the last stage have losses: means over microbatches of equal size, which all ranks of tensor
        # parallelism have.
        shares = job.size("tp") * job.size("dp") * job.size("fsdp") * len(texts)
        return float(sum(losses)) / shares

    return step


def _module(name: str) -> Any:
    """``megatron.core.NAME``; an import statement would mean this repository's ``megatron.core`` to mypy."""
    return importlib.import_module(f"megatron.core.{name}")


def _allow_cpu() -> None:
    """Replace what megatron-core calls without asking whether there is a GPU; nothing here takes time in a step."""
    # Weights, gradient buffers and received activations are allocated there.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # The schedules' number of tokens, the gradient norm and the loss scale are scalars with device="cuda".
    for name in ("zeros", "tensor"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))
    # The optimizer and clipping accept only tensors whose type is called torch.cuda.FloatTensor or alike.
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda self: type_of(self).replace("torch.", "torch.cuda.")  # type: ignore


def _on_cpu(make: Callable[..., Tensor], *values: Any, **options: Any) -> Tensor:
    """``make`` without the device ``cuda``."""
    if options.get("device") == "cuda":
        del options["device"]
    return make(*values, **options)


def _config(job: Job) -> Any:
    """The fields of ``config.json`` by megatron-core's names; kernels of other packages are off."""
    model, transformer = job.model, _module("transformer")
    return transformer.TransformerConfig(
        num_layers=model["num_hidden_layers"],
        hidden_size=model["hidden_size"],
        ffn_hidden_size=model["intermediate_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_key_value_heads"],
        kv_channels=model["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=model["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        transformer_impl="local",
        bf16=job.dtype == "bf16",
        params_dtype=job.torch_dtype,
        pipeline_dtype=job.torch_dtype,
        tensor_model_parallel_size=job.size("tp"),
        pipeline_model_parallel_size=job.size("pp"),
        context_parallel_size=job.size("cp"),
        use_cpu_initialization=job.device == "cpu",
        batch_p2p_sync=job.device == "cuda",
        deallocate_pipeline_outputs=True,
    )


def _model(job: Job, config: Any) -> Any:
    """This rank's part of the model with the start weights."""
    stage, stages = (job.rank, job.ranks) if job.layout == "pp" else (0, 1)
    spec = _module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization="RMSNorm")
    model = _module("models.gpt").GPTModel(
        config,
        spec,
        vocab_size=job.model["vocab_size"],
        max_sequence_length=job.model["max_position_embeddings"],
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=job.model["rope_theta"],
    )
    model.to(job.torch_device, job.torch_dtype)
    weights = megatron_weights(job.read_weights(), job.model, job.size("tp"))
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"decoder.layers.{int(layer) + stage * config.num_layers // stages}.{rest}"
        weight = weights[name]
        if getattr(parameter, "tensor_model_parallel", False):
            weight = weight.chunk(job.size("tp"), parameter.partition_dim)[job.rank if job.layout == "tp" else 0]
        parameter.data.copy_(weight)
    return model


def megatron_weights(source: dict[str, Tensor], model: dict[str, Any], tp: int) -> dict[str, Tensor]:
    """The whole weights by megatron-core's names, in the order in which ``tp`` ranks divide them."""
    groups = model["num_key_value_heads"]
    weights = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        "output_layer.weight": source["lm_head.weight"],
    }
    for layer in range(model["num_hidden_layers"]):
        theirs, ours = f"decoder.layers.{layer}", f"model.layers.{layer}"
        # Each query group has the rows of its queries, key and value.
        qkv = [source[f"{ours}.self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv"]
        # Rows of rank 0's gate, rank 0's up projection, rank 1's gate, and so on.
        fc1 = [source[f"{ours}.mlp.{name}_proj.weight"].unflatten(0, (tp, -1)) for name in ("gate", "up")]
        weights |= {
            f"{theirs}.self_attention.linear_qkv.weight": torch.cat(qkv, dim=1).flatten(0, 1),
            f"{theirs}.self_attention.linear_proj.weight": source[f"{ours}.self_attn.o_proj.weight"],
            f"{theirs}.mlp.linear_fc1.weight": torch.cat(fc1, dim=1).flatten(0, 1),
            f"{theirs}.mlp.linear_fc2.weight": source[f"{ours}.mlp.down_proj.weight"],
            f"{theirs}.input_layernorm.weight": source[f"{ours}.input_layernorm.weight"],
            f"{theirs}.pre_mlp_layernorm.weight": source[f"{ours}.post_attention_layernorm.weight"],
        }
    return weights


def _wrap(job: Job, config: Any, model: Any) -> Any:
    """The model with main gradients in fp32, which are reduced over the ranks of data parallelism."""
    distributed = _module("distributed")
    ddp = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if job.layout == "fsdp":
        return _wrap_fsdp(job, config, ddp, model)
    return distributed.DistributedDataParallel(config, ddp, model)


def _wrap_fsdp(job: Job, config: Any, ddp: Any, model: Any) -> Any:
    """The model with weights, gradients and optimizer state divided by torch's FSDP2."""
    module = _module("distributed.torch_fully_sharded_data_parallel")
    if job.device == "cpu":
        # The device of the mesh is a constant, "cuda".
        module.DeviceMesh = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))
    wrapped = module.TorchFullyShardedDataParallel(config, ddp, model)
    for part in wrapped.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(job.device == "cpu")  # gloo has no averages
    return wrapped


def _optimizer(job: Job, model: nn.Module) -> Any:
    """megatron-core's optimizer, which clips gradients and keeps main weights in fp32."""
    optimizer = _module("optimizer.optimizer")
    config = optimizer.OptimizerConfig(clip_grad=MAX_NORM, bf16=job.dtype == "bf16")
    inner = adamw(model.parameters())
    if job.dtype == "bf16":
        return optimizer.Float16OptimizerWithFloat16Params(inner, config, None, lambda *_: None)
    return optimizer.FP32Optimizer(inner, config, lambda *_: None)


def _mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of a microbatch's losses ``[b, s]``, to differentiate and to report."""
    mean = losses.mean()
    return mean, mean.detach().clone()  # a copy, because the schedule divides the loss in place
