"""The flags of muP: values that follow from others, and combinations that are refused."""

from dataclasses import replace

import pytest

from megatron.config.command_line import parse_command_line
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.training.checkpoints.comparison import check_architecture, given_architecture

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64 --use-mup --mup-base-hidden-size 16"
)


def model_of(flags: str = "") -> ModelConfig:
    config = parse_command_line(f"{MODEL} {flags}".split())
    config.check(world_size=1)
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
        ("--mup-embedding-mult 2", "--mup-embedding-mult is 2.0 here and 1.0 there"),
        ("--mup-output-mult 2", "--mup-output-mult is 2.0 here and 0.25 there"),
        ("--mup-base-head-dim 8", "--mup-base-head-dim is 8.0 here and None there"),
        ("--mup-attn-scale-power 0.5", "--mup-attn-scale-power is 0.5 here and 1.0 there"),
    ],
)
def test_a_checkpoint_with_another_setting_is_refused(flags: str, words: str) -> None:
    saved = vars(model_of().resolve(64, 1, 16))
    check_architecture(saved, saved, "X")
    check_architecture(given_architecture(model_of()), saved, "X")
    with pytest.raises(CheckpointError) as refusal:
        check_architecture(vars(model_of(flags).resolve(64, 1, 16)), saved, "X")
    assert words in str(refusal.value)


def test_a_checkpoint_without_mup_is_refused() -> None:
    plain = parse_command_line(MODEL.replace("--use-mup --mup-base-hidden-size 16", "").split()).model
    with pytest.raises(CheckpointError, match="--use-mup is True here and False there"):
        check_architecture(vars(model_of().resolve(64, 1, 16)), vars(plain.resolve(64, 1, 16)), "X")
