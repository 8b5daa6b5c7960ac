"""Checkpoints carry their tokenizer: text tools read them from any directory, also when the original is gone."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.commands import convert_checkpoint, evaluate, generate_text
from megatron.commands.average_checkpoints import Average, average
from megatron.commands.convert_checkpoint import FromHuggingFace, ToHuggingFace
from megatron.commands.weight_checkpoints import progress_bar
from megatron.errors import DataError
from tests.end_to_end.run_process import Corpus, FlagValue, bytes_under, call_training, flags_of, records, tiny_corpus


@pytest.fixture
def trained(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose tokenizer has a relative path, with two copies of its checkpoints; another directory is current, in
    which this path is of no file."""
    corpus: Corpus = tiny_corpus(tmp_path_factory.getbasetemp())
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    shutil.copy(corpus.tokenizer, "tokenizer.model")
    places: dict[str, FlagValue] = {"save": "run", "save_interval": 1, "metrics_jsonl": "metrics.jsonl"}
    mirrors = f"{tmp_path}/mirror,file://{tmp_path}/store"
    flags = flags_of(replace(corpus, tokenizer=Path("tokenizer.model")), train_iters=2, **places)
    call_training([*flags, "--redundant-save", *mirrors.split(",")]).succeeded()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def generated(load: str) -> str:
    request = generate_text.GenerateConfig(load=load, prompt="import os", max_new_tokens=2, temperature=0.0)
    return "".join(generate_text.generate(request))


def test_tools_read_a_checkpoint_from_another_directory(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained / "there" / "run"
    text = generated(str(run))
    assert text.startswith("import os")
    # The copies of the checkpoints have it, too, and so has what a tool makes of them.
    (trained / "there" / "tokenizer.model").unlink()
    assert generated(str(trained / "mirror")) == generated(f"file://{trained}/store") == text
    with progress_bar() as progress:
        message = average(Average(f"file://{trained}/store", (1, 2), str(trained / "average")), progress)
    # What is fetched from a URL is gone when the tool has ended.
    assert f"--tokenizer-model {trained}/average/iter_0000002/tokenizer/tokenizer.model" in message
    convert_checkpoint.convert(ToHuggingFace(str(run), str(trained / "hf")))
    convert_checkpoint.convert(FromHuggingFace(str(trained / "hf"), str(trained / "again")))
    shutil.rmtree(trained / "hf")
    (trained / "again").rename(trained / "moved")
    shutil.rmtree(run)
    assert generated(str(trained / "moved")) == text
    assert generated(str(trained / "average")).startswith("import os")
    (trained / "text.txt").write_text("import os\nimport sys\n" * 20)
    words = ["--load", str(trained / "mirror"), "--input", str(trained / "text.txt"), "--device", "cpu"]
    assert evaluate.main(words) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_a_run_that_goes_on_leaves_the_copy_as_it_is(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained / "there")
    before = bytes_under(Path("run") / "tokenizer")
    (name,) = {Path(path).name for path in before}
    assert name == "tokenizer.model"
    corpus: Corpus = tiny_corpus(trained.parent)
    here = replace(corpus, tokenizer=Path("tokenizer.model"))
    again = flags_of(here, train_iters=3, save="run", load="run", metrics_jsonl="metrics.jsonl")
    call_training([*again, "--override-opt-param-scheduler"]).succeeded()
    assert [record["iteration"] for record in records(Path("metrics.jsonl")) if "lm_loss" in record] == [1, 2, 3]
    assert bytes_under(Path("run") / "tokenizer") == before


def test_a_checkpoint_without_a_copy_names_the_missing_file(trained: Path) -> None:
    run = trained / "there" / "run"
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(DataError, match=r"^tokenizer.model does not exist: set --tokenizer-model"):
        generated(str(run))


def test_a_copy_that_cannot_be_written_is_a_warning(
    trained: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    corpus: Corpus = tiny_corpus(tmp_path_factory.getbasetemp())
    (trained / "other").mkdir()
    (trained / "other" / "tokenizer").write_text("in the way")
    call_training(flags_of(corpus, train_iters=2, save=trained / "other")).succeeded()
    assert "The tokenizer is not copied beside the checkpoints: Cannot write" in caplog.text
