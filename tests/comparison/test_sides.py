"""Every kind of path is recognised by its content, with flags, checkpoints and curves; the rest gets a sentence."""

import shutil
from pathlib import Path

import pytest
import torch

from megatron.comparison.megatron_log import parse_log
from megatron.comparison.side import Side, open_side
from megatron.errors import UserError
from tests import megatron_log_parsers
from tests.checkpoint.models import ITERATION, unpack_fixtures
from tests.end_to_end.converted import to_hf
from tests.end_to_end.run_process import MOCK_RUN, call_training, words_of
from tests.messages import assert_helpful

LOSS = 10.45678
LOG = f"""\
------------------------ arguments ------------------------
[default3]:  adam_beta1 ...................................... 0.9
[default0]:  data_path ....................................... ['a', 'b']
  params_dtype .................................... torch.bfloat16
-------------------- end of arguments ---------------------
> building dataset ... 3
 [2026-11-28 10:00:00.000000] iteration        1/     100 | consumed samples:            8 | \
elapsed time per iteration (ms): 10.0 | throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate: 3.000000E-04 | \
global batch size:     8 | \
lm loss: {LOSS:.6E} | loss scale: 1.0 | grad norm: 1.234 | num zeros: 3 | params norm: 5.000 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
rank 3: a warning | that has: bars
[default0]: iteration        2/     100 | consumed samples:           16 | \
lm loss: nan | grad norm: nan |
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations that was moved after it ended, with a log in Megatron-LM's form."""
    directory = tmp_path_factory.mktemp("runs") / "before"
    flags = {**MOCK_RUN, "train_iters": 2, "lr_warmup_iters": 0, "save_interval": 1, "log_format": "megatron"}
    places = {"save": directory / "checkpoints", "run_dir": directory, "metrics_jsonl": directory / "metrics.jsonl"}
    outcome = call_training(words_of({**flags, **places})).succeeded()
    (directory / "train.log").write_text(outcome.stdout)
    moved = directory.rename(directory.with_name("moved"))
    to_hf(moved / "checkpoints", moved.with_name("model"))
    return moved


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixtures(tmp_path_factory.mktemp("megatron_core")) / "llama"


def losses(side: Side) -> list[float]:
    assert side.curve is not None
    return [loss for _, loss in side.curve.curve("lm_loss", in_tokens=False)]


def test_a_run_directory_has_everything_also_after_it_was_moved(run: Path) -> None:
    side = open_side("A", run)
    assert side.kind == "run" and side.config is not None and side.config.training.train_iters == 2
    assert side.checkpoints == {one: run / "checkpoints" / f"iter_{one:07d}" for one in (1, 2)}
    assert side.environment is not None and side.environment["versions"]["torch"] == torch.__version__
    assert side.world_size == 1 and len(losses(side)) == 2


@pytest.mark.parametrize(("place", "iterations"), [("checkpoints", {1, 2}), ("checkpoints/iter_0000002", {2})])
def test_checkpoints_have_the_flags_of_their_run(run: Path, place: str, iterations: set[int]) -> None:
    side = open_side("B", run / place)
    assert side.kind == "checkpoint" and side.checkpoints.keys() == iterations
    assert side.config == open_side("A", run).config and side.environment is None


def test_a_metrics_file_has_the_flags_of_its_run(run: Path) -> None:
    side, whole = open_side("A", run / "metrics.jsonl"), open_side("A", run)
    assert side.kind == "run" and side.config == whole.config and side.world_size == 1
    assert losses(side) == losses(whole) and not side.checkpoints


def test_our_log_is_a_run_with_the_digits_of_the_log(run: Path) -> None:
    side = open_side("A", run / "train.log")
    assert side.kind == "run" and side.config is None
    assert losses(side) == pytest.approx(losses(open_side("A", run)), rel=5e-7)


def test_a_model_of_hugging_face_is_a_checkpoint_of_iteration_0(run: Path) -> None:
    side = open_side("B", run.with_name("model"))
    assert side.kind == "hugging-face" and side.checkpoints == {0: run.with_name("model")}
    assert side.foreign is not None and side.foreign["hidden_size"] == MOCK_RUN["hidden_size"]


def test_megatrons_directories_have_arguments_and_the_log_beside_them(megatron: Path, tmp_path: Path) -> None:
    shutil.copytree(megatron, tmp_path / "run")
    (tmp_path / "run" / "train.log").write_text(LOG)
    root, one = open_side("A", tmp_path / "run"), open_side("B", megatron / ITERATION)
    for side in (root, one):
        assert side.kind == "megatron-lm" and side.checkpoints.keys() == {7} and side.config is None
        assert side.foreign is not None and side.foreign["num_layers"] == 2
    assert losses(root) == [LOSS] and one.curve is None


def test_a_log_of_megatron_has_arguments_and_iterations_between_lines_of_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    side = open_side("A", tmp_path / "log")
    assert side.kind == "megatron-lm"
    assert side.foreign == {"adam_beta1": 0.9, "data_path": ["a", "b"], "params_dtype": "torch.bfloat16"}
    log = parse_log(LOG.splitlines())
    first, second = log.history.iterations
    known = megatron_log_parsers.between_bars(LOG.replace("[default0]:", ""))
    assert first["lm_loss"] == LOSS == known["lm loss"][0] and first["grad_norm"] == known["grad norm"][0]
    assert first["consumed_samples"] == 8 and second["consumed_samples"] == 16 and second["lm_loss"] is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent", None, "does not exist: give an existing path"),
        ("text.log", "step 1 loss 3.5\n", "unknown form: give one with Megatron-LM's lines"),
        ("other.jsonl", '{"a": 1}\n', "has no losses"),
        ("empty", {}, "nothing that can be compared: name a run directory"),
        ("copy", {"manifest.json": ""}, "under another name"),
        ("old", {"mp_rank_00/model_optim_rng.pt": ""}, "the format torch"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(
    name: str, content: str | dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif content is not None:
        (tmp_path / name).mkdir()
        for file, text in content.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        open_side("A", tmp_path / name)
    assert_helpful(str(caught.value), str(tmp_path / name))


def test_a_url_gets_its_remedy() -> None:
    with pytest.raises(UserError, match=r"A s3://bucket/run is a URL.* copy what it names"):
        open_side("A", "s3://bucket/run")
