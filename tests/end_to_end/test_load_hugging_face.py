"""``--load-hf`` takes the architecture and the tokenizer from the directory, refuses flags that contradict it, and
carries ``generation_config.json``."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.finding import find_checkpoint
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace, convert
from megatron.config.command_line import CommandLine
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError, UserError
from megatron.training.checkpoints.comparison import with_hugging_face
from tests.checkpoint.models import LLAMA, hugging_face_model
from tests.end_to_end.run_process import Corpus, call_training, losses

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 61
_FLAGS = (
    "--mock-data --seq-length 16 --micro-batch-size 1 --global-batch-size 2 --num-workers 0 --device cpu --lr 1e-2 "
    "--train-iters 2 --log-interval 1 --fp64"
)
STEP = _FLAGS.split()
GENERATION = '{\n  "temperature": 0.6,\t"eos_token_id": [2, 3],\r\n  "note": "\u00e9"}'
"""Odd formatting, which must come back."""


def save_model(directory: Path, vocab_size: int = VOCABULARY) -> Path:
    """The files of a small random model of Qwen3, whose sizes are no default here."""
    config = replace(
        LLAMA,
        qk_layernorm=True,
        hidden_size=16,
        ffn_hidden_size=24,
        kv_channels=8,
        vocab_size=vocab_size,
        max_position_embeddings=32,
        norm_epsilon=1e-4,
        rotary_base=777.0,
        untie_embeddings_and_output_weights=False,
    )
    hugging_face_model(config).double().save_pretrained(directory)
    (directory / "generation_config.json").write_bytes(GENERATION.encode())
    return directory


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return save_model(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def with_tokenizer(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more ids than its tokenizer has, as published ones."""
    directory = save_model(tmp_path_factory.mktemp("hf"), vocab_size=400)
    shutil.copy(corpus.tokenizer, directory / "tokenizer.model")
    return directory


def completed(*words: object) -> RunConfig:
    """The flags that a run with these words has."""
    arguments = list(map(str, words))
    line = CommandLine.of(arguments)
    return with_hugging_face(line, line.parse().checked()).parse().checked()


def typed(hf: Path) -> list[str]:
    """The architecture of ``hf`` by hand."""
    return (
        "--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --num-query-groups 2 "
        "--kv-channels 8 --rotary-base 777 --norm-epsilon 1e-4 --qk-layernorm "
        f"--no-untie-embeddings-and-output-weights --vocab-size {VOCABULARY}"
    ).split()


def test_a_run_without_a_size_is_the_run_whose_sizes_were_typed(hf: Path, tmp_path: Path) -> None:
    common = [*STEP, "--load-hf", str(hf), "--metrics-jsonl"]
    outcome = call_training([*common, str(tmp_path / "found"), "--save", str(tmp_path / "run")]).succeeded()
    assert f"> architecture and vocabulary: from {hf}" in outcome.stdout
    call_training([*common, str(tmp_path / "typed"), *typed(hf)]).succeeded()
    assert losses(tmp_path / "found") == losses(tmp_path / "typed")
    # The same command resumes, and so does one that takes the architecture from the checkpoint.
    again = [*common, str(tmp_path / "resumed"), "--load", str(tmp_path / "run"), "--train-iters", "3"]
    again += ["--override-opt-param-scheduler", "--save", str(tmp_path / "run")]
    call_training([*again, "--use-checkpoint-args"]).succeeded()
    assert len(losses(tmp_path / "resumed")) == 1
    # The run's checkpoints carry the generation settings, also when they were resumed.
    assert find_checkpoint(tmp_path / "run") == 3
    convert(ToHuggingFace(str(tmp_path / "run"), str(tmp_path / "back"), tokenizer=False))
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == GENERATION.encode()


def test_a_conversion_carries_the_generation_settings(hf: Path, tmp_path: Path) -> None:
    convert(FromHuggingFace(str(hf), str(tmp_path / "ours")))
    convert(ToHuggingFace(str(tmp_path / "ours"), str(tmp_path / "back"), tokenizer=False))
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == GENERATION.encode()
    shutil.copytree(hf, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "other")))
    (tmp_path / "hf" / "generation_config.json").unlink()
    convert(FromHuggingFace(str(tmp_path / "hf"), str(tmp_path / "without")))
    convert(ToHuggingFace(str(tmp_path / "without"), str(tmp_path / "bare"), tokenizer=False))
    assert not (tmp_path / "bare" / "generation_config.json").exists()


