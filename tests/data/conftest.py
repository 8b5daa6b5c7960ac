"""The golden corpora; tokenizers of every kind, trained or written here, or Llama 3's."""

import base64
import importlib.metadata
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.train_tokenizer import TrainTokenizerConfig, train
from megatron.config.data import TokenizerConfig
from megatron.data.tokenizer_formats import END_OF_TEXT
from tests.data.corpora import CORPUS_A, CORPUS_B, golden_documents, write
from tests.data.texts import AWKWARD_TEXTS


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Corpora ``a`` and ``b`` in the working directory: their names are part of cache keys."""
    monkeypatch.chdir(tmp_path)
    write("a", golden_documents(CORPUS_A))
    write("b", golden_documents(CORPUS_B, start=500))
    return tmp_path


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


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory, python_sources: list[str]) -> TokenizerConfig:
    """vocab.json and merges.txt, as GPT-2's, of a small byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([*python_sources[:3], *AWKWARD_TEXTS], trainer)
    vocabulary, merges = fast.model.save(str(tmp_path_factory.mktemp("gpt2")))
    ids = json.loads(Path(vocabulary).read_text())
    Path(vocabulary).write_text(json.dumps(ids | {END_OF_TEXT: len(ids)}))
    return TokenizerConfig("GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)


@pytest.fixture
def llama2_model(tmp_path: Path) -> str:
    """Llama 2's pieces, which splintr has with it, with scores as Llama 2's model has them: in their order."""
    import splintr
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    types = proto.ModelProto.SentencePiece
    model = proto.ModelProto()
    vocabulary = splintr.Tokenizer.from_pretrained("llama2")
    for number in range(32_000):
        text = vocabulary.decode_token_bytes(number).decode(errors="replace").replace(" ", "\u2581")
        if number < 3:
            piece, kind = ("<unk>", "<s>", "</s>")[number], (types.UNKNOWN, types.CONTROL, types.CONTROL)[number]
        else:
            piece, kind = (f"<0x{number - 3:02X}>", types.BYTE) if number < 259 else (text, types.NORMAL)
        model.pieces.add(piece=piece, type=kind, score=float(min(0, 259 - number)))
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    return str(tmp_path / "tokenizer.model")
