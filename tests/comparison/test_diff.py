"""``megatron-llama diff`` on runs, checkpoints and models: verdict, exit code, page and JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import compare_runs
from megatron.comparison.compare import compare
from megatron.comparison.experiment import ExperimentError, Request
from megatron.comparison.finding import Verdict
from megatron.comparison.page import to_json, to_page, to_text
from megatron.config.run import RunConfig
from tests.comparison.in_process import InProcess
from tests.end_to_end.converted import to_hf
from tests.end_to_end.run_process import call_training, words_of

FLAGS: dict[str, Any] = {
    "device": "cpu", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 64, "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 30, "seq_length": 16,
    "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3, "lr": 1e-3, "num_workers": 0, "eval_iters": 0,
    "log_interval": 1, "save_interval": 3, "bf16": True, "clip_grad": 50.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that differ in a flag, in the seed, in nothing but the microbatch; and the first as a model."""
    root = tmp_path_factory.mktemp("runs")
    more: dict[str, dict[str, Any]] = {
        "base": {},
        "epsilon": {"norm_epsilon": 1e-2, "clip_grad": 100.0},
        "seed": {"seed": 7},
        "microbatch": {"micro_batch_size": 4},
        "long": {"train_iters": 8, "save_interval": 4, "lr_warmup_iters": 2, "min_lr": 1e-5},
        "decay": {"train_iters": 8, "save_interval": 4, "lr_warmup_iters": 2, "lr_decay_iters": 5, "min_lr": 1e-5},
    }
    for name, changed in more.items():
        places = {"save": root / name, "metrics_jsonl": root / name / "metrics.jsonl"}
        call_training(words_of({**FLAGS, **changed, **places})).succeeded()
    to_hf(root / "base", root / "model")
    return root


def verdict_on(runs: Path, a: str, b: str, directory: Path) -> Verdict:
    return compare((str(runs / a), str(runs / b)), InProcess({}), directory, 8, lambda text: None)


def test_a_flag_is_named_and_a_harmless_one_is_not(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "base", "epsilon", tmp_path)
    assert verdict.kind == "cause" and verdict.exit_code == 3
    assert [(one.what, one.a, one.b) for one in verdict.causes] == [("--norm-epsilon", "1e-05", "0.01")]
    assert [one.what for one in verdict.others] == ["--clip-grad"]
    assert "layers.0.input_layernorm" in verdict.sentence
    names = ("base <b>", "epsilon")
    text, page = to_text(verdict, names), to_page(verdict, names)
    assert verdict.sentence in text and "differs, does not explain:\n  --clip-grad" in text
    assert "base &lt;b&gt;" in page and "<b>" not in page
    assert not re.findall(r"(?:src|href)=", page)
    assert page.count("<circle") > 200  # every operation and its expected error
    content = json.loads(to_json(verdict, names))
    assert content["exit_code"] == 3 and content["causes"][0]["what"] == "--norm-epsilon"


def test_another_seed_explains_samples_and_weights(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "base", "seed", tmp_path)
    assert [one.what for one in verdict.causes] == ["--seed"]
    tokens = next(one for one in verdict.parts if one.part == "data")
    assert tokens.differences[0].what == "tokens" and tokens.figures is not None
    assert to_page(verdict, ("a", "b")).count("badge bad") >= 2


def test_a_shorter_decay_shows_in_the_last_steps_from_trained_weights(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "long", "decay", tmp_path)
    assert verdict.kind == "cause" and [one.what for one in verdict.causes] == ["--lr-decay-iters"]
    compared = verdict.parts[-1].compared
    assert "From A's weights of iteration 4: " in compared and "iterations 7 and 8" in compared

    def without_checkpoints(label: str, config: RunConfig, world_size: int, request: Request, directory: Path) -> None:
        if request.checkpoint is not None:
            raise ExperimentError("It cannot be loaded.")
        InProcess({})(label, config, world_size, request, directory)

    names = str(runs / "long"), str(runs / "decay")
    verdict = compare(names, without_checkpoints, tmp_path / "without", 8, lambda text: None)
    assert verdict.kind == "unclear" and verdict.parts[-1].compared.endswith("none: It cannot be loaded.")


def test_another_microbatch_is_rounding(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "base", "microbatch", tmp_path)
    assert verdict.kind == "rounding" and verdict.exit_code == 0
    assert not verdict.causes


def test_a_run_beside_itself_is_equal(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "base", "base/metrics.jsonl", tmp_path)
    assert verdict.kind == "equal" and verdict.exit_code == 0


def test_a_model_of_transformers(runs: Path, tmp_path: Path) -> None:
    verdict = verdict_on(runs, "base", "model", tmp_path)
    assert verdict.exit_code == 0 and "in fp64" in verdict.sentence
    place = runs / "model" / "config.json"
    before = place.read_text()
    place.write_text(json.dumps({**json.loads(before), "rms_norm_eps": 1e-2}))
    (tmp_path / "2").mkdir()
    verdict = verdict_on(runs, "model", "base", tmp_path / "2")
    place.write_text(before)
    assert [one.what for one in verdict.causes] == ["--norm-epsilon"] and verdict.exit_code == 3


MEGATRON_LOG = """
------------------------ arguments ------------------------
  attention_dropout ............................... 0.1
  bf16 ............................................ True
  clip_grad ....................................... 50.0
  ffn_hidden_size ................................. 64
  global_batch_size ............................... 4
  group_query_attention ........................... True
  hidden_size ..................................... 32
  lr .............................................. 0.001
  max_position_embeddings ......................... 16
  micro_batch_size ................................ 2
  num_attention_heads ............................. 4
  num_layers ...................................... 2
  num_query_groups ................................ 2
  normalization ................................... RMSNorm
  padded_vocab_size ............................... 128
  position_embedding_type ......................... rope
  rotary_base ..................................... 5000
  seq_length ...................................... 16
  swiglu .......................................... True
  add_bias_linear ................................. False
  train_iters ..................................... 3
  untie_embeddings_and_output_weights ............. True
-------------------- end of arguments ---------------------
 [2026-11-28 10:00:00.000000] iteration        1/       3 | consumed samples:            4 | lm loss: 3.400000E+00 |
"""


def test_a_log_of_megatron_beside_a_run(runs: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(MEGATRON_LOG)
    verdict = compare((str(log), str(runs / "base")), InProcess({}), tmp_path, 8, lambda text: None)
    assert [(one.what, one.a, one.b) for one in verdict.causes] == [("--rotary-base", "5000", "500000")]
    assert [(one.what, one.remark) for one in verdict.others] == [
        ("--attention-dropout", "not tried: this code has no other value")
    ]
    assert "are not compared" in verdict.parts[0].compared


def test_without_experiments_nothing_is_said_to_explain(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs / "base"), str(runs / "epsilon"), "--no-experiments", "--html", str(tmp_path / "page.html")]
    monkeypatch.setattr("sys.argv", ["diff", *words])
    assert compare_runs.main_diff() == 2
    out = capsys.readouterr().out
    assert "Not decided: there are 2 differences that may change the loss" in out
    assert "differs, not tried:\n  --norm-epsilon" in out
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a"], "B is missing: add it"),
        (["a", "b", "--max-ranks", "0"], "--max-ranks 0 must be at least 1"),
        (["a", "b", "--code-a", "/"], "--code-a / is no checkout of this code"),
        (["a", "b", "--keep", "/"], "--keep / exists"),
        (["/no/such", "b"], "A /no/such does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diff", *words])
    assert compare_runs.main_diff() == 2
    assert sentence in capsys.readouterr().err
