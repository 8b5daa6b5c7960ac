"""Damaged files of the sample-order cache: built again with a warning; never other samples, never a traceback."""

import logging
import os
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from tests.data.corpora import settings_of, write
from tests.data.file_damage import DAMAGES

Order = list[list[int]]


def order(cache: str | None) -> Order:
    """Every array of a blend of two corpora and of both corpora, read through the cache."""
    children = [GPTDataset(IndexedDataset(name), 0, 300, settings_of(cache=cache)) for name in ("a", "b")]
    blend = BlendedDataset(children, [0.6, 0.4], 400, 0, cache)
    arrays = [*children[0].order, *children[1].order, blend.dataset_index, blend.dataset_sample_index]
    return [array[:].ravel().tolist() for array in arrays]


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Corpora in the working directory with a cache of their orders in ``cache``; the order."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(3)
    for name in ("a", "b"):
        write(name, [generator.integers(1000, size=n).tolist() for n in generator.integers(1, 30, size=60)])
    wanted = order(None)
    assert order("cache") == wanted
    return wanted


def damage_the_cache(wanted: Order, trials: int, seed: int) -> tuple[int, int]:
    """Damage one file of the cache per trial; how many entries were built again, and how many were used."""
    good = {path: path.read_bytes() for path in sorted(Path("cache").iterdir())}
    rebuilt = 0
    for trial in range(trials):
        chance = random.Random(f"{seed} {trial}")
        victim, damage = chance.choice(list(good)), chance.choice(list(DAMAGES))
        DAMAGES[damage](victim, chance)
        before = None if damage == "missing" else victim.stat().st_mtime_ns
        assert order("cache") == wanted, f"trial {trial}: {damage} of {victim} was read"
        rebuilt += not victim.exists() or victim.stat().st_mtime_ns != before
        if victim.name.endswith("description.txt"):  # nothing reads it
            victim.write_bytes(good[victim])
        assert sorted(Path("cache").iterdir()) == list(good)
        assert all(path.read_bytes() == content for path, content in good.items()), f"trial {trial}: {damage}"
    return rebuilt, trials - rebuilt


@pytest.mark.parametrize("trials", [60, pytest.param(400, marks=pytest.mark.whole_matrix)])
def test_of_damaged_caches_none_gives_another_order_and_none_a_traceback(corpora: Order, trials: int) -> None:
    rebuilt, unread = damage_the_cache(corpora, trials, seed=trials)
    print(f"{trials} damaged caches: {rebuilt} built again, {unread} not read or unchanged")
    assert rebuilt > trials // 2


def test_a_damaged_entry_is_named_once(corpora: Order, caplog: pytest.LogCaptureFixture) -> None:
    (victim,) = (path for path in Path("cache").glob("*Blended*-dataset_index.npy"))
    DAMAGES["flip"](victim, random.Random(1))
    with caplog.at_level(logging.WARNING):
        assert order("cache") == corpora
    assert caplog.text.count("The cached sample order") == 1
    assert f"The cached sample order {victim} is damaged" in caplog.text and "building it again" in caplog.text


def test_an_entry_without_digests_is_built_again_once(
    corpora: Order, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Megatron-LM and of older versions: nothing says whether they are whole."""
    for path in Path("cache").glob("*-digests.json"):
        path.unlink()
    victim = next(iter(Path("cache").glob("*GPTDataset*-document_index.npy")))
    content = bytearray(victim.read_bytes())
    content[-4] ^= 1  # another document
    victim.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert order("cache") == corpora
    assert caplog.text.count("has no digests (another program or an older version wrote it)") == 3

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("built although it was cached")

    monkeypatch.setattr(gpt_dataset, "build_sample_order", refuse)
    assert order("cache") == corpora


def test_waiting_processes_do_not_read_a_damaged_entry_again_and_again(corpora: Order) -> None:
    """The digests go first when an entry is built again, so whoever waits finds no entry."""
    seen: list[bool] = []
    real = np.save

    def look(*arguments: object, **keywords: object) -> None:
        seen.append(len(list(Path("cache").glob("*-digests.json"))) == 2)
        real(*arguments, **keywords)  # type: ignore[arg-type]

    os.truncate(next(iter(Path("cache").glob("*GPTDataset*-shuffle_index.npy"))), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "save", look)
        assert order("cache") == corpora
    assert seen == [True] * 3
