"""Texts that are packed while training: every document once, in any division, and on from any state."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatron.data import text_stream
from megatron.data.data_module import decode_state, encode_state
from megatron.data.text_inputs import list_sources
from megatron.data.text_stream import FillInTheMiddle, TextStream
from megatron.data.tokenizers import NullTokenizer
from megatron.errors import DataError

DOCUMENTS, LENGTH = 900, 7
END = DOCUMENTS
FIM = FillInTheMiddle(1001, 1002, 1003, rate=0.6, spm_rate=0.3)


def texts_in(folder: Path, kind: str) -> list[str]:
    """Files of documents; document n is its number, up to ten times."""
    documents = [" ".join([str(number)] * (number % 10 + 1)) for number in range(DOCUMENTS)]
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    parts = {"a.jsonl": lines[:700], "b.jsonl.gz": lines[700:800], "c.jsonl": lines[800:]}
    if kind == "stream":  # of the package datasets, from files with other names
        for name, part in zip(("one.jsonl", "two.jsonl"), (lines[:450], lines[450:])):
            (folder / name).write_text("".join(part))
        return [f"dataset:{folder}"]
    for name, part in parts.items():
        content = "".join(part).encode()
        content = gzip.compress(content) if name.endswith(".gz") else content
        with fsspec.open(f"memory://texts/{name}" if kind == "memory" else str(folder / name), "wb") as file:
            file.write(content)
    return ["memory://texts/*"] if kind == "memory" else [str(folder)]


def streams(paths: Sequence[str], size: int, **changes: Any) -> list[TextStream]:
    place = {"key": "text", "tokenizer": NullTokenizer(END), "seq_length": LENGTH, "seed": 1, "size": size}
    return [TextStream(list_sources(paths), rank=rank, **{**place, **changes}) for rank in range(size)]


def saved(stream: TextStream) -> Any:
    """The state as a checkpoint has it."""
    return decode_state(encode_state(stream.state_dict()))


def read(stream: TextStream, samples: int) -> Counter[int]:
    """How often each token is in the next samples; a sample begins with the last token of the one before."""
    is_fresh = not len(saved(stream)["tokens"])
    found = [next(stream)[0 if is_fresh and not number else 1 :] for number in range(samples)]
    return Counter(np.concatenate(found).tolist())


@pytest.fixture(params=["files", "memory", "stream"])
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if request.param == "stream":
        pytest.importorskip("datasets")
        monkeypatch.setattr(text_stream, "STREAM_BYTES", 0)  # small batches
    return texts_in(tmp_path, request.param)


def test_a_stream_continues_bit_for_bit_from_every_state(paths: list[str]) -> None:
    (whole,) = streams(paths, 1)
    states, samples = [], []
    for _ in range(900):  # into the second epoch
        states.append(saved(whole))
        samples.append(next(whole))
    for place in (0, 1, 5, 300, 720, 850):
        (again,) = streams(paths, 1)
        again.load_state_dict(states[place])
        for sample in samples[place : place + 40]:
            assert np.array_equal(next(again), sample)
    assert max(state["next"][0] for state in states) == 1
    firsts = [np.concatenate(samples[n : n + 30]).tolist() for n in (0, 840)]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize(("sizes", "seed"), [((1, 2), 0), ((1, 2), 1), ((2, 1), 2), ((2, 3, 1), 1), ((3, 4, 2), 0)])
def test_every_document_is_read_once_although_ranks_are_divided_again(
    paths: list[str], sizes: tuple[int, ...], seed: int
) -> None:
    found: Counter[int] = Counter()
    ranks = streams(paths, sizes[0], seed=seed)
    for size in sizes:
        if size != len(ranks):
            states = [saved(stream) for stream in ranks]
            ranks = streams(paths, size, seed=seed)
            for stream in ranks:
                stream.redivide(states)
        for rank, stream in enumerate(ranks):  # some ranks are further than others
            found += read(stream, 20 + 25 * rank)
    for stream in ranks:
        while saved(stream)["next"][0] == 0:  # the rest of the epoch
            found += read(stream, 1)
        found += Counter(saved(stream)["tokens"][1:].tolist())
    # Only whole documents of the next epoch are there a second time.
    for number in range(DOCUMENTS):
        assert found[number] in (number % 10 + 1, 2 * (number % 10 + 1)), number
    assert DOCUMENTS <= found[END] <= DOCUMENTS + 12 * len(ranks)


def test_a_rank_without_documents_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "1 2 3"}\n')
    assert len(next(streams([str(tmp_path)], 2)[0])) == LENGTH + 1
    with pytest.raises(DataError, match=r"^--train-text-path has no document for data-parallel rank 1 of 2: give it"):
        next(streams([str(tmp_path)], 2)[1])
    (tmp_path / "one.jsonl").write_text('{"texts": "1 2 3"}\n')
    with pytest.raises(DataError, match=r"one.jsonl, line 1 has no key 'text': name the right key with --text-key"):
        next(streams([str(tmp_path)], 1)[0])


# --- fill in the middle ---------------------------------------------------------------------------------------


class Characters(NullTokenizer):
    """Each character is its code."""

    def tokenize(self, text: str) -> list[int]:
        return [ord(one) for one in text]


def put_together(tokens: list[int]) -> tuple[str, str, tuple[int, int]]:
    """The order of a document, its text, and the places where it was cut: read one token after the other."""
    if FIM.prefix not in tokens:
        return "whole", "".join(map(chr, tokens)), (0, 0)
    assert Counter(token for token in tokens if token > 1000) == {1001: 1, 1002: 1, 1003: 1} and tokens[0] == 1001
    after: dict[int, str] = {}
    for token in tokens:
        if token > 1000:
            sign = token
            after[sign] = ""
        else:
            after[sign] += chr(token)
    order = [token for token in tokens if token > 1000]
    assert order == [FIM.prefix, FIM.suffix, FIM.middle]
    prefix, middle, suffix = (after[sign] for sign in (FIM.prefix, FIM.middle, FIM.suffix))
    # Without a prefix before it, the middle may begin with the prefix.
    kind = "prefix first" if prefix else "suffix first"
    return kind, prefix + middle + suffix, (len(prefix), len(prefix + middle))


def test_the_middle_of_documents_comes_last(tmp_path: Path) -> None:
    """1,000 documents, put together again by their sentinel tokens."""
    texts = [f"{number:04d}" + "abcdefghijklmnopqrstuvwxyz"[: number % 27] * 2 for number in range(1000)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = {"tokenizer": Characters(1100), "seq_length": 60_000, "fim": FIM}
    (stream,) = streams([str(tmp_path)], 1, **changes)
    tokens = next(stream)
    ends = np.flatnonzero(tokens == 1100)
    documents = [part[1:] if place else part for place, part in enumerate(np.split(tokens, ends))]
    found = [put_together(document.tolist()) for document in documents[:900]]
    kinds = Counter(kind for kind, _, _ in found)
    assert {text for _, text, _ in found} <= set(texts) and len({text for _, text, _ in found}) == 900
    assert abs(kinds["whole"] / 900 - 0.4) < 0.06 and abs(kinds["suffix first"] / 900 - 0.6 * 0.3) < 0.06
    # Both cuts are uniform between the characters: a third of the text before, between and after them.
    cuts = np.array([(low / len(text), high / len(text)) for kind, text, (low, high) in found if kind[0] == "p"])
    assert np.allclose(cuts.mean(axis=0), (1 / 3, 2 / 3), atol=0.05)
    # Every rank divides a document in the same way.
    for rank in streams([str(tmp_path)], 2, **(changes | {"seq_length": 20_000})):
        tokens = next(rank)
        parts = np.split(tokens, np.flatnonzero(tokens == 1100))[1:-1]
        assert len(parts) > 100 and {tuple(part) for part in parts} <= {(1100, *one[one != 1100]) for one in documents}
