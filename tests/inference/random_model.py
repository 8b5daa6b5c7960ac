"""Random models, and their logits without a cache."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.architectures.catalog import ARCHITECTURES
from megatron.architectures.transformer_config import TransformerConfig
from megatron.core.models.transformer import TransformerModel
from megatron.core.parameter import initialize_parameters
from megatron.core.topology import RankGrid, Topology, single_process
from megatron.inference.cached_model import CachedModel
from megatron.inference.loading import build_model
from tests.model.llama4 import CASES, CHUNK, llama4_config
from tests.model.reference import CPU, YARN_VARIANTS, architecture
from tests.whole_model import logits_of

TOLERANCE = 1e-9
MODELS: dict[str, TransformerConfig] = {
    name: architecture(scaling=False, tied=name == "qwen2", tp=1, family=name)
    for name in ARCHITECTURES
    if name != "llama4_text"
} | {
    "scaled rope": architecture(scaling=True, tied=True, tp=1),
    "yarn": replace(YARN_VARIANTS["short"], max_position_embeddings=64),
    "windows": replace(architecture(scaling=False, tied=False, tp=1), window_size="4,0", window_attn_skip_freq="2"),
    "sinks": replace(architecture(scaling=False, tied=False, tp=1), window_size="4,0", softmax_type="learnable"),
    "off by one": replace(architecture(scaling=False, tied=False, tp=1), softmax_type="off-by-one"),
    "capped": replace(architecture(scaling=False, tied=False, tp=1), window_size="2,0", attn_logit_softcapping=1.0),
    "llama4_text": llama4_config(**CASES["scout"]),
    "llama4 with dense layers": llama4_config(**CASES["maverick with scaling"]),
}
PROMPTS = (3, 1, CHUNK + 5)
"""Lengths: rows are at different places of a chunk, and in different chunks."""
STEPS, ROWS_END_AT = 2 * CHUNK + 2, {5: (0, 2), 11: (1,)}
"""The passes after the prompts; the rows that go on after some of them."""


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def topology(self) -> Topology:
        if self.tp * self.pp == 1:
            return single_process()
        grid = RankGrid(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.tp // self.ep)
        return Topology(grid, torch.distributed.get_rank(), CPU)


def random_model(config: TransformerConfig, topology: Topology, with_cache: bool) -> TransformerModel:
    """In fp64, with the same weights in every layout."""
    model = build_model(config, topology, torch.float64, with_cache)
    initialize_parameters(model.parameters(), seed=3)
    return model


def cached(name: str, topology: Topology | None = None, num_ids: int | None = None) -> CachedModel:
    """One of the models with a cache; without a topology in one process."""
    topology = topology or single_process()
    return CachedModel(random_model(MODELS[name], topology, with_cache=True), topology, num_ids)


def texts_of(config: TransformerConfig) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(config.vocab_size, (length + STEPS,), generator=generator).tolist() for length in PROMPTS]


def whole_logits(config: TransformerConfig, text: list[int]) -> Tensor:
    """The logits after every token of a text alone, from one pass without a cache, ``[s, v]``."""
    model = random_model(config, single_process(), with_cache=False)
    with torch.no_grad():
        return logits_of(model, torch.tensor([text]))[:, 0, : config.vocab_size]
