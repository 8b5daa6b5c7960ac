#!/usr/bin/env python3
"""Seconds per generated token on one CPU core: this code and ``generate`` of transformers, on the same models.

    python benchmarks/benchmark_generate.py [--turns 9] [--rows small] [--json OUT]

Both continue the same prompt greedily by the same number of tokens, in turns within one process, so that the ratios
hold on a noisy machine. A turn includes the prompt.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch reads them.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch

from benchmarks.benchmark_cpu import MODEL
from megatron.architectures.transformer_config import TransformerConfig
from megatron.commands.tool import run_tool
from megatron.config.inference import GenerationConfig
from megatron.core.parameter import initialize_parameters
from megatron.core.topology import single_process
from megatron.flags import require_at_least
from megatron.inference.cached_model import CachedModel
from megatron.inference.generator import generate_ids
from megatron.inference.loading import build_model
from megatron.training.initialize import Process, prepare_cpu
from megatron.urls import refuse_urls

SMALL = replace(MODEL, max_position_embeddings=2048)
LARGE = TransformerConfig(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=2048,
    num_attention_heads=12,
    num_query_groups=4,
    kv_channels=64,
    vocab_size=32000,
    padded_vocab_size=32000,
    max_position_embeddings=2048,
)
MODELS = {"small (6 M)": SMALL, "large (124 M)": LARGE}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BenchmarkConfig:
    """How long to measure."""

    turns: int = 9
    """Turns of each side; the median counts."""
    prompt_tokens: int = 32
    """Tokens of the prompt."""
    new_tokens: int = 64
    """New tokens of a turn."""
    batch_size: int = 1
    """Prompts that are continued at once."""
    rows: str = ""
    """Measure only the rows whose name contains this."""
    json: str | None = None
    """File for the figures."""

    def check(self) -> None:
        sizes = {"--turns": self.turns, "--prompt-tokens": self.prompt_tokens, "--new-tokens": self.new_tokens}
        require_at_least(2, {"--turns": self.turns})
        require_at_least(1, {**sizes, "--batch-size": self.batch_size})
        refuse_urls({"--json": self.json}, "write to a local path")


def ours(model: TransformerConfig, dtype: torch.dtype, prompts: list[list[int]], count: int) -> Callable[[], object]:
    """Generation by this code."""
    built = build_model(model, single_process(), dtype)
    initialize_parameters(built.parameters(), seed=1)
    cached, config = CachedModel(built, single_process()), GenerationConfig(max_new_tokens=count, temperature=0.0)

    def generate() -> int:
        cached.forget()
        return sum(len(turn) for turn in generate_ids(cached, prompts, config))

    return generate


def theirs(model: TransformerConfig, dtype: torch.dtype, prompts: list[list[int]], count: int) -> Callable[[], object]:
    """Generation by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=False,
    )
    built: Any = LlamaForCausalLM(config)
    built.to(dtype).eval()
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)

    def generate() -> object:
        return built.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
        )

    return generate


def seconds_of(generate: Callable[[], object]) -> float:
    started = time.perf_counter()
    generate()
    return time.perf_counter() - started


def measure(config: BenchmarkConfig, model: TransformerConfig, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds per token of both sides, and the ratio of the turns."""
    generator = torch.Generator().manual_seed(0)
    shape = config.batch_size, config.prompt_tokens
    prompts: list[list[int]] = torch.randint(model.vocab_size, shape, generator=generator).tolist()
    sides = [build(model, dtype, prompts, config.new_tokens) for build in (ours, theirs)]
    times: list[list[float]] = [[], []]
    for turn in range(-1, config.turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            seconds = seconds_of(sides[side])
            if turn >= 0:  # the first turn warms up
                times[side].append(seconds)
    ratios = [one / other for one, other in zip(*times, strict=True)]
    low, *_, high = quantiles(ratios, n=10, method="inclusive")
    milliseconds = [1000 * median(side) / config.new_tokens for side in times]
    return {
        "ours_ms": milliseconds[0],
        "transformers_ms": milliseconds[1],
        "ratio": median(ratios),
        "ratio_10": low,
        "ratio_90": high,
    }


def measure_all(config: BenchmarkConfig) -> None:
    """Measure, and report."""
    config.check()
    prepare_cpu(Process(has_thread_count=True))
    print("row                     ours ms/token   transformers ms/token   ratio (10 to 90 %)")
    results = {}
    for name, model in MODELS.items():
        for dtype_name, dtype in DTYPES.items():
            row = f"{name} {dtype_name}"
            if config.rows not in row:
                continue
            found = results[row] = measure(config, model, dtype)
            interval = f"{found['ratio']:.2f} ({found['ratio_10']:.2f} to {found['ratio_90']:.2f})"
            print(f"{row:22}  {found['ours_ms']:13.2f}   {found['transformers_ms']:21.2f}   {interval}", flush=True)
    if config.json is not None:
        Path(config.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


main = partial(run_tool, BenchmarkConfig, measure_all, __doc__)

if __name__ == "__main__":
    sys.exit(main())