def test_the_dry_run_knows_the_model_of_the_directory(with_tokenizer: Path, tmp_path: Path) -> None:
    flags = [*STEP, "--load-hf", str(with_tokenizer), "--dry-run", "--num-gpus", "2", "--dry-run-json"]
    call_training([*flags, str(tmp_path / "plan.json")]).succeeded()
    plan = json.loads((tmp_path / "plan.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(with_tokenizer)
    assert plan["total_parameters"] == sum(parameter.numel() for parameter in theirs.parameters())


def test_flags_that_agree_with_the_directory_change_nothing(hf: Path, with_tokenizer: Path, corpus: Corpus) -> None:
    alone = completed(*STEP, "--load-hf", hf)
    assert completed(*STEP, "--load-hf", hf, *typed(hf)) == alone
    assert completed(*STEP, "--vocab-size", VOCABULARY, f"--load-hf={hf}") == alone
    assert alone.model.qk_layernorm and alone.model.max_position_embeddings == 32
    longer = completed(*STEP, "--load-hf", hf, "--seq-length", 64).model
    assert longer == replace(alone.model, max_position_embeddings=None)
    # Another copy of the tokenizer is the same tokenizer.
    found = completed("--load-hf", with_tokenizer).tokenizer
    assert (found.tokenizer_type, found.vocab_size) == ("SentencePieceTokenizer", 400)
    assert found.tokenizer_model == str(with_tokenizer / "tokenizer.model")
    for kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        assert completed("--load-hf", with_tokenizer, "--tokenizer-type", kind).tokenizer == replace(
            found, tokenizer_type=kind
        )
    other = completed("--load-hf", with_tokenizer, "--tokenizer-model", corpus.tokenizer).tokenizer
    assert other == replace(found, tokenizer_model=str(corpus.tokenizer))
    # A directory without a tokenizer contradicts none.
    null = completed("--load-hf", hf, "--tokenizer-type", "NullTokenizer").tokenizer
    assert null.vocab_size == VOCABULARY - 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rotary-base 7", "--rotary-base is 7.0 here and 777.0 there"),
        ("--num-layers=3 --ffn-hidden-size 64", "--num-layers is 3 here and 2 there; --ffn-hidden-size is 64 here"),
        ("--no-qk-layernorm", "--qk-layernorm is False here and True there"),
        ("--model llama3-8b", "--num-layers is 32 here and 2 there"),
        ("--num-experts 4", "is a dense model, but --num-experts is 4"),
        ("--no-rope-freq 2", "--no-rope-freq is"),
        ("--vocab-size 60", "--vocab-size is 60 here and 61 there"),
        ("--tokenizer-type NullTokenizer --vocab-size 61", "--vocab-size is 61 here and 60 there"),
    ],
)
def test_a_flag_that_contradicts_the_directory_is_refused_with_both_values(hf: Path, words: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        completed(*STEP, "--load-hf", hf, *words.split())
    assert sentence in str(refusal.value) and str(hf) in str(refusal.value)


def test_another_tokenizer_than_the_directory_s_is_refused(with_tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="--tokenizer-type is NullTokenizer here and SentencePieceTokenizer there; --vocab-size is 9"
    ):
        completed("--load-hf", with_tokenizer, "--tokenizer-type", "NullTokenizer", "--vocab-size", 9)
    other = tmp_path / "tokenizer.model"
    other.write_bytes(b"another")
    with pytest.raises(UserError, match=f"--tokenizer-model is {other} here and {with_tokenizer / 'tokenizer.model'}"):
        completed("--load-hf", with_tokenizer, "--tokenizer-model", other)


def test_a_directory_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    outcome = call_training([*STEP, "--load-hf", str(tmp_path)])
    assert outcome.exit_code == 2 and outcome.refusal(f"{tmp_path / 'config.json'} is missing")
    with pytest.raises(UserError, match="--load-hf s3://bucket/model is a URL"):
        completed("--load-hf", "s3://bucket/model")


def test_a_smaller_tokenizer_stays_with_a_converted_model(with_tokenizer: Path, tmp_path: Path) -> None:
    """Its ids are fewer than the rows of the embedding: the flags that the tool prints must say so."""
    advice = convert(FromHuggingFace(str(with_tokenizer), str(tmp_path / "ours")))
    assert "--vocab-size 400" in advice
    assert asdict(completed("--load-hf", with_tokenizer).tokenizer)["vocab_size"] == 400
