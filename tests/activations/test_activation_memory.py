"""What layers keep for their backward pass, with all activations kept, recomputed, or in the host's memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from megatron.architectures.transformer_config import TransformerConfig
from megatron.config.activations import ActivationConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.activations import HostCopies, Offloaded, PlainCopies, TensorPair
from megatron.core.data_parallel.buffer import ParameterBuffer
from megatron.core.gradient import DeferredWeightGrad, compute_deferred
from megatron.core.models.layer import TransformerLayer
from megatron.core.models.parallelize import build_model
from megatron.core.models.transformer import TransformerChunk, TransformerModel
from megatron.core.topology import single_process
from megatron.schedules.stages import VirtualStage
from tests.parallel.layout_run import CPU, Layout, context
from tests.parallel.tasks import full, selective
from tests.storage_watch import PeakWatch, StorageWatch

LAYERS, LENGTH, ROWS, ITEM = 4, 32, 2, 8
MODEL = TransformerConfig(
    num_layers=LAYERS, hidden_size=32, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2,
    kv_channels=8, vocab_size=8, padded_vocab_size=8, max_position_embeddings=LENGTH,
)  # fmt: skip
H, Q, G, F, N = (
    MODEL.hidden_size,
    MODEL.query_size,
    MODEL.key_value_size,
    MODEL.ffn_hidden_size,
    MODEL.num_attention_heads,
)
ALL = 4 * H + 2 * Q + 2 * G + 3 * F + N + 2
"""Numbers per token and layer: inputs of norms, the query-key-value and the first MLP product, and a number for each
norm; what attention attends with and to, and a number for each head; both sides of SwiGLU."""


def on_host(layers: int, activations: ActivationConfig | None = None) -> ActivationConfig:
    return replace(activations or ActivationConfig(), cpu_offloading_num_layers=layers)


FP8 = PrecisionConfig(bf16=True, fp8_format="hybrid")


def build(
    activations: ActivationConfig, fp8: PrecisionConfig | None = None
) -> tuple[TransformerModel, TransformerChunk, ParameterBuffer]:
    """The layers between embedding and head, with a gradient buffer."""
    middle = VirtualStage(range(LAYERS), has_embedding=False, has_output_layer=False)
    model = build_model(MODEL, context(single_process(), Layout(), precision=fp8), 1, [middle], activations)
    (chunk,) = model.chunks
    assert isinstance(chunk, TransformerChunk)
    with torch.no_grad():
        # The rotations, which stay, as quantised weights do.
        chunk(torch.zeros(LENGTH, ROWS, H, dtype=torch.float64))
    return model, chunk, ParameterBuffer(list(model.parameters()), torch.float64, shards=1)


def copy_with(chunk: TransformerChunk, copies: HostCopies) -> None:
    """Let the offloaded layers of ``chunk`` copy with ``copies``."""
    for layer in chunk.layers:
        if isinstance(layer, Offloaded):
            layer.copies = copies


def received() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(LENGTH, ROWS, H, dtype=torch.float64, generator=generator).requires_grad_()


def forward(chunk: TransformerChunk, hidden: Tensor) -> tuple[GradientEdge, Tensor]:
    """The root of the graph, and a gradient for it."""
    outputs = chunk(hidden)
    return get_gradient_edge(outputs), torch.ones_like(outputs)


def numbers(watch: StorageWatch) -> float:
    """What is there, in numbers per token, without the gradient of the outputs."""
    return watch.live_bytes() / (ITEM * LENGTH * ROWS) - H


KEPT = {
    "everything": (ActivationConfig(), LAYERS * ALL),
    "core_attn": (selective("core_attn"), LAYERS * (ALL - Q - N)),
    "layernorm": (selective("layernorm"), LAYERS * (ALL - 2 * H - 2)),
    "mlp_act": (selective("mlp_act"), LAYERS * (ALL - F)),
    "mlp": (selective("mlp"), LAYERS * (ALL - 3 * F - H - 1)),
    "mlp and layernorm": (selective("mlp", "layernorm"), LAYERS * (ALL - 3 * F - 2 * H - 2)),
    "three": (selective("core_attn", "layernorm", "mlp_act"), LAYERS * (2 * H + Q + 2 * G + 2 * F)),
    "uniform 1": (full("uniform", 1), LAYERS * H),
    "uniform 2": (full("uniform", 2), LAYERS * H / 2),
    "uniform 3": (full("uniform", 3), 2 * H),
    "block 1": (full("block", 1), H + (LAYERS - 1) * ALL),
    "block 3": (full("block", 3), 3 * H + ALL),
}


@pytest.mark.parametrize("mode", KEPT)
def test_between_forward_and_backward_that_much_is_kept(mode: str) -> None:
    """The formulas of docs/memory.md; the first layer's input was there before."""
    activations, expected = KEPT[mode]
    _, chunk, _ = build(activations)
    hidden = received()
    with StorageWatch() as watch:
        edge, gradient = forward(chunk, hidden)
    assert numbers(watch) == expected - H
    torch.autograd.backward(edge, gradient)
    assert numbers(watch) == 0, "something outlives the backward pass"


