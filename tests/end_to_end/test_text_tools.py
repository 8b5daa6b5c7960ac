"""Text from checkpoints: the same from one process and from two, from a prompt, a file of prompts, and line by line;
with the tokenizer that a checkpoint carries."""

import json
import re
import shutil
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import convert_checkpoint, evaluate, generate_text
from megatron.commands.checkpoints import Average, Progress, average
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace
from megatron.core.topology import single_process
from megatron.inference.loading import load_model
from tests.end_to_end.converted import tensors_of
from tests.end_to_end.run_process import Corpus, Flags, call_training, flags_of, run_tool, tiny_corpus

# --- text of a model with experts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model with a dense layer, a shared expert, and experts with a bias."""
    directory = tmp_path_factory.mktemp("experts")
    experts: Flags = {
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
    model = load_model(str(trained), single_process()).model.model
    assert model.expert_balance is not None
    (bias,) = model.expert_balance.state().values()
    assert bias.abs().max() >= 0.5
    assert bias.equal(tensors_of(trained)["layers.1.mlp.router.expert_bias"])


def test_text_is_the_same_from_one_process_and_from_two(trained: Path) -> None:
    arguments = ("--load", trained, "--prompt", "import ", "--temperature", 0, "--max-new-tokens", 8)
    alone = run_tool("tools/generate_text.py", *arguments)
    assert len(alone) > len("import \n")
    assert run_tool("tools/generate_text.py", *arguments, processes=2) == alone


def generate(*words: object) -> int:
    """Run the command in this process."""
    return generate_text.main([str(word) for word in words])


def test_a_file_of_prompts_becomes_json_rows(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every text is the one that its prompt has alone, and the other fields of a prompt are kept."""
    prompts: list[dict[str, Any]] = [
        {"prompt": "import ", "id": 7},
        {"prompt": "def read_file(path):\n    return", "id": "x"},
        {"prompt": "é"},
    ]
    rows, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts) + "\n")
    common = ("--load", trained, "--max-new-tokens", 6, "--temperature", 1.5)
    arguments = ("--prompts", rows, "--output", output, "--batch-size", 2, "--seed", 3)
    assert generate(*common, *arguments) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and re.fullmatch(r"tokens/s: prompts [0-9.,]+, new [0-9.,]+\n", stderr.splitlines(True)[-1])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for number, (prompt, result) in enumerate(zip(prompts, found, strict=True)):
        alone = ("--prompt", prompt["prompt"], "--seed", 3 + number)
        assert generate(*common, *alone) == 0
        assert capsys.readouterr().out == f"{result['prompt']}{result['text']}\n"
        # The corpus is Python's library, so with another Python a text may end by itself.
        finish = "max_new_tokens" if result["tokens"] == 6 else "end_of_document"
        assert result == {**prompt, "text": result["text"], "tokens": result["tokens"], "finish": finish}

    lines = tmp_path / "prompts.txt"
    lines.write_text("import \n\né\n")
    assert generate(*common, "--prompts", lines, "--seed", 3) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["prompt"] for result in printed] == ["import ", "é"]
    assert printed[0]["text"] == found[0]["text"]


def test_lines_are_one_text(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty line begins a new text, and so does a text that is too long."""
    common = ("--load", trained, "--max-new-tokens", 3, "--temperature", 0, "--max-position-embeddings", 40)

    def continuation(prompt: str) -> str:
        assert generate(*common, "--prompt", prompt) == 0
        return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")

    first = continuation("import ")
    second = continuation(f"import {first}\nx")
    monkeypatch.setattr(sys, "stdin", StringIO("import \nx\n\nimport \n" + "a" * 50 + "\nimport "))
    assert generate(*common, "--interactive") == 0
    found = capsys.readouterr().out
    (refused,) = re.findall(r"\(\d+ tokens .*, a text has at most 40: a new text begins\.\)", found)
    assert first != "" and found == "\n".join([first, second, first, refused, first, ""])
    # A text that fills the context has no room for a continuation.
    tokens = int(refused.removeprefix("(").split()[0])
    monkeypatch.setattr(sys, "stdin", StringIO("import \n" + "a" * 50))
    assert generate(*common[:-1], tokens, "--interactive") == 0
    refused = f"({tokens} tokens are too many, a text has at most {tokens}: a new text begins.)\n"
    assert capsys.readouterr().out.endswith(refused)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "Exactly one of --prompt, --prompts, --interactive is needed, and none of them is given"),
        (("--prompt", "a", "--interactive"), "and --prompt and --interactive is given"),
        (("--prompt", "a", "--output", "b"), "--output b needs --prompts"),
        (("--prompts", "{}/no.txt"), "no.txt cannot be read (No such file or directory): check the path"),
        (("--prompts", "{}/empty.txt"), "empty.txt holds no prompt"),
        (("--prompts", "{}/bad.jsonl"), "Line 2 of {}/bad.jsonl is not JSON"),
        (("--prompts", "{}/deep.jsonl"), "Line 1 of {}/deep.jsonl is not JSON"),
        (("--prompts", "{}/key.jsonl"), 'is not an object with a text under "prompt"'),
        (("--prompts", "{}/empty.txt", "--output", "{}/no/texts"), "--output {}/no/texts cannot be written"),
        (("--prompt", "a", "--expert-model-parallel-size", "2"), "does not divide the 1 processes of a stage"),
        (("--prompt", "a", "--pipeline-model-parallel-size", "2"), "does not divide 1 processes: start a multiple"),
        (("--prompt", "a", "--pipeline-model-parallel-size", "0"), "must be at least 1"),
    ],
)
def test_wrong_requests_are_refused_in_one_sentence(
    trained: Path, tmp_path: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "key.jsonl").write_text('{"text": "a"}\n')
    assert generate("--load", trained, *(word.format(tmp_path) for word in words)) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("ERROR: ") and stderr.count("\n") == 1
    assert sentence.format(tmp_path) in stderr


