"""Hugging Face's Llama with torch's AdamW as a contender of benchmarks/peers.py.

Two ranks have torch's DistributedDataParallel, or what transformers itself makes of torch's FSDP2 and of its plan for
tensor parallelism. Its pipeline stages are for inference, and it has no context parallelism: these rows are left out.

In bf16 the weights stay in fp32 and the model computes under autocast, as with ``bf16`` of transformers' own trainer.
The variant ``main weights`` has bf16 weights beside fp32 main weights, as ours and megatron-core have. Either way the
optimizer holds fp32, so its work is equal. Bf16 weights alone are no contender: they lose small updates, and the loss
falls more slowly.
"""

import importlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib.peers.job import MAX_NORM, Job, Step, adamw, loss_sum

_MAIN_WEIGHTS = "main weights"


def build(job: Job) -> Step:
    """A step of microbatches."""
    model = _model(job)
    weights = list(model.parameters())
    mains = [nn.Parameter(one.detach().float()) for one in weights] if job.variant == _MAIN_WEIGHTS else []
    kinds = _kinds(mains or weights)
    optimizers = [adamw(kind) for kind in kinds]
    run: Any = torch.compile(model) if job.is_compiled else model
    if job.layout == "dp":
        run = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replicas, same = job.size("dp") * job.size("fsdp"), job.size("tp")

    def step(batch: Tensor) -> float:
        total = torch.zeros((), device=job.torch_device)
        texts = job.microbatches(batch)
        for number, text in enumerate(texts, start=1):
            with _sync(run, is_last=number == len(texts)):
                with nullcontext() if mains else job.autocast:
                    logits = run(input_ids=text[:, :-1]).logits
                loss = loss_sum(logits, text[:, 1:]) / batch[:, 1:].numel()
                (loss * replicas).backward()  # torch averages the gradients of the replicas
            total += loss.detach()
        for main, weight in zip(mains, weights, strict=False):
            main.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        _clip(kinds)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for main, weight in zip(mains, weights, strict=False):
            weight.data.copy_(main)
        return float(total) / same

    return step


def _model(job: Job) -> Any:
    """The model with the start weights."""
    transformers: Any = importlib.import_module("transformers")
    dtype = job.torch_dtype if job.variant == _MAIN_WEIGHTS else torch.float32
    if job.layout not in ("fsdp", "tp"):
        config = transformers.LlamaConfig(**job.model, attn_implementation="sdpa", use_cache=False)
        model = transformers.LlamaForCausalLM(config).to(job.torch_device, dtype)
        model.load_state_dict(job.read_weights())
        return model
    distributed: Any = importlib.import_module("transformers.distributed")
    model = transformers.LlamaForCausalLM.from_pretrained(
        job.weights,
        distributed_config=distributed.DistributedConfig(**{f"{job.layout}_size": job.ranks}),
        dtype=dtype,
        attn_implementation="sdpa",
        use_cache=False,
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(job.device == "cpu")  # gloo has no averages
    return model.train()


def _kinds(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Whole and divided parameters apart, because torch's fused kernels do not take a mixture."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return list(kinds.values())


def _sync(run: Any, is_last: bool) -> AbstractContextManager[None]:
    """DistributedDataParallel accumulates gradients without an all-reduce until the last microbatch."""
    return run.no_sync() if isinstance(run, DistributedDataParallel) and not is_last else nullcontext()


def _clip(kinds: Sequence[Sequence[nn.Parameter]]) -> None:
    """Clip the gradients of all ``kinds`` by their common norm."""
    norms = [nn.utils.get_total_norm([one.grad for one in kind if one.grad is not None]) for kind in kinds]
    norm = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).norm()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, MAX_NORM, norm)
