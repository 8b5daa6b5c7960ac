"""Flags are compared by their meaning."""

from dataclasses import fields
from pathlib import Path

import pytest

from megatron.comparison.finding import Comparison
from megatron.comparison.flags import EFFECTS, EXCEPTIONS, MEANINGS, compare_flags, effect_of
from megatron.comparison.side import Side
from megatron.config.command_line import parse_command_line
from megatron.config.run import RunConfig

GROUPS = frozenset(group.name for group in fields(RunConfig))
BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --mock-data --vocab-size 64 --lr 1e-3 "
)
MEGATRON = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128, "seq_length": 16,
    "max_position_embeddings": 16, "padded_vocab_size": 64, "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 10000, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "untie_embeddings_and_output_weights": True, "train_iters": 4,
}  # fmt: skip


def compared(words: str, others: str) -> Comparison:
    a, b = (parse_command_line((BASE + one).split()) for one in (words, others))
    return compare_flags(Side("A", Path(), "run", a, GROUPS), Side("B", Path(), "run", b, GROUPS))


def beside_megatron(**arguments: object) -> Comparison:
    config = parse_command_line((BASE + "--train-iters 4 --rotary-base 500000").split())
    foreign = Side("B", Path(), "megatron-lm", foreign={**MEGATRON, **arguments})
    return compare_flags(Side("A", Path(), "run", config, GROUPS), foreign)


def test_the_table_names_flags_that_exist_once() -> None:
    assert EFFECTS.keys() == GROUPS
    names = {field.name for group in fields(RunConfig) for field in fields(getattr(RunConfig(), group.name))}
    listed = [name for text in EXCEPTIONS.values() for name in text.split()]
    assert len(listed) == len(set(listed)) and {*listed, *(name for one in MEANINGS for name in one)} <= names


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("--train-iters 4", "--train-iters 4 --lr-decay-iters 4"),
        ("--train-iters 4", "--train-samples 8"),
        ("--use-distributed-optimizer", "--data-parallel-sharding-strategy optim"),
        ("", "--num-query-groups 4"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("", "--log-interval 7 --num-workers 3"),
    ],
)
def test_spellings_of_the_same_run_are_equal(words: str, others: str) -> None:
    assert not compared(words, others).differences


@pytest.mark.parametrize(
    ("words", "flag", "changes_loss"),
    [
        ("--train-samples 10", "--train-samples", True),
        ("--seed 5", "--seed", True),
        ("--rotary-base 10000", "--rotary-base", True),
        ("--bf16", "--bf16", True),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size", False),
    ],
)
def test_a_difference_is_found(words: str, flag: str, changes_loss: bool) -> None:
    found = {
        one.what: one.changes_loss for one in compared("--train-samples 8", "--train-samples 8 " + words).differences
    }
    assert found == {flag: changes_loss}


def test_rope_base_of_megatron_is_found() -> None:
    found = {one.what: (one.a, one.b) for one in beside_megatron().differences}
    assert found["--rotary-base"] == ("500000", "10000")


def test_an_architecture_that_is_no_llama_is_not_called_equal() -> None:
    result = beside_megatron(position_embedding_type="learned_absolute")
    assert not result.is_complete and "learned_absolute" in result.compared
    assert "--rotary-base" not in {one.what for one in result.differences}


def test_every_flag_has_an_effect() -> None:
    """A new flag fails here until its effect on the loss is decided."""
    found: dict[str, list[str]] = {"loss": [], "rounding": [], "nothing": []}
    for group in fields(RunConfig):
        for field in fields(getattr(RunConfig(), group.name)):
            found[effect_of(group.name, field.name)].append(field.name)
    decided = (Path(__file__).parent / "effects_of_flags.txt").read_text().splitlines()
    assert {line.partition(": ")[0]: line.partition(": ")[2].split() for line in decided} == found


def test_what_megatron_does_and_this_code_does_not_is_a_difference(tmp_path: Path) -> None:
    arguments = {"hidden_dropout": 0.1, "attention_dropout": 0.0, "calculate_per_token_loss": False}
    a = Side("A", tmp_path, "megatron-lm", foreign=arguments)
    b = Side("B", tmp_path, "run", config=RunConfig())
    found = {one.what: (one.a, one.b) for one in compare_flags(a, b).differences}
    assert found["--hidden-dropout"] == ("0.1", "0 in this code")
    assert found["--calculate-per-token-loss"] == ("False", "True in this code")
    assert "--attention-dropout" not in found and "--micro-batch-size" not in found
