"""A run from Python computes what the command computes, and leaves nothing behind; the notebook runs as it is."""

import json
import os
import random
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_llama as ml
from megatron.errors import CheckpointError
from megatron.training.loop.listeners import Evaluation as EvaluationListener
from megatron_llama.run import FlagValue, words_of
from tests.end_to_end.run_process import Corpus, call_training, iterations, run_python, tiny_corpus
from tests.model.reference import fp32_means_fp64

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
SIZES |= {"num_attention_heads": 4, "num_query_groups": 2}
BATCH: dict[str, Any] = {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4}
BATCH |= {"num_workers": 0, "device": "cpu"}
NUMBERS: dict[str, Any] = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 99, "lr": 1e-2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return tiny_corpus(tmp_path_factory.getbasetemp())


def flags_of(corpus: Corpus, **changes: FlagValue) -> dict[str, Any]:
    flags = {"train_iters": 4, "lr": 1e-2, "eval_interval": 100, "eval_iters": 2}
    data = {"data_path": corpus.prefix, "split": "80,20,0"}
    tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": corpus.tokenizer}
    return {**SIZES, **BATCH, **flags, **data, **tokenizer, **changes}


def process_state() -> dict[str, Any]:
    """What a run might leave behind."""
    numbers: Any = np.random.get_state(legacy=False)["state"]
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "variables": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "groups": torch.distributed.is_initialized(),
        "random": (random.getstate(), numbers["key"].tobytes(), numbers["pos"], torch.get_rng_state().tolist()),
        "python threads": {thread.name for thread in threading.enumerate()},
    }


def test_steps_are_those_of_the_command_and_nothing_is_left_behind(tmp_path: Path, corpus: Corpus) -> None:
    """Twice in one process, the second time off the main thread, where no signal handler can be set."""
    metrics = tmp_path / "metrics.jsonl"
    flags = flags_of(corpus, log_interval=1, deterministic_mode=True)
    outcome = call_training(words_of({**flags, "metrics_jsonl": metrics}))
    assert outcome.exit_code == 0, outcome.stderr
    expected = [(record["lm_loss"], record["grad_norm"], record["learning_rate"]) for record in iterations(metrics)]
    before = process_state()
    found: list[list[tuple[float, float, float]]] = []

    def train() -> None:
        with ml.Run(**flags) as run:
            found.append([(step.loss, step.grad_norm, step.learning_rate) for step in run.steps()])
            assert run.iteration == 4

    train()
    assert process_state() == before
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert process_state() == before
    assert found == [expected, expected]


def test_a_run_is_saved_exported_and_continued(tmp_path: Path, corpus: Corpus) -> None:
    transformers = pytest.importorskip("transformers")
    with ml.Run(**flags_of(corpus)) as run:
        first = next(run.steps(1))
        assert (first.iteration, first.is_last, first.tokens) == (1, False, 128)
        run.step()
        assert run.save(tmp_path / "saved") == tmp_path / "saved/iter_0000002"
        run.export(tmp_path / "hf")
        evaluation = run.evaluate()
        assert (evaluation.iteration, evaluation.split) == (2, "validation")
        third = run.step()
        text = run.generate("def ", max_new_tokens=4, temperature=0)
        assert text.startswith("def ") and len(text) > len("def ")
        run.save(tmp_path / "third")
        assert {path.name for path in tmp_path.iterdir()} == {"saved", "hf", "third"}
    with ml.Model(tmp_path / "third") as model:
        assert model.generate_batch(["def ", "import "], max_new_tokens=4, temperature=0)[0] == text
    with ml.Run(**flags_of(corpus), load=tmp_path / "saved") as run:
        assert run.iteration == 2 and run.config.model.num_layers == 2
        again = run.step()
        assert (again.loss, again.grad_norm) == (third.loss, third.grad_norm)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.config.num_hidden_layers == 2
    assert json.loads((tmp_path / "hf/config.json").read_text(encoding="utf-8"))["hidden_size"] == 32


