"""Texts in batches: the ids of transformers, of each prompt alone and of every layout; and why texts end."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.inference import GenerationConfig, LoadedModelConfig
from megatron.core.topology import single_process
from megatron.data.tokenizers import (
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)
from megatron.errors import ConfigError, DataError
from megatron.inference.cached_model import CachedModel
from megatron.inference.generator import Completion, NewToken, Sampler, Speed, TextStream, complete, generate_ids
from megatron.inference.loading import build_model
from tests.inference.random_model import MODELS, Layout, cached
from tests.model import reference as parity
from tests.rank_pool import RankPool

GREEDY = GenerationConfig(max_new_tokens=16, temperature=0.0)
DRAWN = replace(GREEDY, temperature=1.5, seed=7)
PROMPTS = ([5, 7, 11], [2], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])


def ids_of(
    model: CachedModel, prompts: Sequence[list[int]], config: GenerationConfig, stop_ids: Sequence[int] = ()
) -> list[list[int]]:
    """The new ids of every prompt."""
    texts: list[list[int]] = [[] for _ in prompts]
    for turn in generate_ids(model, prompts, config, stop_ids):
        for new in turn:
            texts[new.row].append(new.token)
    return texts


def ids_of_transformers(config: TransformerConfig, prompt: list[int]) -> tuple[CachedModel, list[int]]:
    """What transformers generates, and our model with the same weights."""
    theirs = parity.random_model(config).eval()
    with parity.fp32_means_fp64():
        ids = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=GREEDY.max_new_tokens, eos_token_id=None
        )
    weights = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    model = build_model(config, single_process(), torch.float64)
    parity.load(model, parity.to_global(theirs, weights, config))
    return CachedModel(model, single_process()), ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "scaled rope", "mixtral", "qwen3_moe"])
def test_greedy_ids_are_those_that_transformers_generates(name: str) -> None:
    model, wanted = ids_of_transformers(MODELS[name], PROMPTS[2])
    assert len(set(wanted)) > 3
    assert ids_of(model, PROMPTS, GREEDY)[2] == wanted


@pytest.mark.parametrize("config", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_batch_has_the_text_of_each_prompt_alone(config: GenerationConfig) -> None:
    model = cached("llama4_text")
    alone = [
        ids_of(model, [prompt], replace(config, seed=config.seed + number))[0] for number, prompt in enumerate(PROMPTS)
    ]
    assert all(len(set(ids)) > 3 for ids in alone)
    assert ids_of(model, PROMPTS, config) == alone


def test_the_seed_determines_the_text() -> None:
    model = cached("llama")
    first, same, other = (ids_of(model, PROMPTS, replace(DRAWN, seed=seed)) for seed in (7, 7, 8))
    assert first == same and first != other
    assert first[1] != other[0], "texts with the same seed have different prompts"


def ids_on_rank(layout: Layout, name: str) -> list[list[list[int]]]:
    model = cached(name, layout.topology)
    return [ids_of(model, PROMPTS, config, stop_ids=range(0, 60, 8)) for config in (GREEDY, DRAWN)]


@cache
def ids_alone(name: str) -> list[list[list[int]]]:
    return ids_on_rank(Layout(), name)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_all_ranks_have_the_ids_of_one_process(four_ranks: RankPool, layout: Layout, name: str) -> None:
    """Also when texts of a batch end before others."""
    assert len({len(text) for texts in ids_alone(name) for text in texts}) > 2
    for ids in four_ranks.run(ids_on_rank, layout, name, world_size=layout.tp * layout.pp):
        assert ids == ids_alone(name)


def test_texts_end_for_three_reasons() -> None:
    """Each at its own token; the others go on."""
    model = cached("llama")
    free = ids_of(model, PROMPTS, GREEDY)
    stop = next(token for token in free[0] if token not in free[1] + free[2])
    length = len(PROMPTS[2]) + 5
    turns = list(generate_ids(model, PROMPTS, replace(GREEDY, max_position_embeddings=length), stop_ids=(stop,)))
    last = {new.row: (turn, new) for turn, news in enumerate(turns) for new in news}
    assert last[0] == (free[0].index(stop), NewToken(0, stop, "end_of_document"))
    assert last[1] == (14, NewToken(1, free[1][14], "max_position_embeddings"))
    assert last[2] == (4, NewToken(2, free[2][4], "max_position_embeddings"))
    assert [news[-1].finish for news in generate_ids(model, PROMPTS[:1], GREEDY)] == [*[None] * 15, "max_new_tokens"]


def test_a_text_may_use_every_position_and_no_more() -> None:
    model = cached("llama")
    prompt = [token % 60 for token in range(model.max_length - 3)]
    assert [len(ids) for ids in ids_of(model, [prompt, prompt[3:]], GREEDY)] == [3, 6]
    with pytest.raises(DataError, match="Prompt 1 has 64 tokens, and a text has at most 64"):
        ids_of(model, [prompt, [1] * 64], GREEDY)
    (longer,) = ids_of(model, [prompt], replace(GREEDY, max_position_embeddings=100))
    assert len(longer) == GREEDY.max_new_tokens


def test_completions_have_the_new_text_and_count_its_tokens() -> None:
    model, speed = cached("llama"), Speed()
    tokenizer = NullTokenizer(60)
    free = ids_of(model, PROMPTS[:2], GREEDY)
    stop = next(token for token in free[0] if token not in free[1])
    count = free[0].index(stop)
    found = complete(model, tokenizer, ["5 7 11", "2"], GREEDY, stop_ids=(stop,), speed=speed)
    texts = ["".join(f" {token}" for token in ids) for ids in (free[0][:count], free[1])]
    assert found == [
        Completion("5 7 11", texts[0], count, "end_of_document"),
        Completion("2", texts[1], 16, "max_new_tokens"),
    ]
    assert (speed.prompt_tokens, speed.new_tokens) == (4, count + 15)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.1}, "--temperature -0.1 must be finite and not negative"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, "--top-p 1.1 must be above 0 and at most 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0 must be at least 1"),
        ({"max_position_embeddings": 0}, "--max-position-embeddings 0 must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(GREEDY, **changes).check()  # type: ignore[arg-type]


# --- the model's flags ---------------------------------------------------------------------------------------


HF: dict[str, Any] = {"load_hf": "model"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "Exactly one of --load and --load-hf is needed, and none of them is given: correct it."),
        (
            {"load": "a", "load_hf": "b"},
            "Exactly one of --load and --load-hf is needed, and both are given: correct it.",
        ),
        ({**HF, "ckpt_step": 3}, "--ckpt-step needs --load: add it, or remove --ckpt-step."),
        (
            {"load": "a", "load_hf_text_only": True},
            "--load-hf-text-only needs --load-hf: add it, or remove --load-hf-text-only.",
        ),
        ({**HF, "pipeline_model_parallel_size": 0}, "--pipeline-model-parallel-size 0 must be at least 1."),
        ({**HF, "expert_model_parallel_size": 0}, "--expert-model-parallel-size 0 must be at least 1."),
    ],
)
def test_mistakes_in_the_flags_of_a_model_are_one_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        LoadedModelConfig(**flags).check()
    assert str(found.value) == sentence


def test_a_checkpoint_or_a_directory_is_accepted() -> None:
    LoadedModelConfig(load="s3://bucket/run", ckpt_step=3).check()
    LoadedModelConfig(**HF, load_hf_text_only=True).check()


# --- sampling -----------------------------------------------------------------------------------------------


CONFIG = GenerationConfig(temperature=1.0, top_p=1.0)
DRAWS = 4000


def defined(logits: Tensor, config: GenerationConfig) -> Tensor:
    """The probabilities, token by token."""
    probabilities = torch.softmax(logits.double() / config.temperature, dim=0)
    kept, total = torch.zeros_like(probabilities), 0.0
    for number, token in enumerate(probabilities.argsort(descending=True).tolist()):
        if total < config.top_p and (number < config.top_k or not config.top_k):
            kept[token] = probabilities[token]
        total += float(probabilities[token])
    return kept / kept.sum()


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.7, "top_k": 2}, {"top_p": 0.95, "top_k": 600}],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [7, 700])
def test_frequencies_are_the_probabilities(changes: dict[str, float], vocabulary: int) -> None:
    """With a flat distribution over a large vocabulary, top-p needs more than the tokens that are sorted first."""
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * (1.5 if vocabulary == 7 else 0.3)
    numbers = range(DRAWS)
    drawn = Sampler(config, numbers).draw(logits.expand(DRAWS, -1), numbers)
    wanted = defined(logits, config)
    assert not wanted[drawn].eq(0).any(), "a token was drawn that is left out"
    counts = torch.bincount(torch.tensor(drawn), minlength=vocabulary)
    # In ranges of equal probability, which have enough draws each.
    groups = (wanted.cumsum(0) * 5).floor().clamp(max=4).long()
    share, expected = (torch.zeros(5, dtype=torch.float64).index_add_(0, groups, x.double()) for x in (counts, wanted))
    assert (share / DRAWS - expected).abs().max() < 5 * 0.5 / math.sqrt(DRAWS)


def test_the_nucleus_ends_where_its_probability_is_reached() -> None:
    """Of four equal tokens two have half of the probability."""
    drawn = Sampler(replace(CONFIG, top_p=0.5), range(DRAWS)).draw(torch.zeros(DRAWS, 4), range(DRAWS))
    assert len(set(drawn)) == 2


def test_temperature_0_and_one_token_of_top_k_are_greedy() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    for changes in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}):
        sampler = Sampler(replace(CONFIG, **changes), range(5))
        assert sampler.draw(logits, range(5)) == logits.argmax(dim=1).tolist()


def test_a_text_draws_the_same_with_any_others_beside_it() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    together = Sampler(CONFIG, range(4))
    first, second = together.draw(logits, range(4)), together.draw(logits[2:], [2, 3])
    alone = Sampler(replace(CONFIG, seed=CONFIG.seed + 2), [0])
    assert [alone.draw(logits[2:3], [0]), alone.draw(logits[2:3], [0])] == [[first[2]], [second[0]]]


# --- text ---------------------------------------------------------------------------------------------------


TEXTS = ("  def f(x):\n\treturn x ", "naïve façade: 東京 🙂🙃\n", " leading and  double spaces", "x", "\n\n", "5 7 11")


@pytest.fixture(params=["sentencepiece", "tiktoken", "tokenizers", "null"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    match request.param:
        case "sentencepiece":
            return SentencePieceTokenizer(request.getfixturevalue("sentencepiece_model"))
        case "tiktoken":
            return TikTokenizer(request.getfixturevalue("byte_ranks"))
        case "tokenizers":
            directory: Path = request.getfixturevalue("hugging_face_directory")
            return HuggingFaceTokenizer(str(directory))
        case _:
            return NullTokenizer(60)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: int) -> list[str]:
    """The parts of a text whose first ``prompt`` ids come together."""
    stream = TextStream(tokenizer)
    parts = [stream.add(ids[:prompt], is_last=prompt == len(ids))]
    return parts + [stream.add([ids[place]], is_last=place == len(ids) - 1) for place in range(prompt, len(ids))]


@pytest.mark.parametrize("prompt", [0, 1, 4])
def test_parts_add_up_to_the_text(tokenizer: Tokenizer, prompt: int) -> None:
    for text in TEXTS if not isinstance(tokenizer, NullTokenizer) else TEXTS[-1:]:
        ids = tokenizer.tokenize(text)
        assert "".join(streamed(tokenizer, ids, min(prompt, len(ids)))) == tokenizer.detokenize(ids)


def test_parts_of_random_ids_add_up(tokenizer: Tokenizer, chance: random.Random) -> None:
    """Also special tokens, and bytes that are no characters."""
    for _ in range(50):
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(1, 30))]
        assert "".join(streamed(tokenizer, ids, 1)) == tokenizer.detokenize(ids), ids


def test_text_comes_with_its_tokens_and_characters_are_whole(byte_ranks: str) -> None:
    tokenizer = TikTokenizer(byte_ranks)
    ids = tokenizer.tokenize("aé🙂!")
    assert len(ids) == 8, "one token for each byte"
    assert streamed(tokenizer, ids, 1) == ["a", "", "é", "", "", "", "🙂", "!"]
    # What is cut comes at the end.
    assert streamed(tokenizer, ids[:5], 1) == ["a", "", "é", "", "\ufffd"]
