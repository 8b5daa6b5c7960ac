"""tools/evaluate.py: every token of a text once, the same in every layout, and the loss that transformers computes."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.commands import evaluate
from megatron.commands.convert_checkpoint import ToHuggingFace, convert
from megatron.data.tokenizers import SentencePieceTokenizer
from tests.end_to_end.run_process import (
    Corpus,
    Flags,
    FlagValue,
    call_training,
    flags_of,
    fork_training,
    run_tool,
    tokenize,
    words_of,
    write_documents,
)

SEQUENCE = 32
call = partial(call_training, main=evaluate.main)
EXPERTS: Flags = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


@pytest.fixture(scope="module")
def with_experts(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    call_training(flags_of(corpus, train_iters=2, fp64=True, save=directory, **EXPERTS)).succeeded()
    return directory


@pytest.fixture(params=["trained", "with_experts"], ids=["dense", "experts"])
def model(request: pytest.FixtureRequest) -> Path:
    """A model in fp64."""
    directory: Path = request.getfixturevalue(request.param)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents, one of them of a few tokens."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    write_documents(path, documents=2, first=70)
    first, second = (json.loads(line)["text"][:700] for line in path.read_text().splitlines())
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in (first, "na\u00efve = 1", second)))
    return path


def flags_for(model: Path, text: Path, output: Path, **changes: FlagValue) -> list[str]:
    return words_of({"load": model, "input": text, "json": output, "micro_batch_size": 2, "device": "cpu", **changes})


def results(model: Path, text: Path, output: Path, processes: int = 1, **changes: FlagValue) -> dict[str, Any]:
    """The JSON of an evaluation."""
    flags = flags_for(model, text, output, **changes)
    (call(flags) if processes == 1 else fork_training(flags, processes, evaluate.main)).succeeded()
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def documents(text: Path) -> list[str]:
    return [json.loads(line)["text"] for line in text.read_text().splitlines()]


def loss_of_transformers(saved: Path, ids: list[int], stride: int) -> float:
    """Sum of -log p of every token, from windows that are cut here on their own: the last ``SEQUENCE`` tokens before
    the end of a window are the context of its last ``stride`` tokens."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64, experts_implementation="eager")
    total, predicted = 0.0, 1  # ids[0] only gives context
    while predicted < len(ids):
        end = min(len(ids), predicted + (SEQUENCE if predicted == 1 else stride))
        # With a padded end the window still begins where a whole one would.
        whole_end = predicted + (SEQUENCE if predicted == 1 else stride)
        begin = whole_end - SEQUENCE - 1
        with torch.no_grad():
            logits = network(torch.tensor([ids[begin : end - 1]])).logits[0]
        chosen = torch.log_softmax(logits, -1)[range(end - 1 - begin), ids[begin + 1 : end]]
        total -= float(chosen[predicted - begin - 1 :].sum())
        predicted = end
    return total


@pytest.mark.parametrize("stride", [SEQUENCE, 8])
def test_loss_is_the_one_of_transformers(model: Path, text: Path, corpus: Corpus, tmp_path: Path, stride: int) -> None:
    found = results(model, text, tmp_path / "out.json", stride=stride)["total"]
    convert(ToHuggingFace(load=str(model), hf=str(tmp_path / "hf")))
    tokenizer = SentencePieceTokenizer(str(corpus.tokenizer))
    ids = [tokenizer.eod, *(id for one in documents(text) for id in [*tokenizer.tokenize(one), tokenizer.eod])]
    nats = loss_of_transformers(tmp_path / "hf", ids, stride)
    num_bytes = sum(len(one.encode()) for one in documents(text))
    assert (found["tokens"], found["bytes"], found["documents"]) == (len(ids) - 1, num_bytes, 3)
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
    theirs: dict[str, Any] = {"load": None, "load_hf": tmp_path / "hf", "seq_length": SEQUENCE, "fp64": True}
    theirs["stride"] = stride
    tokenizer_of: dict[str, Any] = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": corpus.tokenizer}
    again = results(model, text, tmp_path / "again.json", **theirs, **tokenizer_of)
    assert again["total"] == pytest.approx(found, rel=1e-12)


