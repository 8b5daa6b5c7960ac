"""Tokenizers of every kind, trained or written here, or Llama 3's."""

import base64
import importlib.metadata
import json
import sysconfig
from pathlib import Path

import pytest

from megatron.commands.train_tokenizer import TrainTokenizerConfig, train


@pytest.fixture(scope="session")
def python_sources() -> list[str]:
    """Some 800 kB of source code."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))[:40]]


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory, python_sources: list[str]) -> str:
    directory = tmp_path_factory.mktemp("sentencepiece")
    with open(directory / "sources.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"code": source}) + "\n" for source in python_sources)
    config = TrainTokenizerConfig(
        input=(str(directory / "sources.jsonl"),),
        model_prefix=str(directory / "deeper" / "python"),
        vocab_size=1000,
        json_key="code",
        num_threads=2,
    )
    path = train(config)
    assert [file.name for file in (directory / "deeper").iterdir()] == ["python.model"]
    return path


@pytest.fixture(scope="session")
def llama3_model() -> str:
    """Llama 3's tokenizer.model."""
    return published_model("llama3")


@pytest.fixture(scope="session")
def llama4_model() -> str:
    """Llama 4's tokenizer.model."""
    return published_model("llama4")


def published_model(family: str) -> str:
    """The tokenizer.model of a family from the llama-models package, which is not imported."""
    try:
        files = importlib.metadata.files("llama-models") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llama-models is not installed")
    (model,) = (file for file in files if file.as_posix() == f"llama_models/{family}/tokenizer.model")
    return str(model.locate())


@pytest.fixture
def byte_ranks(tmp_path: Path) -> str:
    """A model of single bytes and a few merges, in Llama 3's format."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"  ", b"    ", b"ab"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.fixture
def hugging_face_directory(tmp_path: Path) -> Path:
    """A byte-level BPE that would add <s>, truncate and pad if it were asked to."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["a loop over words in a list of words"] * 3, trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.enable_truncation(5)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
