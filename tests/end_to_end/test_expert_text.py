"""Text from a model with experts: the same from one process and from two, and with the biases of the experts."""

from pathlib import Path

import pytest

from megatron.core.topology import single_process
from tests.end_to_end.run_process import FlagValue, call_training, flags_of, run_tool, tiny_corpus
from tests.end_to_end.test_upcycling import tensors_of
from tools import generate_text
from tools.generate_text import GenerateConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model with a dense layer, a shared expert, and experts with a bias."""
    directory = tmp_path_factory.mktemp("experts")
    experts: dict[str, FlagValue] = {
        "num_experts": 4,
        "moe_layer_freq": "[0,1]",
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.5,
    }
    corpus = tiny_corpus(tmp_path_factory.getbasetemp())
    call_training(flags_of(corpus, train_iters=3, save=directory, **experts)).succeeded()
    return directory


def test_the_biases_of_the_experts_are_loaded(trained: Path) -> None:
    model, _ = generate_text.load_model(GenerateConfig(str(trained), "import "), single_process())
    assert model.expert_balance is not None
    (bias,) = model.expert_balance.state().values()
    assert bias.abs().max() >= 0.5
    assert bias.equal(tensors_of(trained)["layers.1.mlp.router.expert_bias"])


def test_text_is_the_same_from_one_process_and_from_two(trained: Path) -> None:
    arguments = ("--load", trained, "--prompt", "import ", "--temperature", 0, "--max-new-tokens", 8)
    alone = run_tool("tools/generate_text.py", *arguments)
    assert len(alone) > len("import \n")
    assert run_tool("tools/generate_text.py", *arguments, processes=2) == alone
