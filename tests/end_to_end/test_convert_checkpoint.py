"""From Hugging Face into training and back: every bit, the same logits, bounded memory, and never half a result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.architectures.catalog import ARCHITECTURES
from megatron.checkpoint import streaming
from megatron.checkpoint.checkpointing import save_checkpoint
from megatron.checkpoint.directory import MANIFEST
from megatron.checkpoint.finding import find_checkpoint
from megatron.checkpoint.manifest import read_checkpoint
from megatron.commands import checkpoints, convert_checkpoint, generate_text
from megatron.commands.checkpoints import DtypeName
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace
from megatron.config.data import TokenizerConfig
from megatron.data.digests import seal
from megatron.data.tokenizers import build_tokenizer
from megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.models import weights_under
from tests.end_to_end.converted import (
    assert_our_logits_are_theirs,
    assert_same_logits,
    assert_same_weights,
    continued,
    from_hf,
    their_model,
    to_hf,
    transformers,
)
from tests.end_to_end.run_process import (
    Corpus,
    bytes_under,
    call_training,
    checkpoint_of,
    flags_of,
    fork_training,
    losses,
    run_tool,
)
from tests.storage_watch import PeakWatch

FAMILIES = [("llama", False), *((name, name in ("llama", "qwen2")) for name in ARCHITECTURES)]
"""Architectures, and whether the head is tied to the embedding."""


@pytest.fixture(scope="module")
def model() -> Any:
    """A small Llama of transformers, untied."""
    return their_model(tied=False)


@pytest.fixture
def hf(model: Any, tmp_path: Path) -> Path:
    """Its files, in several shards."""
    return in_shards(model, tmp_path / "hf")


def in_shards(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory, max_shard_size="10KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


# --- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_bits_and_logits_come_back(family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight back, in one file and in several; and after a run with the advised flags that changes no weight. In
    blocks that end inside an expert, and with the experts of a layer in several files."""
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 640)
    model = their_model(tied, family)
    hf = in_shards(model, tmp_path / "hf")
    advice = from_hf(hf, tmp_path / "ours")
    assert_our_logits_are_theirs(tmp_path / "ours", model)
    to_hf(tmp_path / "ours", tmp_path / "shards", max_shard_size="8000")
    to_hf(tmp_path / "ours", tmp_path / "single")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert [path.name for path in (tmp_path / "single").glob("model*")] == ["model.safetensors"]
    assert_same_logits(tmp_path / "shards", model)
    call_training(continued(advice, tmp_path / "run")).succeeded()
    assert find_checkpoint(tmp_path / "run") == 1
    to_hf(tmp_path / "run", tmp_path / "trained")
    for back in ("shards", "single", "trained"):
        assert_same_weights(tmp_path / back, hf)


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama4_text"])
def test_gains_are_one_plus_the_weights_of_norms_and_bf16_gains_come_back(family: str, tmp_path: Path) -> None:
    """Gains in bf16 from 2^-17 on, of both signs; in bf16 a weight, gain minus one, would lose bits below a half."""
    model = their_model(False, family).bfloat16()
    gains = [0.0, 2.0**-17, -(2.0**-17), 0.01, 0.3, 0.4, 0.5, 0.999, 1.0, 1.01, 2.5, 100.0, -0.3]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[: len(gains)] = torch.tensor(gains)[: len(parameter)]
    model.save_pretrained(tmp_path / "hf")
    advice = from_hf(tmp_path / "hf", tmp_path / "ours", apply_layernorm_1p=True)
    assert "--apply-layernorm-1p" in advice
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_weights(tmp_path / "back", tmp_path / "hf")
    assert_our_logits_are_theirs(tmp_path / "ours", model)
    weights = weights_under(checkpoint_of(tmp_path / "ours", 0))
    final = next(tensor for name, tensor in weights.items() if name.startswith("model/final_layernorm.weight"))
    assert final.dtype == torch.float32
    assert torch.equal(final.double() + 1.0, model.model.norm.weight.detach().double())