# --- checkpoints carry their tokenizer ------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose tokenizer has a relative path, with two copies of its checkpoints; another directory is current, in
    which this path is of no file."""
    corpus: Corpus = tiny_corpus(tmp_path_factory.getbasetemp())
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    shutil.copy(corpus.tokenizer, "tokenizer.model")
    places: Flags = {"save": "run", "save_interval": 1, "metrics_jsonl": "metrics.jsonl"}
    mirrors = f"{tmp_path}/mirror,file://{tmp_path}/store"
    flags = flags_of(replace(corpus, tokenizer=Path("tokenizer.model")), train_iters=2, **places)
    call_training([*flags, "--redundant-save", *mirrors.split(",")]).succeeded()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def generated(load: str) -> str:
    request = generate_text.GenerateConfig(load=load, prompt="import os", max_new_tokens=2, temperature=0.0)
    return "".join(generate_text.generate(request))


def test_tools_read_a_checkpoint_from_another_directory(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied / "there" / "run"
    text = generated(str(run))
    assert text.startswith("import os")
    # The copies of the checkpoints have it, too, and so has what a tool makes of them.
    (copied / "there" / "tokenizer.model").unlink()
    assert generated(str(copied / "mirror")) == generated(f"file://{copied}/store") == text
    with Progress() as progress:
        message = average(Average(f"file://{copied}/store", (1, 2), str(copied / "average")), progress)
    # What is fetched from a URL is gone when the tool has ended.
    assert f"--tokenizer-model {copied}/average/iter_0000002/tokenizer/tokenizer.model" in message
    convert_checkpoint.convert(ToHuggingFace(str(run), str(copied / "hf")))
    convert_checkpoint.convert(FromHuggingFace(str(copied / "hf"), str(copied / "again")))
    shutil.rmtree(copied / "hf")
    (copied / "again").rename(copied / "moved")
    shutil.rmtree(run)
    assert generated(str(copied / "moved")) == text
    assert generated(str(copied / "average")).startswith("import os")
    (copied / "text.txt").write_text("import os\nimport sys\n" * 20)
    words = ["--load", str(copied / "mirror"), "--input", str(copied / "text.txt"), "--device", "cpu"]
    assert evaluate.main(words) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_a_copy_that_cannot_be_written_is_a_warning(
    copied: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    corpus: Corpus = tiny_corpus(tmp_path_factory.getbasetemp())
    (copied / "other").mkdir()
    (copied / "other" / "tokenizer").write_text("in the way")
    call_training(flags_of(corpus, train_iters=2, save=copied / "other")).succeeded()
    assert "The tokenizer is not copied beside the checkpoints: Cannot write" in caplog.text