FP8_KEPT = {
    "everything": (ActivationConfig(), ALL - 2 * H - F, 2 * H + Q + F, 4),
    "mlp_act": (selective("mlp_act"), ALL - 2 * H - F, 2 * H + Q, 3),
    "layernorm": (selective("layernorm"), ALL - 2 * H - F - 2, Q + F, 2),
    "full": (full("uniform", 1), H, 0, 0),
}
"""Numbers per token and layer, numbers of one byte, and scales per layer."""


@pytest.mark.parametrize("mode", FP8_KEPT)
def test_in_fp8_the_inputs_of_linear_layers_are_bytes(mode: str) -> None:
    """That of the output projection beside attention's own; and on the host are neither scales nor weights."""
    activations, numbers_kept, bytes_kept, scales = FP8_KEPT[mode]
    _, chunk, _ = build(activations, FP8)
    hidden = received()
    with StorageWatch() as watch:
        _, gradient = forward(chunk, hidden)
    expected = LAYERS * LENGTH * ROWS * (ITEM * numbers_kept + bytes_kept) - hidden.nbytes
    assert watch.live_bytes() - gradient.nbytes == expected + LAYERS * scales * 4
    _, chunk, _ = build(on_host(LAYERS, activations), FP8)
    sent: list[int] = []
    copy_with(chunk, HostCopies(CPU, WatchedCopies(sent.append), PlainCopies()))
    forward(chunk, hidden)
    assert sum(sent) == expected + hidden.nbytes


def peak(activations: ActivationConfig) -> float:
    """Most numbers per token at once, in a forward and a backward pass."""
    _, chunk, _ = build(activations)
    hidden = received()
    with PeakWatch() as watch:
        edge, gradient = forward(chunk, hidden)
        torch.autograd.backward(edge, gradient)
    return watch.peak / (ITEM * LENGTH * ROWS)


def test_the_peak_falls_by_what_is_not_kept() -> None:
    """With one layer's activations and working memory on top of the inputs, whatever the number of layers."""
    everything = peak(ActivationConfig())
    one_by_one, two_by_two = peak(full("uniform", 1)), peak(full("uniform", 2))
    assert everything > LAYERS * ALL
    assert one_by_one < everything - (LAYERS - 1) * (ALL - H) + 2 * H
    assert two_by_two < everything - (LAYERS - 2) * ALL + 2 * H
    assert peak(selective("mlp_act")) < everything - (LAYERS - 1) * F + 2 * H