def test_a_run_of_gains_minus_one_starts_from_hugging_face_and_its_own_checkpoints(hf: Path, tmp_path: Path) -> None:
    words = continued(from_hf(hf, tmp_path / "ours"), tmp_path / "run")
    flags = [word for word in words if word not in ("--load", str(tmp_path / "ours"), "--finetune")]
    call_training([*flags, "--apply-layernorm-1p", "--load-hf", str(hf)]).succeeded()
    to_hf(tmp_path / "run", tmp_path / "back")
    found, wanted = weights_under(tmp_path / "back"), weights_under(hf)
    for name, tensor in wanted.items():
        # The weight, gain minus one, is rounded to fp32.
        rounding = 2.0**-23 * (1.0 + tensor.abs()) if "norm" in name else 0.0
        assert ((found[name] - tensor).abs() <= rounding).all(), name
    refused = call_training([*flags, "--load", str(tmp_path / "run")])
    assert "--apply-layernorm-1p is False here and True there" in refused.errors[0]


def test_training_can_count_on_from_the_iteration_given(hf: Path, tmp_path: Path) -> None:
    advice = from_hf(hf, tmp_path / "ours", iteration=7)
    flags = [word for word in continued(advice, tmp_path / "run") if word != "--finetune"]
    flags[flags.index("--train-iters") + 1] = "8"
    call_training([*flags, "--no-load-optim", "--no-load-rng"]).succeeded()
    to_hf(tmp_path / "run", tmp_path / "back", ckpt_step=8)
    assert_same_weights(tmp_path / "back", hf)
    flags[flags.index("--save") + 1] = str(tmp_path / "other")
    refused = call_training(flags)
    assert refused.errors and "has no optimizer state: add --no-load-optim" in refused.errors[0]
    refused = call_training([*flags, "--no-load-optim", "--use-checkpoint-opt-param-scheduler"])
    assert refused.errors and "has no learning-rate schedule" in refused.errors[0]


# --- number formats and tokenizers -----------------------------------------------------------------------------


