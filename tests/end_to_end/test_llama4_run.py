"""A tiny Llama 4 as a user has it: training from layout to layout, text, and the same text from transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Llama4ForCausalLM

from megatron.core.ops.documents import Documents
from megatron.core.topology import single_process
from megatron.inference.cached_model import CachedModel
from megatron.inference.loading import load_model
from tests.end_to_end.run_process import (
    Corpus,
    FlagValue,
    assert_close,
    call_training,
    flags_of,
    fork_training,
    grad_norms,
    latest_iteration,
    losses,
    records,
    run_tool,
    tiny_corpus,
)

CHUNK, FLOOR, LENGTH = 8, 4, 32
LLAMA4: dict[str, FlagValue] = {
    "num_layers": 4,
    "seq_length": LENGTH,
    "no_rope_freq": "4",
    "attention_chunk_size": CHUNK,
    "qk_l2_norm": True,
    "attention_temperature_tuning": True,
    "attention_temperature_floor": FLOOR,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]*2",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
PROMPT = "import os\n\n\ndef read_file(path):\n    with open(path) as file:\n        return "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The session's corpus."""
    return tiny_corpus(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process, whose loss has fallen."""
    directory = tmp_path_factory.mktemp("llama4")
    metrics = directory / "metrics.jsonl"
    run: dict[str, FlagValue] = {"train_iters": 30, "eval_interval": 30, "eval_iters": 2}
    call_training(flags_of(corpus, save=directory, metrics_jsonl=metrics, **run, **LLAMA4)).succeeded()
    found = losses(metrics)
    (evaluated,) = [record["validation_loss"] for record in records(metrics) if "validation_loss" in record]
    assert max(found[-1], evaluated) < found[0] - 0.5
    return directory


@pytest.fixture(scope="module")
def theirs(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Llama4ForCausalLM:
    """The model that transformers loads from the export."""
    exported = tmp_path_factory.mktemp("export") / "hf"
    run_tool("tools/convert_checkpoint.py", "to-hf", "--load", trained, "--hf", exported)
    model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager", dtype=torch.float32)
    assert isinstance(model, Llama4ForCausalLM)
    return model.eval()


def test_a_run_goes_from_layout_to_layout_and_equals_one_process(corpus: Corpus, tmp_path: Path) -> None:
    """Tensor and expert parallelism, then context parallelism, whose ranks hold parts of chunks, then a pipeline whose
    last stage has the layer without rotary position embedding, then one process, in fp64."""
    alone, relay, save = tmp_path / "alone.jsonl", tmp_path / "relay.jsonl", tmp_path / "checkpoints"
    documents: dict[str, FlagValue] = {"reset_attention_mask": True, "reset_position_ids": True, "fp64": True}
    call_training(flags_of(corpus, metrics_jsonl=alone, **documents, **LLAMA4)).succeeded()
    common = flags_of(corpus, metrics_jsonl=relay, save=save, load=save, **documents, **LLAMA4)
    layouts = [
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer",
        "--context-parallel-size 2 --expert-model-parallel-size 2 --use-torch-fsdp2",
        "--pipeline-model-parallel-size 2",
    ]
    for number, layout in enumerate(layouts):
        iteration = 2 * (number + 1)
        fork_training([*common, *layout.split(), "--exit-interval", str(iteration)], processes=2).succeeded()
        assert latest_iteration(save) == iteration
    call_training(common).succeeded()
    assert_close(losses(relay), losses(alone), 1e-9)
    assert_close(grad_norms(relay), grad_norms(alone), 1e-9)


def next_logits(checkpoint: Path, texts: Iterator[list[int]]) -> Iterator[Tensor]:
    """What the generator computes after each text, from its tokens, and from the last one and the cache."""
    from_all, from_last = (
        CachedModel(load_model(str(checkpoint), single_process()).model, single_process()) for _ in range(2)
    )
    for ids in texts:
        for logits in (from_all.start([ids, ids], len(ids)), from_last.start([ids], len(ids))):
            assert logits is not None
            yield logits[0]


@torch.no_grad()
def test_the_borders_of_chunks_are_right_after_prompts_of_every_length(
    trained: Path, theirs: Llama4ForCausalLM
) -> None:
    ids = torch.randint(theirs.config.vocab_size, (3 * CHUNK + 2,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [ids[: length + 1] for length in range(len(ids))]
    found = next_logits(trained, iter(prompts))
    for prompt in prompts:
        wanted = theirs(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(next(found), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(next(found), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_document_of_a_sequence_is_what_transformers_computes_of_it_alone(
    trained: Path, theirs: Llama4ForCausalLM
) -> None:
    """With positions that restart and attention inside documents, also the temperature."""
    lengths = (5, 2 * CHUNK + 3, 1, CHUNK + 1)
    generator = torch.Generator().manual_seed(2)
    alone = [torch.randint(theirs.config.vocab_size, (1, length), generator=generator) for length in lengths]
    starts = torch.cat([torch.arange(length) == 0 for length in lengths]).unsqueeze(0)
    documents = Documents(starts, masks_attention=True, resets_positions=True, device=torch.device("cpu"))
    model = load_model(str(trained), single_process(), with_cache=False).model
    found = model.chunks[0](torch.cat(alone, dim=1), documents)[:, 0, : theirs.config.vocab_size]  # [s, v]
    wanted = torch.cat([theirs(ids, use_cache=False).logits[0] for ids in alone])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def greedy(model: Llama4ForCausalLM, ids: list[int], count: int) -> list[int]:
    """The ids that transformers adds, each from the whole text."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids


@torch.no_grad()
def test_text_is_what_transformers_generates_from_the_export(trained: Path, theirs: Llama4ForCausalLM) -> None:
    """From a prompt longer than a chunk to one longer than the sequences of the training, across borders of chunks; in
    one process and with the tensor and expert parallelism of two."""
    tokenizer = load_model(str(trained), single_process()).tokenizer
    prompt = tokenizer.tokenize(PROMPT)
    assert len(prompt) > 2 * CHUNK
    count = 3 * CHUNK
    ids = greedy(theirs, prompt, count)
    assert tokenizer.eod not in ids
    wanted = tokenizer.detokenize(ids) + "\n"
    longest = ("--max-new-tokens", count, "--max-position-embeddings", len(prompt) + count)
    arguments = ("--load", trained, "--prompt", PROMPT, "--temperature", 0, *longest)
    assert run_tool("tools/generate_text.py", *arguments) == wanted
    assert run_tool("tools/generate_text.py", *arguments, processes=2) == wanted