@pytest.mark.parametrize("mode", [mode for mode in KEPT if mode != "everything"])
def test_between_b_and_w_the_same_is_held_as_with_everything_kept(mode: str) -> None:
    """The inputs of linear layers, computed again or not, and the gradients of their outputs."""

    def held_after(activations: ActivationConfig) -> tuple[int, list[DeferredWeightGrad], ParameterBuffer]:
        model, chunk, buffer = build(activations)
        hidden = received()
        with StorageWatch() as watch:
            edge, gradient = forward(chunk, hidden)
            with model.context.weight_gradients.deferring() as deferred:
                torch.autograd.backward(edge, gradient)
            del gradient
            hidden.grad = None
        return watch.live_bytes(), deferred, buffer

    size, deferred, buffer = held_after(KEPT[mode][0])
    expected_size, expected_held, expected_buffer = held_after(ActivationConfig())
    assert (size, len(deferred)) == (expected_size, len(expected_held))
    assert len(deferred) == 4 * LAYERS
    compute_deferred(deferred)
    compute_deferred(expected_held)
    assert torch.equal(buffer.gradients, expected_buffer.gradients)


QKV, FC1, PROJ, FC2 = H * (Q + 2 * G), 2 * H * F, Q * H, F * H
"""Elements of the weights."""