def test_the_evaluation_is_the_loss_of_transformers(tmp_path: Path, corpus: Corpus) -> None:
    """Over the samples that Megatron's sample order gives, read here one by one."""
    transformers = pytest.importorskip("transformers")
    flags = flags_of(corpus, micro_batch_size=1, global_batch_size=1, eval_iters=3, train_iters=1)
    with ml.Run(**flags) as run:
        run.export(tmp_path / "hf")
        loss = run.evaluate().loss
    with ml.Run(**flags) as run:
        listeners = run._open_trainer.listeners
        (validation,) = next(one.sets for one in listeners if isinstance(one, EvaluationListener))
        samples = [next(validation.microbatches) for _ in range(3)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    losses = []
    for sample in samples:
        with torch.no_grad():
            logits = model(sample["tokens"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits[0], sample["labels"][0]).item())
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_mistakes_are_one_sentence(corpus: Corpus, tmp_path: Path) -> None:
    before = process_state()
    with pytest.raises(ml.ConfigError, match=r"^--learning-rate is not a flag"):
        ml.Run(**flags_of(corpus), learning_rate=1)
    with pytest.raises(ml.ConfigError, match=r"^--dry-run has no effect in megatron_llama\.Run"):
        ml.Run(**flags_of(corpus), dry_run=True, num_gpus=1)
    with pytest.raises(ml.UserError):
        ml.Run(**flags_of(corpus, tokenizer_model=tmp_path / "missing.model"))
    assert process_state() == before
    with ml.Run(**flags_of(corpus, split="1,0,0", train_iters=1, eval_interval=None)) as run:
        with pytest.raises(ml.ConfigError, match=r"^The run has no validation data: set --eval-interval"):
            run.evaluate()
        run.step()
        with pytest.raises(ml.ConfigError, match=r"^The run ends after iteration 1 .*use a larger --train-iters"):
            run.step()
    with pytest.raises(ml.ConfigError, match=r"^The run is closed"):
        run.step()


def test_keywords_are_flags() -> None:
    flags = {"bf16": True, "sequence_parallel": False, "lr": 3e-4, "load": None, "data_path": ["0.5", "a"]}
    words = ["--bf16", "--no-sequence-parallel", "--lr", "0.0003", "--data-path", "0.5", "a"]
    assert words_of(flags) == words
    assert words_of({"cpu_offloading_num_layers": -1}) == ["--cpu-offloading-num-layers=-1"]


def test_a_tool_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    with pytest.raises(ml.ConfigError, match=r"^megatron-llama train ends its process: use megatron_llama\.Run"):
        ml.command("train", "--help")
    with pytest.raises(ml.ConfigError, match=r"did you mean plot\?"):
        ml.command("plott")
    with pytest.raises(RuntimeError, match=r"^megatron-llama merge-data failed with exit code \d: its output"):
        ml.command("merge-data", "--input", "/nowhere", "--output-prefix", "/nowhere/x")
    assert sys.argv is before and signal.getsignal(signal.SIGTERM) is handler


UNCLOSED = """
import megatron_llama as ml

run = ml.Run.from_flags({words!r})
run.step()
if {is_model}:
    run.save({directory!r})
    run.close()
    model = ml.Model({directory!r})
"""


@pytest.mark.processes
@pytest.mark.parametrize("is_model", [False, True])
def test_what_is_not_closed_ends_quietly_with_python(tmp_path: Path, is_model: bool) -> None:
    words = shlex.join(words_of({**SIZES, **BATCH, **NUMBERS, "train_iters": 3}))
    program = UNCLOSED.format(words=words, is_model=is_model, directory=str(tmp_path / "saved"))
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow(reason="starts two ranks under the launcher")
def test_ranks_of_torchrun_build_runs_one_after_the_other(tmp_path: Path) -> None:
    sizes = words_of({**SIZES, **BATCH, **NUMBERS, "train_iters": 3, "fp64": True})
    with ml.Run.from_flags(sizes) as run:
        expected = [step.loss for step in run.steps()]
        text = run.generate("1 2 3", max_new_tokens=4, temperature=0)
    launch = ["-m", "megatron.operation.launch", "--standalone", "--nproc-per-node", "2", "-m"]
    done = run_python(*launch, "tests.package.several_ranks", str(tmp_path), shlex.join(sizes))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}").read_text(encoding="utf-8"))
        for layout in ("data", "tensor"):
            assert found[layout] == pytest.approx(expected, rel=1e-9)
            assert found[f"{layout} text"] == text
            assert (tmp_path / layout / "config.json").exists()


# --- the notebook --------------------------------------------------------------------------------------------

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, from its first cell to its last; it holds no output, which would be of another version of the code."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number} of {NOTEBOOK.name}", "exec"), variables)
    losses = variables["losses"]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    printed = capsys.readouterr().out
    assert "continues after iteration 20" in printed and "iteration 30: loss" in printed
    assert "global batch size of 7" in printed.splitlines()[-1]
    assert (tmp_path / "notebook/hugging_face/config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"notebook"}


# --- muP at Hugging Face -------------------------------------------------------------------------------------
# It has no multipliers: they are in the weights, and the logits are equal.

RUN: dict[str, Any] = {**SIZES, **BATCH, "init_method_std": 0.2, "vocab_size": 60, "seq_length": 16, "fp64": True}
RUN |= {"mock_data": True, "train_iters": 2, "lr": 1e-2}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 24, "mup_base_head_dim": 5.0}
MUP |= {"mup_embedding_mult": 3.0, "mup_output_mult": 0.7}


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", {}),
        ("llama", {"untie_embeddings_and_output_weights": False}),
        ("qwen2", {"add_qkv_bias": True}),
        ("qwen3", {"qk_layernorm": True, "apply_layernorm_1p": True, "untie_embeddings_and_output_weights": False}),
    ],
    ids=["llama", "tied", "bias", "qk-norm-tied"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, flags: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    with ml.Run(**RUN, **MUP, **flags) as run:
        run.step()
        run.export(tmp_path / "hf")
        tokens = torch.arange(32).view(2, 16) * 7 % 60
        with torch.no_grad():
            ours = run.chunks[0](tokens).transpose(0, 1)
    with fp32_means_fp64(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
        assert model.config.model_type == family
        theirs = model(tokens).logits
    assert torch.allclose(ours[..., : theirs.shape[-1]], theirs, rtol=1e-9, atol=1e-9)
    assert float(theirs.std()) > 0.05


def test_a_run_continues_only_with_its_own_setting(tmp_path: Path) -> None:
    with ml.Run(**RUN, **MUP) as run:
        run.step()
        run.save(tmp_path)
        second = run.step()
    with ml.Run(**RUN, **MUP, load=tmp_path) as run:
        assert run.step().loss == second.loss
    with pytest.raises(CheckpointError, match="--use-mup is False here and True there"), ml.Run(**RUN, load=tmp_path):
        pass
