"""Multi-token prediction in every layout equals one process, and one process equals a slow definition.

The definition follows DeepSeek-V3 (arXiv 2412.19437, section 2.2), one sequence at a time, without the code of the
project.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.parallelize import build_model
from megatron.core.parameter import info_of
from megatron.core.topology import single_process
from tests.parallel.comparison import compare_balance, compare_with_one_process, one_process
from tests.parallel.layout_run import (
    BATCH,
    MODEL,
    SEED,
    SEQUENCE,
    Layout,
    Task,
    assemble,
    context,
    sample,
)
from tests.parallel.rows import identifier
from tests.parallel.tasks import ADAM_CLIPPED_HARD, DELAYED, MIX, MUON_TIED, SGD, full, selective
from tests.rank_pool import RankPool

TWO = replace(MODEL, mtp_num_layers=2, use_rope_scaling=False)
UNTIED = replace(SGD, model=TWO)
TIED = replace(ADAM_CLIPPED_HARD, model=replace(TWO, untie_embeddings_and_output_weights=False), steps=2)
DOCUMENTS = replace(UNTIED, masks_documents=True, resets_positions=True, z_loss_multiplier=0.1)
IN_DOCUMENTS = replace(DOCUMENTS, z_loss_multiplier=None)
DEEP = replace(TIED, model=replace(TIED.model, num_layers=4))
DEEP_UNTIED = replace(UNTIED, model=replace(TWO, num_layers=4))
EXPERTS = replace(MIX, model=replace(MIX.model, mtp_num_layers=1), steps=2)
LAYOUTS: tuple[tuple[Task, Layout], ...] = (
    (UNTIED, Layout(dp=2, microbatches=2, strategy="optim", bucket_size=3000, overlap_grad_reduce=True)),
    (UNTIED, Layout(pp=2, microbatches=2)),
    (TIED, Layout(pp=2, microbatches=2)),
    (TIED, Layout(pp=2, dp=2, microbatches=2, strategy="optim", bucket_size=3000, overlap_param_gather=True)),
    (UNTIED, Layout(tp=2, sequence_parallel=True, activations=full("uniform", 1, loss_chunk_size=7))),
    (TIED, Layout(tp=2, pp=2, activations=selective("core_attn", "mlp"))),
    (DOCUMENTS, Layout(cp=2, microbatches=2, pp=2)),
    (DOCUMENTS, Layout(tp=2, cp=2, sequence_parallel=True)),
    (DEEP, Layout(pp=2, microbatches=4, schedule="zb-h1")),
    (DEEP_UNTIED, Layout(pp=2, microbatches=4, schedule="zb-v", tp=2, sequence_parallel=True)),
    (DEEP, Layout(pp=2, microbatches=4, schedule="interleaved", chunks=2)),
    (DEEP_UNTIED, Layout(pp=2, dp=2, microbatches=2, strategy="optim_grads", overlap_grad_reduce=True)),
    (UNTIED, Layout(pp=2, dp=2, microbatches=2, strategy="optim_grads_params", overlap_param_gather=True)),
    (TIED, Layout(dp=2, microbatches=2, strategy="optim_grads_params")),
    (TIED, Layout(pp=2, dp=2, microbatches=2, strategy="optim_grads_params")),
    (UNTIED, Layout(pp=4, schedule="1f1b", microbatches=4, split="E|t|t|L")),
    (DEEP, Layout(pp=2, microbatches=4, schedule="dualpipe-v")),
    (replace(MUON_TIED, model=TIED.model, steps=2), Layout(pp=2, tp=2, microbatches=2)),
    (replace(DELAYED, model=TWO, steps=2), Layout(pp=2, tp=2, microbatches=2)),
)
EXPERT_LAYOUTS = (
    Layout(dp=2, ep=2, microbatches=2, dispatcher="alltoall"),
    Layout(tp=2, pp=2, sequence_parallel=True, ep=2, dispatcher="allgather", microbatches=2),
    Layout(dp=2, ep=2, pp=2, microbatches=2, strategy="optim_grads_params"),
    Layout(dp=2, strategy="optim_grads_params"),
)


@pytest.mark.parametrize(("task", "layout"), LAYOUTS, ids=identifier)
def test_layout_equals_one_process(four_ranks: RankPool, task: Task, layout: Layout) -> None:
    late = LAYOUTS.index((task, layout)) % 2 == 1
    compare_with_one_process(four_ranks, task, replace(layout, late=late))


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=identifier)
def test_experts_in_a_depth_equal_one_process(four_ranks: RankPool, layout: Layout) -> None:
    traces = compare_with_one_process(four_ranks, EXPERTS, layout)
    compare_balance(traces, one_process(EXPERTS))


class Definition:
    """The losses of one sequence, from global weights by name."""

    def __init__(self, weights: dict[str, Tensor], task: Task) -> None:
        self.weights, self.task = weights, task
        self.embedding = weights["embedding.word_embeddings.weight"]
        self.head = weights.get("output_layer.weight", self.embedding)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.task.model.norm_epsilon).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def layer(self, number: int, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        model, name = self.task.model, f"layers.{number}"
        heads, groups, size = model.num_attention_heads, model.num_query_groups, model.kv_channels
        normed = self.norm(f"{name}.input_layernorm", x)  # [s, h]
        qkv = normed @ self.weights[f"{name}.self_attention.linear_qkv.weight"].t()
        query, key, value = qkv.unflatten(-1, (-1, size)).split((heads, groups, groups), dim=1)  # [s, heads, d]
        frequencies = model.rotary_base ** (-2.0 * torch.arange(size // 2, dtype=torch.float64) / size)
        angles = positions[:, None] * frequencies  # [s, d / 2]
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        query, key = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for one in (query, key)
        )
        key, value = (one.repeat_interleave(heads // groups, dim=1) for one in (key, value))
        scores = torch.einsum("qnd,knd->nqk", query, key) / math.sqrt(size)
        probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        attended = torch.einsum("nqk,knd->qnd", probabilities, value).flatten(1)
        x = x + attended @ self.weights[f"{name}.self_attention.linear_proj.weight"].t()
        normed = self.norm(f"{name}.pre_mlp_layernorm", x)
        gate, up = (normed @ self.weights[f"{name}.mlp.linear_fc1.weight"].t()).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.weights[f"{name}.mlp.linear_fc2.weight"].t()

    def losses(self, one: dict[str, Tensor]) -> list[list[Tensor]]:
        """The losses of the unmasked tokens, of the next token and of every depth."""
        model, text = self.task.model, [*one["tokens"].tolist(), int(one["labels"][-1])]
        starts = [place == 0 or bool(one["document_starts"][place]) for place in range(SEQUENCE)]
        document = [sum(starts[: place + 1]) for place in range(SEQUENCE)]
        numbers, visible = torch.arange(SEQUENCE), torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        positions = numbers.double()
        if self.task.masks_documents:
            visible &= torch.tensor(document)[:, None] == torch.tensor(document)
        if self.task.resets_positions:
            positions = torch.tensor([float(place - document.index(document[place])) for place in range(SEQUENCE)])
        x = self.embedding[one["tokens"]]
        for number in range(model.num_layers):
            x = self.layer(number, x, positions, visible)
        hidden, found = self.norm("final_layernorm", x), []
        for depth in range(model.mtp_num_layers + 1):
            if depth > 0:
                name = f"layers.{model.num_layers + depth - 1}"
                ahead = [text[place + depth] if place + depth <= SEQUENCE else 0 for place in range(SEQUENCE)]
                both = [self.norm(f"{name}.enorm", self.embedding[ahead]), self.norm(f"{name}.hnorm", hidden)]
                x = torch.cat(both, dim=-1) @ self.weights[f"{name}.eh_proj.weight"].t()
                x = self.layer(model.num_layers + depth - 1, x, positions, visible)
                hidden = self.norm(f"{name}.final_layernorm", x)
            scores, kept = (hidden @ self.head.t()).log_softmax(dim=-1), []
            for place in range(SEQUENCE - depth):
                is_inside = document[place] == document[place + depth] or not self.task.marks_documents
                if one["loss_mask"][place + depth] and is_inside:
                    kept.append(-scores[place, text[place + depth + 1]])
            found.append(kept)
        return found


@pytest.mark.parametrize("task", [UNTIED, replace(TIED, optimizer=UNTIED.optimizer), IN_DOCUMENTS], ids=identifier)
def test_one_process_takes_the_step_of_the_definition(task: Task) -> None:
    """Loss, metrics and every gradient of the first step, by autograd."""
    model = build_model(task.model, context(single_process(), Layout()), SEED)
    weights = {}
    for parameter in model.parameters():
        info = info_of(parameter)
        weights[info.name] = parameter.detach()[: info.global_shape[0]].clone().requires_grad_()
    definition = Definition(weights, task)
    losses: list[list[Tensor]] = [[] for _ in range(task.model.mtp_num_layers + 1)]
    for index in range(BATCH):
        for kept, more in zip(losses, definition.losses(sample(index))):
            kept += more
    assert len({len(kept) for kept in losses}) == len(losses), "each depth has its own number of tokens"
    main, *depths = (torch.stack(kept).mean() for kept in losses)
    factor = task.mtp_loss_scaling_factor / len(depths)
    torch.autograd.backward(main + factor * sum(depths))
    trace = one_process(task)
    assert trace.losses[0] == pytest.approx(main.item(), rel=1e-12)
    wanted = {f"mtp_{number + 1}_loss": pytest.approx(loss.item(), rel=1e-12) for number, loss in enumerate(depths)}
    assert trace.auxiliary[0] == wanted
    gradients = assemble(trace.gradients[0])
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        assert (gradients[name] - weight.grad).abs().max() < 1e-12 * weight.grad.abs().max() + 1e-18, name
