"""GPT-2's tokenizer in two files gives the ids of transformers, and flags without effect are named."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from megatron.commands.preprocess_data import PreprocessConfig, preprocess
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.data import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers import build_tokenizer, describe_tokenizer
from megatron.errors import ConfigError, DataError
from tests.data.texts import AWKWARD_TEXTS, random_texts
from tests.end_to_end.run_process import call_training

END = "<|endoftext|>"
TEXTS = [
    *(text for text in AWKWARD_TEXTS if END not in text),
    "it's they'll we've I'M don't",
    "x  y   z\n\n \n\t\ttabs",
    "1234567 3.14 \u0663\u0664 \u00bd \u2460",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e17\u0e35\u0e48 \u1f468\u200d\U0001f469\u200d\U0001f467",
    "\u0120\u010a byte-level signs themselves \u00c2\u00a0",
    "#version: 0.2",
    *random_texts(300),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """vocab.json and merges.txt, as GPT-2's, of a small byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    here = Path(__file__).read_text(encoding="utf-8")
    fast.train_from_iterator([*here.split("\n\n"), *TEXTS], trainer)
    directory = tmp_path_factory.mktemp("gpt2")
    vocab, merges = fast.model.save(str(directory))
    ids = json.loads(Path(vocab).read_text())
    Path(vocab).write_text(json.dumps(ids | {END: len(ids)}))
    return vocab, merges


def config_of(files: tuple[str, str], **changes: Any) -> TokenizerConfig:
    return TokenizerConfig("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1], **changes)


def test_ids_are_those_of_transformers(files: tuple[str, str]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(Path(files[0]).parent)
    ours = build_tokenizer(config_of(files))
    assert (ours.vocab_size, ours.eod, ours.bos) == (len(theirs), theirs.eos_token_id, theirs.bos_token_id)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.tokenize(text) == ids, text
        assert ours.detokenize(ids) == text
    # The faster library, if it is installed, too.
    assert ours.tokenize_to_arrays(TEXTS).tokens.tolist() == list(chain(*theirs(TEXTS)["input_ids"]))
    # The end of a document is not read from a text.
    assert ours.eod not in ours.tokenize(f"a{END}b") and ours.detokenize(ours.tokenize(f"a{END}b")) == f"a{END}b"


def test_a_corpus_is_preprocessed_and_trained_on(files: tuple[str, str], tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text))
    prefix = str(tmp_path / "corpus")
    preprocess(PreprocessConfig((str(source),), prefix, tokenizer=config_of(files), append_eod=True))
    tokenizer = build_tokenizer(config_of(files))
    first = IndexedDataset(f"{prefix}_text_document").get(0).tolist()
    assert first == [*tokenizer.tokenize(next(filter(None, TEXTS))), tokenizer.eod]
    flags = "--model tiny --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --num-workers 0"
    places = ["--data-path", f"{prefix}_text_document", "--data-cache-path", str(tmp_path / "cache")]
    words = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files[0], "--merge-file", files[1]]
    call_training([*flags.split(), "--lr", "1e-3", "--device", "cpu", *places, *words]).succeeded()


def test_beside_another_tokenizer_the_flags_are_named_and_change_nothing(files: tuple[str, str]) -> None:
    flags = "--model tiny --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --num-workers 0"
    words = [*flags.split(), "--lr", "1e-3", "--device", "cpu", "--mock-data", "--vocab-size", "99"]
    outcome = call_training([*words, "--vocab-file", "no/vocab.json", "--merge-file", "no/merges.txt"]).succeeded()
    assert "> no effect here: --vocab-file, --merge-file" in outcome.stdout
    assert "no effect" not in call_training(words).succeeded().stdout
    null = TokenizerConfig("NullTokenizer", vocab_size=9, vocab_file="no", merge_file="no")
    null.check()
    assert describe_tokenizer(null) == describe_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=9))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v", "needs --merge-file: add it"),
        ("--tokenizer-type GPT2BPETokenizer --merge-file m", "needs --vocab-file: add it"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m --tokenizer-model t",
            "--tokenizer-model t is not used by --tokenizer-type GPT2BPETokenizer",
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --merge-file m", "--merge-file and --tokenizer-t"),
    ],
)
def test_where_they_would_matter_they_are_refused(words: str, sentence: str) -> None:
    flags = "--model tiny --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1 --data-path P"
    with pytest.raises(ConfigError, match=sentence):
        check_run(parse_command_line([*flags.split(), *words.split()]), 1)


@pytest.mark.parametrize(
    ("vocabulary", "merges", "sentence"),
    [
        ("[", "", r"vocab\.json is not JSON"),
        ("[" * 100_000, "", r"vocab\.json is not JSON"),
        ("[1]", "", r"vocab\.json is not a JSON object of tokens and ids"),
        ('{"a": 0, "b": "1"}', "", r"vocab\.json is not a JSON object of tokens and ids"),
        ('{"a": 0}', "", r"vocab\.json has no <\|endoftext\|>"),
        ('{"a": 0, "b": 1, "<|endoftext|>": 2}', "#version: 0.2\na b\n", r"Line 2 of .*merges\.txt, 'a b', merges no"),
        ('{"a": 0, "<|endoftext|>": 2}', "a\n", r"Line 1 of .*merges\.txt"),
        (None, "", r"vocab\.json does not exist: set --vocab-file"),
        ('{"a": 0, "<|endoftext|>": 2}', None, r"merges\.txt does not exist: set --merge-file"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, vocabulary: str | None, merges: str | None, sentence: str) -> None:
    files = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    for path, content in zip(files, (vocabulary, merges)):
        if content is not None:
            Path(path).write_text(content)
    with pytest.raises(DataError, match=sentence):
        build_tokenizer(config_of(files))


def test_a_larger_vocabulary_than_the_model_s_is_refused(files: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 9 is below the \d+ ids of .*vocab\.json"):
        build_tokenizer(config_of(files, vocab_size=9))