def test_master_weights_are_what_other_formats_come_from(corpus: Corpus, tmp_path: Path) -> None:
    """And the tokenizer goes along, so that the result can be converted again and write text."""
    call_training(flags_of(corpus, bf16=True, train_iters=2, save=tmp_path / "run")).succeeded()
    dtypes: tuple[DtypeName, ...] = ("keep", "fp32", "fp16")
    for dtype in dtypes:
        to_hf(tmp_path / "run", tmp_path / dtype, tokenizer=True, dtype=dtype)
    kept, wide, half = (weights_under(tmp_path / dtype) for dtype in dtypes)
    for name, master in wide.items():
        assert (kept[name].dtype, master.dtype, half[name].dtype) == (torch.bfloat16, torch.float32, torch.float16)
        assert torch.equal(kept[name], master.bfloat16()) and torch.equal(half[name], master.half()), name
    assert any(not torch.equal(master, master.bfloat16().float()) for master in wide.values())
    assert json.loads((tmp_path / "keep" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    trained_with = build_tokenizer(TokenizerConfig("SentencePieceTokenizer", str(corpus.tokenizer)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "keep")
    for text in ("import os", "  two  blanks\n\tline", "na\u00efve \u4e2d\u6587 \U0001f600", ""):
        assert theirs(text)["input_ids"] == trained_with.tokenize(text)
    from_hf(tmp_path / "keep", tmp_path / "ours")
    state = read_checkpoint(tmp_path / "ours", 0).state
    tokenizer = build_tokenizer(TokenizerConfig(**state["flags"]["tokenizer"]))
    assert tokenizer.eod == json.loads((tmp_path / "keep" / "config.json").read_text())["eos_token_id"]
    assert tokenizer.vocab_size == state["architecture"]["vocab_size"]
    request = generate_text.GenerateConfig(
        load=str(tmp_path / "ours"), prompt="def ", max_new_tokens=2, temperature=0.0
    )
    assert "".join(generate_text.generate(request)).startswith("def ")


def test_a_model_without_its_tokenizer_is_written_on_demand_alone(hf: Path, tmp_path: Path) -> None:
    from_hf(hf, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"names no tokenizer: add --no-tokenizer"):
        to_hf(tmp_path / "ours", tmp_path / "back", tokenizer=True)
    assert not (tmp_path / "back").exists()
    assert "without a tokenizer" in to_hf(tmp_path / "ours", tmp_path / "back", tokenizer=False)


def test_a_dtype_can_be_chosen_on_the_way_in(hf: Path, tmp_path: Path) -> None:
    from_hf(hf, tmp_path / "ours", "bf16")
    to_hf(tmp_path / "ours", tmp_path / "back")
    found, wanted = weights_under(tmp_path / "back"), weights_under(hf)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())


def test_numbers_beyond_fp16_are_refused_in_both_directions(tmp_path: Path) -> None:
    model = their_model(tied=True)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = 1e6
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has numbers beyond the range of fp16"):
        from_hf(tmp_path / "hf", tmp_path / "ours", "fp16")
    from_hf(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has numbers beyond the range of fp16"):
        to_hf(tmp_path / "ours", tmp_path / "back", dtype="fp16")
    assert not (tmp_path / "back").exists()


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    their_model(tied=False).save_pretrained(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight exists and differs"):
        from_hf(tmp_path / "hf", tmp_path / "ours")


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_one_block_at_a_time_is_in_memory(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model(tied=False).save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 1024)
    monkeypatch.setattr("megatron.checkpoint.safetensors_file._BAND_BYTES", 256)
    with PeakWatch() as watch:
        from_hf(tmp_path / "hf", tmp_path / "ours")
    if direction == "to-hf":
        with PeakWatch() as watch:
            to_hf(tmp_path / "ours", tmp_path / "back")
        assert_same_weights(tmp_path / "back", tmp_path / "hf")
    # A block, and the rows that were read and compared for it but are not copied yet.
    assert 1024 <= watch.peak <= 1024 + 256


# --- what must not be ----------------------------------------------------------------------------------------


def test_nothing_is_overwritten(hf: Path, tmp_path: Path) -> None:
    from_hf(hf, tmp_path / "ours")
    before = bytes_under(tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        from_hf(hf, tmp_path / "ours", iteration=3)
    with pytest.raises(CheckpointError, match="already exists and is not overwritten"):
        to_hf(tmp_path / "ours", hf)
    assert bytes_under(tmp_path) == before


def test_a_damaged_checkpoint_is_not_converted(hf: Path, tmp_path: Path) -> None:
    from_hf(hf, tmp_path / "ours")
    (weights,) = checkpoint_of(tmp_path / "ours", 0).glob("weights_*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-100] ^= 4
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights_00000\.safetensors is damaged"):
        to_hf(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ToHuggingFace("a", "b", max_shard_size="5 apples"), "--max-shard-size 5 apples is no size"),
        (ToHuggingFace("a", "b", max_shard_size="0"), "--max-shard-size 0 is no size"),
        (FromHuggingFace("a", "b", iteration=-1), "--iteration -1 must"),
    ],
)
def test_bad_flags_are_refused(config: FromHuggingFace | ToHuggingFace, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert_checkpoint.convert(config)


def test_sizes_of_shards() -> None:
    sizes = {"5GB": 5 * 10**9, "2GiB": 2**31, "1.5 MB": 1_500_000, "123": 123}
    assert {text: ToHuggingFace("a", "b", max_shard_size=text).max_shard_bytes for text in sizes} == sizes


# --- the commands ----------------------------------------------------------------------------------------------


def test_the_commands_as_they_are_typed(model: Any, hf: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    run_tool("tools/convert_checkpoint.py", "from-hf", "--hf", tmp_path / "hf", "--save", ours)
    words = ["--max-shard-size", "5GB", "--no-tokenizer"]
    run_tool("tools/convert_checkpoint.py", "to-hf", "--load", ours, "--hf", back, *words)
    assert_same_weights(back, hf)
    assert_same_logits(back, model)
    found = json.loads(run_tool("tools/inspect_checkpoint.py", "--load", ours, "--verify", "--json"))
    assert (found["iteration"], found["damage"]) == (0, [])
    table = found["tensors"]["model/layers.1.self_attention.linear_proj.weight"]
    assert (table["dtype"], table["shape"]) == ("float32", [32, 64])
    assert sum(tensor["bytes"] for tensor in found["tensors"].values()) <= found["bytes"]


def inspected(load: Path, exit_code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the tool prints."""
    assert checkpoints.main_inspect(["--load", str(load), "--verify"]) == exit_code
    return "".join(capsys.readouterr())


def test_inspection_tells_the_layout_and_names_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model tiny --num-layers 1 --mock-data --vocab-size 61 --seq-length 32 --micro-batch-size 1 "
        "--global-batch-size 1 --num-workers 0 --device cpu --lr 1e-3 --train-iters 1 --bf16"
    )
    call_training([*flags.split(), "--save", str(tmp_path)]).succeeded()
    assert "every file is as it was written" in inspected(tmp_path, 0, capsys)
    (tmp_path / "iter_0000001" / "rank_00000.safetensors").write_bytes(b"short")
    printed = inspected(tmp_path, 1, capsys)
    assert "tensor 1" in printed and "precision bf16" in printed and "optimizer adam" in printed
    assert "optimizer/master: " in printed and "random: " in printed
    assert "rank_00000.safetensors has 5 bytes" in printed
    assert "has no checkpoint" in inspected(tmp_path / "nowhere", 2, capsys)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop("model/a"), "holds model/a@0, which the manifest does not name"),
        (lambda tensors: tensors["model/b"].update(dtype="I32"), "its entry model/b@0,0 is not what the manifest says"),
    ],
)
def test_inspection_notices_a_manifest_of_other_tensors(
    change: Callable[[Any], Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All digests are right: whoever can write a checkpoint can do that."""
    save_checkpoint(tmp_path, 1, {"model/a": torch.ones(3), "model/b": torch.ones(2, 2)}, {"iteration": 1})
    path = tmp_path / "iter_0000001" / MANIFEST
    content = json.loads(path.read_text())["manifest"]
    change(content["tensors"])
    path.write_text(seal("manifest", json.dumps(content)))
    assert sentence in inspected(tmp_path, 1, capsys)


# --- straight into a run -------------------------------------------------------------------------------------


def direct_and_expected(hf: Path, tmp_path: Path, words: str, layout: str = "") -> tuple[list[str], list[float]]:
    """The command that starts from their files, and the losses of a run from the converted checkpoint."""
    common = [*continued(from_hf(hf, tmp_path / "ours"), tmp_path / "saved"), "--lr", "1e-2", *words.split()]
    call_training([*common, "--metrics-jsonl", str(tmp_path / "expected.jsonl")]).succeeded()
    direct = [word for word in common if word not in ("--finetune", "--load", str(tmp_path / "ours"))]
    direct += ["--load-hf", str(hf), "--save", str(tmp_path / "other"), *layout.split()]
    return [*direct, "--metrics-jsonl", str(tmp_path / "direct.jsonl")], losses(tmp_path / "expected.jsonl")


@pytest.mark.parametrize(("family", "precision"), [("llama", "--bf16"), ("llama4_text", "--fp64")])
def test_a_run_from_their_files_is_the_run_from_the_conversion(tmp_path: Path, family: str, precision: str) -> None:
    hf = in_shards(their_model(False, family), tmp_path / "hf")
    direct, expected = direct_and_expected(hf, tmp_path, f"--train-iters 3 {precision}")
    call_training(direct).succeeded()
    assert losses(tmp_path / "direct.jsonl") == expected
    # Where there is a checkpoint already, it goes first.
    again = ["--load", str(tmp_path / "other"), "--train-iters", "4", "--override-opt-param-scheduler"]
    call_training([*direct, *again]).succeeded()
    assert losses(tmp_path / "direct.jsonl")[:3] == expected


def test_each_rank_reads_its_own_part(hf: Path, tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel"
    direct, expected = direct_and_expected(hf, tmp_path, "--train-iters 2 --fp64 --micro-batch-size 1", layout)
    fork_training(direct, 2).succeeded()
    assert losses(tmp_path / "direct.jsonl") == pytest.approx(expected, rel=1e-9)