@pytest.mark.parametrize(
    ("activations", "again"),
    [
        (selective("core_attn", "layernorm", "mlp_act"), 0),
        (selective("mlp"), LAYERS * FC1),
        (selective("mlp", "layernorm"), LAYERS * FC1),
        (full("uniform", 1), LAYERS * (QKV + PROJ + FC1)),
        (full("uniform", 2), LAYERS * (QKV + PROJ + FC1 + FC2) - LAYERS // 2 * FC2),
        (full("block", 1), QKV + PROJ + FC1),
        (on_host(2), 0),
    ],
)
def test_what_nobody_needs_is_not_computed_again(activations: ActivationConfig, again: int) -> None:
    """The last product of what runs again; counted are matrix products, without attention."""

    def operations(activations: ActivationConfig) -> int:
        _, chunk, _ = build(activations)
        with FlopCounterMode(display=False) as counter:
            edge, gradient = forward(chunk, received())
            torch.autograd.backward(edge, gradient)
        return counter.get_total_flops()

    assert operations(activations) - operations(ActivationConfig()) == 2 * LENGTH * ROWS * again


def test_an_evaluation_recomputes_and_moves_nothing() -> None:
    for activations in (full("uniform", 2), selective("core_attn", "mlp"), on_host(2)):
        _, chunk, _ = build(activations)
        hidden = received()
        with torch.no_grad(), StorageWatch() as watch:
            outputs = chunk(hidden)
        assert watch.live_bytes() == outputs.nbytes


# --- on the host ---------------------------------------------------------------------------------------------


class WatchedCopies(PlainCopies):
    """Notes the memory on the host, and when something is copied."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self.note = note

    def copy(self, pairs: Sequence[TensorPair]) -> None:
        super().copy(pairs)
        self.note(sum(target.nbytes for target, _ in pairs))


@pytest.mark.parametrize(
    ("activations", "moved", "stays"),
    [
        (on_host(1), ALL, (LAYERS - 1) * ALL),
        (on_host(3), 3 * ALL, ALL),
        (on_host(4), 4 * ALL, 0),
        (on_host(2, selective("mlp_act", "layernorm")), 2 * (ALL - F - 2 * H - 2), 2 * (ALL - F - 2 * H - 2)),
        (on_host(3, full("uniform", 1)), 3 * H, H),
        (on_host(1, full("uniform", 3)), H, H),
        (on_host(2, full("block", 1)), H + ALL, 2 * ALL),
    ],
)
def test_what_is_on_the_host_is_not_on_the_device(activations: ActivationConfig, moved: int, stays: int) -> None:
    """And it is there once, although layers save some tensors twice."""
    _, chunk, _ = build(activations)
    sent: list[int] = []
    fetched: list[int] = []
    copy_with(chunk, HostCopies(CPU, WatchedCopies(sent.append), WatchedCopies(fetched.append)))
    hidden = received()
    with StorageWatch() as watch:
        edge, gradient = forward(chunk, hidden)
        assert sum(sent) == moved * ITEM * LENGTH * ROWS
        # The first layer's input was there before, its copy was not.
        assert numbers(watch) == moved + stays
        assert not fetched
        torch.autograd.backward(edge, gradient)
        assert sorted(fetched) == sorted(sent)
        del gradient
    assert watch.live_bytes() == hidden.nbytes, "only its gradient outlives the backward pass"


@pytest.mark.parametrize("count", [2, 4])
def test_a_layer_comes_back_while_the_one_behind_it_goes_backward(count: int) -> None:
    _, chunk, _ = build(on_host(count))
    events: list[str] = []
    sizes: list[int] = []
    copy_with(chunk, HostCopies(CPU, WatchedCopies(sizes.append), WatchedCopies(lambda size: events.append("fetch"))))
    for number, unit in enumerate(chunk.layers):
        layer = unit.module if isinstance(unit, Offloaded) else unit
        assert isinstance(layer, TransformerLayer)
        # The first product to go backward, and what is last.
        last_linear = layer.get_submodule("mlp.swiglu_fc2.linear")
        for part, word in ((last_linear, "begin"), (layer.get_submodule("self_attention.norm_qkv.norm"), "end")):
            part.register_full_backward_pre_hook(lambda *_, event=f"{word} {number}": events.append(event))
    edge, gradient = forward(chunk, received())
    torch.autograd.backward(edge, gradient)
    assert len(sizes) == count
    wanted = ["fetch"] if count == LAYERS else []
    for number in reversed(range(LAYERS)):
        wanted += ["fetch"] if 0 < number <= count else []
        wanted += [f"begin {number}", f"end {number}"]
    assert events == wanted


class LazyCopies:
    """Under way until somebody waits for them; sources must live as long."""

    def __init__(self, pairs: Sequence[TensorPair]) -> None:
        self.pairs = [(target, ref(source)) for target, source in pairs]
        self.is_done = False

    def wait(self) -> None:
        """Copy now."""
        for target, source in self.pairs if not self.is_done else []:
            alive = source()
            assert alive is not None, "freed before it was copied"
            target.copy_(alive)
        self.is_done = True

    synchronize = wait


class LazyStream:
    """Copies as late as a busy stream might."""

    def __init__(self) -> None:
        self.asked: list[LazyCopies] = []

    def copy(self, pairs: Sequence[TensorPair]) -> LazyCopies:
        """Start to."""
        for target, _ in pairs:
            target.fill_(torch.nan)
        self.asked.append(LazyCopies(pairs))
        return self.asked[-1]


def gradients(activations: ActivationConfig, copies: HostCopies | None) -> Tensor:
    """Of all weights and the input, over two passes that overlap."""
    _, chunk, buffer = build(activations)
    if copies is not None:
        copy_with(chunk, copies)
    inputs = [received() for _ in range(2)]
    graphs = [forward(chunk, hidden) for hidden in inputs]
    for edge, gradient in graphs:
        torch.autograd.backward(edge, gradient)
    found = [hidden.grad for hidden in inputs]
    return torch.cat([buffer.gradients, *(gradient.flatten() for gradient in found if gradient is not None)])


@pytest.mark.parametrize("activations", [on_host(2), on_host(4), on_host(3, full("uniform", 1))])
def test_copies_that_take_their_time_are_waited_for(activations: ActivationConfig) -> None:
    """Nobody reads what is not there yet; what has hardly left when it is needed is not copied back."""
    out, back = LazyStream(), LazyStream()
    copies = HostCopies(CPU, out, back)
    assert torch.equal(gradients(activations, copies), gradients(ActivationConfig(), None))
    layers = activations.cpu_offloading_num_layers
    assert (len(out.asked), len(back.asked)) == (2 * layers, 2 * layers - 1)