DIVIDED: Flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = [
    ("trained", {**DIVIDED, "pipeline_model_parallel_size": 2}),
    ("with_experts", {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, indirect=["model"])
def test_every_layout_gives_the_same(model: Path, text: Path, tmp_path: Path, layout: Flags) -> None:
    """With windows that are not a multiple of the ranks and microbatches; ``tests/parallel`` has further layouts."""
    alone = results(model, text, tmp_path / "alone.json", micro_batch_size=3)["total"]
    ranks = results(model, text, tmp_path / "ranks.json", processes=4, **layout)["total"]
    assert (ranks["tokens"], ranks["bytes"]) == (alone["tokens"], alone["bytes"])
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert ranks[key] == pytest.approx(alone[key], rel=1e-9)


def test_a_corpus_has_the_result_of_its_text(trained: Path, text: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Also the bytes, which follow from the tokens alone; several texts have results of their own."""
    copied = tmp_path / "text.jsonl"
    copied.write_text(text.read_text())
    prefix = tokenize(copied, corpus.tokenizer)
    flags = flags_for(trained, text, tmp_path / "out.json")
    outcome = call([*flags, "--input", str(text), str(prefix)]).succeeded()
    found = json.loads((tmp_path / "out.json").read_text())
    of_text, of_corpus = found["texts"]
    assert {**of_corpus, "input": str(text)} == of_text
    assert found["total"]["tokens"] == 2 * of_text["tokens"]
    assert found["total"]["loss"] == pytest.approx(of_text["loss"], rel=1e-12)
    shown = f"text.jsonl: loss {of_text['loss']:.6f}, perplexity {of_text['perplexity']:.6g}, bits per byte "
    assert shown in outcome.stdout and "all texts: loss" in outcome.stdout


def test_masks_are_those_of_training(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    """The checkpoint of a run with --eod-mask-loss and separate documents."""
    masks: Flags = {"eod_mask_loss": True, "reset_attention_mask": True, "reset_position_ids": True}
    call_training(flags_of(corpus, train_iters=2, fp64=True, save=tmp_path / "model", **masks)).succeeded()
    masked = results(tmp_path / "model", text, tmp_path / "a.json")["total"]
    plain = results(tmp_path / "model", text, tmp_path / "b.json", eod_mask_loss=False)["total"]
    together = results(tmp_path / "model", text, tmp_path / "c.json", eod_mask_loss=False, reset_attention_mask=False)
    # The first token of each of three documents follows the end of another one.
    assert plain["tokens"] - masked["tokens"] == 3
    assert together["total"]["loss"] != pytest.approx(plain["loss"], rel=1e-6)


def test_mistakes_are_one_sentence(trained: Path, text: Path, corpus: Corpus, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": 5}\n')
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    cases = {
        ("--load", str(trained)): "--input is missing",
        ("--input", str(text)): "--load is missing",
        ("--load", str(tmp_path / "nowhere"), "--input", str(text)): "nowhere has no checkpoint",
        ("--load", str(trained), "--input", "nothing.txt"): "nothing.txt does not exist",
        ("--load", str(trained), "--input", f"{corpus.prefix}.bin"): f"use its prefix, {corpus.prefix}",
        ("--load", str(trained), "--input", str(broken)): "broken.jsonl, line 2 has no text under the key 'text'",
        ("--load", str(trained), "--input", str(empty)): "empty.txt has no tokens",
        ("--load", str(trained), "--input", str(text), "--stride", "33"): "--stride 33 is more than --seq-length 32",
        ("--load", "nowhere", "--input", str(text), "--json", "s3://a/b"): "--json s3://a/b is a URL",
        ("--load", str(trained), "--input", str(text), "--save", "x"): "--save has no effect in tools/evaluate.py",
        ("--load", str(trained), "--input", str(text), "--data-path", "x"): "name the texts with --input",
        ("--load", str(trained), "--input", str(text), "--stryde", "3"): "--stryde is not a flag",
    }
    for flags, sentence in cases.items():
        outcome = call([*flags, "--device", "cpu"])
        assert outcome.exit_code == 2, flags
        assert sentence in outcome.errors[0], (flags, outcome.errors)
        assert len(outcome.errors) == 1, outcome.errors


def test_the_tool_runs_as_a_script(trained: Path, text: Path) -> None:
    assert "text.jsonl: loss" in run_tool("tools/evaluate.py", "--load", trained, "--input", text, "--device", "cpu")
