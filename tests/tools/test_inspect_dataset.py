"""tools/inspect_dataset.py shows counts, lengths and documents, and finds what is damaged."""

import os
from pathlib import Path

import pytest

from megatron.commands.datasets import InspectConfig, inspect
from megatron.config.data import TokenizerConfig
from megatron.data.corpus_digests import corpus_fingerprint
from megatron.errors import ConfigError, DataError
from tests.data.corpora import write
from tests.data.file_damage import flip
from tests.data.texts import NULL


def test_what_is_in_a_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6, 998]])
    config = InspectConfig(
        prefix, plot=tmp_path / "plot.png", documents=(0, 2), max_tokens=2, check=True, tokenizer=NULL
    )
    text = "\n".join(inspect(config))
    for part in ("documents  3", "tokens     7 (uint16, 14 bytes)", "document 2: 3 tokens, the first 2", "5 6", "yes:"):
        assert part in text
    assert (tmp_path / "plot.png").stat().st_size > 0
    shown = "\n".join(inspect(InspectConfig(prefix)))
    assert "           2 .. 3                       2 ####" in shown
    assert " 4 .. " not in shown  # the longest has three tokens
    small = TokenizerConfig("NullTokenizer", vocab_size=900)
    with pytest.raises(DataError, match=r"document 2 holds token id 998, which is not in the vocabulary of 901 ids"):
        list(inspect(InspectConfig(prefix, check=True, tokenizer=small)))
    with pytest.raises(ConfigError, match=r"--documents 3 is none of 0\.\.2"):
        list(inspect(InspectConfig(prefix, documents=(3,))))
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(34 + 3 * 4 + 8)
        file.write(b"\x00" * 8)
    with pytest.raises(DataError, match="sequence 1 does not begin where the one before ends: write the data again"):
        list(inspect(InspectConfig(prefix, check=True)))


def test_the_digests_of_a_dataset_are_shown_compared_and_made(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4], [5, 6, 998]])
    checked = InspectConfig(prefix, check=True)
    assert f"digests    fingerprint {corpus_fingerprint(prefix)}" in "\n".join(inspect(checked))
    assert "digests    match every byte of both files" in list(inspect(checked))
    for kind, sentence in ((".idx", r"a\.idx"), (".bin", r"a\.bin is damaged")):
        flip(prefix + kind, 8 * 12)
        with pytest.raises(DataError, match=sentence):
            list(inspect(checked))
        if kind == ".idx":
            flip(prefix + kind, 8 * 12)
    list(inspect(InspectConfig(prefix, write_digests=True)))
    assert "digests    match every byte of both files" in list(inspect(checked))
    os.remove(f"{prefix}.digests.json")
    assert "digests    none" in "\n".join(inspect(checked))
    with pytest.raises(ConfigError, match="make the digests where the files are local"):
        list(inspect(InspectConfig(f"file://{prefix}", write_digests=True)))
