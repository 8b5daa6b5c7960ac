"""Hugging Face's Llama with torch's AdamW as a contender of benchmarks/peers.py: eager or compiled, on one rank."""

import importlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_worker import MAX_NORM, Job, Step, adamw, loss_sum


def build(job: Job) -> Step:
    """A step of microbatches."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(**job.model, attn_implementation="sdpa", use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(job.torch_device, job.torch_dtype)
    model.load_state_dict(job.read_weights())
    optimizer = adamw(model.parameters())
    run: Any = torch.compile(model) if job.is_compiled else model

    def step(batch: Tensor) -> float:
        total = torch.zeros((), device=job.torch_device)
        for text in job.microbatches(batch):
            loss = loss_sum(run(input_ids=text[:, :-1]).logits, text[:, 1:]) / batch[:, 1:].numel()
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
