"""The pattern of MoE layers, the counts of parameters and FLOPs, and muP: values that follow from others; all after a
checkpoint, too."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.architectures.catalog import PRESET_VOCABULARIES, PRESETS
from megatron.architectures.layer_pattern import PatternError, describe_layers, parse_layer_pattern
from megatron.architectures.transformer_config import TransformerConfig
from megatron.checkpoint.schema import FORMAT_VERSION, upgrade
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.model import ModelConfig, preset
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.comparison import check_architecture, given_architecture
from megatron.training.checkpoints.saved_run import state_of_weights


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", "1111"),
        (" 2 ", "1010"),
        ("3", "1001"),
        ("9", "1000"),
        ("99999999999999999999", "1000"),
        ("00000000000000000000002", "1010"),
        ("[0,1]*2", "0101"),
        ("2*[0,1]", "0101"),
        ("2 * [ 0 ] * 1 + [1 , 1]", "0011"),
        ("([0]*1+[1]*3)*2", "01110111"),
        ("[0]*0+[1]", "1"),
        ("(([1]+[0])*2+[1])*2", "1010110101"),
        ("([0,1]*24)", "01" * 24),
    ],
)
def test_a_pattern_means_what_the_lists_of_python_mean(text: str, layers: str) -> None:
    parsed = parse_layer_pattern(text, len(layers))
    assert "".join(str(int(layer)) for layer in parsed) == layers
    assert parse_layer_pattern(describe_layers(parsed), len(layers)) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "[]", "[1", "[1]]", "[1]+", "*[1]", "[1]*[1]", "2*2", "[1]-[0]", "[True]", "f()", "[1][0]"],
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        parse_layer_pattern(text, 1)


@pytest.mark.parametrize("text", ["[1]*9999999999999", "([1]*9999)*9999", "+".join(["[1]*9000"] * 9), "(" * 5000])
def test_a_pattern_costs_neither_memory_nor_stack(text: str) -> None:
    with pytest.raises(PatternError, match=r"10,000 layers|20 levels"):
        parse_layer_pattern(text, 4)


def test_equal_layers_have_one_description() -> None:
    texts = ("2", "[1,0]*3", "3*[1,0]", "([1]+[0])*3")
    assert {describe_layers(parse_layer_pattern(text, 6)) for text in texts} == {"2"}
    assert describe_layers(parse_layer_pattern("[0,1]*2", 4)) == "[0,1,0,1]"


def test_the_number_of_layers_of_a_pattern_is_compared() -> None:
    model = replace(preset("tiny-moe"), moe_layer_freq="[0,1]*3")
    with pytest.raises(ConfigError, match=r"--moe-layer-freq \[0,1\]\*3 describes 6 layers, but --num-layers is 4: "):
        model.resolve(100, 1, 64)


DENSE_FIRST = replace(
    preset("tiny-moe"), moe_layer_freq="([0,1])*2", moe_router_score_function="sigmoid", moe_router_topk=3,
    moe_router_topk_scaling_factor=2.5, moe_router_num_groups=4, moe_router_group_topk=2,
    moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=96,
)  # fmt: skip


@pytest.mark.parametrize("model", [preset("tiny"), preset("tiny-moe"), DENSE_FIRST])
def test_an_architecture_survives_a_checkpoint(model: ModelConfig) -> None:
    architecture = model.resolve(100, 1, 8192)
    saved = json.loads(json.dumps(state_of_weights(1, architecture, {}).to_json()))
    loaded = upgrade(saved, FORMAT_VERSION).architecture
    assert loaded == architecture
    assert ModelConfig.of(loaded).resolve(100, 1, 8192) == architecture


def test_experts_are_as_wide_as_the_mlp_by_default() -> None:
    architecture = replace(preset("tiny"), num_experts=4).resolve(100, 1, 64)
    assert architecture.moe_ffn_hidden_size == architecture.ffn_hidden_size == 384


PUBLISHED = {
    name: [float(number) for number in numbers]
    for name, *numbers in map(str.split, Path(__file__).with_name("published_models.txt").read_text().splitlines()[1:])
}


def test_every_published_preset_is_counted() -> None:
    assert PUBLISHED.keys() == PRESETS.keys() - {"tiny", "tiny-moe", "tiny-llama4"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_flops_and_vocabulary_of_published_models(name: str) -> None:
    vocab_size, parameters, *of_experts = PUBLISHED[name]
    architecture = preset(name).resolve(int(vocab_size), 1, 4096)
    assert architecture.num_parameters() == parameters
    assert architecture.padded_vocab_size == vocab_size, "the published sizes have no padding"
    mock = ["--mock-data", "--model", name]
    assert parse_command_line(mock).mock_vocab_size == vocab_size
    assert parse_command_line([*mock, "--vocab-size", "500"]).mock_vocab_size == 500
    assert parse_command_line(["--mock-data", "--model", "tiny"]).mock_vocab_size is None
    for active in of_experts[:1]:
        assert round(architecture.num_active_parameters() / 1e9, 2) == active
    for length, gflop in zip((4096, 8192, 32768), of_experts[1:]):
        assert round(architecture.flops_per_token(length) / 1e9, 3) == gflop


@pytest.mark.parametrize("length", [5, 8, 16, 20])
def test_attention_is_counted_inside_chunks(length: int) -> None:
    """Compared with a count of the squares of the chunks, in layers of both kinds."""
    scout = preset("llama4-scout").resolve(PRESET_VOCABULARIES["llama4-scout"], 1, 4096)
    model = replace(scout, num_layers=4, attention_chunk_size=8)
    chunks = [len(range(length)[start : start + 8]) for start in range(0, length, 8)]
    inside = sum(size**2 for size in chunks) / length
    rope, nope = (model.flops_of_layers([layer], length, has_output_layer=False) for layer in (2, 3))
    assert nope - rope == pytest.approx(6 * 40 * 128 * (length - inside), rel=1e-12)
    whole = replace(model, attention_chunk_size=None)
    assert whole.flops_per_token(length) - model.flops_per_token(length) == pytest.approx(3 * (nope - rope), rel=1e-12)


def test_only_the_chosen_experts_and_the_shared_one_are_active() -> None:
    architecture = DENSE_FIRST.resolve(100, 1, 64)
    rest = asdict(architecture)
    more_experts = TransformerConfig(**rest | {"num_experts": 16})
    expert = 3 * 128 * 192
    assert more_experts.num_parameters() - architecture.num_parameters() == 2 * 8 * (expert + 128)
    assert more_experts.num_active_parameters() - architecture.num_active_parameters() == 2 * 8 * 128
    chosen_more = TransformerConfig(**rest | {"moe_router_topk": 4})
    assert chosen_more.num_parameters() == architecture.num_parameters()
    assert chosen_more.flops_per_token(64) - architecture.flops_per_token(64) == 6 * 2 * expert
    without_shared = TransformerConfig(**rest | {"moe_shared_expert_intermediate_size": None})
    assert architecture.num_parameters() - without_shared.num_parameters() == 2 * 3 * 128 * 96
    assert architecture.flops_per_token(64) - without_shared.flops_per_token(64) == 6 * 2 * 3 * 128 * 96


def test_the_flops_of_the_stages_are_those_of_the_model() -> None:
    architecture = DENSE_FIRST.resolve(100, 1, 64)
    halves = [architecture.flops_of_layers(range(2 * i, 2 * i + 2), 64, has_output_layer=i == 1) for i in range(2)]
    assert sum(halves) == architecture.flops_per_token(64)
    dense, moe = (architecture.flops_of_layers([layer], 64, has_output_layer=False) for layer in (0, 1))
    assert moe - dense == 6 * 128 * (8 + 3 * (3 * 192 + 96 - 192))


def test_tiny_moe_computes_as_much_as_tiny() -> None:
    tiny, moe = (preset(name).resolve(1000, 1, 64) for name in ("tiny", "tiny-moe"))
    assert moe.flops_per_token(64) - tiny.flops_per_token(64) == 6 * 4 * 8 * 128, "the routers"
    assert moe.num_active_parameters() - tiny.num_active_parameters() == 4 * 8 * 128


# --- muP ------------------------------------------------------------------------------------------------------

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 --use-mup --mup-base-hidden-size 16"
)


def model_of(flags: str = "") -> ModelConfig:
    config = parse_command_line(f"{MODEL} {flags}".split())
    check_run(config, 1)
    return config.model


def test_the_multiplier_of_the_logits_follows_from_the_widths() -> None:
    resolved = model_of().resolve(64, 1, 16)
    assert (resolved.width_mult, resolved.output_multiplier, resolved.embedding_multiplier) == (4.0, 0.25, 1.0)
    assert model_of("--mup-output-mult 2").resolve(64, 1, 16).output_multiplier == 2.0


def test_the_base_is_the_model_itself_by_default() -> None:
    config = replace(model_of(), mup_base_hidden_size=None)
    assert config.resolve(64, 1, 16).width_mult == config.resolve(64, 1, 16).output_multiplier == 1.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mup-base-hidden-size 32", "--mup-base-hidden-size is 32 here and 16 there"),
        ("--mup-output-mult 2", "--mup-output-mult is 2.0 here and 0.25 there"),
        ("--mup-base-head-dim 8", "--mup-base-head-dim is 8.0 here and None there"),
    ],
)
def test_a_checkpoint_with_another_setting_is_refused(flags: str, words: str) -> None:
    saved = vars(model_of().resolve(64, 1, 16))
    check_architecture(saved, saved, "X")
    check_architecture(given_architecture(model_of()), saved, "X")
    with pytest.raises(CheckpointError) as refusal:
        check_architecture(vars(model_of(flags).resolve(64, 1, 16)), saved, "X")
    assert words in str(refusal.value)
